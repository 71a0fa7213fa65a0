"""Many photos, read a batch at a time, what can't be read among them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from PIL import Image

from mmattn.preprocess.image import ImageReader, ImageReadError


def each_batch(
    images: Any,
    reader: ImageReader,
    make: Callable[[dict[str, np.ndarray], int], Iterable[Any]],
    batch_size: int,
    on_error: str,
    progress: Callable[[int, int], None] | None,
) -> list[Any]:
    """What `make` makes of photos, in their order.

    Args:
        images: one photo or many: paths, bytes of image files, PIL images, uint8 arrays (H, W, 3) or one (B, H, W, 3).
        make: ({"pixels": (B, height, width, 3)}, batches that are still to come, this one included) -> a result a row.
        batch_size: photos in memory at once.
        on_error: "raise" stops at the first photo that can't be read; "return" puts its ImageReadError in its place.
        progress: called as progress(done, total) after each batch.

    Raises:
        ImageReadError: with on_error="raise".
        ValueError: a setting that isn't known or doesn't fit.
    """
    if on_error not in ("raise", "return"):
        raise ValueError(f'on_error={on_error!r} is not known. Known: "raise", "return"')
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    photos = _listed(images)
    batches = math.ceil(len(photos) / batch_size)
    results: list[Any] = []
    for first in range(0, len(photos), batch_size):
        group = [_read(reader, photo, on_error) for photo in photos[first : first + batch_size]]
        pixels = [pixel for pixel in group if not isinstance(pixel, ImageReadError)]
        made: Iterable[Any] = ()
        if pixels:
            made = make({"pixels": np.stack(pixels)}, batches - first // batch_size)
        found = iter(made)
        results += [entry if isinstance(entry, ImageReadError) else next(found) for entry in group]
        if progress is not None:
            progress(len(results), len(photos))
    return results


def _read(reader: ImageReader, photo: Any, on_error: str) -> np.ndarray | ImageReadError:
    try:
        return reader(photo)
    except ImageReadError as error:
        if on_error == "raise":
            raise
        return error


def _listed(images: Any) -> list[Any]:
    """One photo or many as a list."""
    if isinstance(images, str | bytes | bytearray | memoryview | os.PathLike | Image.Image):
        return [images]
    if isinstance(images, np.ndarray):
        return list(images) if images.ndim == 4 else [images]
    if not isinstance(images, Iterable):
        raise TypeError(
            f"images must be a path, bytes, a PIL image, an array or a list of these, not {type(images).__name__}"
        )
    return list(images)
