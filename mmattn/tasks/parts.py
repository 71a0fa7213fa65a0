"""Faults of a run's parts, told with the place in the configuration that made them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmattn.bundle_kinds import KINDS, check_generation
from mmattn.encoders.features import FeatureCacheError
from mmattn.preprocess.text import Tokenizer

Report = Callable[[str, str], None]  # (id of a record, what is wrong with it)


class PartError(ValueError):
    """A part of a run cannot be made with these data. `path` is its place in the configuration."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


@contextmanager
def blame(path: str) -> Iterator[None]:
    """Says of which part of the configuration a fault in here is."""
    try:
        yield
    except PartError:
        raise
    except (ValueError, FeatureCacheError) as error:
        raise PartError(path, str(error)) from error


def tokenizer_of(path: Path, train: Callable[..., Tokenizer], texts: Iterable[str]) -> Tokenizer:
    """A run's own tokenizer: trained on its texts the first time, read from the run folder afterwards."""
    if not path.exists():
        train(texts=texts).save(path)
    return Tokenizer.load(path)


def check_part(part: Any, kind: type, wanted: str) -> None:
    """Refuses an encoder or decoder of another task: a picture's encoder is made before its run, what has a vocabulary
    by it, and some tasks have no encoder or no decoder."""
    part = part or None  # an empty node of the configuration
    if not isinstance(part, kind):
        found = "none" if part is None else getattr(part, "func", type(part)).__name__
        raise ValueError(f"this task needs {wanted}. Received {found}.")


def check_decoding(parts: dict[str, Any], kind: str, **more: Any) -> None:
    """Refuses settings that a bundle of that kind could not hold, of those that the end of a run will try."""
    for candidate in parts["final"].grid():
        check_generation({**KINDS[kind].generation, **parts["validation"].decoding(), **candidate, **more}, kind)
