"""Training batches of sentence pairs: counted in tokens, sorted by length into a few fixed shapes.

An endless stream whose batch k depends on (seed, k) alone. Shape letters: B rows, S source length, T target length,
M labels of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mmattn.data.targets import BOS, EOS, PAD, check_ids

Batch = tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]
TOO_LONG = ("skip", "cut", "error")


class Bucket(NamedTuple):
    """Pairs of similar length: their numbers by ascending target length, and the shape of the batches made of them."""

    pairs: np.ndarray  # int64 (n,)
    rows: int  # B
    batches: int  # in one pass
    source_length: int  # S
    target_length: int  # T
    labels: int  # M, what the real labels of any batch of the bucket fit into


class PairBatches:
    """Batches (inputs, labels, weights) of a source of sentence pairs, for an encoder-decoder.

    In each pass every pair comes once. The pairs are sorted by length into at most `max_shapes` buckets, whose bounds
    are those with the least padding, and each bucket has one fixed shape. A batch takes its rows from all target
    lengths of its bucket alike, so that the number of its real labels hardly varies. The model is asked for logits at
    the real labels alone ("label_places"). Which pairs of one length meet in a batch, and the order of the batches, is
    drawn anew for each pass.

    Args:
        source: random access to records with `source` (a text), `targets` (texts) and `id`.
        encode_source: a text to ids without bos and eos.
        encode_target: the same for the other language; default: `encode_source`, a joint vocabulary.
        tokens_per_batch: most tokens of a batch, padding included, counted on its longer side.
        max_length: most tokens of a sentence, its end token included.
        too_long: what becomes of a pair with a longer sentence: "skip" leaves it out; "cut" keeps the first
            `max_length` tokens (a target that was cut has no end token, so that no false end is taught); "error"
            refuses it. `faults` lists what was left out or cut: (id, why).
        max_shapes: most buckets.
        seed: decides all order, 0 to 2**32 - 1.
        shuffle: False keeps one order in every pass.
        eval_batch_size: sentences in a batch of `examples`.

    Raises:
        ValueError: an argument out of range, a source without pairs, or a pair that is too long for "error".

    >>> pairs = [{"id": "1", "source": "a b", "targets": ["x"]}, {"id": "2", "source": "a", "targets": ["x y z"]}]
    >>> encode = lambda text: [ord(letter) for letter in text.split()]
    >>> batches = PairBatches(pairs, encode, tokens_per_batch=8, max_shapes=1)
    >>> inputs, labels, weights = next(batches.iterate())
    >>> inputs["source_ids"].tolist(), inputs["target_ids"].tolist()
    ([[97, 98, 3], [97, 3, 0]], [[2, 120, 0, 0], [2, 120, 121, 122]])
    >>> inputs["label_places"].tolist(), labels.tolist()
    ([0, 1, 4, 5, 6, 7], [120, 3, 120, 121, 122, 3])
    """

    several_shapes = True

    def __init__(
        self,
        source: Any,
        encode_source: Callable[[str], Sequence[int]],
        encode_target: Callable[[str], Sequence[int]] | None = None,
        tokens_per_batch: int = 2048,
        max_length: int = 256,
        too_long: str = "skip",
        max_shapes: int = 8,
        seed: int = 0,
        shuffle: bool = True,
        eval_batch_size: int = 64,
    ) -> None:
        _check(tokens_per_batch, max_length, too_long, max_shapes, seed, eval_batch_size)
        self.source = source
        self.encode_source = encode_source
        self.max_length = max_length
        self.seed = seed
        self.shuffle = shuffle
        self.eval_batch_size = eval_batch_size
        self.too_long = too_long
        self.faults: list[tuple[str, str]] = []
        self._sources, self._labels = self._encode(encode_source, encode_target or encode_source, too_long)
        if not self._labels:
            raise ValueError(
                f"The source has no pair to train on: {len(source)} records, {len(self.faults)} pairs too long."
            )
        self.num_examples = len(self._labels)
        lengths = np.array([(len(s), len(t)) for s, t in zip(self._sources, self._labels, strict=True)])
        self.buckets = make_buckets(lengths, tokens_per_batch, max_shapes)
        self._pass: tuple[int, list[tuple[Bucket, np.ndarray]]] = (-1, [])

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one pass."""
        return sum(bucket.batches for bucket in self.buckets)

    @property
    def labels_per_epoch(self) -> int:
        """Real target tokens of one pass, end tokens included."""
        return sum(map(len, self._labels))

    @property
    def padding(self) -> float:
        """Share of the positions of one pass, of both sides, that are padding."""
        made = sum(b.batches * b.rows * (b.source_length + b.target_length) for b in self.buckets)
        real = sum(map(len, self._sources)) + self.labels_per_epoch
        return 1.0 - real / made

    def iterate(self, start: int = 0) -> Iterator[Batch]:
        """Yield batches number start, start + 1, ... without end.

        Returns:
            A generator of ({"source_ids": int32 (B, S), "target_ids": int32 (B, T), "label_places": int32 (M,)}, labels
            int32 (M,), weights float32 (M,)). Places that are left over repeat place 0 with weight 0.
        """
        if start < 0:
            raise ValueError(f"start={start}: batches are numbered from 0.")
        while True:
            number, place = divmod(start, self.steps_per_epoch)
            if self._pass[0] != number:
                self._pass = number, self._plan(number)
            bucket, pairs = self._pass[1][place]
            yield self._batch(bucket, pairs)
            start += 1

    def examples(self, most: int | None = None) -> Iterator[tuple[dict[str, np.ndarray], list[dict[str, Any]]]]:
        """Yield ({"source_ids": (B, S)}, records), the shortest first, each record once.

        A source longer than `max_length` is cut.

        Args:
            most: of the first so many records of the source; None for all.
        """
        size = self.eval_batch_size
        records = [self.source[index] for index in range(min(len(self.source), most or len(self.source)))]
        rows = [self._source_row(self.encode_source, record["source"]) for record in records]
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        for begin in range(0, len(order), size):
            chosen = order[begin : begin + size]
            yield {"source_ids": pad_rows([rows[i] for i in chosen])}, [records[i] for i in chosen]

    def _encode(
        self, encode_source: Callable[[str], Any], encode_target: Callable[[str], Any], too_long: str
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        sources, labels = [], []
        for index in range(len(self.source)):
            record = self.source[index]
            source_row = np.array([*check_ids(encode_source(record["source"]), record["source"]), EOS], "int32")
            for text in record["targets"]:
                label_row = np.array([*check_ids(encode_target(text), text), EOS], "int32")
                longest = max(len(source_row), len(label_row))
                if longest > self.max_length:
                    rule = f"{longest} tokens; at most max_length={self.max_length} fit"
                    if too_long == "error":
                        advice = 'too_long="skip" leaves such pairs out, "cut" cuts them.'
                        raise ValueError(f"{record['id']}: {rule}. {advice}")
                    self.faults.append((str(record["id"]), f"{rule}: {'cut' if too_long == 'cut' else 'left out'}"))
                    if too_long == "skip":
                        continue
                sources.append(_cut_source(source_row, self.max_length))
                labels.append(label_row[: self.max_length])
        return sources, labels

    def _source_row(self, encode: Callable[[str], Any], text: str) -> np.ndarray:
        return _cut_source(np.array([*check_ids(encode(text), text), EOS], "int32"), self.max_length)

    def _plan(self, number: int) -> list[tuple[Bucket, np.ndarray]]:
        """All batches of pass `number`, as (bucket, numbers of its pairs; -1 for an empty row)."""
        rng = np.random.default_rng([self.seed, number if self.shuffle else 0])
        planned: list[tuple[Bucket, np.ndarray]] = []
        for bucket in self.buckets:
            pairs = bucket.pairs
            if self.shuffle:  # pairs of one length change places
                lengths = np.array([len(self._labels[i]) for i in pairs])
                pairs = pairs[np.lexsort((rng.random(len(pairs)), lengths))]
            placed = np.full(bucket.rows * bucket.batches, -1)
            placed[len(placed) - len(pairs) :] = pairs
            strata = placed.reshape(bucket.rows, bucket.batches)  # row r of every batch comes from stratum r
            if self.shuffle:
                strata = rng.permuted(strata, axis=1)
            planned += [(bucket, strata[:, j]) for j in range(bucket.batches)]
        if not self.shuffle:
            return planned
        return [planned[i] for i in rng.permutation(len(planned))]

    def _batch(self, bucket: Bucket, pairs: np.ndarray) -> Batch:
        source_ids = np.full((bucket.rows, bucket.source_length), PAD, "int32")
        target_ids = np.full((bucket.rows, bucket.target_length), PAD, "int32")
        places = np.zeros(bucket.labels, "int32")
        labels = np.full(bucket.labels, PAD, "int32")
        weights = np.zeros(bucket.labels, "float32")
        filled = 0
        for row, pair in enumerate(pairs):
            if pair < 0:
                source_ids[row, 0] = EOS  # an empty row: no position without a memory to look at
                continue
            source, label = self._sources[pair], self._labels[pair]
            end = filled + len(label)
            source_ids[row, : len(source)] = source
            target_ids[row, 0] = BOS
            target_ids[row, 1 : len(label)] = label[:-1]
            places[filled:end] = row * bucket.target_length + np.arange(len(label))
            labels[filled:end] = label
            weights[filled:end] = 1.0
            filled = end
        return {"source_ids": source_ids, "target_ids": target_ids, "label_places": places}, labels, weights


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


def pad_rows(rows: Sequence[np.ndarray], width: int | None = None) -> np.ndarray:
    """Rows of ids in one array, padded on the right: int32 (B, width), or as wide as the longest row.

    >>> pad_rows([[5, 3], [3]]).tolist()
    [[5, 3], [3, 0]]
    """
    padded = np.full((len(rows), width or max(map(len, rows))), PAD, "int32")
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded


def _cut_source(row: np.ndarray, max_length: int) -> np.ndarray:
    """A source's ids with their end token, also where words had to go."""
    return row if len(row) <= max_length else np.append(row[: max_length - 1], np.int32(EOS))


def _check(tokens: int, max_length: int, too_long: str, max_shapes: int, seed: int, eval_batch_size: int) -> None:
    for name, value, least in (
        ("max_length", max_length, 2),
        ("tokens_per_batch", tokens, 2),
        ("max_shapes", max_shapes, 1),
        ("eval_batch_size", eval_batch_size, 1),
    ):
        if value < least:
            raise ValueError(f"{name}={value} is too small: at least {least}.")
    if too_long not in TOO_LONG:
        raise ValueError(f"too_long={too_long!r} is unknown. It is one of {', '.join(TOO_LONG)}.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} is out of range: 0 to {2**32 - 1}.")
