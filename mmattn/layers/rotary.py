"""Rotary positions: queries and keys are turned by an angle that grows with their place.

The product of a query at place t and a key at place s then depends on their contents and on t - s alone.
"""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops


def rotate(heads: Any, places: Any, base: float = 10000.0) -> Any:
    """Turns each pair of channels (i, i + K/2) of the vector at place t by the angle t / base^(2i/K).

    The pairs are those of GPT-NeoX and Llama (the two halves of a head), not neighbours (2i, 2i + 1) as in the paper;
    for a trained model the two are the same but for the order of the channels. Angles and products are in float32 at
    least, whatever the dtype of the heads.

    Args:
        heads: `(B, H, T, K)`, queries or keys; K even.
        places: `(T,)` whole numbers, 0 = the first place.
        base: the wavelengths run from 2 pi to 2 pi `base`, about.

    Returns:
        `(B, H, T, K)`, of the same lengths and dtype.

    Raises:
        ValueError: for an odd K.

    Example:
        >>> import numpy as np
        >>> query, key = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 4))
        >>> def score(t, s):
        ...     return float(np.sum(np.asarray(rotate(query, np.array([t]))) * np.asarray(rotate(key, np.array([s])))))
        >>> round(score(7, 5) - score(2, 0), 5) == 0, round(score(7, 5) - score(5, 7), 5) == 0
        (True, False)

    Source:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, section 3.2.
    """
    width = heads.shape[-1]
    check_rotary(width)
    dtype = keras.backend.standardize_dtype(heads.dtype)
    wide = "float64" if dtype == "float64" else "float32"
    pairs = ops.cast(ops.arange(width // 2, dtype="int32"), wide)
    rates = ops.exp(pairs * (-2.0 * math.log(base) / width))
    angles = ops.cast(places, wide)[:, None] * rates[None, :]  # (T, K/2)
    cosine, sine = ops.cos(angles), ops.sin(angles)
    heads = ops.cast(heads, wide)
    first, second = heads[..., : width // 2], heads[..., width // 2 :]
    turned = ops.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return ops.cast(turned, dtype)


def check_rotary(key_dim: int) -> None:
    """Refuses a head whose channels do not pair up.

    >>> check_rotary(5)
    Traceback (most recent call last):
    ValueError: Rotary positions turn pairs of channels, so key_dim, the width of a head, is even. Received 5.
    """
    if key_dim % 2:
        raise ValueError(
            f"Rotary positions turn pairs of channels, so key_dim, the width of a head, is even. Received {key_dim}."
        )
