"""Scaled dot-product attention on heads that are already split, by three ways that give one result.

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V

explicit  all weights at once, `(B, H, T, S)`: the only way to look at them, and the fastest for short sequences;
chunked   some queries at a time, in memory that grows with T + S; see mmattn/layers/chunked.py;
fused     the backend's own kernel.

Shapes: B batch, H query heads, G key and value heads (H = G R; query head h goes with g = h // R), T target (query)
length, S memory (key) length, N some of the queries, K and V head widths.

Whatever stands under a mask, even a NaN, reaches neither a result nor a gradient. A query that may see nothing gives
zeros and passes no gradient. Softmax and what leads to it are in float32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
from keras import ops

from mmattn import backend
from mmattn.layers.masks import check_mask
from mmattn.layers.sight import Sight

HIDDEN = -3e38  # a score under a mask, in float32 or wider: its exponential is zero beside that of any other score
FLOAT16_MAX = 65504.0


@dataclass(frozen=True)
class Scoring:
    """How a product of query and key becomes a score.

    Attributes:
        scale: of the product; it goes to the query, before the product, so that half precision does not overflow.
        soft_cap: scores become cap * tanh(score / cap), so that none is larger (Gemma 2, 2024, section 2).
        slopes: (H,) of ALiBi: a key so many places away loses slope times that (Press et al. 2022, section 3).
    """

    scale: float
    soft_cap: float | None = None
    slopes: tuple[float, ...] | None = None

    def products(self, query: Any, key: Any, seen: Any = None) -> Any:
        """`(B, H, N, S)` in float32 at least, capped. With `seen`, slopes are finite though a hidden product is not."""
        query = query * self.scale
        found = pairs(query, key) if seen is None else _safe_pairs(query, key)
        if seen is not None and self.soft_cap is not None:  # tanh would pass NaN on to the slopes
            found = ops.where(seen, found, ops.zeros((), found.dtype))
        if keras.backend.standardize_dtype(found.dtype) == "float16":  # softmax of infinity is not a number
            found = ops.clip(ops.cast(found, "float32"), -FLOAT16_MAX, FLOAT16_MAX)
        found = ops.cast(found, wide_of(found.dtype))
        return found if self.soft_cap is None else self.soft_cap * ops.tanh(found / self.soft_cap)

    def slope(self, products: Any, slopes: Any) -> Any:
        """Slopes of the scores to slopes of the products before the cap."""
        if self.soft_cap is None:
            return slopes
        return slopes * (1.0 - ops.square(products / self.soft_cap))

    def placed(self, products: Any, sight: Sight, rows: Any, low: Any = 0, high: Any = None, heads: Any = None) -> Any:
        """The scores: what depends on the places of the queries `rows` (N,) and keys low .. high is added.

        `heads`, whole numbers (B, H), says which heads these are where it is not all of them in their order.
        """
        if self.slopes is None:
            return products
        away = ops.cast(ops.abs(sight.distances(rows, low, high)), products.dtype)
        slopes = ops.convert_to_tensor(self.slopes, dtype=products.dtype)
        if heads is not None:
            slopes = ops.take(slopes, heads, axis=0)
        return products - slopes[..., None, None] * away


class Attended(NamedTuple):
    """What a path gives.

    Attributes:
        heads: `(B, H, T, V)`.
        weights: `(B, H, T, S)` before dropout, where they were made.
        sees: boolean `(B | 1, T | 1)`, the queries of which a head sees something; None where all do.
    """

    heads: Any
    weights: Any = None
    sees: Any = None


def attend(query: Any, key: Any, value: Any, mask: Any = None, dropout: Any = None) -> tuple[Any, Any]:
    """Scaled dot-product attention, the equation above, on heads that are already split.

    Args:
        query: `(B, H, T, K)`; the scale is 1 / sqrt(K).
        key: `(B, G, S, K)`.
        value: `(B, G, S, V)`.
        mask: boolean `(T, S)`, `(B, T, S)` or `(B, H, T, S)`, True = may look; None = everything may be seen.
        dropout: a function applied to the weights before they meet the values.

    Returns:
        `(B, H, T, V)` and the weights `(B, H, T, S)` before dropout.

    Raises:
        ValueError: for a mask that is not boolean or whose shape does not fit.

    Example:
        >>> import numpy as np
        >>> heads, weights = attend(np.ones((1, 2, 3, 4)), np.ones((1, 2, 5, 4)), np.ones((1, 2, 5, 6)))
        >>> tuple(heads.shape), tuple(weights.shape)
        ((1, 2, 3, 6), (1, 2, 3, 5))
    """
    query, key, value = (ops.convert_to_tensor(array) for array in (query, key, value))
    if mask is not None:
        mask = check_mask(mask, query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    sight = Sight(ops.shape(query)[2], ops.shape(key)[2], mask)
    found = explicit(query, key, value, sight, Scoring(1.0 / math.sqrt(query.shape[-1])), dropout=dropout)
    return found.heads, found.weights


def explicit(
    query: Any,
    key: Any,
    value: Any,
    sight: Sight,
    scoring: Scoring,
    bias: Any = None,
    dropout: Callable[[Any], Any] | None = None,
    guard: bool = True,
) -> Attended:
    """All weights at once.

    Args:
        query: `(B, H, T, K)`.
        key: `(B, G, S, K)`.
        value: `(B, G, S, V)`.
        bias: added to the scores, `(B | 1, H | 1, T, S)`.
        dropout: applied to the weights before they meet the values.
        guard: False where keys and values are known to be finite and no gradient is wanted, as in a step.
    """
    mask = sight.dense()
    if guard and mask is not None:
        key, value = guarded(key, value)
    rows = ops.arange(sight.targets, dtype="int32")
    scores = scoring.placed(scoring.products(query, key, mask if guard else None), sight, rows)
    if bias is not None:
        scores = scores + ops.cast(bias, scores.dtype)
    sees = None
    if mask is None:
        weights = softmax(scores)
    else:
        weights = softmax(ops.where(mask, scores, ops.cast(HIDDEN, scores.dtype)))
        if sight.may_blind:
            sees = ops.any(mask, axis=-1, keepdims=True)
            weights = weights * ops.cast(sees, weights.dtype)
            sees = ops.any(sees[..., 0], axis=1)
    weights = ops.cast(weights, value.dtype)
    return Attended(mixed(weights if dropout is None else dropout(weights), value), weights, sees)


def fused(query: Any, key: Any, value: Any, sight: Sight, scoring: Scoring) -> Attended:
    """The backend's own kernel. It knows a scale, a mask and groups of heads, and no more."""
    causal = sight.is_plainly_causal
    if sight.is_open:
        return Attended(backend.sdpa(query, key, value, None, scoring.scale, causal=False))
    mask = None if causal else sight.dense()
    broken = ops.logical_not(ops.logical_and(finite_rows(key), finite_rows(value)))  # (B, G, S, 1)
    asks = finite_rows(query)  # (B, H, T, 1)
    seeing = None
    if mask is not None and sight.may_blind:
        seeing = ops.any(mask, axis=-1, keepdims=True)
        mask = ops.logical_or(mask, ops.logical_not(seeing))
    zero = ops.zeros((), query.dtype)
    found = backend.sdpa(
        ops.where(asks, query, zero), ops.where(broken, zero, key), ops.where(broken, zero, value), mask,
        scoring.scale, causal,
    )  # fmt: skip
    hit = broken[:, :, None, :, 0]  # (B, G, 1, S)
    if mask is not None and mask.shape[1] != 1:
        hit = ops.repeat(hit, query.shape[1] // key.shape[1], axis=1)
    else:  # all heads see the same places
        hit = ops.any(hit, axis=1, keepdims=True)
    if causal:
        touched = ops.cumsum(ops.cast(hit, "int32"), axis=-1)[:, :, 0, :, None] > 0
    else:
        touched = ops.any(ops.logical_and(mask, hit), axis=-1, keepdims=True)
    found = ops.where(ops.logical_and(asks, ops.logical_not(touched)), found, ops.full((), float("nan"), query.dtype))
    if seeing is None:
        return Attended(found)
    return Attended(ops.where(seeing, found, zero), None, ops.any(seeing[..., 0], axis=1))


def guarded(key: Any, value: Any) -> tuple[Any, Any]:
    """Keys and values of which one that is not finite harms only those who may see it.

    Such a value becomes zeros, since a weight of zero would not hide it, and its key NaN, so that it is not lost.
    """
    fine = finite_rows(value)
    told = ops.logical_and(fine, finite_rows(key))  # a key of infinity would be hidden from those who may see it
    nan, zero = ops.full((), float("nan"), key.dtype), ops.zeros((), value.dtype)
    return ops.where(told, key, nan), ops.where(fine, value, zero)


def pairs(query: Any, key: Any) -> Any:
    """The product of each query with each key: `(B, H, N, K)`, `(B, G, S, K)` -> `(B, H, N, S)`."""
    return _of_heads(backend.matmul(_of_groups(query, key.shape[1]), key, transpose_b=True), query)


def mixed(weights: Any, value: Any) -> Any:
    """The weighted sums of the values: `(B, H, N, S)`, `(B, G, S, V)` -> `(B, H, N, V)`."""
    return _of_heads(ops.matmul(_of_groups(weights, value.shape[1]), value), weights)


def gathered(weights: Any, rows: Any, groups: int) -> Any:
    """What each key gets from all queries: `(B, H, N, S)`, `(B, H, N, V)` -> `(B, G, V, S)`.

    The narrow array is the one to transpose: TensorFlow takes half the time for that.
    """
    weights, rows = (_of_groups(array, groups) for array in (weights, rows))
    return backend.matmul(rows, weights, transpose_a=True)


def finite(array: Any) -> Any:
    """The array with 0 for whatever is not finite."""
    return ops.where(ops.isfinite(array), array, ops.zeros((), array.dtype))


def finite_rows(array: Any) -> Any:
    """Which rows are finite: `(.., S, X)` -> `(.., S, 1)`."""
    return ops.all(ops.isfinite(array), axis=-1, keepdims=True)


def wide_of(dtype: Any) -> str:
    """float32, or float64 where that is computed in."""
    return "float64" if keras.backend.standardize_dtype(dtype) == "float64" else "float32"


def softmax(scores: Any) -> Any:
    """Over the last axis. Keras' own warns of an axis of length 1, which here is a sentence of one word."""
    if scores.shape[-1] != 1:
        return ops.softmax(scores, axis=-1)
    return ops.exp(ops.log_softmax(scores, axis=-1))  # 1, whose slope is a zero and not missing


def _safe_pairs(query: Any, key: Any) -> Any:
    """`pairs`, whose slopes are finite where those of the products are: 0 times NaN counts as 0."""

    def forward(query: Any, key: Any) -> Any:
        return (pairs(query, key),), (query, key)

    def backward(kept: Any, slopes: Any) -> Any:
        (query, key), (slopes,) = kept, slopes
        of_key = ops.swapaxes(gathered(slopes, finite(query), key.shape[1]), -1, -2)
        return mixed(slopes, finite(key)), of_key

    return backend.with_gradient(forward, backward, query, key)[0]


def _of_groups(array: Any, groups: int) -> Any:
    """`(B, H, N, X)` -> `(B, G, R N, X)`: the queries that share keys, one after the other."""
    if array.shape[1] == groups:
        return array
    batch, heads, rows, width = ops.shape(array)
    return ops.reshape(array, (batch, groups, heads // groups * rows, width))


def _of_heads(array: Any, like: Any) -> Any:
    """`(B, G, R N, X)` -> `(B, H, N, X)`, H and N those of `like`."""
    if array.shape[1] == like.shape[1]:
        return array
    batch, heads, rows, _ = ops.shape(like)
    return ops.reshape(array, (batch, heads, rows, ops.shape(array)[-1]))
