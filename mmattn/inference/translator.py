"""Translations of sentences: a bundle, its tokenizers and the decoding behind one object.

Shapes: S source tokens, T target tokens, W words.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmattn.bundle import find_bundle, load_bundle
from mmattn.bundle_model import generation_of
from mmattn.generation import SOURCE, TextGenerator
from mmattn.inference.attention import cross_attention, save_picture
from mmattn.inference.settings import checked_settings
from mmattn.inference.translation import Job, Translation
from mmattn.preprocess.text import Tokenizer


@dataclass(frozen=True)
class Alignment:
    """Which source words the decoder looked at for each word of a translation.

    Attributes:
        source_words: W' words.
        target_words: W words.
        weights: float32 (W, W'), each row's sum 1. The share that lay on no source word, that is on the end token, is
            left out of them.
        end: float32 (W,), that share.
    """

    source_words: tuple[str, ...]
    target_words: tuple[str, ...]
    weights: np.ndarray
    end: np.ndarray


class Translator:
    """Translates texts, one sentence each.

    Args:
        model: an `mmattn.model.EncoderDecoder` whose encoder reads "source_ids" (or what has its `start`, `step` and
            `attention`).
        tokenizer: of the target language.
        source_tokenizer: of the source language; None: the same for both.
        generation: defaults for decoding; what is left out is taken from `mmattn.bundle_kinds.KINDS`, with lengths
            that the model can read and make.

    Raises:
        ValueError: a default that isn't known or doesn't fit.

    >>> from mmattn.decoders import TransformerDecoder
    >>> from mmattn.encoders.text import TextEncoder
    >>> from mmattn.model import EncoderDecoder
    >>> tokenizer = Tokenizer.train(["a red circle", "un cercle rouge"] * 9, vocabulary_size=32, shrink=True)
    >>> sizes = dict(vocabulary_size=tokenizer.vocabulary_size, hidden_dim=8, num_layers=1, num_heads=2)
    >>> model = EncoderDecoder(TextEncoder(**sizes), TransformerDecoder(**sizes), share_embeddings=True)
    >>> translator = Translator(model, tokenizer)
    >>> first, blank = translator.translate(["a circle", ""], max_length=5)
    >>> 0 < first.confidence < 1, blank.text
    (True, '')
    >>> translator.attention("a red circle", first).source_words
    Traceback (most recent call last):
    ValueError: this translation is of another text
    >>> translator.attention("a circle", first).source_words
    ('a', 'circle')
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        source_tokenizer: Tokenizer | None = None,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.source_tokenizer = source_tokenizer or tokenizer
        self.generation = generation_of(model, generation, "translator")
        if not getattr(model, "built", True):
            model.build({SOURCE: (None, None), "target_ids": (None, None)})
        self.generator = TextGenerator(model, tokenizer)

    @classmethod
    def load(
        cls, name_or_folder: str | os.PathLike[str] | None = None, custom_objects: Mapping[str, Any] | None = None
    ) -> Translator:
        """A translator from a bundle's folder, or from the name of a shipped one (None: the default one).

        Raises:
            mmattn.bundle.BundleError: no such bundle, it is no translator's, or it is damaged, unsafe or too new.
        """
        bundle = load_bundle(find_bundle(name_or_folder, "translator"), custom_objects, kind="translator")
        return cls(bundle.model, bundle.tokenizer, bundle.source_tokenizer, bundle.generation)

    def translate(
        self,
        texts: str | Iterable[str],
        *,
        nbest: int = 1,
        batch_size: int = 32,
        on_error: str = "raise",
        progress: Callable[[int, int], None] | None = None,
        compiled: bool | str = "auto",
        **settings: Any,
    ) -> list[Any]:
        """Translations of texts, in their order.

        A text's translation doesn't depend on what the others say. It may depend on `batch_size`: sums are rounded
        otherwise in batches of other sizes, and where two words are as good as equally likely that decides.

        Texts of about the same length are translated together. A blank text has an empty translation.

        Args:
            texts: one text or many, a sentence each.
            nbest: also give the next best translations as `alternatives`.
            batch_size: texts that are translated at once. Of more texts than that, every batch is filled up to it, so
                that one compiled program serves each length.
            on_error: what to do with a text of more than `max_source_length` tokens, end token included: "raise"
                stops before anything is translated; "return" puts a SourceError in its place. Nothing is ever cut.
            progress: called as progress(done, total) once blank texts are done, and after each batch.
            compiled: as for `mmattn.Captioner.caption`.
            settings: other values than the defaults in `generation`: method, num_beams, length_penalty, patience,
                max_length, length_factor, length_offset (see `mmattn.generation.TextGenerator`), min_length,
                no_repeat_ngram, max_source_length.

        Returns:
            a list of `Translation`, also for one text.

        Raises:
            SourceError: with on_error="raise".
            ValueError: a setting that isn't known or doesn't fit.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        job = self._job(nbest, batch_size, on_error, compiled, settings)
        return job.results(texts, progress)

    def attention(
        self, text: str, translation: Translation | None = None, layer: int | None = -1, head: int | None = None
    ) -> Alignment:
        """Which source words the decoder looked at for each word, from one full pass over the translation.

        The cross-attention of the positions that predict a target word's pieces is averaged over them, and that on a
        source word's pieces is added up.

        Args:
            text: the source.
            translation: what to explain; default: the model's own translation.
            layer: decoder layer, from 0; -1 the last, None the mean of all.
            head: attention head, None the mean of all.

        Raises:
            SourceError: the text is too long.
            ValueError: no such layer or head; a translation of another text.
        """
        if translation is None:
            translation = self.translate(text)[0]
        job = self._job(1, 1, "raise", "auto", {})
        ids = job.read(text, 1)
        if not isinstance(translation, Translation):
            raise TypeError(f"translation must be what translate gave, not {type(translation).__name__}")
        if ids != translation.source_ids:
            raise ValueError("this translation is of another text")
        sources, targets = self.source_tokenizer.words(ids, text), self.tokenizer.words(translation.ids)
        if not sources or not targets:
            return _alignment(sources, targets, np.zeros((len(targets), len(sources))))
        inputs = {SOURCE: np.array([[*ids, self.source_tokenizer.eos_id]], "int32")}
        scores = cross_attention(self.model, inputs, translation.ids, layer, head)  # (T, S)
        rows = np.stack([scores[places].mean(axis=0) for _, places in targets])
        return _alignment(sources, targets, np.stack([rows[:, places].sum(axis=1) for _, places in sources], axis=1))

    def save_attention(
        self, text: str, path: str | os.PathLike[str], translation: Translation | None = None
    ) -> Translation:
        """Writes `attention` as a PNG, a heat map with both sentences on its axes, and returns the translation.

        Raises:
            SourceError, ValueError: as for `attention`.
            OSError: the picture can't be written.
        """
        from mmattn.pictures import alignment_sheet

        translation = self.translate(text)[0] if translation is None else translation
        found = self.attention(text, translation)
        save_picture(alignment_sheet(found.source_words, found.target_words, found.weights), path)
        return translation

    def _job(self, nbest: int, batch_size: int, on_error: str, compiled: bool | str, settings: Any) -> Job:
        if on_error not in ("raise", "return"):
            raise ValueError(f'on_error={on_error!r} is not known. Known: "raise", "return"')
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        chosen = checked_settings(self.generation, nbest, settings, "translator", self.tokenizer.vocabulary_size)
        most = min(chosen.pop("max_source_length"), self.generator.longest_source)
        options = {**chosen, "nbest": nbest, "compiled": compiled}
        return Job(self.generator, self.source_tokenizer, batch_size, on_error, int(most), options)


def _alignment(sources: Any, targets: Any, weights: np.ndarray) -> Alignment:
    """`weights` (W, W'): shares of all that each target word looked at."""
    total = weights.sum(axis=1, keepdims=True)
    shares = (weights / np.maximum(total, np.finfo("float32").tiny)).astype("float32")
    end = np.clip(1.0 - total[:, 0], 0.0, 1.0).astype("float32")
    return Alignment(tuple(word for word, _ in sources), tuple(word for word, _ in targets), shares, end)
