"""The kinds of bundles: what each needs, and its settings for generating text with their defaults and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """One kind of bundle.

    Attributes:
        name: as a sentence calls it.
        format_version: the first format that has this kind.
        opened_by: the class that loads it.
        parts: what it holds beside its model: tokenizer, reader, classes.
        probe: rows of log-probabilities that its probe gives, see `mmattn.bundle_model.probe_inputs`.
        methods: how its texts may be generated; () for a kind that generates none.
        generation: the settings and their defaults.
    """

    name: str
    format_version: int
    opened_by: str
    parts: tuple[str, ...]
    probe: int
    methods: tuple[str, ...]
    generation: Mapping[str, Any]


KINDS = {
    "captioner": Kind(
        "a captioner",
        1,
        "Captioner",
        ("tokenizer", "reader"),
        6,
        ("beam", "greedy"),
        {
            "method": "beam",
            "num_beams": 3,
            "length_penalty": 0.6,
            "max_length": 32,
            "min_length": 1,
            "no_repeat_ngram": 0,
            "low_confidence": 0.0,
        },
    ),
    "translator": Kind(
        "a translator",
        2,
        "Translator",
        ("tokenizer",),
        6,
        ("beam", "greedy"),
        {
            "method": "beam",
            "num_beams": 5,
            "length_penalty": 1.0,
            "patience": 2.0,
            "max_length": 256,
            "length_factor": 2.0,
            "length_offset": 10,
            "min_length": 1,
            "no_repeat_ngram": 0,
            "max_source_length": 256,
        },
    ),
    "language_model": Kind(
        "a language model",
        2,
        "Writer",
        ("tokenizer",),
        6,
        ("sample", "greedy"),
        {
            "method": "sample",
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "max_length": 256,
            "context_length": 0,
            "memory_length": 0,
            "documents": False,  # whether each text that it was trained on was one for itself, as when it is scored
        },
    ),
    "masked_language_model": Kind(
        "a masked language model", 3, "MaskFiller", ("tokenizer",), 8, (), {"max_source_length": 256}
    ),
    "classifier": Kind("a classifier", 3, "Classifier", ("reader", "classes"), 1, (), {}),
}
_UNTIL_NOW = {"patience": 0.0, "memory_length": 0, "documents": False}  # what was done before there was the setting
_RANGES = {
    "num_beams": (1, 64),
    "length_penalty": (-10.0, 10.0),
    "patience": (0.0, 64.0),
    "max_length": (1, 4096),
    "min_length": (0, 4096),
    "no_repeat_ngram": (0, 64),
    "low_confidence": (0.0, 1.0),
    "length_factor": (0.0, 100.0),
    "length_offset": (1, 4096),
    "max_source_length": (2, 4096),
    "temperature": (0.001, 1000.0),
    "top_k": (0, 10_000_000),
    "top_p": (0.000001, 1.0),
    "context_length": (0, 65536),
    "memory_length": (0, 65536),
}


def check_generation(settings: Mapping[str, Any], kind: str = "captioner") -> dict[str, Any]:
    """The settings of a bundle of that kind, if each is known, there and in its range.

    A setting that came later may be missing: it gets the value that means what was done before.

    Raises:
        ValueError: names the setting and the range.

    >>> check_generation({**KINDS["language_model"].generation, "top_p": 1.5}, "language_model")
    Traceback (most recent call last):
    ValueError: generation.top_p=1.5 must be a number from 1e-06 to 1.0
    """
    known, methods = KINDS[kind].generation, KINDS[kind].methods
    settings = {name: value for name, value in _UNTIL_NOW.items() if name in known} | dict(settings)
    if unknown := settings.keys() - known.keys():
        raise ValueError(f"generation: {', '.join(sorted(unknown))} is not known. Known: {', '.join(known)}")
    if missing := known.keys() - settings.keys():
        raise ValueError(f"generation: {', '.join(sorted(missing))} is missing")
    if methods and settings["method"] not in methods:
        raise ValueError(f"generation.method={settings['method']!r} is not known. Known: {', '.join(methods)}")
    if not isinstance(settings.get("documents", False), bool):
        raise ValueError(f"generation.documents={settings['documents']!r} must be true or false")
    for name in known.keys() & _RANGES.keys():
        value, (low, high) = settings[name], _RANGES[name]
        whole = isinstance(low, int)
        fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not fits or not low <= value <= high:
            what = "whole number" if whole else "number"
            raise ValueError(f"generation.{name}={value!r} must be a {what} from {low} to {high}")
    return settings
