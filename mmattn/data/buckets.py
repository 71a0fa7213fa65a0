"""Buckets of sentence pairs of similar length: few shapes with little padding.

Shape letters: B rows, S source length, T target length, M labels of a batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Bucket(NamedTuple):
    """Pairs of similar length: their numbers by ascending target length, and the shape of the batches made of them."""

    pairs: np.ndarray  # int64 (n,)
    rows: int  # B
    batches: int  # in one pass
    source_length: int  # S
    target_length: int  # T
    labels: int  # M, what the real labels of any batch of the bucket fit into


def make_buckets(lengths: np.ndarray, tokens_per_batch: int, max_shapes: int) -> list[Bucket]:
    """Sorts pairs into at most `max_shapes` buckets by the longer of their two sides, with the least padding in all.

    Args:
        lengths: int (N, 2), source and target tokens of each pair.

    Example:
        >>> buckets = make_buckets(np.array([[3, 3], [9, 8], [3, 2], [8, 9]]), tokens_per_batch=18, max_shapes=2)
        >>> [(b.pairs.tolist(), b.rows, b.source_length, b.target_length, b.labels) for b in buckets]
        [([2, 0], 2, 3, 3, 5), ([1, 3], 2, 9, 9, 17)]
    """
    keys = lengths.max(axis=1)
    bounds = _bounds(lengths, keys, max_shapes)
    buckets = []
    for low, high in zip([0, *bounds[:-1]], bounds, strict=True):
        inside = np.flatnonzero((keys > low) & (keys <= high))
        pairs = inside[np.lexsort((inside, lengths[inside, 1]))]
        batches = -(-len(pairs) // max(1, tokens_per_batch // int(high)))
        rows = -(-len(pairs) // batches)
        targets = np.zeros(rows * batches, "int64")
        targets[len(targets) - len(pairs) :] = lengths[pairs, 1]
        labels = int(targets.reshape(rows, batches).max(axis=1).sum())
        source_length, target_length = (int(n) for n in lengths[pairs].max(axis=0))
        buckets.append(Bucket(pairs, rows, batches, source_length, target_length, labels))
    return buckets


def _bounds(lengths: np.ndarray, keys: np.ndarray, most: int) -> list[int]:
    """Upper bounds of the buckets on `keys`, by dynamic programming over the lengths that occur."""
    values = np.unique(keys)
    counts = np.array([(keys == v).sum() for v in values])
    sides = np.array([lengths[keys == v].max(axis=0) for v in values])  # (lengths, 2)
    number = len(values)
    before = np.concatenate([[0], np.cumsum(counts)])
    cost = np.full((number + 1, number + 1), np.inf)  # positions made of the lengths first .. last - 1
    for first in range(number):
        width = np.maximum.accumulate(sides[first:], axis=0).sum(axis=1)
        cost[first, first + 1 :] = (before[first + 1 :] - before[first]) * width
    best, back = cost[0], []  # best[last]: of all lengths before `last`, with the buckets so far
    for _ in range(min(most, number) - 1):
        options = best[:, None] + cost  # (split, last)
        split = options.argmin(axis=0)
        shorter = options[split, np.arange(number + 1)]
        back.append(np.where(shorter < best, split, 0))
        best = np.minimum(best, shorter)
    last, bounds = number, []
    for split in reversed(back):
        if split[last]:
            bounds.append(int(values[last - 1]))
            last = split[last]
    return [*bounds, int(values[last - 1])][::-1]


def plan_pass(
    buckets: list[Bucket], lengths: np.ndarray, seed: int, number: int, shuffle: bool
) -> list[tuple[Bucket, np.ndarray]]:
    """All batches of one pass, as (bucket, numbers of its pairs; -1 for an empty row).

    A batch takes its rows from all target lengths of its bucket alike. Which pairs of one length meet in a batch, and
    the order of the batches, is drawn from (seed, number); without `shuffle` one order serves every pass.

    Args:
        lengths: int (N,), the target tokens of each pair.
    """
    rng = np.random.default_rng([seed, number if shuffle else 0])
    planned: list[tuple[Bucket, np.ndarray]] = []
    for bucket in buckets:
        pairs = bucket.pairs
        if shuffle:  # pairs of one length change places
            pairs = pairs[np.lexsort((rng.random(len(pairs)), lengths[pairs]))]
        placed = np.full(bucket.rows * bucket.batches, -1)
        placed[len(placed) - len(pairs) :] = pairs
        strata = placed.reshape(bucket.rows, bucket.batches)  # row r of every batch comes from stratum r
        if shuffle:
            strata = rng.permuted(strata, axis=1)
        planned += [(bucket, strata[:, j]) for j in range(bucket.batches)]
    if not shuffle:
        return planned
    return [planned[i] for i in rng.permutation(len(planned))]
