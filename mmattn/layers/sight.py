"""What each query may see: the rules of a call kept apart, so that a T x S mask is made only where one is needed.

Shapes: B batch, H heads, T target (query) length, S memory (key) length, N some of the queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keras import ops

from mmattn.layers.masks import combine_masks


@dataclass(frozen=True)
class Sight:
    """All that hides a key from a query; everything is True = may look, and None hides nothing.

    Attributes:
        targets, sources: T and S, as numbers or scalar arrays.
        mask: boolean `(B | 1, H | 1, T | 1, S)`.
        keys: boolean `(B, S)`, the real keys.
        queries: boolean `(B, T)`, the real queries.
        causal: a query sees the keys up to its own place.
        window: a query sees the keys that are less than so many places away.
        place: of the first query, among the keys. None: the queries are the last T of the S, so that new tokens with
            their cache see what they would see in a call over the whole.
    Queries from T on (padding of the last block) may see anything.
    """

    targets: Any
    sources: Any
    mask: Any = None
    keys: Any = None
    queries: Any = None
    causal: bool = False
    window: int | None = None
    place: Any = None

    @property
    def is_open(self) -> bool:
        """Whether nothing is hidden."""
        return self.mask is None and self.keys is None and self.queries is None and not self.is_placed

    @property
    def is_placed(self) -> bool:
        """Whether a rule goes by places."""
        return self.causal or self.window is not None

    @property
    def is_plainly_causal(self) -> bool:
        """Whether nothing is hidden but what follows, in a square."""
        square = isinstance(self.targets, int) and self.targets == self.sources
        return self.causal and square and all(rule is None for rule in (*self.arrays(), self.window, self.place))

    @property
    def fills_a_plane(self) -> bool:
        """Whether what is hidden takes a T x S array to be said in one: neither keys alone nor plain causality."""
        by_query = self.queries is not None or (self.mask is not None and self.mask.shape[2] != 1)
        return by_query or (self.is_placed and not self.is_plainly_causal)

    @property
    def may_blind(self) -> bool:
        """Whether a query may be left with nothing to see."""
        by_place = self.is_placed and not self._fits(self.targets, self.sources)
        return by_place or any(rule is not None for rule in self.arrays())

    @property
    def may_hide(self) -> bool:
        """Whether a key may be hidden from all queries, or a query be left with nothing to see."""
        by_window = self.window is not None and not self._fits(self.sources, self.targets)
        return by_window or self.may_blind

    @staticmethod
    def _fits(few: Any, many: Any) -> bool:
        """Whether one length is known to be no more than the other."""
        return few is many or (isinstance(few, int) and isinstance(many, int) and few <= many)

    def arrays(self) -> tuple[Any, ...]:
        """What `with_gradient` has to be handed: see `holding`."""
        return self.mask, self.keys, self.queries

    def holding(self, mask: Any, keys: Any, queries: Any) -> Sight:
        """The same rules with these arrays."""
        return Sight(self.targets, self.sources, mask, keys, queries, self.causal, self.window, self.place)

    @property
    def first_place(self) -> Any:
        """The place of the first query among the keys."""
        return self.sources - self.targets if self.place is None else self.place

    def distances(self, rows: Any, low: Any = 0, high: Any = None) -> Any:
        """Query place minus key place, int32 `(N, high - low)`, of the queries `rows` (N,) and the keys low .. high."""
        places = rows + self.first_place
        return places[:, None] - ops.arange(low, self.sources if high is None else high, dtype="int32")[None, :]

    def of_rows(self, rows: Any, mask: Any, queries: Any, low: Any = 0, high: Any = None) -> Any:
        """What some queries may see of some keys: boolean `(B | 1, H | 1, N | 1, high - low)`, or None.

        Args:
            rows: int32 (N,), numbers of the queries.
            mask, queries: those rows of `mask` and `queries` that are theirs.
            low, high: the keys; default: all.
        """
        placed = None
        if self.is_placed:
            away = self.distances(rows, low, high)
            if self.causal:
                placed = away >= 0
            if self.window is not None:
                placed = combine_masks(placed, ops.abs(away) < self.window)
        return combine_masks(
            None if mask is None else mask[..., low:high],
            None if self.keys is None else self.keys[:, None, None, low:high],
            None if queries is None else queries[:, None, :, None],
            None if placed is None else placed[None, None],
        )

    def dense(self) -> Any:
        """For all queries: boolean `(B | 1, H | 1, T | 1, S)`, or None."""
        rows = ops.arange(self.targets, dtype="int32") if self.is_placed else None
        return self.of_rows(rows, self.mask, self.queries)

    def reach(self, first: int, last: int) -> tuple[int, int]:
        """The keys that the places of queries first .. last - 1 let them see: from, to. Needs T and S as numbers."""
        shift = self.first_place
        low = 0 if self.window is None else max(0, first + shift - self.window + 1)
        high = self.sources
        if self.causal:
            high = last + shift
        elif self.window is not None:
            high = last + shift + self.window - 1
        high = max(1, min(self.sources, high))
        return min(low, high - 1), high
