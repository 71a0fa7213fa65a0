"""Noise for sampling that is a function of (seed, row, position, token) alone: a counter-based integer hash.

It depends on no generator state, so that a row draws the same numbers alone, in any batch and on every backend.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import ops


def _signed(word: int) -> int:
    """The 32 low bits of `word` as a signed number."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def seed_words(seed: int) -> np.ndarray:
    """A seed of up to 64 bits as two int32 words `(2,)`."""
    return np.array([_signed(seed), _signed(seed >> 32)], dtype="int32")


def _shifted(x: Any, bits: int) -> Any:
    """Logical shift to the right: the arithmetic one without its copies of the sign."""
    return ops.bitwise_and(ops.right_shift(x, bits), (1 << (32 - bits)) - 1)


def mix(x: Any) -> Any:
    """A bijection of int32 in which each bit flips each other with a chance near 1/2 (C. Wellons' lowbias32, 2018)."""
    x = ops.bitwise_xor(x, _shifted(x, 16)) * _signed(0x7FEB352D)
    x = ops.bitwise_xor(x, _shifted(x, 15)) * _signed(0x846CA68B)
    return ops.bitwise_xor(x, _shifted(x, 16))


def hashed(words: Any, rows: Any, position: Any, vocabulary_size: int) -> Any:
    """Evenly spread int32 `(B, V)` for a seed's two words, rows `(B,)`, one position and all tokens.

    Each (seed, row, position) makes two keys, 64 bits, so that two of them sharing a stream does not happen.
    """
    words, rows, position = (ops.cast(array, "int32") for array in (words, rows, position))
    key = mix(mix(words[0]) + words[1])
    key = mix(mix(rows + key) + position * _signed(0x9E3779B9))  # (B,)
    other = mix(mix(rows * _signed(0x85EBCA6B) + mix(words[1] + _signed(0x3C6EF372))) + mix(position + words[0]))
    token = ops.arange(vocabulary_size, dtype="int32") * _signed(0x9E3779B1)
    return mix(mix(ops.bitwise_xor(token[None], key[:, None])) + other[:, None])


def uniform(words: Any, rows: Any, position: Any, vocabulary_size: int) -> Any:
    """float32 `(B, V)` evenly spread over (0, 1): 32 bits, so that small numbers keep their precision."""
    x = hashed(words, rows, position, vocabulary_size)
    high = ops.cast(_shifted(x, 16), "float32") * 2.0**-16
    low = (ops.cast(ops.bitwise_and(x, 0xFFFF), "float32") + 0.5) * 2.0**-32
    return ops.minimum(high + low, 1.0 - 2.0**-24)


def gumbel(words: Any, rows: Any, position: Any, vocabulary_size: int) -> Any:
    """Standard Gumbel noise `(B, V)`: the argmax of log-probabilities plus it is a draw from them."""
    return -ops.log(-ops.log1p(-uniform(words, rows, position, vocabulary_size)))
