"""CIDEr-D (Vedantam et al. 2015, https://arxiv.org/abs/1411.5726, section 4 and the -D variant of section 7)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mmattn.metrics.pairs import check_pairs

Gram = tuple[str, ...]
ORDERS = 4
SIGMA = 6.0  # of the penalty on a difference of lengths


def cider_d(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Mean CIDEr-D, 0 to 10 (papers print it times 100: 0.5 here is their 50).

    The inverse document frequencies come from the references given, so a score holds for that set of images: compare
    scores on the same set alone, and give more than one image (the weight of a word that every image has, hence of
    every word of a single image, is 0).

    Args:
        hypotheses: N strings, normalised (see `normalize_caption`); words are what blanks separate. An empty one
            scores 0.
        references: N lists of one or more strings, normalised.

    Raises:
        ValueError: no hypothesis, other numbers of hypotheses and reference lists, or a hypothesis without a reference.

    Example:
        >>> references = [["a dog runs on grass", "a dog on green grass"], ["two men sit in a boat"]]
        >>> round(cider_d(["a dog on grass", "two men in a boat"], references), 3)
        4.316
    """
    return float(cider_d_scores(hypotheses, references).mean())


def cider_d_scores(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> np.ndarray:
    """CIDEr-D of each image, float64 (N,); its mean is `cider_d`. Takes what `cider_d` takes."""
    check_pairs(hypotheses, references)
    counted = [[_grams(reference) for reference in several] for several in references]
    frequency: Counter[Gram] = Counter()
    for several in counted:
        frequency.update({gram for grams in several for gram in grams})
    log_images = math.log(len(references))
    idf = {gram: log_images - math.log(images) for gram, images in frequency.items()}
    scores = np.zeros(len(hypotheses))
    for i, (hypothesis, several) in enumerate(zip(hypotheses, counted, strict=True)):
        vector = _weigh(_grams(hypothesis), idf, log_images)
        scores[i] = 10.0 * sum(_similarity(vector, _weigh(grams, idf, log_images)) for grams in several) / len(several)
    return scores


class _Vector(NamedTuple):
    """The weighted n-grams of one text."""

    weights: dict[Gram, float]
    norms: list[float]  # one for each order
    length: int  # in words


def _grams(text: str) -> Counter[Gram]:
    words = text.split()
    return Counter(tuple(words[i : i + n]) for n in range(1, ORDERS + 1) for i in range(len(words) - n + 1))


def _weigh(grams: Counter[Gram], idf: dict[Gram, float], unseen: float) -> _Vector:
    weights, squares, length = {}, [0.0] * ORDERS, 0
    for gram, count in grams.items():
        weight = weights[gram] = count * idf.get(gram, unseen)
        squares[len(gram) - 1] += weight * weight
        if len(gram) == 1:
            length += count
    return _Vector(weights, [math.sqrt(square) for square in squares], length)


def _similarity(hypothesis: _Vector, reference: _Vector) -> float:
    """Mean over the orders of the clipped cosine, times the penalty for another length; 0 to 1."""
    dots = [0.0] * ORDERS
    theirs = reference.weights
    for gram, weight in hypothesis.weights.items():
        other = theirs.get(gram)
        if other:
            dots[len(gram) - 1] += min(weight, other) * other
    cosines = sum(
        dot / (mine * their)
        for dot, mine, their in zip(dots, hypothesis.norms, reference.norms, strict=True)
        if mine and their
    )
    return cosines / ORDERS * math.exp(-((hypothesis.length - reference.length) ** 2) / (2 * SIGMA**2))
