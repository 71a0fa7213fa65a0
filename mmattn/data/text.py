"""Plain text for language models: a share of one file, an endless stream of random windows, windows for evaluation."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from mmattn.data.splits import SPLITS, check_split, exact_shares
from mmattn.data.targets import fingerprint_of
from mmattn.data.text_files import TextFileError, read_text

Batch = tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]


class TextSource:
    """Random access to the lines of one share of a text, records `{"id": "input.txt:17", "text": line with its end}`.

    The file is cut by characters into contiguous shares: those from the whole part of n times the shares before it on,
    for a file of n characters. So the texts of the records, joined, are the share to the character, and with (0.9, 0.1)
    train and valid are the first 90 % and the last 10 %, as in nanoGPT. The first and the last line may be cut.

    Args:
        path: UTF-8, plain or compressed; \\r\\n counts as \\n (see `mmattn.data.text_files`).
        split: "train", "valid" or "test". None takes the whole text.
        shares: Of train, valid and test, sum 1. With two shares "test" is the same as "valid".

    Attributes:
        text: The whole share, str.

    Raises:
        TextFileError: a file that cannot be read, or a share without a character.
        ValueError: an unknown split or impossible shares.
    """

    def __init__(self, path: str | Path, split: str | None = None, shares: Sequence[float] = (0.9, 0.1)):
        check_split(split)
        exact = exact_shares(shares, (2, 3))
        file, whole = Path(path), read_text(path)
        begin, end = 0, len(whole)
        if split is not None:
            cuts = [0, *(int(len(whole) * share) for share in accumulate(exact[:-1])), len(whole)]
            place = min(SPLITS.index(split), len(exact) - 1)
            begin, end = cuts[place], cuts[place + 1]
        self.text = whole[begin:end]
        if not self.text:
            raise TextFileError(f"{file}: no text in split {split!r}: {len(whole)} characters in shares {shares}.")
        first = whole.count("\n", 0, begin) + 1
        lines = self.text.split("\n")
        self._lines = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
        self._ids = [f"{file.name}:{first + number}" for number in range(len(self._lines))]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, str]:
        index, size = operator.index(index), len(self)
        if not -size <= index < size:
            raise IndexError(f"There is no record {index}: there are {size}, numbered 0 to {size - 1}.")
        return {"id": self._ids[index], "text": self._lines[index]}


class TextBatches:
    """Batches (inputs, labels, weights) of windows of a text, for a language model.

    The texts of the source's records are joined as they are and encoded in one piece to tokens x_0 .. x_{N-1}. The
    window at i with T = `length` has labels [x_i .. x_{i+T-1}] and target_ids [bos, x_i .. x_{i+T-2}]: the first token
    is foretold from bos alone. With bos_id=None the window has target_ids [x_i .. x_{i+T-1}] and labels
    [x_{i+1} .. x_{i+T}]: the first is foretold from the token before it, as in nanoGPT.

    Batch k of the stream holds windows at places drawn with replacement from (seed, k) alone; with shuffle=False it
    holds the windows k B .. k B + B - 1 of those at 0, T, 2 T, ... (whole ones only), from the start again at the end.

    Args:
        source: Random access to records with `text`.
        encode_text: A text to ids without bos and eos.
        batch_size: B, windows a batch.
        length: T, tokens a window.
        seed: Decides the places, 0 to 2**32 - 1.
        shuffle: False takes the windows in the order of the text.
        bos_id: The id that begins each window, or None.

    Raises:
        ValueError: an argument out of range, or a text shorter than one window.

    >>> source, encode = [{"id": "1", "text": "to be or not to be"}], lambda text: list(text.encode())
    >>> batches = TextBatches(source, encode, batch_size=2, length=5)
    >>> inputs, labels, weights = next(batches.iterate(start=1000))
    >>> inputs["target_ids"].shape, labels.shape, batches.num_tokens, batches.steps_per_epoch
    ((2, 5), (2, 5), 18, 2)
    >>> [bytes(row).decode() for _, labels, _ in batches.windows() for row in labels.astype("uint8")]
    ['to be', ' or n', 'ot to', ' be\\x00\\x00']
    """

    def __init__(
        self,
        source: Any,
        encode_text: Callable[[str], Sequence[int]],
        batch_size: int,
        length: int,
        seed: int = 0,
        shuffle: bool = True,
        bos_id: int | None = 2,
    ):
        for name, value in (("batch_size", batch_size), ("length", length)):
            if value < 1:
                raise ValueError(f"{name}={value} is too small: at least 1.")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed} is out of range: 0 to {2**32 - 1}.")
        self.source = source
        self.batch_size = batch_size
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self.bos_id = bos_id
        text = "".join(source[index]["text"] for index in range(len(source)))
        tokens = np.asarray(encode_text(text), dtype=np.int32)
        self.num_tokens = len(tokens)
        # What each position reads and what it has to foretell: window i is _read[i:i+T] and _told[i:i+T].
        self._told = tokens if bos_id is not None else tokens[1:]
        self._read = tokens[:-1] if bos_id is None else np.concatenate([[bos_id], tokens[:-1]]).astype(np.int32)
        if len(self._told) < length:
            least = length + (bos_id is None)
            raise ValueError(f"A window of length={length} needs {least} tokens; the text has {self.num_tokens}.")

    def fingerprint(self) -> str:
        """Of everything that decides the batches: the tokens, and which windows of them are drawn."""
        rule = [self.seed, self.shuffle, self.batch_size, self.length]
        return fingerprint_of(rule, [self._read, self._told])

    @property
    def steps_per_epoch(self) -> int:
        """Batches that hold, between them, as many tokens as the text has; the last may be beyond."""
        return -(-len(self._told) // (self.batch_size * self.length))

    def iterate(self, start: int = 0) -> Iterator[Batch]:
        """Yield batches number start, start + 1, ... without end: {"target_ids": int32 (B, T)}, labels int32 (B, T),
        weights float32 (B, T), all 1."""
        if start < 0:
            raise ValueError(f"start={start}: batches are numbered from 0.")
        return self._stream(start)

    def windows(self, batch_size: int | None = None) -> Iterator[Batch]:
        """Yield the windows at 0, T, 2 T, ..., so that every token is a label once (with bos_id=None every one but the
        first).

        All batches are (batch_size, T); where the text ends early ids are 0 and weights are 0.
        """
        size = self.batch_size if batch_size is None else batch_size
        if size < 1:
            raise ValueError(f"batch_size={size} is too small: at least 1.")
        for first in range(0, len(self._told), size * self.length):
            yield self._batch(first + self.length * np.arange(size))

    def _stream(self, number: int) -> Iterator[Batch]:
        places = len(self._told) - self.length + 1
        whole = len(self._told) // self.length
        while True:
            if self.shuffle:  # raw 64-bit numbers: the same in every release of NumPy
                drawn = np.random.PCG64(np.random.SeedSequence([self.seed, number])).random_raw(self.batch_size)
                yield self._batch((drawn % np.uint64(places)).astype(np.int64))
            else:
                yield self._batch((number * self.batch_size + np.arange(self.batch_size)) % whole * self.length)
            number += 1

    def _batch(self, starts: np.ndarray) -> Batch:
        positions = starts[:, None] + np.arange(self.length)  # (B, T)
        real = positions < len(self._told)
        positions = np.where(real, positions, 0)
        read, told = (np.where(real, ids[positions], 0) for ids in (self._read, self._told))
        if self.bos_id is not None:
            read[:, 0] = self.bos_id
        return {"target_ids": read}, told, real.astype(np.float32)
