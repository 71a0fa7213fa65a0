"""Scores of generated captions: during training, for the choice of the decoding defaults, and at the end."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mmattn.metrics import caption_scores, normalize_caption
from mmattn.training.callbacks import listed

Examples = Callable[[], Iterable[tuple[dict[str, Any], Sequence[Mapping[str, Any]]]]]
Describe = Callable[..., Sequence[Any]]  # (inputs, **options) -> an object with text and confidence for each row
SCORES = ("bleu1", "bleu2", "bleu3", "bleu4", "cider_d", "rouge_l", "exact", "distinct")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One described picture. `confidence`: geometric mean of the tokens' probabilities."""

    id: str
    caption: str
    references: list[str]
    confidence: float


@dataclasses.dataclass(frozen=True)
class ValidationOptions:
    """How captions are generated for the validations during a run.

    Args:
        method: "greedy" or "beam".
        num_beams: for beam search.
        max_length, min_length: tokens of a caption, end token included.
        no_repeat_ngram: no n words twice in one caption; 0 allows all.
        pictures: how many pictures of the validation split to describe; None for all.
    """

    method: str = "greedy"
    num_beams: int = 1
    max_length: int = 32
    min_length: int = 1
    no_repeat_ngram: int = 0
    pictures: int | None = None

    def __post_init__(self) -> None:
        if self.method not in ("greedy", "beam"):
            raise ValueError(f"method={self.method!r} is unknown. Known: greedy, beam.")
        if not 0 <= self.min_length < self.max_length:
            raise ValueError(
                f"min_length={self.min_length} must be 0 or more and less than max_length={self.max_length}."
            )
        if self.num_beams < 1 or self.no_repeat_ngram < 0:
            raise ValueError(
                f"num_beams={self.num_beams} must be at least 1, no_repeat_ngram={self.no_repeat_ngram} at least 0."
            )
        if self.pictures is not None and self.pictures < 1:
            raise ValueError(f"pictures={self.pictures} must be at least 1, or null for all.")

    def decoding(self) -> dict[str, Any]:
        """What is handed to the decoder."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "pictures"}


@dataclasses.dataclass(frozen=True)
class FinalOptions:
    """What is tried on the validation split at the end of a run; the best becomes the bundle's default.

    Args:
        num_beams: numbers of beams, 1 for greedy.
        length_penalty: exponents of Wu et al. 2016, equation 14; they do nothing for one beam.
        pictures: how many validation pictures to try them on; None for all.
        shuffled: also score the test captions with the photos shuffled, to see that they depend on the photos.
        weights_dtype: how the bundle stores its weights: "float16", "float32" or "int8".
        low_confidence_share: of the validation captions, the share that the bundle's threshold marks.
    """

    num_beams: Sequence[int] = (1, 3, 5)
    length_penalty: Sequence[float] = (0.6, 0.9, 1.2)
    pictures: int | None = None
    shuffled: bool = True
    weights_dtype: str = "float16"
    low_confidence_share: float = 0.1

    def __post_init__(self) -> None:
        if not self.num_beams or min(self.num_beams) < 1:
            raise ValueError(f"num_beams={list(self.num_beams)} must be a list of numbers, each at least 1.")
        if not self.length_penalty:
            raise ValueError("length_penalty must name at least one exponent; 0 is none.")
        if self.pictures is not None and self.pictures < 1:
            raise ValueError(f"pictures={self.pictures} must be at least 1, or null for all.")
        if self.weights_dtype not in ("float16", "float32", "int8"):
            raise ValueError(f"weights_dtype={self.weights_dtype!r} is unknown. Known: float16, float32, int8.")
        if not 0 <= self.low_confidence_share < 1:
            raise ValueError(f"low_confidence_share={self.low_confidence_share} must be in [0, 1).")

    def grid(self) -> list[dict[str, Any]]:
        """Decoding options to try, the cheapest first.

        >>> len(FinalOptions().grid())
        7
        """
        tried: list[dict[str, Any]] = [{"method": "greedy"}] if 1 in self.num_beams else []
        beams = sorted(n for n in set(self.num_beams) if n > 1)
        pairs = itertools.product(beams, sorted(set(self.length_penalty)))
        return tried + [{"method": "beam", "num_beams": n, "length_penalty": float(a)} for n, a in pairs]


def describe_pictures(
    describe: Describe, examples: Examples, options: Mapping[str, Any], most: int | None = None
) -> list[Prediction]:
    """Generates one caption for each picture.

    Args:
        describe: a `Describer`, or what is called and answers like it.
        examples: called without arguments; gives batches of (inputs, records).
        options: what to call `describe` with: method, max_length and so on.
        most: stop after that many pictures.
    """
    predictions: list[Prediction] = []
    for inputs, records in examples():
        for made, record in zip(describe(inputs, **options), records, strict=True):
            predictions.append(
                Prediction(str(record["id"]), made.text, list(record["captions"]), float(made.confidence))
            )
        if most is not None and len(predictions) >= most:
            return predictions[:most]
    return predictions


def score(predictions: Sequence[Prediction]) -> dict[str, float]:
    """`caption_scores` and `exact`, the share of captions that equal one of their references word for word.

    >>> made = [Prediction("1", "a dog", ["A dog."], 0.9), Prediction("2", "two cats", ["a cat"], 0.4)]
    >>> score(made)["exact"]
    0.5
    """
    captions = [p.caption for p in predictions]
    references = [p.references for p in predictions]
    equal = [normalize_caption(p.caption) in {normalize_caption(r) for r in p.references} for p in predictions]
    return {**caption_scores(captions, references), "exact": sum(equal) / len(equal)}


def score_shuffled(predictions: Sequence[Prediction], seed: int = 0) -> dict[str, float]:
    """The scores when each picture gets the caption of another one: what is left does not come from the pictures."""
    if len(predictions) < 2:
        raise ValueError("Shuffling needs at least 2 pictures.")
    order = np.random.default_rng(seed).permutation(len(predictions))
    given: list[Any] = [None] * len(predictions)
    for place, following in zip(order, np.roll(order, -1), strict=True):  # one cycle through all: nobody keeps its own
        given[place] = dataclasses.replace(predictions[place], caption=predictions[following].caption)
    return score(given)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The best decoding options, its captions, and an entry for each that was tried."""

    options: dict[str, Any]
    predictions: list[Prediction]
    tried: list[dict[str, Any]]


def choose_decoding(
    describe: Describe,
    examples: Examples,
    fixed: Mapping[str, Any],
    options: FinalOptions,
    monitor: str,
    say: Callable[[str], None] = print,
) -> Choice:
    """Tries the grid on the validation pictures.

    Args:
        describe, examples: as for `describe_pictures`.
        fixed: options that all share, such as max_length.
        monitor: the score that decides; of equals the cheaper wins.
    """
    best: Choice | None = None
    best_score = -np.inf
    tried = []
    for candidate in options.grid():
        together = {**fixed, **candidate}
        predictions = describe_pictures(describe, examples, together, options.pictures)
        scores = score(predictions)
        tried.append({"options": candidate, "scores": scores})
        shown = listed({name: scores[name] for name in dict.fromkeys((monitor, "bleu4", "cider_d"))})
        say(f"  {' '.join(str(v) for v in candidate.values())}: {shown}")
        if best is None or scores[monitor] > best_score:
            best, best_score = Choice(together, predictions, tried), scores[monitor]
    assert best is not None
    return best


def confidence_threshold(predictions: Sequence[Prediction], share: float) -> float:
    """The confidence below which a share of the captions lies.

    >>> confidence_threshold([Prediction(str(i), "", [], i / 10) for i in range(10)], 0.2)
    0.2
    """
    ordered = sorted(p.confidence for p in predictions)
    return round(ordered[int(share * len(ordered))], 4) if share else 0.0
