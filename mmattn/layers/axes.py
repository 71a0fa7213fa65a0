"""Which axes of a tensor attention runs over, and how they become one: (B, T, ..) for any rank.

Shapes: B batch, d1 .. dn the axes between batch and width, H heads, K head width, T and S the attended axes as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from keras import ops


class Axes:
    """Moves heads and masks between the caller's axes and `(B', H, T, K)`.

    Args:
        rank: of the inputs, `(B, d1 .. dn, D)`: n + 2.
        axes: those that attention runs over, counted as in the inputs; None for all between batch and width. The
            others are treated like the batch.

    Raises:
        ValueError: for an axis that is the batch, the width or none at all, or that comes twice.

    >>> Axes(4, (2,)).kept, Axes(4, (-2,)).attended
    ((0, 1), (2,))
    """

    def __init__(self, rank: int, axes: Sequence[int] | None = None) -> None:
        inner = range(1, rank - 1)
        attended = tuple(inner) if axes is None else tuple(axis + rank if axis < 0 else axis for axis in axes)
        if not attended or len(set(attended)) != len(attended) or any(axis not in inner for axis in attended):
            raise ValueError(
                f"attention_axes are different axes between batch and width, 1 to {rank - 2} for inputs of rank "
                f"{rank}. Received {axes}."
            )
        self.rank = rank
        self.attended = attended
        self.kept = tuple(axis for axis in range(rank - 1) if axis not in attended)

    def check_kept(self, query: Sequence[Any], key: Sequence[Any]) -> None:
        """Refuses shapes of inputs that differ in an axis, other than the batch, that attention does not run over."""
        for axis in self.kept[1:]:
            if None not in (query[axis], key[axis]) and query[axis] != key[axis]:
                raise ValueError(
                    "Axes that attention does not run over must be equal in query, key and value. Received query "
                    f"{tuple(query)}, key {tuple(key)} and attention_axes={self.attended}: they differ in axis {axis}."
                )

    @property
    def is_plain(self) -> bool:
        """Whether the inputs are `(B, T, D)`."""
        return self.rank == 3

    @property
    def has_order(self) -> bool:
        """Whether attention runs over one axis, so that one position is before another."""
        return len(self.attended) == 1

    def length(self, array: Any) -> Any:
        """How many positions of an input attention runs over: a number, or a scalar array."""
        shape = ops.shape(array)
        return _product([shape[axis] for axis in self.attended])

    def heads(self, array: Any) -> Any:
        """`(B, d1 .. dn, H, K)` -> `(B', H, T, K)`."""
        if self.is_plain:
            return ops.transpose(array, (0, 2, 1, 3))
        array = ops.transpose(array, (*self.kept, self.rank - 1, *self.attended, self.rank))
        return self._merged(array, len(self.kept))

    def back(self, array: Any, like: Any) -> Any:
        """`(B', H, T, K)` -> `(B, d1 .. dn, H, K)`, the axes of `like`, an input."""
        if self.is_plain:
            return ops.transpose(array, (0, 2, 1, 3))
        sizes, shape = ops.shape(like), ops.shape(array)
        apart = [sizes[axis] for axis in self.kept], [sizes[axis] for axis in self.attended]
        array = ops.reshape(array, (*apart[0], shape[1], *apart[1], shape[3]))
        places = (*self.kept, self.rank - 1, *self.attended, self.rank)
        return ops.transpose(array, [places.index(axis) for axis in range(self.rank + 1)])

    def positions(self, mask: Any) -> Any:
        """A mask of positions, `(B, d1 .. dn)` -> `(B', T)`."""
        if self.is_plain:
            return mask
        mask = ops.transpose(mask, (*self.kept, *self.attended))
        shape = ops.shape(mask)
        count = len(self.kept)
        return ops.reshape(mask, (_product(shape[:count]), _product(shape[count:])))

    def apart(self, mask: Any, like: Any) -> Any:
        """`(B' | 1, T | 1)` -> `(B | 1, d1 .. dn)`, the axes of `like`, an input."""
        if self.is_plain:
            return mask
        sizes = ops.shape(like)
        order = (*self.kept, *self.attended)
        apart = [sizes[axis] for axis in order]
        count = len(self.kept)
        mask = ops.broadcast_to(mask, (_product(apart[:count]), _product(apart[count:])))
        return ops.transpose(ops.reshape(mask, apart), [order.index(axis) for axis in range(self.rank - 1)])

    def mask(self, mask: Any, query: Any, key: Any, heads: int) -> Any:
        """An attention mask of an input of higher rank -> `(B' | 1, H | 1, T, S)`.

        Args:
            mask: boolean `(*kept, *targets, *sources)` or `(*kept, H, *targets, *sources)`, where an axis of 1 stands
                for "the same for all". Of the kept axes the last may be missing, or all: `(B, *targets, *sources)`.

        Raises:
            ValueError: for a shape that does not fit, or that can be read in two ways.
        """
        targets, sources = ([array.shape[axis] for axis in self.attended] for array in (query, key))
        kept = [query.shape[axis] for axis in self.kept]
        received, inner = tuple(mask.shape), 2 * len(self.attended)
        wanted = (*kept, heads, *targets, *sources)
        lead, missing = len(received) - inner, len(wanted) - len(received)
        shape = (*received[: max(lead, 0)], *[1] * missing, *received[max(lead, 0) :])
        fits = (
            lead >= 0
            and missing >= 0
            and all(None in pair or pair[0] in (1, pair[1]) for pair in zip(shape, wanted, strict=True))
            and all(None in pair or pair[0] == pair[1] for pair in zip(shape[-len(sources) :], sources, strict=True))
        )
        if not fits:
            raise ValueError(
                f"An attention mask for inputs of rank {self.rank} with attention_axes={self.attended} has the shape "
                f"(kept axes, [H,] T, S) = {tuple(kept)}, [{heads},] {tuple(targets)}, {tuple(sources)}; the first of "
                f"the kept axes is B. Received {received}."
            )
        padding = None not in received and received == tuple(key.shape[:-1])
        by_head = 0 < lead <= len(kept) and missing and lead > 1 and received[lead - 1] == heads == kept[lead - 1] != 1
        if (padding and any(size != 1 for size in received)) or by_head:
            other = "the padding mask of the keys" if padding else f"a mask for each of H={heads} heads"
            raise ValueError(
                f"A mask of shape {received} can be read in two ways for kept axes {tuple(kept)}, T={tuple(targets)}, "
                f"S={tuple(sources)}: one of them is {other}. Give it all axes, (kept axes, H or 1, T, S), or padding "
                "through `key_mask`."
            )
        for _ in range(missing):
            mask = ops.expand_dims(mask, lead)
        count = len(kept)
        full = list(ops.shape(mask))
        if any(n != 1 for n in shape[:count]):
            full[:count] = [ops.shape(query)[axis] for axis in self.kept]
        full[count + 1 :] = [ops.shape(array)[axis] for array in (query, key) for axis in self.attended]
        mask = ops.broadcast_to(mask, full)
        rows = _product(full[:count])
        middle = count + 1 + len(self.attended)
        return ops.reshape(mask, (rows, full[count], _product(full[count + 1 : middle]), _product(full[middle:])))

    def scores(self, array: Any, query: Any, key: Any) -> Any:
        """Weights `(B', H, T, S)` -> `(*kept, H, *targets, *sources)`."""
        if self.is_plain:
            return array
        sizes = ops.shape(query), ops.shape(key)
        kept = [sizes[0][axis] for axis in self.kept]
        inner = [size[axis] for size in sizes for axis in self.attended]
        return ops.reshape(array, (*kept, ops.shape(array)[1], *inner))

    def scores_shape(self, query: Sequence[Any], key: Sequence[Any], heads: int) -> tuple[Any, ...]:
        """The shape of `scores`, from the shapes of the inputs."""
        inner = [shape[axis] for shape in (query, key) for axis in self.attended]
        return (*(query[axis] for axis in self.kept), heads, *inner)

    def _merged(self, array: Any, count: int) -> Any:
        shape = ops.shape(array)
        end = count + 1 + len(self.attended)
        return ops.reshape(array, (_product(shape[:count]), shape[count], _product(shape[count + 1 : end]), shape[end]))


def _product(sizes: Sequence[Any]) -> Any:
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else ops.prod(ops.stack(list(sizes)))
