"""Measured rounds as Markdown tables: medians, quartiles, and ratios to the first row of a table."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table whose first column is text and whose others are numbers."""
    lines = [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]
    return lines + [f"| {' | '.join(cells)} |" for cells in rows]


TIMES = ("ms", "quartiles", "tokens/s", "x first row")


def times(seconds: Sequence[float], tokens: int, first: Sequence[float]) -> list[str]:
    """The cells of `TIMES` for one row. Its rounds and those of the first row were measured in turn.

    >>> times([0.2, 0.4, 0.6], 100, [0.1, 0.1, 0.1])
    ['400', '300 to 500', '250', '4.00']
    """
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    ratio = statistics.median(own / other for own, other in zip(seconds, first, strict=True))
    rate = f"{tokens / median:,.0f}"
    return [number(median * 1000), f"{number(low * 1000)} to {number(high * 1000)}", rate, f"{ratio:.2f}"]


def number(value: float) -> str:
    """Three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def machine(packages: Iterable[str]) -> dict[str, object]:
    """Processor, load of the last minute, Python and the versions of packages."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    versions = {package: importlib.metadata.version(package) for package in packages}
    return {"processor": _processor(), "load": load, "versions": {"Python": platform.python_version(), **versions}}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
