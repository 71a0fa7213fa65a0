"""What several tasks do with a run's parts. Faults are told with the place in the configuration that made them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmattn.bundle_kinds import KINDS, check_generation
from mmattn.encoders.features import FeatureCacheError
from mmattn.preprocess.image import ImageReadError
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
        check_settings(kind, **{**parts["validation"].decoding(), **candidate, **more})


def check_settings(kind: str, **settings: Any) -> None:
    """Refuses settings that a bundle of that kind could not hold, of those that come from how it is trained."""
    check_generation({**KINDS[kind].generation, **settings}, kind)


def features_of(parts: dict[str, Any], sources: dict[str, Any], say: Callable[[str], None]) -> Any:
    """The frozen backbone's features of all pictures, computed now where they are not on the disk; None without."""
    if parts["features"] is None:
        return None
    cache = parts["features"](backbone=parts["encoder"].backbone, reader=parts["reader"])
    images = [source[index]["image"] for source in sources.values() for index in range(len(source))]
    say(f"Features of {len(images)} pictures, kept in {cache.folder}:")
    # A picture that cannot be read is reported when a batch asks for it.
    cache.fill(images, on_error=lambda image, error: None, progress=sys.stdout.isatty())
    return cache


def how_to_read(reader: Any, features: Any, reject: Report) -> dict[str, Any]:
    """How batches come by their pictures: what `mmattn.data.picture_batches.PictureBatches` take for it."""
    return {
        "read_image": reader if features is None else features,
        "image_key": "pixels" if features is None else "features",
        "skip_errors": (ImageReadError,),
        "on_error": lambda record, error: reject(str(record["id"]), str(error)),
    }
