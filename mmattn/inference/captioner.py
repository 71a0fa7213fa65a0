"""Captions for photos: a bundle, the image reader and the decoding behind one object.

Shapes: P patches of the encoder's grid, W words of a caption.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmattn.bundle import find_bundle, load_bundle
from mmattn.bundle_model import generation_of
from mmattn.generation import Text, TextGenerator
from mmattn.inference.attention import cross_attention, save_picture
from mmattn.inference.photos import each_batch
from mmattn.inference.settings import checked_settings
from mmattn.pictures import attention_sheet
from mmattn.preprocess.image import ImageReader
from mmattn.preprocess.text import Tokenizer

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Caption:
    """One caption of one photo.

    Attributes:
        text: the sentence.
        score: log-probability divided by the length penalty: what beam search ranks by.
        confidence: geometric mean of the tokens' probabilities, 0 to 1: exp(log-probability / tokens), end token
            included.
        low_confidence: the confidence is below the threshold that the bundle's maker chose.
        ids: the tokens, without start and end.
        alternatives: the next best captions, best first, when `nbest` asked for them.
    """

    text: str
    score: float
    confidence: float
    low_confidence: bool
    ids: tuple[int, ...]
    alternatives: tuple[Caption, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Attention:
    """Where the decoder looked for each word of a caption.

    Attributes:
        caption: the caption.
        words: W words.
        weights: float32 (W, rows, columns), each word's sums to 1. Cell (r, c) is the r-th patch from the top and the
            c-th from the left of the model's input, which lies on the photo at `box`.
        size: (width, height) of the upright photo.
        box: (left, top, right, bottom) of the model's input on the photo, in its pixels; beyond its border where it
            was padded.
    """

    caption: Caption
    words: tuple[str, ...]
    weights: np.ndarray
    size: tuple[int, int]
    box: Box


class Captioner:
    """Describes photos.

    Args:
        model: an `mmattn.model.EncoderDecoder` (or what has its `start`, `step` and `attention`).
        tokenizer: its tokenizer.
        reader: reads a photo as the model was trained on.
        generation: defaults for decoding; what is left out is taken from `mmattn.bundle_kinds.KINDS`, with a
            max_length that the model can make.

    Raises:
        ValueError: a default that isn't known or doesn't fit.

    >>> import keras, numpy as np
    >>> from mmattn.decoders import TransformerDecoder
    >>> from mmattn.encoders.image import VisionTransformer
    >>> from mmattn.model import EncoderDecoder
    >>> tokenizer = Tokenizer.train(["a red circle", "a blue square"] * 9, vocabulary_size=32, shrink=True)
    >>> encoder = VisionTransformer((32, 32), patch_size=16, hidden_dim=8, num_layers=1, num_heads=2)
    >>> decoder = TransformerDecoder(tokenizer.vocabulary_size, hidden_dim=8, num_layers=1, num_heads=2)
    >>> captioner = Captioner(EncoderDecoder(encoder, decoder), tokenizer, ImageReader((32, 32)))
    >>> photo = np.zeros((60, 80, 3), "uint8")  # or a path, the bytes of a file, a PIL image; or a list of these
    >>> [caption] = captioner.caption(photo, max_length=5)
    >>> 0 < caption.confidence < 1
    True
    >>> captioner.attention(photo, caption).box
    (0.0, 0.0, 80.0, 60.0)
    """

    def __init__(
        self, model: Any, tokenizer: Tokenizer, reader: ImageReader, generation: Mapping[str, Any] | None = None
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.reader = reader
        self.generation = generation_of(model, generation)
        if not getattr(model, "built", True):
            model.build({"pixels": (None, *reader.size, 3), "target_ids": (None, None)})
        self.generator = TextGenerator(model, tokenizer)

    @classmethod
    def load(
        cls, name_or_folder: str | os.PathLike[str] | None = None, custom_objects: Mapping[str, Any] | None = None
    ) -> Captioner:
        """A captioner from a bundle's folder, or from the name of a shipped one (None: the default one).

        Raises:
            mmattn.bundle.BundleError: no such bundle, it is no captioner's, or it is damaged, unsafe or too new.
        """
        bundle = load_bundle(find_bundle(name_or_folder), custom_objects, kind="captioner")
        return cls(bundle.model, bundle.tokenizer, bundle.reader, bundle.generation)

    def caption(
        self,
        images: Any,
        *,
        nbest: int = 1,
        batch_size: int = 16,
        on_error: str = "raise",
        progress: Callable[[int, int], None] | None = None,
        compiled: bool | str = "auto",
        **settings: Any,
    ) -> list[Any]:
        """Captions of photos, in their order. A photo's caption doesn't depend on its batch.

        Args:
            images: one photo or many: paths, bytes of image files, PIL images, uint8 arrays (H, W, 3) or one (B, H,
                W, 3).
            nbest: also give the next best captions as `alternatives`.
            batch_size: photos in memory at once.
            on_error: "raise" stops at the first photo that can't be read; "return" puts its ImageReadError there.
            progress: called as progress(done, total) after each batch.
            compiled: True compiles the whole loop: seconds once, then the fastest, for many photos and servers. "step"
                compiles no loop, only one step as a plain graph: a first caption soonest. False runs operation by
                operation, for a debugger. "auto" takes "step" for the first photos and True from where that pays. All
                give the same captions. JAX always compiles the loop for "auto"; torch compiles nothing. See
                `mmattn.decoding.Generator`.
            settings: other values than the defaults in `generation`: method, num_beams, length_penalty, max_length,
                min_length, no_repeat_ngram, low_confidence.

        Returns:
            a list of `Caption`, also for one photo.

        Raises:
            ImageReadError: with on_error="raise".
            ValueError: a setting that isn't known or doesn't fit.
        """
        chosen = self._settings(nbest, settings)

        def make(inputs: dict[str, np.ndarray], left: int) -> list[Caption]:
            return self._generate(inputs, nbest, chosen, compiled=compiled, batches=left)

        return each_batch(images, self.reader, make, batch_size, on_error, progress)

    def attention(
        self, image: Any, caption: Caption | None = None, layer: int | None = -1, head: int | None = None
    ) -> Attention:
        """Where the decoder looked for each word, from one full pass over the caption.

        A word's weights are the cross-attention of the positions that predict its pieces, averaged over them.

        Args:
            image: one photo, as for `caption`.
            caption: what to explain; default: the model's own caption.
            layer: decoder layer, from 0; -1 the last, None the mean of all.
            head: attention head, None the mean of all.

        Raises:
            ImageReadError: the photo can't be read.
            ValueError: no such layer or head; an encoder without a grid of patches.
        """
        grid = getattr(self.model.encoder, "grid", None)
        if grid is None:
            raise ValueError(f"{self.model.encoder.name} has no grid of patches: its memory doesn't lie on the photo")
        rows, columns = grid
        size = self.reader.photo(image).size
        inputs = {"pixels": self.reader(image)[None]}
        if caption is None:
            caption = self._generate(inputs, 1, self._settings(1, {}))[0]
        scores = cross_attention(self.model, inputs, caption.ids, layer, head)[:, : rows * columns]  # (T, P)
        words = self.tokenizer.words(caption.ids)
        weights = np.stack([scores[places].mean(axis=0) for _, places in words]) if words else scores[:0]
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), np.finfo("float32").tiny)
        box = self.reader.box(size)
        return Attention(caption, tuple(word for word, _ in words), weights.reshape(-1, rows, columns), size, box)

    def save_attention(self, image: Any, path: str | os.PathLike[str], caption: Caption | None = None) -> None:
        """Writes `attention` as a PNG: the photo, and for each word the photo under a heat map in its own geometry.

        Raises:
            ImageReadError: the photo can't be read.
            OSError: the picture can't be written.
        """
        found = self.attention(image, caption)
        sheet = attention_sheet(self.reader.photo(image), found.caption.text, found.words, found.weights, found.box)
        save_picture(sheet, path)

    def _settings(self, nbest: int, changes: Mapping[str, Any]) -> dict[str, Any]:
        return checked_settings(self.generation, nbest, changes, "captioner", self.tokenizer.vocabulary_size)

    def _generate(
        self, inputs: Mapping[str, Any], nbest: int, chosen: Mapping[str, Any], **options: Any
    ) -> list[Caption]:
        """One batch."""
        decoding = {name: value for name, value in chosen.items() if name != "low_confidence"}
        threshold = chosen["low_confidence"]
        found = self.generator(inputs, nbest, **decoding, **options)
        return [
            _caption(best, threshold, tuple(_caption(text, threshold) for text in others)) for best, *others in found
        ]


def _caption(text: Text, threshold: float, alternatives: tuple[Caption, ...] = ()) -> Caption:
    return Caption(text.text, text.score, text.confidence, text.confidence < threshold, text.ids, alternatives)
