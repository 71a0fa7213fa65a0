"""Plain text as streams: each row of a batch goes on in the same row of the next, for models that remember."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mmattn.data.targets import EOS, fingerprint_of
from mmattn.data.text import Batch


class StreamBatches:
    """Batches (inputs, labels, weights) of B streams of text, for a language model with a memory.

    The texts of the source's records are joined as they are, or with `documents=True` are each a document that ends
    with eos. Tokens x_0 .. x_{n-1} are labels in their order; before each of them the one before it is read, and before
    the first bos (with bos_id=None the first is read only). They are cut into N segments of T = `length` labels; a
    document begins with a segment, and its last one may be short: ids 0, weights 0.

    Row b goes through the segments from the whole part of b N / B on, to those of row b + 1. Where it begins, at the
    first batch of each pass, and where a document begins, `reset` is True and bos is read; what the model remembers of
    that row has nothing to do with it. In training (`iterate`) a row also begins anew by chance, since a model that
    has always read something before does not know how to begin. Batch k is a function of k and the seed alone; nothing
    is shuffled.

    Args:
        source: Random access to records with `text`.
        encode_text: A text to ids without bos and eos.
        batch_size: B, streams.
        length: T, labels of a segment.
        documents: Whether each record is a text for itself.
        bos_id: The id that begins a text, or None.
        restarts: With what probability a row begins anew where it need not.
        seed: Of these restarts, 0 or more.

    Attributes:
        num_tokens: Tokens of all texts.

    Raises:
        ValueError: an argument out of range, or no label in the whole source.

    >>> source, encode = [{"id": "1", "text": "to be or not to be"}], lambda text: list(text.encode())
    >>> batches = StreamBatches(source, encode, batch_size=2, length=5)
    >>> for inputs, labels, weights in batches.one_pass():
    ...     print(inputs["reset"], [bytes(row).decode() for row in labels.astype("uint8")])
    [ True  True] ['to be', 'ot to']
    [False False] [' or n', ' be\\x00\\x00']
    """

    def __init__(
        self,
        source: Any,
        encode_text: Callable[[str], Sequence[int]],
        batch_size: int,
        length: int,
        documents: bool = False,
        bos_id: int | None = 2,
        restarts: float = 0.0,
        seed: int = 0,
    ):
        for name, value in (("batch_size", batch_size), ("length", length)):
            if value < 1:
                raise ValueError(f"{name}={value} is too small: at least 1.")
        if not 0.0 <= restarts <= 1.0:
            raise ValueError(f"restarts={restarts} is a probability, 0 to 1.")
        self.source = source
        if seed < 0:
            raise ValueError(f"seed={seed} must be at least 0.")
        self.restarts = restarts
        self.seed = seed
        self.batch_size = batch_size
        self.length = length
        self.documents = documents
        self.bos_id = bos_id
        texts = [source[index]["text"] for index in range(len(source))]
        tokens = [np.asarray(encode_text(text), "int32") for text in (texts if documents else ["".join(texts)])]
        self.num_tokens = sum(map(len, tokens))
        cut = [parts for ids in tokens if len((parts := self._segments(ids))[0])]
        if not cut:
            least = "one token" if bos_id is not None else "two tokens"
            raise ValueError(f"A stream needs a text of {least}; the source has {self.num_tokens} in {len(texts)}.")
        # Of each segment: what is read and told (N, T), what of that is real, and whether a text begins with it.
        self._read, self._told, self._real = (np.concatenate(parts) for parts in zip(*cut, strict=True))
        self._begins = np.concatenate([np.arange(len(real)) == 0 for *_, real in cut])

    def fingerprint(self) -> str:
        """Of everything that decides the batches."""
        rule = ["streams", self.batch_size, self.length, self.bos_id, self.restarts, self.seed]
        return fingerprint_of(rule, [self._read, self._told, self._real, self._begins])

    @property
    def steps_per_epoch(self) -> int:
        """Batches of a pass, which has each label once."""
        return -(-len(self._told) // self.batch_size)

    def iterate(self, start: int = 0) -> Iterator[Batch]:
        """Yield batches number start, start + 1, ... without end: {"target_ids": int32 (B, T), "reset": bool (B,)},
        labels int32 (B, T), weights float32 (B, T). After a pass comes the next."""
        if start < 0:
            raise ValueError(f"start={start}: batches are numbered from 0.")
        return self._stream(start)

    def one_pass(self, batch_size: int | None = None) -> Iterator[Batch]:
        """Yield the batches of one pass, with as many streams; 1: the whole source is one stream."""
        size = self.batch_size if batch_size is None else batch_size
        if size < 1:
            raise ValueError(f"batch_size={size} is too small: at least 1.")
        return (self._batch(step, size) for step in range(-(-len(self._told) // size)))

    def _stream(self, number: int) -> Iterator[Batch]:
        while True:
            anew = np.random.default_rng([self.seed, number]).random(self.batch_size) < self.restarts
            yield self._batch(number % self.steps_per_epoch, self.batch_size, anew)
            number += 1

    def _batch(self, step: int, size: int, anew: np.ndarray | bool = False) -> Batch:
        bounds = np.arange(size + 1) * len(self._told) // size
        segments = bounds[:-1] + step
        there = segments < bounds[1:]  # a row may be one segment shorter than another
        segments = np.where(there, segments, 0)
        reset = there & (self._begins[segments] | (step == 0) | anew)
        read, told, real = (
            np.where(there[:, None], part[segments], 0) for part in (self._read, self._told, self._real)
        )
        if self.bos_id is not None:
            read[reset, 0] = self.bos_id
        return {"target_ids": read, "reset": reset}, told, real.astype(np.float32)

    def _segments(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What is read, told and real of one text, `(n, T)` each."""
        told = np.concatenate([tokens, [EOS]]).astype("int32") if self.documents else tokens
        if self.bos_id is None:
            read, told = told[:-1], told[1:]
        else:
            read = np.concatenate([[self.bos_id], told[:-1]]).astype("int32")[: len(told)]
        more = -len(told) % self.length
        real = np.pad(np.ones(len(told), bool), (0, more))
        parts = (np.pad(read, (0, more)), np.pad(told, (0, more)), real)
        return tuple(part.reshape(-1, self.length) for part in parts)  # type: ignore[return-value]
