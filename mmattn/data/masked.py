"""Sentences with words hidden, for a masked language model.

The mask is the token behind the tokenizer's last: of a vocabulary of V ids it has the number V, and the model's has
V + 1. Shape letters: B rows, S length, M hidden tokens of a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mmattn.data.buckets import Bucket, make_buckets, plan_pass
from mmattn.data.targets import EOS, PAD, fingerprint_of, token_row

Batch = tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]
Words = Callable[[Sequence[int]], Sequence[tuple[Any, Sequence[int]]]]
_ORDINARY = 4  # the first id that is not special


class Sentence(NamedTuple):
    """The ids of a sentence with eos, and for each but eos the number of its word, -1 where it is of none."""

    ids: np.ndarray  # int32 (S,)
    word_of: np.ndarray  # int32 (S - 1,)

    def sizes(self) -> np.ndarray:
        """How many tokens each word has."""
        return np.bincount(self.word_of[self.word_of >= 0])


class MaskedBatches:
    """Batches (inputs, labels, weights) of sentences of which some words are hidden, to be told from the others.

    Of the tokens of a batch the share `share` is hidden, by whole words drawn at random, all pieces of a word together.
    A hidden word is replaced by masks, by other tokens or by itself (`replace`); which, is drawn for the whole word, so
    that no piece of it gives the others away. In each pass every sentence comes once, sorted by length into a few fixed
    shapes as in `mmattn.data.pair_batches.PairBatches`; batch k depends on (seed, k) alone.

    Args:
        source: random access to records with `text` and `id`.
        encode_text: a text to ids without bos and eos.
        words: ids to (word, places of its tokens), as `mmattn.preprocess.text.Tokenizer.words`; None: each token is a
            word.
        vocabulary_size: V, of the tokenizer.
        tokens_per_batch: most tokens of a batch, padding included.
        max_length: most tokens of a sentence, its end token included; a longer one is cut, and `faults` lists it as
            (id, why).
        share: of the tokens that are hidden.
        replace: shares of the hidden words that become masks, other tokens, themselves; sum 1.
        whole_words: False hides single tokens, as BERT did at first.
        max_shapes: most shapes of batches.
        seed: decides all order and all masks, 0 to 2**32 - 1.

    Raises:
        ValueError: an argument out of range, or a source without a token.

    Source:
        Devlin et al. 2019, section 3.1 and appendix A.1; for whole words their code of May 2019; for one draw a word
        Joshi et al., "SpanBERT", 2020, section 3.1.

    >>> encode = lambda text: [4 + ord(letter) - 97 for letter in text]
    >>> batches = MaskedBatches([{"id": "1", "text": "abcdef"}], encode, None, 30, share=0.3, replace=(1, 0, 0))
    >>> inputs, labels, weights = next(batches.iterate())
    >>> int((inputs["source_ids"] == 30).sum()), labels.shape, weights.tolist()
    (2, (2,), [1.0, 1.0])
    """

    several_shapes = True

    def __init__(
        self,
        source: Any,
        encode_text: Callable[[str], Sequence[int]],
        words: Words | None,
        vocabulary_size: int,
        tokens_per_batch: int = 2048,
        max_length: int = 256,
        share: float = 0.15,
        replace: Sequence[float] = (0.8, 0.1, 0.1),
        whole_words: bool = True,
        max_shapes: int = 8,
        seed: int = 0,
    ) -> None:
        _check(vocabulary_size, tokens_per_batch, max_length, max_shapes, share, seed)
        if len(replace) != 3 or min(replace) < 0 or abs(sum(replace) - 1.0) > 1e-6:
            raise ValueError(f"replace={tuple(replace)}: shares of masks, other tokens and the same are needed, sum 1.")
        self.vocabulary_size = vocabulary_size
        self.max_length = max_length
        self.share = share
        self.replace = tuple(map(float, replace))
        self.seed = seed
        self.sentences, self.faults = _encoded(source, encode_text, words if whole_words else None, max_length)
        self._counts = np.array([sentence.sizes().sum() for sentence in self.sentences])
        lengths = np.array([len(sentence.ids) for sentence in self.sentences])
        self.buckets = make_buckets(np.stack([lengths, self._counts], axis=1), tokens_per_batch, max_shapes)
        self._longest = {b.source_length: max(self.sentences[i].sizes().max() for i in b.pairs) for b in self.buckets}

    def fingerprint(self) -> str:
        """Of everything that decides the batches: the sentences, their words, and how these are hidden."""
        rule = [self.seed, self.share, self.replace, self.vocabulary_size, *(bucket[1:] for bucket in self.buckets)]
        return fingerprint_of(rule, itertools.chain((b.pairs for b in self.buckets), *self.sentences))

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one pass."""
        return sum(bucket.batches for bucket in self.buckets)

    def iterate(self, start: int = 0) -> Iterator[Batch]:
        """Yield batches number start, start + 1, ... without end.

        Returns:
            A generator of ({"source_ids": int32 (B, S), "label_places": int32 (M,)}, labels int32 (M,), weights float32
            (M,)): the flat places b * S + s of the hidden tokens, and what these were. Places that are left over repeat
            place 0 with weight 0.
        """
        if start < 0:
            raise ValueError(f"start={start}: batches are numbered from 0.")
        return self._stream(start)

    def _stream(self, start: int) -> Iterator[Batch]:
        number, place = divmod(start, self.steps_per_epoch)
        while True:
            plan = plan_pass(self.buckets, self._counts, self.seed, number, True)
            for offset, (bucket, rows) in enumerate(plan[place:], number * self.steps_per_epoch + place):
                yield self._batch(bucket, rows, np.random.default_rng([self.seed, offset, 1]))
            number, place = number + 1, 0

    def _batch(self, bucket: Bucket, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        real = [(row, self.sentences[index]) for row, index in enumerate(rows) if index >= 0]
        sizes = [sentence.sizes() for _, sentence in real]
        owners = np.repeat(np.arange(len(real)), [len(found) for found in sizes])  # the sentence of each word
        numbers = np.concatenate([np.arange(len(found)) for found in sizes])  # its number in there
        flat = np.concatenate(sizes)
        hidden = _drawn(flat, max(1, round(self.share * int(flat.sum()))), rng)
        most = max(round(self.share * bucket.labels), int(self._longest[bucket.source_length]))
        batch = _Filled(bucket, most)
        for row, sentence in real:
            batch.put(row, sentence.ids)
        for word in sorted(hidden):
            row, sentence = real[owners[word]]
            places = np.flatnonzero(sentence.word_of == numbers[word])
            batch.hide(row, places, sentence.ids[places], self._replacement(sentence.ids[places], rng))
        return batch.batch()

    def _replacement(self, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray | int:
        kind = rng.random()
        if kind < self.replace[0]:
            return self.vocabulary_size
        if kind < self.replace[0] + self.replace[1]:
            return rng.integers(_ORDINARY, self.vocabulary_size, len(ids))
        return ids


def hidden_once(
    source: Any,
    encode_text: Callable[[str], Sequence[int]],
    words: Words | None,
    vocabulary_size: int,
    tokens_per_batch: int = 2048,
    max_length: int = 256,
    share: float = 0.15,
    max_shapes: int = 8,
    on_fault: Callable[[str, str], None] | None = None,
) -> Iterator[Batch]:
    """Yield batches, as `MaskedBatches` has them, in which every word of a source is masked once, for an evaluation.

    The words of a sentence are dealt out by a draw that depends on the sentence alone, and it comes in as many copies
    as there are deals of about `share` of its tokens. A hidden word is always masks. So the scores depend neither on
    a seed nor on the batches.

    Args:
        source, encode_text, words, vocabulary_size, tokens_per_batch, max_length, share, max_shapes: as for
            `MaskedBatches`.
        on_fault: called as on_fault(id, why) for each sentence that is left out or cut.

    >>> encode = lambda text: [4 + ord(letter) - 97 for letter in text]
    >>> [(inputs, labels, weights)] = hidden_once([{"id": "1", "text": "abc"}], encode, None, 30, share=0.5)
    >>> (inputs["source_ids"] == 30).sum(axis=1).tolist(), sorted(labels[weights > 0].tolist())
    ([1, 2], [4, 5, 6])
    """
    _check(vocabulary_size, tokens_per_batch, max_length, max_shapes, share, 0)
    sentences, faults = _encoded(source, encode_text, words, max_length)
    if on_fault is not None:
        for name, why in faults:
            on_fault(name, why)
    copies: list[tuple[Sentence, np.ndarray]] = []
    for sentence in sentences:
        sizes = sentence.sizes()
        rng = np.random.default_rng([*sentence.ids.tolist(), 1])
        for deal in _deals(sizes, max(1, round(share * int(sizes.sum()))), rng):
            copies.append((sentence, np.flatnonzero(np.isin(sentence.word_of, deal))))
    counts = np.array([len(places) for _, places in copies])
    lengths = np.array([len(sentence.ids) for sentence, _ in copies])
    buckets = make_buckets(np.stack([lengths, counts], axis=1), tokens_per_batch, max_shapes)
    for bucket, rows in plan_pass(buckets, counts, 0, 0, False):
        batch = _Filled(bucket, bucket.labels)
        for row, index in enumerate(rows):
            if index >= 0:
                sentence, places = copies[index]
                batch.put(row, sentence.ids)
                batch.hide(row, places, sentence.ids[places], vocabulary_size)
        yield batch.batch()


class _Filled:
    """A batch that is being filled."""

    def __init__(self, bucket: Bucket, most: int) -> None:
        self.ids = np.full((bucket.rows, bucket.source_length), PAD, "int32")
        self.ids[:, 0] = EOS  # an empty row: no position without another to look at
        self.places, self.labels = np.zeros(most, "int32"), np.full(most, PAD, "int32")
        self.filled = 0

    def put(self, row: int, ids: np.ndarray) -> None:
        self.ids[row, : len(ids)] = ids

    def hide(self, row: int, places: np.ndarray, labels: np.ndarray, replacement: np.ndarray | int) -> None:
        end = self.filled + len(places)
        self.places[self.filled : end] = row * self.ids.shape[1] + places
        self.labels[self.filled : end] = labels
        self.ids[row, places] = replacement
        self.filled = end

    def batch(self) -> Batch:
        weights = (np.arange(len(self.labels)) < self.filled).astype("float32")
        return {"source_ids": self.ids, "label_places": self.places}, self.labels, weights


def _encoded(
    source: Any, encode_text: Callable[[str], Sequence[int]], words: Words | None, max_length: int
) -> tuple[list[Sentence], list[tuple[str, str]]]:
    """The sentences that have a word, and the faults of the others."""
    sentences, faults = [], []
    for index in range(len(source)):
        record = source[index]
        ids = token_row(record["text"], encode_text)
        if len(ids) > max_length:
            faults.append((str(record["id"]), f"{len(ids)} tokens; at most max_length={max_length} fit: cut"))
            ids = np.append(ids[: max_length - 1], np.int32(EOS))
        word_of = np.arange(len(ids) - 1, dtype="int32")
        if words is not None:
            word_of[:] = -1
            for number, (_, places) in enumerate(words(ids[:-1].tolist())):
                word_of[list(places)] = number
        if len(word_of) and word_of.max() >= 0:
            sentences.append(Sentence(ids, word_of))
        else:
            faults.append((str(record["id"]), "no word: left out"))
    if not sentences:
        raise ValueError(f"The source has no word to hide: {len(source)} records.")
    return sentences, faults


def _drawn(sizes: np.ndarray, budget: int, rng: np.random.Generator) -> list[int]:
    """Words in random order, as long as all of their tokens are within the budget; at least one."""
    order = rng.permutation(len(sizes))
    chosen: list[int] = []
    for word in order:
        if sizes[word] <= budget:
            chosen.append(int(word))
            budget -= sizes[word]
            if not budget:
                break
    return chosen or [int(order[0])]


def _deals(sizes: np.ndarray, budget: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """All words in random order, cut where there are `budget` tokens or more."""
    deal: list[int] = []
    for word in rng.permutation(len(sizes)):
        deal.append(int(word))
        if sizes[deal].sum() >= budget:
            yield deal
            deal = []
    if deal:
        yield deal


def _check(vocabulary_size: int, tokens: int, max_length: int, max_shapes: int, share: float, seed: int) -> None:
    for name, value, least in (
        ("vocabulary_size", vocabulary_size, _ORDINARY + 1),
        ("tokens_per_batch", tokens, 2),
        ("max_length", max_length, 2),
        ("max_shapes", max_shapes, 1),
    ):
        if value < least:
            raise ValueError(f"{name}={value} is too small: at least {least}.")
    if not 0 < share < 1:
        raise ValueError(f"share={share} must be in (0, 1). The usual value is 0.15.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} is out of range: 0 to {2**32 - 1}.")
