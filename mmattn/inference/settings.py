"""The settings of one call: the defaults with the caller's changes, once they fit each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmattn.bundle_kinds import check_generation


def checked_settings(
    defaults: Mapping[str, Any], nbest: int, changes: Mapping[str, Any], kind: str, vocabulary_size: int
) -> dict[str, Any]:
    """The settings of one call to a captioner or translator.

    Beams that weren't asked for are as many as `nbest` needs; more than one text or a number of beams means beam
    search, unless the caller names the method.

    Raises:
        ValueError: a setting that isn't known or doesn't fit.
    """
    chosen = check_generation({**defaults, **changes}, kind)
    if nbest < 1:
        raise ValueError(f"nbest={nbest} must be at least 1")
    if "method" not in changes and ("num_beams" in changes or nbest > 1):
        chosen["method"] = "beam"
    if chosen["method"] == "beam" and "num_beams" not in changes:
        chosen["num_beams"] = max(chosen["num_beams"], nbest)
    beams = chosen["num_beams"] if chosen["method"] == "beam" else 1
    if nbest > beams:
        what = {"captioner": "captions", "translator": "translations"}[kind]
        raise ValueError(f"nbest={nbest} {what} need at least as many beams; there are {beams}")
    if beams > vocabulary_size:
        raise ValueError(f"num_beams={beams} exceeds the {vocabulary_size} tokens of the vocabulary")
    if "min_length" not in changes:
        chosen["min_length"] = min(chosen["min_length"], chosen["max_length"] - 1)
    return chosen
