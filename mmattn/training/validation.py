"""Scores of generated texts: during training, for the choice of the decoding defaults, and at the end."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmattn.bundle import Bundle, update_bundle
from mmattn.metrics import caption_scores, normalize_caption
from mmattn.training.callbacks import listed
from mmattn.training.folder import JsonLines, write_json

Examples = Callable[[], Iterable[tuple[dict[str, Any], Sequence[Mapping[str, Any]]]]]
Generate = Callable[..., Sequence[Any]]  # (inputs, **options) -> an object with text and confidence for each row
Scores = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One generated text. `confidence`: geometric mean of the tokens' probabilities."""

    id: str
    text: str
    references: list[str]
    confidence: float


class Scoring:
    """How the texts of a task are scored.

    Args:
        references: the field of a record that holds its references, a list of texts.
        names: of the scores.
        score: (texts, lists of references) -> scores by name.

    Call arguments:
        predictions: what is to be scored.

    >>> share = lambda texts, references: {"exact": sum(t in r for t, r in zip(texts, references)) / len(texts)}
    >>> Scoring("captions", ("exact",), share)([Prediction("1", "a", ["a"], 1.0), Prediction("2", "b", ["a"], 1.0)])
    {'exact': 0.5}
    """

    def __init__(
        self, references: str, names: Sequence[str], score: Callable[[list[str], list[list[str]]], Scores]
    ) -> None:
        self.references = references
        self.names = tuple(names)
        self.score = score

    def __call__(self, predictions: Sequence[Prediction]) -> Scores:
        return self.score([p.text for p in predictions], [p.references for p in predictions])


def _score_captions(captions: list[str], references: list[list[str]]) -> Scores:
    """`caption_scores` and `exact`, the share of captions that equal one of their references word for word."""
    equal = [
        normalize_caption(caption) in {normalize_caption(r) for r in several}
        for caption, several in zip(captions, references, strict=True)
    ]
    return {**caption_scores(captions, references), "exact": sum(equal) / len(equal)}


CAPTIONS = Scoring(
    "captions", ("bleu1", "bleu2", "bleu3", "bleu4", "cider_d", "rouge_l", "exact", "distinct"), _score_captions
)


@dataclasses.dataclass(frozen=True)
class ValidationOptions:
    """How texts are generated for the validations during a run.

    Args:
        method: "greedy" or "beam".
        num_beams: for beam search.
        length_penalty: exponent of Wu et al. 2016, equation 14; it does nothing for one beam.
        patience: of beam search, at validation and in the end; see `mmattn.decoding.beam`. None is off, which is all
            that captioners know.
        max_length, min_length: tokens of a text, end token included.
        no_repeat_ngram: no n words twice in one text; 0 allows all.
        length_factor, length_offset: at most length_factor * S + length_offset tokens for a source of S tokens, padding
            included; None for no such limit.
        examples: how many of the validation split to do; None for all.
    """

    method: str = "greedy"
    num_beams: int = 1
    length_penalty: float = 0.6
    patience: float | None = None
    max_length: int = 32
    min_length: int = 1
    no_repeat_ngram: int = 0
    length_factor: float | None = None
    length_offset: int | None = None
    examples: int | None = None

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
        if (self.length_factor is None) != (self.length_offset is None):
            raise ValueError("length_factor and length_offset are given together, or neither.")
        if self.examples is not None and self.examples < 1:
            raise ValueError(f"examples={self.examples} must be at least 1, or null for all.")

    def decoding(self) -> dict[str, Any]:
        """What is handed to the decoder: the limit by the source's length only where there is one."""
        given = dataclasses.asdict(self)
        return {name: value for name, value in given.items() if name != "examples" and value is not None}


@dataclasses.dataclass(frozen=True)
class FinalOptions:
    """What is tried on the validation split at the end of a run; the best becomes the bundle's default.

    Args:
        num_beams: numbers of beams, 1 for greedy.
        length_penalty: exponents of Wu et al. 2016, equation 14; they do nothing for one beam.
        examples: how many of the validation split to try them on; None for all.
        shuffled: also score the test texts with their inputs shuffled, to see that they depend on them.
        weights_dtype: how the bundle stores its weights: "float16", "float32" or "int8".
        low_confidence_share: of the validation texts, the share that the bundle's threshold marks.
    """

    num_beams: Sequence[int] = (1, 3, 5)
    length_penalty: Sequence[float] = (0.6, 0.9, 1.2)
    examples: int | None = None
    shuffled: bool = True
    weights_dtype: str = "float16"
    low_confidence_share: float = 0.1

    def __post_init__(self) -> None:
        if not self.num_beams or min(self.num_beams) < 1:
            raise ValueError(f"num_beams={list(self.num_beams)} must be a list of numbers, each at least 1.")
        if not self.length_penalty:
            raise ValueError("length_penalty must name at least one exponent; 0 is none.")
        if self.examples is not None and self.examples < 1:
            raise ValueError(f"examples={self.examples} must be at least 1, or null for all.")
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


def predict(
    generate: Generate, examples: Examples, options: Mapping[str, Any], scoring: Scoring, most: int | None = None
) -> list[Prediction]:
    """Generates one text for each example.

    Args:
        generate: `mmattn.generation.TextGenerator.best`, or what is called and answers like it.
        examples: called without arguments; gives batches of (inputs, records).
        options: what to call `generate` with: method, max_length and so on.
        scoring: says where the references are.
        most: stop after that many.
    """
    predictions: list[Prediction] = []
    for inputs, records in examples():
        for made, record in zip(generate(inputs, **options), records, strict=True):
            references = list(record[scoring.references])
            predictions.append(Prediction(str(record["id"]), made.text, references, float(made.confidence)))
        if most is not None and len(predictions) >= most:
            return predictions[:most]
    return predictions


def score_shuffled(predictions: Sequence[Prediction], scoring: Scoring, seed: int = 0) -> Scores:
    """The scores when each input gets the text of another one: what is left does not come from the inputs."""
    if len(predictions) < 2:
        raise ValueError("Shuffling needs at least 2 predictions.")
    order = np.random.default_rng(seed).permutation(len(predictions))
    given: list[Any] = [None] * len(predictions)
    for place, following in zip(order, np.roll(order, -1), strict=True):  # one cycle through all: nobody keeps its own
        given[place] = dataclasses.replace(predictions[place], text=predictions[following].text)
    return scoring(given)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The best decoding options, its texts, and an entry for each that was tried."""

    options: dict[str, Any]
    predictions: list[Prediction]
    tried: list[dict[str, Any]]


def choose_decoding(
    generate: Generate,
    examples: Examples,
    fixed: Mapping[str, Any],
    options: FinalOptions,
    scoring: Scoring,
    monitor: str,
    say: Callable[[str], None] = print,
) -> Choice:
    """Tries the grid on the validation split.

    Args:
        generate, examples, scoring: as for `predict`.
        fixed: options that all share, such as max_length.
        monitor: the score that decides; of equals the cheaper wins.
    """
    best: Choice | None = None
    best_score = -np.inf
    tried = []
    for candidate in options.grid():
        together = {**fixed, **candidate}
        predictions = predict(generate, examples, together, scoring, options.examples)
        scores = scoring(predictions)
        tried.append({"options": candidate, "scores": scores})
        shown = dict.fromkeys((monitor, *(name for name in ("bleu4", "cider_d", "chrf") if name in scores)))
        say(f"  {' '.join(str(v) for v in candidate.values())}: {listed({name: scores[name] for name in shown})}")
        if best is None or scores[monitor] > best_score:
            best, best_score = Choice(together, predictions, tried), scores[monitor]
    assert best is not None
    return best


def finish(
    generate: Generate,
    examples: Examples,
    fixed: Mapping[str, Any],
    options: FinalOptions,
    scoring: Scoring,
    monitor: str,
    folder: Path,
    bundled: Callable[[Choice], Bundle],
    test: Callable[[Bundle], tuple[list[Prediction], dict[str, Any]]],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The end of a run that generates: chooses the decoding, makes the bundle, scores it on the test split.

    Args:
        generate, examples, fixed, options, scoring, monitor: as for `choose_decoding`.
        folder: the run folder; predictions.jsonl and results.json are written there, the latter last.
        bundled: makes the bundle of a choice.
        test: the bundle's predictions of the test split, and what more is to be said about them ("card": in its card).
    """
    say("Decoding options on the validation split:")
    choice = choose_decoding(generate, examples, fixed, options, scoring, monitor, say)
    bundle = bundled(choice)
    say(f"Test split, by the bundle, with {listed(decoding_of(bundle.generation))}.")
    predictions, more = test(bundle)
    tested = scoring(predictions)
    results = {
        "generation": bundle.generation,
        "valid": scoring(choice.predictions),
        "tried": choice.tried,
        "test_examples": len(predictions),
        "test": tested,
    }
    if options.shuffled and len(predictions) > 1:
        results["test_shuffled"] = score_shuffled(predictions, scoring)
    results |= more
    JsonLines(folder / "predictions.jsonl").write([dataclasses.asdict(p) for p in predictions])
    shown = {name: round(value, 4) for name, value in tested.items()}
    update_bundle(bundle.folder, card={"scores": {"test": shown}, **more.get("card", {})})
    write_json(folder / "results.json", results)
    return results


def decoding_of(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Of a bundle's settings those that decoding takes."""
    return {name: value for name, value in generation.items() if name not in ("low_confidence", "max_source_length")}


def confidence_threshold(predictions: Sequence[Prediction], share: float) -> float:
    """The confidence below which a share of the texts lies.

    >>> confidence_threshold([Prediction(str(i), "", [], i / 10) for i in range(10)], 0.2)
    0.2
    """
    ordered = sorted(p.confidence for p in predictions)
    return round(ordered[int(share * len(ordered))], 4) if share else 0.0
