"""What can be told of a hidden token by counting alone: the bar that a masked language model has to clear."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_BOS = 2  # stands before each sentence


class Neighbours:
    """Guesses hidden tokens from counts of a training text.

    "unigram" always says the most frequent token. "bigram" says the likeliest token behind the left neighbour or the
    likeliest one before the right neighbour, whichever has the greater share in the training text; a neighbour that is
    hidden too, or was never seen, says nothing, and where both say nothing the most frequent token is said. Of equals
    the one with the smaller id is taken.

    Args:
        sentences: rows of ids, each with its end token.
        size: V + 1, the mask being the last id.

    >>> found = Neighbours([np.array([5, 6, 3]), np.array([5, 6, 3]), np.array([6, 7, 3])], size=9)
    >>> found.unigram, found.bigram(np.array([[5, 8, 8, 3]]), np.array([1, 2])).tolist()
    (6, [6, 6])
    """

    def __init__(self, sentences: Iterable[np.ndarray], size: int) -> None:
        rows = [np.concatenate([[_BOS], row]) for row in sentences]
        left = np.concatenate([row[:-1] for row in rows])
        right = np.concatenate([row[1:] for row in rows])
        ordinary = right[right > 3]
        self.mask_id = size - 1
        self.unigram = int(np.bincount(ordinary, minlength=size).argmax())
        keep = right > 3  # never guess an end, and never a start
        self._after = _best(left[keep], right[keep], np.bincount(left, minlength=size), size)
        keep = left > 3
        self._before = _best(right[keep], left[keep], np.bincount(right, minlength=size), size)

    def bigram(self, source_ids: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The guesses at flat places b * S + s of `source_ids` (B, S): int (M,)."""
        length = source_ids.shape[1]
        starts = np.concatenate([np.full((len(source_ids), 1), _BOS), source_ids, np.zeros((len(source_ids), 1))], 1)
        padded = starts.astype("int64").ravel()
        middle = (places // length) * (length + 2) + places % length + 1
        guesses, shares = np.full(len(places), self.unigram), np.zeros(len(places))
        for (token, share), neighbour in ((self._after, padded[middle - 1]), (self._before, padded[middle + 1])):
            better = (neighbour != self.mask_id) & (share[neighbour] > shares)
            guesses = np.where(better, token[neighbour], guesses)
            shares = np.where(better, share[neighbour], shares)
        return guesses

    def accuracies(self, batches: Iterable[tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]]) -> dict[str, float]:
        """The shares of hidden tokens that are guessed right, of batches as `mmattn.data.masked` makes them."""
        right = np.zeros(2)
        count = 0.0
        for inputs, labels, weights in batches:
            guesses = self.bigram(inputs["source_ids"], inputs["label_places"])
            right += [((guess == labels) * weights).sum() for guess in (self.unigram, guesses)]
            count += weights.sum()
        return dict(zip(("unigram", "bigram"), (right / count).tolist(), strict=True))


def _best(given: np.ndarray, told: np.ndarray, totals: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each id its likeliest partner, and that one's share of all that it was seen with."""
    pairs, counts = np.unique(given.astype("int64") * size + told, return_counts=True)
    order = np.lexsort((-pairs, counts))  # the greatest count last, of equals the smallest partner
    first, second = np.divmod(pairs[order], size)
    token, share = np.zeros(size, "int64"), np.zeros(size)
    token[first] = second
    share[first] = counts[order] / totals[first]
    return token, share
