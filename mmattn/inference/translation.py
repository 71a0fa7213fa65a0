"""One call of a translator: which texts it reads, in which batches, and their translations in the order given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmattn.generation import SOURCE, Text, TextGenerator
from mmattn.preprocess.text import Tokenizer


class SourceError(ValueError):
    """A text that can't be translated.

    Attributes:
        number: which of the texts, counted from 1.
        reason: why.
    """

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"text {number}: {reason}")
        self.number = number
        self.reason = reason


@dataclass(frozen=True)
class Translation:
    """One translation of one text.

    Attributes:
        text: the sentence.
        score: log-probability divided by the length penalty: what beam search ranks by.
        confidence: geometric mean of the tokens' probabilities, 0 to 1, end token included.
        ids: the tokens, without start and end.
        source_ids: those of the source, without end. () for a text in which the tokenizer finds no token, whose
            translation is empty, with score 0 and confidence 1.
        alternatives: the next best translations, best first, when `nbest` asked for them.
    """

    text: str
    score: float
    confidence: float
    ids: tuple[int, ...]
    source_ids: tuple[int, ...]
    alternatives: tuple[Translation, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Job:
    """What all texts of one call have in common."""

    generator: TextGenerator
    tokenizer: Tokenizer
    batch_size: int
    on_error: str
    most: int
    options: dict[str, Any]

    def read(self, text: str, number: int) -> tuple[int, ...]:
        """The tokens of a text, without end. Refuses one that is too long."""
        ids = tuple(self.tokenizer.encode(text))
        if not text.strip():
            return ()
        if len(ids) >= self.most:
            raise SourceError(
                number,
                f"{len(ids) + 1} tokens with the end token, and {self.most} are allowed (max_source_length). "
                "Translate it sentence by sentence",
            )
        return ids

    def results(self, texts: Sequence[str], progress: Callable[[int, int], None] | None = None) -> list[Any]:
        """The translations of texts, or their errors, in order."""
        results: list[Any] = [None] * len(texts)
        places: dict[tuple[int, ...], list[int]] = {}  # equal texts are translated once
        for place, text in enumerate(texts):
            try:
                ids = self.read(text, place + 1)
            except SourceError as error:
                if self.on_error == "raise":
                    raise
                results[place] = error
                continue
            if ids:
                places.setdefault(ids, []).append(place)
            else:
                results[place] = Translation("", 0.0, 1.0, (), ())
        done, full = sum(result is not None for result in results), len(texts) > self.batch_size
        if progress is not None and done:
            progress(done, len(texts))
        for sources, left in self._batches(places):
            for source, found in zip(sources, self._translated(sources, left, full), strict=True):
                for place in places[source]:
                    results[place] = found
                done += len(places[source])
            if progress is not None:
                progress(done, len(texts))
        return results

    def _batches(self, sources: Iterable[tuple[int, ...]]) -> Iterator[tuple[list[tuple[int, ...]], int]]:
        """Batches of sources of one width, the shortest first, and how many of that width are to come.

        All of a batch have the same width, on which the length of a translation depends.
        """
        groups: dict[int, list[tuple[int, ...]]] = {}
        for source in sorted(sources, key=len):
            groups.setdefault(self.generator.width(len(source) + 1), []).append(source)
        for group in groups.values():
            for start in range(0, len(group), self.batch_size):
                yield group[start : start + self.batch_size], math.ceil((len(group) - start) / self.batch_size)

    def _translated(self, sources: Sequence[tuple[int, ...]], left: int, full: bool) -> list[Translation]:
        rows = self.batch_size if full else len(sources)
        width = max(map(len, sources)) + 1
        ids = np.full((rows, width), self.tokenizer.pad_id, "int32")
        for row in range(rows):
            source = sources[min(row, len(sources) - 1)]
            ids[row, : len(source) + 1] = [*source, self.tokenizer.eos_id]
        found = self.generator({SOURCE: ids}, batches=left, **self.options)
        return [_ranked(texts, source) for texts, source in zip(found, sources, strict=False)]


def _ranked(texts: Sequence[Text], source: tuple[int, ...]) -> Translation:
    best, *others = (Translation(t.text, t.score, t.confidence, t.ids, source) for t in texts)
    return Translation(best.text, best.score, best.confidence, best.ids, source, tuple(others))
