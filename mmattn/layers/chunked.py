"""Attention of some queries at a time, in memory that grows with T + S instead of T S.

The backward pass computes the weights of a block once more, and gets the slopes of its softmax from the output alone
(Rabe & Staats, "Self-attention Does Not Need O(n^2) Memory", 2021; Dao et al., "FlashAttention", 2022, algorithm 4). A
block has all its keys, so that its softmax is the backend's own: to split the keys as well costs more passes over the
weights, on a CPU more than it saves. Where places limit what may be seen, the keys that no query of some blocks can
see are left out.

Slopes of slopes pass through it, but not where XLA compiles them for TensorFlow, which cannot differentiate a loop in a
loop: there `flash_attention=False` takes the explicit path.

A block is of as many queries as fit, then of as many heads: one large product per head uses several processors, many
small ones do not.

Shapes as in dot_product.py; P = B G keys' heads, C of them in a piece, R = H / G query heads that share one; N queries
of a block, Z keys of a span.
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

BLOCK = 2**20  # weights of a block, 4 MiB in float32, which a processor's caches hold
ROWS = 64  # of a product at least: on a CPU one of 16 rows takes 1.7 times as long for each
AT_ONCE = 2  # blocks: what one does on one processor alone, the other's products fill up
SPANS = 8  # most pieces of the sequence whose queries share a range of keys


def chunked(
    query: Any,
    key: Any,
    value: Any,
    sight: Sight,
    scoring: Scoring,
    rate: float = 0.0,
    seed: Any = None,
    sizes: tuple[int, int] | None = None,
) -> Attended:
    """Some heads and some of their queries at a time.

    Args:
        query: `(B, H, T, K)`.
        key: `(B, G, S, K)`.
        value: `(B, G, S, V)`.
        rate: share of the weights dropped; `seed`, two whole numbers, says which.
        sizes: C and N; by default such that a block has about a million weights, or more: at least 64 // R queries are
            together, and 16.
    """
    passes = _Passes(query, key, value, sight, scoring, rate, sizes)
    output, *sees = backend.with_gradient(passes.forward, passes.backward, query, key, value, *sight.arrays(), seed)
    return Attended(output, None, *sees)


def block_sizes(heads: Any, shared: int, targets: Any, sources: Any) -> tuple[Any, Any]:
    """C and N of P heads: numbers, or scalar arrays where P, T or S is not known before the program runs.

    As few blocks as the room allows, and all of about one size. At least 1 each, also of no heads or queries: a block
    of what fills them up is less than a rule for arrays that turn out to be empty.
    """
    heads, targets, of_query = (_most(1, size) for size in (heads, targets, shared * sources))
    rows = _most(max(16, ROWS // shared // 16 * 16), BLOCK // of_query // 16 * 16)
    count = -(-targets // rows)
    rows = -(-targets // (count * 16)) * 16
    together = _most(1, BLOCK // of_query // targets)  # their product may be too large for int32
    pieces = -(-heads // together)
    return -(-heads // pieces), _least(targets, rows)


def _most(one: Any, other: Any) -> Any:
    return max(one, other) if isinstance(one, int) and isinstance(other, int) else ops.maximum(one, other)


def _least(one: Any, other: Any) -> Any:
    return min(one, other) if isinstance(one, int) and isinstance(other, int) else ops.minimum(one, other)


class _Passes:
    def __init__(
        self, query: Any, key: Any, value: Any, sight: Sight, scoring: Scoring, rate: float, sizes: Any
    ) -> None:
        self.batch, heads, self.targets, _ = ops.shape(query)
        self.groups, self.sources = key.shape[1], ops.shape(key)[2]
        self.shared = heads // self.groups
        self.heads = self.batch * self.groups
        self.sight, self.scoring, self.rate = sight, scoring, rate
        self.together, self.rows = sizes or block_sizes(self.heads, self.shared, self.targets, self.sources)
        self.pieces = _most(1, -(-self.heads // self.together))
        self.count = _most(1, -(-self.targets // self.rows))
        self.dtype = keras.backend.standardize_dtype(query.dtype)
        self.wide = wide_of(self.dtype)

    def forward(
        self, query: Any, key: Any, value: Any, mask: Any, keys: Any, queries: Any, seed: Any
    ) -> tuple[Any, Any]:
        kept = query, key, value, mask, keys, queries, seed
        if not self.sight.is_open:
            key, value = guarded(key, value)
        view = _View(self, mask, keys, queries, seed)
        arrays = tuple(self._pieces(array) for array in (query, key, value))

        def piece(number: Any, carry: Any) -> Any:
            query, key, value = (ops.take(array, number, axis=0) for array in arrays)
            return carry, self._piece_forward(number, view, query, key, value)

        _, (output, sees) = backend.scan_blocks(piece, (), self.pieces, (self.dtype, "bool"))
        output = self._whole(output)
        if not self.sight.may_blind:
            return (output,), (*kept, output)
        return (output, self._any_head(sees)), (*kept, output)

    def backward(self, kept: Any, slopes: Any) -> tuple[Any, ...]:
        query, key, value, mask, keys, queries, seed, output = kept
        if not self.sight.is_open:
            key, value = guarded(key, value)
        view = _View(self, mask, keys, queries, seed)
        above = ops.cast(slopes[0], query.dtype)
        agreed = ops.sum(ops.cast(above, self.wide) * ops.cast(output, self.wide), axis=-1)  # (B, H, T)
        arrays = tuple(self._pieces(array) for array in (query, key, value, above, agreed))

        def piece(number: Any, carry: Any) -> Any:
            return carry, self._piece_backward(number, view, *(ops.take(array, number, axis=0) for array in arrays))

        _, found = backend.scan_blocks(piece, (), self.pieces, (self.dtype, self.wide, self.wide))
        of_query, of_key, of_value = (self._whole(array) for array in found)
        return of_query, ops.cast(of_key, key.dtype), ops.cast(of_value, value.dtype), None, None, None, None

    def _piece_forward(self, piece: Any, view: _View, query: Any, key: Any, value: Any) -> tuple[Any, Any]:
        """`(C, R, T, K)`, `(C, 1, S, K)`, `(C, 1, S, V)` -> `(C, R, T, V)` and boolean `(C, T)`."""
        queries = self._blocks(query)
        outputs, sees = [], []
        done = ops.zeros((), "int32")  # the next span waits for it
        for count, low, high in self._spans():
            own_key, own_value = key[:, :, low:high], value[:, :, low:high]

            def block(
                _: Any, carry: Any, low: Any = low, high: Any = high, k: Any = own_key, v: Any = own_value
            ) -> Any:
                (number,) = carry
                weights, _, seen = self._weights(piece, number, queries, k, view, low, high)
                seeing = ops.ones((self.together, self.rows), "bool")
                if seen is not None:
                    seeing = ops.logical_and(ops.any(seen, axis=(1, 3)), seeing)
                used = self._dropped(weights, view.seed, piece, number) if self.rate else weights
                return (number + 1,), (mixed(ops.cast(used, v.dtype), v), seeing)

            (done,), (output, seeing) = backend.scan_blocks(block, (done,), count, (self.dtype, "bool"), AT_ONCE)
            outputs.append(output)
            sees.append(seeing)
        return self._joined(outputs), self._seeing(sees)

    def _piece_backward(
        self, piece: Any, view: _View, query: Any, key: Any, value: Any, above: Any, agreed: Any
    ) -> tuple[Any, Any, Any]:
        """The slopes of what `_piece_forward` gets, from those of what it gives."""
        plain_query, plain_key = (query, key) if self.sight.is_open else (finite(query), finite(key))
        queries = self._blocks(query)
        # A number times an array, their product with another, a sum: TensorFlow makes one operation of it on many
        # processors. In half precision the slopes stay as large as they are, and the scale comes last.
        scale = self.scoring.scale
        early, late = (scale, 1.0) if self.dtype == self.wide else (1.0, scale)
        aboves, asked, lowers = (self._blocks(array) for array in (above, plain_query * late, -early * agreed))
        of_query, of_key, of_value = [], [], []
        done = ops.zeros((), "int32")
        for count, low, high in self._spans():
            own = key[:, :, low:high], plain_key[:, :, low:high], value[:, :, low:high]

            def block(_: Any, carry: Any, low: Any = low, high: Any = high, own: Any = own) -> Any:
                number, of_key, of_value = carry
                key, plain_key, value = own
                weights, products, seen = self._weights(piece, number, queries, key, view, low, high)
                rows = ops.take(aboves, number, axis=2)  # (C, R, N, V)
                of_weights = ops.cast(pairs(rows * early, value), self.wide)
                used = weights
                if self.rate:
                    used, of_weights = (
                        self._dropped(array, view.seed, piece, number) for array in (weights, of_weights)
                    )
                of_scores = weights * (of_weights + ops.take(lowers, number, axis=2)[..., None])
                of_products = self.scoring.slope(products, of_scores)
                if seen is not None:  # 0 times a product that is not a number
                    of_products = ops.where(seen, of_products, ops.zeros_like(of_products))
                of_products = ops.cast(of_products, query.dtype)
                of_value = of_value + ops.cast(gathered(ops.cast(used, rows.dtype), rows, 1), self.wide)
                given = ops.take(asked, number, axis=2)
                of_key = of_key + ops.cast(gathered(of_products, given, 1), self.wide)
                return (number + 1, of_key, of_value), (mixed(of_products, plain_key) * late,)

            empty = tuple(ops.zeros_like(ops.swapaxes(array, -1, -2), dtype=self.wide) for array in (own[0], own[2]))
            (done, part_of_key, part_of_value), (part,) = backend.scan_blocks(
                block, (done, *empty), count, (self.dtype,), AT_ONCE
            )
            of_query.append(part)
            of_key.append(self._widened(part_of_key, low, high))
            of_value.append(self._widened(part_of_value, low, high))
        return self._joined(of_query), ops.swapaxes(sum(of_key), -1, -2), ops.swapaxes(sum(of_value), -1, -2)

    def _weights(
        self, piece: Any, number: Any, queries: Any, key: Any, view: _View, low: Any, high: Any
    ) -> tuple[Any, Any, Any]:
        """Of a block: the weights (C, R, N, Z), the products behind them, and what may be seen."""
        rows = number * self.rows + ops.arange(self.rows, dtype="int32")
        products = self.scoring.products(ops.take(queries, number, axis=2), key)
        scores = self.scoring.placed(products, self.sight, rows, low, high, view.heads(piece))
        sight, mask, real = view.of_block(piece, number)
        seen = sight.of_rows(rows, mask, real, low, high)
        if seen is None:
            return softmax(scores), products, None
        weights = softmax(ops.where(seen, scores, ops.cast(HIDDEN, scores.dtype)))
        if self.sight.may_blind:
            weights = weights * ops.cast(ops.any(seen, axis=-1, keepdims=True), weights.dtype)
        return weights, products, seen

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

    def _pieces(self, array: Any) -> Any:
        """`(B, H | G, ..)` -> `(pieces, C, R | 1, ..)`, filled up with heads of zeros."""
        shape = ops.shape(array)
        array = ops.reshape(array, (self.heads, array.shape[1] // self.groups, *shape[2:]))
        array = _filled(array, 0, self.pieces * self.together - self.heads)
        return ops.reshape(array, (self.pieces, self.together, *ops.shape(array)[1:]))

    def _whole(self, array: Any) -> Any:
        """Back: `(pieces, C, R | 1, L, X)` -> `(B, H | G, L, X)`."""
        _, _, shared, length, width = ops.shape(array)
        array = ops.reshape(array, (self.pieces * self.together, shared, length, width))[: self.heads]
        return ops.reshape(array, (self.batch, self.groups * shared, length, width))

    def _any_head(self, sees: Any) -> Any:
        """`(pieces, C, T)` -> `(B, T)`: what one head sees is seen."""
        length = ops.shape(sees)[2]
        each = ops.reshape(sees, (self.pieces * self.together, length))[: self.heads]
        return ops.any(ops.reshape(each, (self.batch, self.groups, length)), axis=1)

    def _blocks(self, array: Any) -> Any:
        """`(C, R, T, ..)` -> `(C, R, blocks, N, ..)`, filled up with zeros."""
        array = _filled(array, 2, self.count * self.rows - self.targets)
        shape = ops.shape(array)
        return ops.reshape(array, (shape[0], shape[1], self.count, self.rows, *shape[3:]))

    def _joined(self, parts: list[Any]) -> Any:
        """Of the spans, `(blocks, C, R, N, X)` each -> `(C, R, T, X)`."""
        whole = parts[0] if len(parts) == 1 else ops.concatenate(parts)
        whole = ops.transpose(whole, (1, 2, 0, 3, 4))
        shape = ops.shape(whole)
        return ops.reshape(whole, (shape[0], shape[1], self.count * self.rows, shape[4]))[:, :, : self.targets]

    def _seeing(self, parts: list[Any]) -> Any:
        """Of the spans, (blocks, C, N) each -> (C, T)."""
        whole = ops.transpose(ops.concatenate(parts), (1, 0, 2))
        shape = ops.shape(whole)
        return ops.reshape(whole, (shape[0], self.count * self.rows))[:, : self.targets]

    def _widened(self, part: Any, low: Any, high: Any) -> Any:
        """Of the keys low .. high, (C, 1, X, Z) -> (C, 1, X, S)."""
        if not isinstance(high, int) or (low, high) == (0, self.sources):
            return part
        return ops.pad(part, [(0, 0), (0, 0), (0, 0), (low, self.sources - high)])

    def _dropped(self, weights: Any, seed: Any, piece: Any, number: Any) -> Any:
        drawn = backend.random_uniform(ops.shape(weights), seed, piece * self.count + number)
        return ops.where(drawn < self.rate, ops.zeros_like(weights), weights / (1.0 - self.rate))


class _View:
    """What the heads of a piece, and the queries of a block, may see: their part of each array of a `Sight`."""

    def __init__(self, passes: _Passes, mask: Any, keys: Any, queries: Any, seed: Any) -> None:
        self.passes, self.seed = passes, seed
        missing = passes.count * passes.rows - passes.targets
        keys, mask, queries = (None if array is None else _some(array) for array in (keys, mask, queries))
        self.keys, self.mask, self.queries = keys, None, None
        self.one_row = mask is not None and mask.shape[2] == 1
        if mask is not None:
            batch, heads, _, sources = ops.shape(mask)
            self.mask_sizes = batch, heads
            if self.one_row:
                self.mask = ops.reshape(mask, (batch * heads, 1, sources))
            else:
                if mask.shape[2] is None:  # it may turn out to be one row for all
                    mask = ops.broadcast_to(mask, (batch, heads, passes.targets, sources))
                mask = _filled(mask, 2, missing)
                self.mask = ops.reshape(mask, (batch * heads * passes.count, passes.rows, sources))
        if queries is not None:
            self.queries = ops.reshape(_filled(queries, 1, missing), (-1, passes.rows))

    def _numbers(self, piece: Any) -> tuple[Any, Any]:
        """Of the piece: in which row of the batch each of its C heads is, and which of the G heads it is."""
        own = piece * self.passes.together + ops.arange(self.passes.together, dtype="int32")
        own = ops.minimum(own, _most(1, self.passes.heads) - 1)  # those that fill it up
        return own // self.passes.groups, own % self.passes.groups

    def heads(self, piece: Any) -> Any:
        """Which of the H heads those of the piece are: int32 `(C, R)`."""
        shared = self.passes.shared
        return self._numbers(piece)[1][:, None] * shared + ops.arange(shared, dtype="int32")

    def of_block(self, piece: Any, number: Any) -> tuple[Sight, Any, Any]:
        """The rules, the mask `(C | 1, R | 1, N | 1, S)` and the real queries `(C, N)`."""
        count = self.passes.count
        batch, _ = self._numbers(piece)
        keys = mask = queries = None
        if self.keys is not None:
            keys = ops.take(self.keys, _of_one_or_all(batch, ops.shape(self.keys)[0]), axis=0)
        if self.mask is not None:
            rows, heads = self.mask_sizes
            index = _of_one_or_all(batch, rows)[:, None] * heads
            if not (isinstance(heads, int) and heads == 1):
                index = index + ops.minimum(self.heads(piece), heads - 1)
            mask = ops.take(self.mask, index if self.one_row else index * count + number, axis=0)
        if self.queries is not None:
            row = _of_one_or_all(batch, ops.shape(self.queries)[0] // count)
            queries = ops.take(self.queries, row * count + number, axis=0)
        return self.passes.sight.holding(None, keys, None), mask, queries


def _of_one_or_all(numbers: Any, size: Any) -> Any:
    """The numbers in an axis that may have one entry for all."""
    if isinstance(size, int) and size == 1:
        return numbers[:1] * 0
    return ops.minimum(numbers, size - 1)


def _some(array: Any) -> Any:
    """The array with one row at least, from which those that fill a piece up may take."""
    rows = ops.shape(array)[0]
    return array if isinstance(rows, int) else _filled(array, 0, ops.maximum(0, 1 - rows))


def _filled(array: Any, axis: int, missing: Any) -> Any:
    """The array with so many zeros more at the end of the axis."""
    if isinstance(missing, int) and missing == 0:
        return array
    return ops.pad(array, [(0, missing if place == axis else 0) for place in range(len(array.shape))])
