"""The pictures of a comparison. matplotlib is imported when one is drawn (extra `plots`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmattn.comparison.members import Member
from mmattn.metrics.bootstrap import Interval
from mmattn.pictures import alignment_sheet
from mmattn.pictures.letters import INK, write
from mmattn.training.checkpoint import atomic_file

GROWTH = (
    ("train_seconds", "a training step, ms", 1000.0),
    ("train_mebibytes", "memory of a training step, MiB", 1.0),
    ("encode_seconds", "encoding, ms", 1000.0),
    ("generate_seconds", "generation, ms", 1000.0),
)


def plots_installed() -> bool:
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


def score_bars(path: Path, scores: Mapping[str, Interval], label: str) -> None:
    """A bar for each member with its confidence interval."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        names = list(scores)
        values = [scores[name].value for name in names]
        below = [max(0.0, scores[name].value - scores[name].low) for name in names]
        above = [max(0.0, scores[name].high - scores[name].value) for name in names]
        bars = axes.barh(names, values, xerr=[below, above], color=_colours(len(names)), capsize=4)
        axes.bar_label(bars, [f"{value:.1f}" for value in values], padding=12)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.margins(x=0.12)

    _save(path, draw, (8, 1.2 + 0.5 * len(scores)))


def curves(path: Path, members: Sequence[Member], score: str) -> bool:
    """The validation score by epoch; False where nobody has one."""
    lines = {m.name: [(e["epoch"], e[f"val_{score}"]) for e in m.curve if f"val_{score}" in e] for m in members}
    if not any(lines.values()):
        return False

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for (name, points), colour in zip(lines.items(), _colours(len(lines)), strict=True):
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, color=colour)
        axes.set_xlabel("epoch")
        axes.set_ylabel(f"validation {score}")
        axes.legend()

    _save(path, draw, (8, 4.5))
    return True


def growth(path: Path, members: Sequence[Member]) -> bool:
    """What a step costs by the length of the sequences, on logarithmic axes; False where nothing was measured."""
    measured = [m for m in members if any("train_seconds" in entry for entry in m.costs["lengths"])]
    if not measured:
        return False

    from matplotlib.ticker import LogLocator

    lengths = sorted({entry["length"] for member in measured for entry in member.costs["lengths"]})

    def draw(figure: Any) -> None:
        for axes, (key, label, factor) in zip(figure.subplots(2, 2).flat, GROWTH, strict=True):
            for member, colour in zip(measured, _colours(len(measured)), strict=True):
                found = [(e["length"], factor * e[key]) for e in member.costs["lengths"] if e.get(key)]
                if found:
                    axes.plot(*zip(*found, strict=True), marker="o", markersize=3, label=member.name, color=colour)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(lengths, map(str, lengths))
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            axes.set_xlabel("tokens a side")
            axes.set_title(label)
            axes.grid(alpha=0.3)
        figure.axes[0].legend()

    _save(path, draw, (11, 8))
    return True


def by_length(path: Path, lines: Mapping[str, Sequence[float | None]], bins: Sequence[str]) -> None:
    """A score by the length of the source: a line for each member, a point for each bin that has sentences enough."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for (name, scores), colour in zip(lines.items(), _colours(len(lines)), strict=True):
            points = [(place, score) for place, score in enumerate(scores) if score is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name, color=colour)
        axes.set_xticks(range(len(bins)), bins)
        axes.set_xlabel("words of the source")
        axes.set_ylabel("BLEU")
        axes.legend()

    _save(path, draw, (8, 4.5))


def alignments(path: Path, found: Mapping[str, Any]) -> None:
    """The same sentence through each model: heat maps side by side, at most three in a row.

    Args:
        found: of each, "source_words" (W'), "target_words" (W) and "weights" (W, W').
    """
    sheets = {
        name: alignment_sheet(one["source_words"], one["target_words"], np.asarray(one["weights"], "float32"))
        for name, one in found.items()
    }
    across, margin, title = 3, 16, 34
    names = list(sheets)
    rows = [names[first : first + across] for first in range(0, len(names), across)]
    width = max(sum(sheets[name].width + margin for name in row) for row in rows) + margin
    heights = [max(sheets[name].height for name in row) + title + margin for row in rows]
    page = Image.new("RGB", (width, sum(heights) + margin), (255, 255, 255))
    top = margin
    for row, height in zip(rows, heights, strict=True):
        left = margin
        for name in row:
            write(page, (left, top + title / 2), name, 20, INK, anchor="lm")
            page.paste(sheets[name], (left, top + title))
            left += sheets[name].width + margin
        top += height
    with atomic_file(path) as file:
        page.save(file, format="PNG")


def _save(path: Path, draw: Callable[[Any], None], size: tuple[float, float]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=110)


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["tab10"](i % 10) for i in range(count)]
