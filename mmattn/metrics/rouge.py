"""ROUGE-L (Lin 2004, https://aclanthology.org/W04-1013), in the form that caption work reports."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmattn.metrics.pairs import check_pairs

BETA = 1.2  # how much more recall counts than precision


def rouge_l(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Mean ROUGE-L, 0 to 1: the F-measure (beta 1.2) of the longest common subsequence of words.

    With several references the best precision and the best recall are taken, each over all of them, as in the COCO
    caption evaluation.

    Args:
        hypotheses: N strings, normalised (see `normalize_caption`); words are what blanks separate. An empty one
            scores 0.
        references: N lists of one or more strings, normalised.

    Raises:
        ValueError: no hypothesis, other numbers of hypotheses and reference lists, or a hypothesis without a reference.

    Example:
        >>> round(rouge_l(["a dog runs fast"], [["a brown dog runs", "the dog"]]), 3)
        0.75
    """
    return float(rouge_l_scores(hypotheses, references).mean())


def rouge_l_scores(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> np.ndarray:
    """ROUGE-L of each image, float64 (N,); its mean is `rouge_l`. Takes what `rouge_l` takes."""
    check_pairs(hypotheses, references)
    return np.array(
        [_best(hypothesis.split(), several) for hypothesis, several in zip(hypotheses, references, strict=True)]
    )


def _best(words: list[str], references: Sequence[str]) -> float:
    split = [reference.split() for reference in references]
    common = [longest_common_subsequence(words, reference) for reference in split]
    precision = max(common) / max(len(words), 1)
    recall = max(length / max(len(reference), 1) for length, reference in zip(common, split, strict=True))
    if not precision or not recall:
        return 0.0
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence, one machine operation for a row of the usual table (Hyyro 2004).

    >>> longest_common_subsequence("the black dog runs".split(), "the dog that runs".split())
    3
    """
    places: dict[str, int] = {}
    for i, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << i
    every = (1 << len(first)) - 1
    row = every  # bit i is 0 where the table's row steps up at column i
    for word in second:
        hits = row & places.get(word, 0)
        row = ((row + hits) | (row - hits)) & every
    return len(first) - row.bit_count()
