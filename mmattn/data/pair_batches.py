"""Training batches of sentence pairs: counted in tokens, sorted by length into a few fixed shapes.

An endless stream whose batch k depends on (seed, k) alone. Shape letters: B rows, S source length, T target length,
M labels of a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mmattn.data.buckets import Bucket, make_buckets, plan_pass
from mmattn.data.targets import BOS, EOS, PAD, fingerprint_of, token_row

Batch = tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]
TOO_LONG = ("skip", "cut", "error")


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
        tokens_per_batch: most tokens of a batch, padding included, counted on its longer side; a longer pair is a batch
            of its own.
        max_length: most tokens of a sentence, its end token included.
        too_long: what becomes of a pair with a longer sentence: "skip" leaves it out; "cut" keeps the first
            `max_length` tokens (a target that was cut has no end token, so that no false end is taught); "error"
            refuses it. `faults` lists what was left out or cut: (id, why).
        max_shapes: most buckets.
        seed: decides all order, 0 to 2**32 - 1.
        shuffle: False keeps one order in every pass.
        twins: each pair comes twice in its batch, for `mmattn.training.losses.RDropCrossEntropy`: the second half of
            the rows, and of the labels, repeats the first. `tokens_per_batch` counts both.

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
        twins: bool = False,
    ) -> None:
        _check(tokens_per_batch, max_length, too_long, max_shapes, seed)
        self.max_length = max_length
        self.seed = seed
        self.shuffle = shuffle
        self.too_long = too_long
        self.twins = twins
        self.faults: list[tuple[str, str]] = []
        self._sources, self._labels = self._encode(source, encode_source, encode_target or encode_source)
        if not self._labels:
            raise ValueError(
                f"The source has no pair to train on: {len(source)} records, {len(self.faults)} pairs empty or too "
                "long."
            )
        self.num_examples = len(self._labels)
        lengths = np.array([(len(s), len(t)) for s, t in zip(self._sources, self._labels, strict=True)])
        self.buckets = make_buckets(lengths, tokens_per_batch // (2 if twins else 1), max_shapes)

    def fingerprint(self) -> str:
        """Of everything that decides the batches: the encoded pairs, their order and the buckets."""
        rule = [self.seed, self.shuffle, self.twins, *(bucket[1:] for bucket in self.buckets)]
        pairs = (bucket.pairs for bucket in self.buckets)
        return fingerprint_of(rule, itertools.chain(pairs, self._sources, self._labels))

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
        return self._stream(start)

    def _stream(self, start: int) -> Iterator[Batch]:
        number, place = divmod(start, self.steps_per_epoch)
        lengths = np.array(list(map(len, self._labels)))
        while True:
            for bucket, pairs in plan_pass(self.buckets, lengths, self.seed, number, self.shuffle)[place:]:
                batch = self._batch(bucket, pairs)
                yield _doubled(batch) if self.twins else batch
            number, place = number + 1, 0

    def _encode(
        self,
        source: Any,
        encode_source: Callable[[str], Any],
        encode_target: Callable[[str], Any],
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        sources, labels = [], []
        for index in range(len(source)):
            record = source[index]
            source_row = token_row(record["source"], encode_source)
            for text in record["targets"]:
                label_row = token_row(text, encode_target)
                if self._fits(str(record["id"]), source_row, label_row):
                    sources.append(cut_source(source_row, self.max_length))
                    labels.append(label_row[: self.max_length])
        return sources, labels

    def _fits(self, name: str, source_row: np.ndarray, label_row: np.ndarray) -> bool:
        """Whether a pair is to be trained on; what is wrong with it is listed or raised."""
        if len(source_row) == 1 or len(label_row) == 1:
            self.faults.append((name, f"no token in the {'source' if len(source_row) == 1 else 'target'}: left out"))
            return False
        longest = max(len(source_row), len(label_row))
        if longest <= self.max_length:
            return True
        rule = f"{longest} tokens; at most max_length={self.max_length} fit"
        if self.too_long == "error":
            raise ValueError(f'{name}: {rule}. too_long="skip" leaves such pairs out, "cut" cuts them.')
        self.faults.append((name, f"{rule}: {'cut' if self.too_long == 'cut' else 'left out'}"))
        return self.too_long == "cut"

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


def _doubled(batch: Batch) -> Batch:
    inputs, labels, weights = batch
    found = {name: np.concatenate([array, array]) for name, array in inputs.items()}
    found["label_places"][len(labels) :] += inputs["target_ids"].size
    return found, np.concatenate([labels, labels]), np.concatenate([weights, weights])


def source_batches(
    source: Any,
    encode: Callable[[str], Sequence[int]],
    batch_size: int,
    max_length: int,
    most: int | None = None,
    on_fault: Callable[[str, str], None] | None = None,
    width: Callable[[int], int] | None = None,
) -> Iterator[tuple[dict[str, np.ndarray], list[dict[str, Any]]]]:
    """Yield ({"source_ids": int32 (B, S)}, records) for translation, the shortest sources first, each record once.

    Args:
        source: as for `PairBatches`; what else a record holds than `source` and `id` doesn't matter.
        encode: a text to ids without bos and eos.
        batch_size: most rows of a batch.
        max_length: a source of more tokens, its end token included, is cut and told to `on_fault(id, why)`.
        most: only the first so many records; None for all.
        width: to how many tokens a source of so many is widened later (`mmattn.generation.TextGenerator.width`):
            sources of different widths don't meet in a batch, so that what one may give depends on no other.

    >>> made = list(source_batches([{"id": "1", "source": "a b"}, {"id": "2", "source": "c"}], str.encode, 2, 9))
    >>> [record["id"] for _, records in made for record in records]
    ['2', '1']
    """
    rows = []
    for index in range(min(len(source), most or len(source))):
        record = source[index]
        row = token_row(record["source"], encode)
        if len(row) > max_length and on_fault is not None:
            on_fault(str(record["id"]), f"the source has {len(row)} tokens; at most {max_length} fit: cut")
        rows.append((cut_source(row, max_length), record))
    rows.sort(key=lambda pair: len(pair[0]))
    for _, alike in itertools.groupby(rows, key=lambda pair: width(len(pair[0])) if width else 0):
        group = list(alike)
        for begin in range(0, len(group), batch_size):
            chosen = group[begin : begin + batch_size]
            yield {"source_ids": pad_rows([row for row, _ in chosen])}, [record for _, record in chosen]


def pad_rows(rows: Sequence[np.ndarray], width: int | None = None) -> np.ndarray:
    """Rows of ids in one array, padded on the right: int32 (B, width), or as wide as the longest row.

    >>> pad_rows([[5, 3], [3]]).tolist()
    [[5, 3], [3, 0]]
    """
    padded = np.full((len(rows), width or max(map(len, rows))), PAD, "int32")
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded


def cut_source(row: np.ndarray, max_length: int) -> np.ndarray:
    """A source's ids with their end token, also where words had to go."""
    return row if len(row) <= max_length else np.append(row[: max_length - 1], np.int32(EOS))


def _check(tokens: int, max_length: int, too_long: str, max_shapes: int, seed: int) -> None:
    for name, value, least in (
        ("max_length", max_length, 2),
        ("tokens_per_batch", tokens, 2),
        ("max_shapes", max_shapes, 1),
    ):
        if value < least:
            raise ValueError(f"{name}={value} is too small: at least {least}.")
    if too_long not in TOO_LONG:
        raise ValueError(f"too_long={too_long!r} is unknown. It is one of {', '.join(TOO_LONG)}.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} is out of range: 0 to {2**32 - 1}.")
