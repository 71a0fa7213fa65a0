"""Attention of some queries at a time, in memory that grows with T + S instead of T S.

The backward pass computes the weights of a block once more, and gets the slopes of its softmax from the output alone
(Rabe & Staats, "Self-attention Does Not Need O(n^2) Memory", 2021; Dao et al., "FlashAttention", 2022, algorithm 4). A
block has all its keys, so that its softmax is the backend's own: to split the keys as well costs more passes over the
weights, on a CPU more than it saves. Where places limit what may be seen, the keys that no query of some blocks can
see are left out.

Shapes as in dot_product.py; N queries of a block, Z keys of a span.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from mmattn import backend
from mmattn.layers.dot_product import (
    HIDDEN,
    Attended,
    Scoring,
    finite,
    gathered,
    guarded,
    mixed,
    pairs,
    softmax,
    wide_of,
)
from mmattn.layers.sight import Sight

BLOCK = 2**22  # weights of a block, 16 MiB in float32
SPANS = 8  # most pieces of the sequence whose queries share a range of keys


def chunked(
    query: Any,
    key: Any,
    value: Any,
    sight: Sight,
    scoring: Scoring,
    rate: float = 0.0,
    seed: Any = None,
    rows: int | None = None,
) -> Attended:
    """Some queries at a time.

    Args:
        query: `(B, H, T, K)`.
        key: `(B, G, S, K)`.
        value: `(B, G, S, V)`.
        rate: share of the weights dropped; `seed`, two whole numbers, says which.
        rows: N; by default so many that a block has about 4 million weights.
    """
    passes = _Passes(query, key, value, sight, scoring, rate, rows)
    output, *sees = backend.with_gradient(passes.forward, passes.backward, query, key, value, *sight.arrays(), seed)
    return Attended(output, None, *sees)


def block_rows(batch: Any, heads: int, targets: Any, sources: Any) -> Any:
    """Queries of a block: a number, or a scalar array where B, T or S is not known before the program runs."""
    if all(isinstance(size, int) for size in (batch, targets, sources)):
        return max(1, min(targets, max(16, BLOCK // (batch * heads * sources) // 16 * 16)))
    wanted = BLOCK // (batch * heads * sources) // 16 * 16
    return ops.maximum(1, ops.minimum(targets, ops.maximum(16, wanted)))


class _Passes:
    def __init__(
        self, query: Any, key: Any, value: Any, sight: Sight, scoring: Scoring, rate: float, rows: Any
    ) -> None:
        self.batch, self.heads, self.targets, _ = ops.shape(query)
        self.groups, self.sources = key.shape[1], ops.shape(key)[2]
        self.sight, self.scoring, self.rate = sight, scoring, rate
        self.rows = rows or block_rows(self.batch, self.heads, self.targets, self.sources)
        self.count = -(-self.targets // self.rows)
        self.dtype = keras.backend.standardize_dtype(query.dtype)
        self.wide = wide_of(self.dtype)

    def forward(
        self, query: Any, key: Any, value: Any, mask: Any, keys: Any, queries: Any, seed: Any
    ) -> tuple[Any, Any]:
        sight = self.sight.holding(mask, keys, queries)
        kept = query, key, value, mask, keys, queries, seed
        if not sight.is_open:
            key, value = guarded(key, value)
        cut = self._cut(query, mask, queries)
        outputs, sees = [], []
        done = ops.zeros((), "int32")  # the next span waits for it
        for count, low, high in self._spans():
            own_key, own_value = key[:, :, low:high], value[:, :, low:high]

            def block(
                _: Any, carry: Any, low: Any = low, high: Any = high, k: Any = own_key, v: Any = own_value
            ) -> Any:
                (number,) = carry
                weights, _, seen = self._weights(number, cut, k, sight, low, high)
                seeing = ops.ones((), "bool") if seen is None else ops.any(seen, axis=(1, 3))
                used = self._dropped(weights, seed, number) if self.rate else weights
                return (number + 1,), (mixed(ops.cast(used, v.dtype), v), seeing)

            (done,), (output, seeing) = backend.scan_blocks(block, (done,), count, (self.dtype, "bool"))
            outputs.append(output)
            sees.append(seeing)
        output = self._joined(outputs)
        return (output, *self._seeing(sees)), (*kept, output)

    def backward(self, kept: Any, slopes: Any) -> tuple[Any, ...]:
        query, key, value, mask, keys, queries, seed, output = kept
        sight = self.sight.holding(mask, keys, queries)
        if not sight.is_open:
            key, value = guarded(key, value)
        cut = self._cut(query, mask, queries)
        plain_query, plain_key = (query, key) if sight.is_open else (finite(query), finite(key))
        above = ops.cast(slopes[0], query.dtype)
        agreed = ops.sum(ops.cast(above, self.wide) * ops.cast(output, self.wide), axis=-1)  # (B, H, T)
        asked = plain_query * self.scoring.scale
        aboves, asked, agreed = (self._blocks(array) for array in (above, asked, agreed))
        of_query, of_key, of_value = [], [], []
        done = ops.zeros((), "int32")
        for count, low, high in self._spans():
            own = key[:, :, low:high], plain_key[:, :, low:high], value[:, :, low:high]

            def block(_: Any, carry: Any, low: Any = low, high: Any = high, own: Any = own) -> Any:
                number, of_key, of_value = carry
                key, plain_key, value = own
                weights, products, seen = self._weights(number, cut, key, sight, low, high)
                rows = ops.take(aboves, number, axis=2)  # (B, H, N, V)
                of_weights = ops.cast(pairs(rows, value), self.wide)
                used = weights
                if self.rate:
                    used, of_weights = (self._dropped(array, seed, number) for array in (weights, of_weights))
                of_scores = weights * (of_weights - ops.take(agreed, number, axis=2)[..., None])
                of_products = self.scoring.slope(products, of_scores)
                if seen is not None:  # 0 times a product that is not a number
                    of_products = ops.where(seen, of_products, ops.zeros_like(of_products))
                of_products = ops.cast(of_products, query.dtype)
                of_value = of_value + ops.cast(gathered(ops.cast(used, rows.dtype), rows, self.groups), self.wide)
                given = ops.take(asked, number, axis=2)
                of_key = of_key + ops.cast(gathered(of_products, given, self.groups), self.wide)
                return (number + 1, of_key, of_value), (mixed(of_products, plain_key) * self.scoring.scale,)

            empty = (ops.zeros_like(own[0], dtype=self.wide), ops.zeros_like(own[2], dtype=self.wide))
            (done, part_of_key, part_of_value), (part,) = backend.scan_blocks(
                block, (done, *empty), count, (self.dtype,)
            )
            of_query.append(part)
            of_key.append(self._widened(part_of_key, low, high))
            of_value.append(self._widened(part_of_value, low, high))
        found = self._joined(of_query), ops.cast(sum(of_key), key.dtype), ops.cast(sum(of_value), value.dtype)
        return (*found, None, None, None, None)

    def _weights(self, number: Any, cut: Any, key: Any, sight: Sight, low: Any, high: Any) -> tuple[Any, Any, Any]:
        """Of a block: the weights (B, H, N, Z), the products behind them, and what may be seen."""
        query, mask, queries = (_block(array, number) for array in cut)
        rows = number * self.rows + ops.arange(self.rows, dtype="int32")
        products = self.scoring.products(query, key)
        scores = self.scoring.placed(products, sight, rows, low, high)
        seen = sight.of_rows(rows, sight.mask if mask is None else mask, queries, low, high)
        if seen is None:
            return softmax(scores), products, None
        weights = softmax(ops.where(seen, scores, ops.cast(HIDDEN, scores.dtype)))
        if sight.may_blind:
            weights = weights * ops.cast(ops.any(seen, axis=-1, keepdims=True), weights.dtype)
        return weights, products, seen

    def _seeing(self, parts: list[Any]) -> tuple[Any, ...]:
        """Of the spans, (blocks, B | 1, N | 1) each -> (B | 1, T | 1), where a query may be blind."""
        if not self.sight.may_blind:
            return ()
        whole = ops.transpose(ops.concatenate(parts), (1, 0, 2))
        shape = ops.shape(whole)
        if whole.shape[2] == 1:
            return (whole[:, :1, 0],)
        return (ops.reshape(whole, (shape[0], shape[1] * shape[2]))[:, : self.targets],)

    def _spans(self) -> Iterator[tuple[Any, Any, Any]]:
        """Pieces of the sequence: how many blocks, and from where to where are the keys that they can see."""
        known = all(isinstance(size, int) for size in (self.targets, self.sources, self.count))
        if not known or not self.sight.is_placed:
            yield self.count, 0, self.sources
            return
        each = -(-self.count // SPANS)
        for first in range(0, self.count, each):
            last = min(self.count, first + each)
            low, high = self.sight.reach(first * self.rows, min(self.targets, last * self.rows))
            yield last - first, low, high

    def _cut(self, query: Any, mask: Any, queries: Any) -> tuple[Any, Any, Any]:
        """What belongs to the queries, in blocks: the number of the block is axis 2."""
        per_row = mask is not None and mask.shape[2] != 1
        if per_row and mask.shape[2] is None:  # it may turn out to be one row for all
            batch, heads, _, sources = ops.shape(mask)
            mask = ops.broadcast_to(mask, (batch, heads, self.targets, sources))
        return (
            self._blocks(query),
            self._blocks(mask) if per_row else None,
            None if queries is None else self._blocks(queries[:, None])[:, 0],
        )

    def _blocks(self, array: Any) -> Any:
        """`(B, H, T, ..)` -> `(B, H, blocks, N, ..)`, filled up with zeros."""
        missing = self.count * self.rows - self.targets
        if not (isinstance(missing, int) and missing == 0):
            array = ops.pad(array, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * (len(array.shape) - 3))
        shape = ops.shape(array)
        return ops.reshape(array, (shape[0], shape[1], self.count, self.rows, *shape[3:]))

    def _joined(self, parts: list[Any]) -> Any:
        """Of the spans, `(blocks, B, H, N, ..)` each -> `(B, H, T, ..)`."""
        whole = parts[0] if len(parts) == 1 else ops.concatenate(parts)
        whole = ops.transpose(whole, (1, 2, 0, 3, *range(4, len(whole.shape))))
        shape = ops.shape(whole)
        return ops.reshape(whole, (shape[0], shape[1], self.count * self.rows, *shape[4:]))[:, :, : self.targets]

    def _widened(self, part: Any, low: Any, high: Any) -> Any:
        """Of the keys low .. high, (B, G, Z, X) -> (B, G, S, X)."""
        if not isinstance(high, int) or (low, high) == (0, self.sources):
            return part
        return ops.pad(part, [(0, 0), (0, 0), (low, self.sources - high), (0, 0)])

    def _dropped(self, weights: Any, seed: Any, number: Any) -> Any:
        drawn = backend.random_uniform(ops.shape(weights), seed, number)
        return ops.where(drawn < self.rate, ops.zeros_like(weights), weights / (1.0 - self.rate))


def _block(array: Any, number: Any) -> Any:
    if array is None:
        return None
    return ops.take(array, number, axis=2 if len(array.shape) > 3 else 1)
