"""The one check of the pixels that an encoder is given."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn import backend


def check_pixel_range(pixels: Any) -> None:
    """Refuses real-valued pixels that are not 0 to 255. Inside a compiled function the numbers cannot be seen.

    Raises:
        ValueError: numbers below 0, above 255, or all of them from 0 to 1.
    """
    if backend.is_traced(pixels) or not keras.backend.is_float_dtype(keras.backend.standardize_dtype(pixels.dtype)):
        return
    low, high = float(ops.min(pixels)), float(ops.max(pixels))
    if low < 0 or high > 255 or 0 < high <= 1:
        raise ValueError(
            "pixels are numbers from 0 to 255, which the encoder scales itself. "
            f"Received values from {low:g} to {high:g}: they were scaled already. Pass what ImageReader returns."
        )
