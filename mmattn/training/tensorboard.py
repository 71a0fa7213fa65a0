"""Scalars for TensorBoard, from the entries that go into metrics.jsonl. Needs the extra `tensorboard`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any


def installed() -> bool:
    """Whether TensorBoard can be imported."""
    return importlib.util.find_spec("tensorboard") is not None


def scalar_writer(folder: Path) -> Callable[[dict[str, Any]], None]:
    """A function that writes each number of an entry as a scalar at the entry's `step`."""
    from tensorboard.summary import Writer

    writer = Writer(str(folder))

    def listen(entry: dict[str, Any]) -> None:
        for name, value in entry.items():
            if name != "step" and isinstance(value, (int, float)):
                writer.add_scalar(name, value, entry["step"])
        writer.flush()

    return listen
