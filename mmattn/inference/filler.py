"""Words that are missing in sentences: a bundle and its tokenizer behind one object.

Shapes: B sentences, S tokens, M masks, V + 1 tokens of the model, the mask being the last.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops

from mmattn import backend
from mmattn.bundle import find_bundle, load_bundle
from mmattn.bundle_kinds import check_generation
from mmattn.bundle_model import generation_of
from mmattn.generation import SOURCE, longest_source, widened
from mmattn.inference.translation import SourceError
from mmattn.preprocess.text import Tokenizer

MASK = "[MASK]"
_BLANK = "\u2581"  # how SentencePiece writes the blank before a word
_SPECIAL = 4


@dataclass(frozen=True)
class Filling:
    """One sentence with its masks filled in.

    Attributes:
        text: the sentence with the likeliest piece at each mask, as the tokenizer writes it.
        masks: for each mask the likeliest pieces, (text, probability), likeliest first.
    """

    text: str
    masks: tuple[tuple[tuple[str, float], ...], ...]

    def __str__(self) -> str:
        return self.text


class MaskFiller:
    """Fills in what stands for `[MASK]` in sentences.

    A mask stands for one piece of the tokenizer's: for a whole word where blanks lie on both of its sides and the
    vocabulary has the word in one piece, for a part of one where text adjoins it, as in "[MASK]ing". Several masks are
    filled in each by itself.

    Args:
        model: an `mmattn.heads.MaskedLanguageModel`.
        tokenizer: its tokenizer, of one token less.
        generation: `max_source_length`, the most tokens of a sentence, the end token included.

    >>> from mmattn.encoders.text import TextEncoder
    >>> from mmattn.heads import MaskedLanguageModel
    >>> tokenizer = Tokenizer.train(["a red circle", "a blue square"] * 9, vocabulary_size=32, shrink=True)
    >>> encoder = TextEncoder(tokenizer.vocabulary_size + 1, hidden_dim=8, num_layers=1, num_heads=2)
    >>> filler = MaskFiller(MaskedLanguageModel(encoder), tokenizer)
    >>> [filling] = filler.fill("a [MASK] circle", nbest=3)
    >>> len(filling.masks), len(filling.masks[0]), filling.text.startswith("a ")
    (1, 3, True)
    >>> filler.fill("a circle")
    Traceback (most recent call last):
    mmattn.inference.translation.SourceError: text 1: it has no [MASK]
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, generation: Mapping[str, Any] | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.generation = generation_of(model, generation, "masked_language_model")
        self.mask_id = tokenizer.vocabulary_size
        if not getattr(model, "built", True):
            model.build({SOURCE: (None, None)})
        self._compiled = backend.compile(self._log_probabilities, jit=False, variables_of=model)
        begins = [piece.startswith(_BLANK) for piece in tokenizer.pieces(range(tokenizer.vocabulary_size))]
        known = np.arange(tokenizer.vocabulary_size) >= _SPECIAL
        self._inside = known & ~np.array(begins)
        # The pieces that begin a word; of characters, the blank is a token of its own.
        self._beginning = self._inside if tokenizer.model_type == "char" else known & np.array(begins)

    @classmethod
    def load(
        cls, name_or_folder: str | os.PathLike[str] | None = None, custom_objects: Mapping[str, Any] | None = None
    ) -> MaskFiller:
        """A filler from a bundle's folder, or from the name of a shipped one (None: the default one).

        Raises:
            mmattn.bundle.BundleError: no such bundle, it is of another kind, or it is damaged, unsafe or too new.
        """
        kind = "masked_language_model"
        bundle = load_bundle(find_bundle(name_or_folder, kind), custom_objects, kind=kind)
        return cls(bundle.model, bundle.tokenizer, bundle.generation)

    def fill(
        self,
        texts: str | Iterable[str],
        *,
        nbest: int = 1,
        batch_size: int = 32,
        on_error: str = "raise",
        progress: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> list[Any]:
        """Sentences with their masks filled in, in their order.

        Args:
            texts: one sentence or many, each with `[MASK]` in it.
            nbest: how many pieces to give for each mask.
            batch_size: sentences at once.
            on_error: what to do with a sentence without a mask, or of more than `max_source_length` tokens: "raise"
                stops before anything is done; "return" puts a SourceError in its place.
            progress: called as progress(done, total) after each batch.
            settings: another `max_source_length` than in `generation`.

        Returns:
            a list of `Filling`, also for one sentence. A probability is that of the piece among all pieces; where a
            blank stands before the mask only pieces that begin a word are given, elsewhere only those that don't. Where
            each character is a token, it is any but the blank.

        Raises:
            SourceError: with on_error="raise".
            ValueError: a setting that isn't known or doesn't fit.
            FloatingPointError: where the model's scores are NaN.
        """
        chosen = check_generation({**self.generation, **settings}, "masked_language_model")
        most = int(min(chosen["max_source_length"], longest_source(self.model)))
        for name, value in (("nbest", nbest), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if on_error not in ("raise", "return"):
            raise ValueError(f'on_error={on_error!r} is not known. Known: "raise", "return"')
        texts = [texts] if isinstance(texts, str) else list(texts)
        results: list[Any] = []
        readable: list[tuple[int, list[int], list[bool]]] = []  # place, ids, for each mask whether a word begins there
        for place, text in enumerate(texts):
            try:
                readable.append((place, *self._read(text, place + 1, most)))
                results.append(None)
            except SourceError as error:
                if on_error == "raise":
                    raise
                results.append(error)
        for first in range(0, len(readable), batch_size):
            group = readable[first : first + batch_size]
            for (place, *_), filling in zip(group, self._filled(group, nbest, batch_size), strict=True):
                results[place] = filling
            if progress is not None:
                progress(len(texts) - len(readable) + first + len(group), len(texts))
        return results

    def _read(self, text: str, number: int, most: int) -> tuple[list[int], list[bool]]:
        """The ids of a sentence with its end, and for each of its masks whether a word begins there."""
        parts = text.split(MASK)
        if len(parts) == 1:
            raise SourceError(number, f"it has no {MASK}")
        ids, begins = self._encoded(parts[0]), []
        for before, part in itertools.pairwise(parts):
            begins.append(self.tokenizer.normalize(f"a{before}a")[-2:-1].isspace() or not ids)
            adjoins = not self.tokenizer.normalize(f"a{part}a")[1:2].isspace()  # signs may be blanks to the tokenizer
            ids += [self.mask_id, *self._encoded(part, adjoins)]
        if len(ids) >= most:
            raise SourceError(
                number, f"{len(ids) + 1} tokens with the end token, and {most} are allowed (max_source_length)"
            )
        return [*ids, self.tokenizer.eos_id], begins

    def _encoded(self, part: str, adjoins: bool = False) -> list[int]:
        """The ids of what stands before, between or after masks; `adjoins`: the word of a mask goes on. The blanks
        beside a mask belong to the words there, and are tokens of their own only where every character is one."""
        kind = self.tokenizer.model_type
        encode = self.tokenizer.encode_rest if adjoins and kind != "word" else self.tokenizer.encode
        return encode(part if kind == "char" else part.strip())

    def _filled(self, group: list[tuple[int, list[int], list[bool]]], nbest: int, rows: int) -> list[Filling]:
        width = widened(max(len(ids) for _, ids, _ in group), longest_source(self.model))
        source = np.full((rows if len(group) > 1 else 1, width), self.tokenizer.pad_id, "int32")
        source[:, 0] = self.tokenizer.eos_id  # rows that are left over
        for row, (_, ids, _) in enumerate(group):
            source[row, : len(ids)] = ids
        places = np.flatnonzero(source == self.mask_id)
        size = widened(len(places), np.inf)  # few shapes of masks too
        padded = np.pad(places, (0, size - len(places))).astype("int32")
        with backend.no_gradient():
            arrays = (ops.convert_to_tensor(array) for array in (source, padded))
            found = np.asarray(ops.convert_to_numpy(self._compiled(*arrays)))[: len(places), : self.mask_id]
        if np.isnan(found).any():
            raise FloatingPointError("the model's scores are NaN: its weights are of no use")
        rows_of_masks = iter(found)
        return [
            self._filling(ids, [(next(rows_of_masks), begin) for begin in begins], nbest) for _, ids, begins in group
        ]

    def _log_probabilities(self, source: Any, places: Any) -> Any:
        logits = self.model({SOURCE: source, "label_places": places}, training=False)
        return ops.log_softmax(ops.cast(logits, "float32"), axis=-1)

    def _filling(self, ids: list[int], found: list[tuple[np.ndarray, bool]], nbest: int) -> Filling:
        masks, filled = [], list(ids)
        for log_probabilities, begins in found:
            allowed = self._beginning if begins else self._inside
            if not allowed.any():
                allowed = self._beginning | self._inside
            order = np.argsort(np.where(allowed, -log_probabilities, np.inf), kind="stable")
            best = order[: min(nbest, int(allowed.sum()))].tolist()
            names = [piece.replace(_BLANK, " ").strip() for piece in self.tokenizer.pieces(best)]
            masks.append(tuple(zip(names, np.exp(log_probabilities[best]).astype(float).tolist(), strict=True)))
            filled[filled.index(self.mask_id)] = best[0]
        return Filling(self.tokenizer.decode(filled).strip(), tuple(masks))
