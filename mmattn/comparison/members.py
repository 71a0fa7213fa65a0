"""What the run folder of one member of a comparison tells."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmattn.training.folder import JsonLines


@dataclass(frozen=True)
class Member:
    """One model of a comparison.

    Attributes:
        name: what the report calls it.
        folder: its run folder; None before it has one.
        minutes: of training, validation and scoring, over all legs.
        problem: why it has no results, in words; None when it has.
        config: the run's resolved configuration.
        results: the run's results.json.
        predictions: of the test split, dicts with id, text and references, in the order of the data.
        curve: the entries of metrics.jsonl.
        costs: {"options": how it was measured, "lengths": what `mmattn.comparison.costs` found at each}; empty before.
        bundle: what the bundle's bundle.json says.
        alignment: {"sentence": .., **what `mmattn.comparison.sentence` found}; empty before.
    """

    name: str
    folder: Path | None = None
    minutes: float = 0.0
    problem: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    predictions: list[dict[str, Any]] = field(default_factory=list)
    curve: list[dict[str, Any]] = field(default_factory=list)
    costs: dict[str, Any] = field(default_factory=dict)
    bundle: dict[str, Any] = field(default_factory=dict)
    alignment: dict[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return bool(self.results)

    @property
    def kind(self) -> str | None:
        """One of `mmattn.bundle_kinds.KINDS`, as the bundle says."""
        return self.bundle.get("kind")

    @property
    def parameters(self) -> int | None:
        """Their number, frozen ones included."""
        return self.bundle.get("weights", {}).get("parameters")

    @property
    def tokenizer(self) -> str | None:
        """The fingerprint of the tokenizer of what it writes."""
        return self.bundle.get("files", {}).get("tokenizer.model", {}).get("sha256")


def read_member(
    name: str, folder: Path | None, config: dict[str, Any], minutes: float = 0.0, problem: str | None = None
) -> Member:
    """Reads a run folder; what is not there yet is left empty.

    >>> read_member("lstm", None, {}, problem="not started").finished
    False
    """
    if folder is None:
        return Member(name, minutes=minutes, problem=problem, config=config)
    return Member(
        name, folder, minutes, problem, config,
        results=read_json(folder / "results.json"),
        predictions=JsonLines(folder / "predictions.jsonl").read(),
        curve=JsonLines(folder / "metrics.jsonl").read(),
        bundle=read_json(folder / "bundle" / "bundle.json"),
        costs=read_json(folder / "costs.json"),
        alignment=read_json(folder / "alignment.json"),
    )  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
