"""Training batches of captioned images: an endless stream whose batch k depends on (seed, k) alone, on grain.

Whoever trains saves one number, the batches trained on so far, and continues with `iterate(start=that number)`: the
same batches follow, to the bit, without replaying what came before.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging as absl_logging

from mmattn.data.examples import Examples, Fault, Reading, end_with_parent
from mmattn.data.targets import FLIPS, caption_table, fingerprint_of

Batch = tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]
_ENDLESS = 2**62
_open: weakref.WeakSet[Any] = weakref.WeakSet()
_log = logging.getLogger(__name__)


class CaptionBatches:
    """Batches (inputs, labels, weights) of a source of captioned images.

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
        _check(batch_size, max_length, seed, workers, threads, captions_per_image, image_key, flip)
        self.source = source
        self.batch_size = batch_size
        self.lengths = _lengths(lengths, max_length)
        self.workers = workers
        self.threads = threads
        self.on_error = on_error
        self.unreadable: dict[int, Exception] = {}
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
        self._examples = Examples(table, reading, self.lengths, seed, shuffle, flip, augment, captions_per_image)
        self.num_examples = len(self._examples)

    def fingerprint(self) -> str:
        """Of the captions, their tokens and images' numbers, and of the settings; the images are not looked at."""
        table, examples = self._examples.table, self._examples
        rule = [self.batch_size, self.lengths, examples.seed, examples.shuffle, len(self.source)]
        return fingerprint_of(rule, [table.images, table.ids, table.ends])

    @property
    def steps_per_epoch(self) -> int:
        """Batches until every example has come once; the last may already hold the start of the next pass."""
        return -(-self.num_examples // self.batch_size)

    def iterate(self, start: int = 0) -> Iterator[Batch]:
        """Yield batches number start, start + 1, ... without end.

        Returns:
            A generator of ({image_key: (B, ...), "target_ids": int32 (B, T)}, labels int32 (B, T), weights float32
            (B, T)). Close it, or let it go, to stop its threads and processes.
        """
        if start < 0:
            raise ValueError(f"start={start}: batches are numbered from 0.")
        return self._stream(start)

    def examples(self, batch_size: int | None = None) -> Iterator[tuple[dict[str, np.ndarray], list[dict[str, Any]]]]:
        """Yield ({image_key: (B, ...)}, records) over the source once, in its order, each image once.

        Unreadable images are reported and missing from their batch; the last batch may be smaller too.
        """
        size = batch_size or self.batch_size
        for records, images, faults in self._run(0, len(self.source), size, None, self._examples.reading.many):
            self._report(faults)
            if records:
                yield {self._examples.reading.image_key: np.stack(images)}, records

    def _stream(self, start: int) -> Iterator[Batch]:
        examples = self._examples
        for inputs, labels, weights, faults in self._run(
            start * self.batch_size, _ENDLESS, self.batch_size, examples.example, examples.collate, self.workers
        ):
            self._report(faults)
            if self.workers:  # out of the memory shared with the worker, which is scarce
                inputs = {name: np.array(array) for name, array in inputs.items()}
                labels, weights = np.array(labels), np.array(weights)
            yield inputs, labels, weights

    def _run(
        self,
        begin: int,
        end: int,
        size: int,
        one: Callable[[int], Any] | None,
        join: Callable[[Sequence[Any]], Any],
        workers: int = 0,
    ) -> Iterator[Any]:
        """Iterate over join([one(n), ...]) for n = begin .. end - 1 in groups of `size`, prepared ahead by grain."""
        grain = _grain()
        numbers = grain.MapDataset.range(begin, end)
        groups = (numbers if one is None else numbers.map(one)).batch(size, batch_fn=join)
        threads = 1 if workers and self.threads else self.threads
        stream = groups.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads))
        if workers:
            options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
            stream = stream.mp_prefetch(options, worker_init_fn=end_with_parent)
        prepared = _prepared(stream)
        _open.add(prepared)
        return prepared

    def _report(self, faults: list[Fault]) -> None:
        for index, error in faults:
            if index not in self.unreadable:
                self.unreadable[index] = error
                record = self.source[index]
                _log.warning("Skipping unreadable image %s: %s", record["id"], error)
                if self.on_error is not None:
                    self.on_error(record, error)


def _prepared(stream: Any) -> Iterator[Any]:
    iterator = iter(stream)
    try:
        yield from iterator
    finally:
        iterator.close()


@atexit.register
def _close_all() -> None:
    """Close the streams that are still open when Python ends, before the modules that they need are torn down."""
    for stream in list(_open):
        with contextlib.suppress(ValueError):  # another thread is inside
            stream.close()


def _grain() -> Any:
    """Import grain without its warning that jax, which it only wants for profiling, is not installed."""
    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)
    try:
        import grain
    finally:
        absl_logging.set_verbosity(verbosity)
    return grain


def _check(
    batch_size: int,
    max_length: int,
    seed: int,
    workers: int,
    threads: int,
    captions_per_image: int | None,
    image_key: str,
    flip: str,
) -> None:
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("max_length", max_length, 2),
        ("workers", workers, 0),
        ("threads", threads, 0),
        ("captions_per_image", 1 if captions_per_image is None else captions_per_image, 1),
    ):
        if value < least:
            raise ValueError(f"{name}={value} is too small: at least {least}.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} is out of range: 0 to {2**32 - 1}.")
    if image_key not in ("pixels", "features"):
        raise ValueError(f"image_key={image_key!r} is unknown. It is 'pixels' or 'features'.")
    if flip not in FLIPS:
        raise ValueError(f"flip={flip!r} is unknown. It is one of {', '.join(FLIPS)}.")


def _lengths(lengths: Sequence[int] | None, max_length: int) -> tuple[int, ...]:
    """The row lengths in ascending order, with max_length as the last."""
    chosen = sorted({*(lengths or ()), max_length})
    if chosen[0] < 2 or chosen[-1] > max_length:
        raise ValueError(f"lengths={tuple(lengths or ())} must lie between 2 and max_length={max_length}.")
    return tuple(chosen)
