"""Training batches of captioned images: an endless stream whose batch k depends on (seed, k) alone, on grain.

Whoever trains saves one number, the batches trained on so far, and continues with `iterate(start=that number)`: the
same batches follow, to the bit, without replaying what came before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mmattn.data.examples import Examples, Reading
from mmattn.data.picture_batches import PictureBatches, check_stream
from mmattn.data.targets import FLIPS, caption_table, fingerprint_of

_log = logging.getLogger(__name__)


class CaptionBatches(PictureBatches):
    """Batches (inputs, labels, weights) of a source of captioned images.

    The inputs are image_key (B, ...) and "target_ids" int32 (B, T), as labels int32 and weights float32 have them.

    Training takes one example a caption, or one an image with several captions: in each pass over the source every
    example comes once, in an order drawn anew for each pass. The stream does not stop at a pass's end, so a batch may
    hold the end of one and the start of the next.

    A caption longer than `max_length` is cut and loses its eos; one without tokens is left out (`over_long` and
    `without_tokens` count them). An image that raises one of `skip_errors` is reported once, and its place in the
    stream goes to the next readable example of the same pass, so that the stream is the same after a restart.

    Args:
        source: Random access to records with `image`, `captions` and `id`.
        read_image: `record["image"]` to an array, for "pixels" uint8 (height, width, 3). Must give one shape. For
            "features" with flip it also takes `mirrored=True`.
        encode_text: A caption to ids without bos and eos.
        batch_size: Examples in a batch.
        max_length: Most tokens of a row, bos or eos included.
        lengths: Rows are padded to the smallest of these that fits the batch. Default: (max_length,). With Keras' fit
            on TensorFlow keep to one length: it takes the shapes of all batches from the first two.
        seed: Decides order, replacements and augmentation, 0 to 2**32 - 1.
        shuffle: False keeps the source's order in every pass.
        workers: Processes that prepare batches; 0 uses `threads` threads of this one.
        threads: Threads that prepare batches, in each process; 0 prepares a batch when it is asked for.
        captions_per_image: n makes an example of an image and n of its captions, drawn anew for each pass where it has
            more and filled up with empty rows where it has fewer, so that the image is encoded once for all of them;
            target_ids, labels and weights are (B, n, T) then.
        image_key: "pixels", or "features" for what a frozen network made of the image.
        flip: Mirror half of the images: "never"; "unsided": only with captions without the words left and right;
            "swap": all, and exchange these words. English only.
        augment: `augment(array, rng)` to an array; rng is seeded by (seed, place in the stream).
        skip_errors: Exceptions of read_image that mean an unreadable image. Any other ends the stream.
        on_error: Called as `on_error(record, exception)` once for each unreadable image, in the caller's process.

    Raises:
        ValueError: an argument out of range, or a source without captions.

    >>> from mmattn.data.shapes import ShapesSource
    >>> words = "a above an below black blue circle cross green heart left moon of orange pink".split()
    >>> encode = lambda text: [words.index(word) + 4 if word in words else 1 for word in text.split()]
    >>> batches = CaptionBatches(ShapesSource("train", 100), lambda image: image, encode, 8, max_length=10)
    >>> inputs, labels, weights = next(batches.iterate(start=1000))
    >>> inputs["pixels"].shape, inputs["target_ids"].shape, batches.steps_per_epoch
    ((8, 64, 64, 3), (8, 10), 13)
    """

    def __init__(
        self,
        source: Any,
        read_image: Callable[..., np.ndarray],
        encode_text: Callable[[str], Sequence[int]],
        batch_size: int,
        max_length: int,
        lengths: Sequence[int] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        workers: int = 0,
        threads: int = 2,
        captions_per_image: int | None = None,
        image_key: str = "pixels",
        flip: str = "never",
        augment: Callable[[np.ndarray, np.random.Generator], np.ndarray] | None = None,
        skip_errors: tuple[type[Exception], ...] = (),
        on_error: Callable[[dict[str, Any], Exception], None] | None = None,
    ):
        check_stream(batch_size, seed, workers, threads, image_key)
        _check(max_length, captions_per_image, flip)
        self.lengths = _lengths(lengths, max_length)
        table = caption_table(source, encode_text, max_length, flip)
        if not table:
            raise ValueError(
                f"The source has no caption to train on: {len(source)} images, {table.without_tokens} empty."
            )
        self.over_long, self.without_tokens = table.over_long, table.without_tokens
        if self.over_long:
            _log.warning(
                "%d of %d captions have more than %d tokens and are cut.",
                self.over_long,
                len(table.images),
                max_length - 1,
            )
        reading = Reading(source, read_image, skip_errors, image_key)
        examples = Examples(table, reading, self.lengths, seed, shuffle, flip, augment, captions_per_image)
        super().__init__(examples, batch_size, workers, threads, on_error)

    def fingerprint(self) -> str:
        """Of the captions, their tokens and images' numbers, and of the settings; the images are not looked at."""
        table, examples = self._examples.table, self._examples
        rule = [self.batch_size, self.lengths, examples.seed, examples.shuffle, len(self.source)]
        return fingerprint_of(rule, [table.images, table.ids, table.ends])


def _check(max_length: int, captions_per_image: int | None, flip: str) -> None:
    for name, value, least in (
        ("max_length", max_length, 2),
        ("captions_per_image", 1 if captions_per_image is None else captions_per_image, 1),
    ):
        if value < least:
            raise ValueError(f"{name}={value} is too small: at least {least}.")
    if flip not in FLIPS:
        raise ValueError(f"flip={flip!r} is unknown. It is one of {', '.join(FLIPS)}.")


def _lengths(lengths: Sequence[int] | None, max_length: int) -> tuple[int, ...]:
    """The row lengths in ascending order, with max_length as the last."""
    chosen = sorted({*(lengths or ()), max_length})
    if chosen[0] < 2 or chosen[-1] > max_length:
        raise ValueError(f"lengths={tuple(lengths or ())} must lie between 2 and max_length={max_length}.")
    return tuple(chosen)
