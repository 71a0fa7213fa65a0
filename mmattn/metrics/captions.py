"""All scores of a set of generated captions in one call, and the normalisation that the published figures use."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from mmattn.metrics.bleu import bleu_orders
from mmattn.metrics.cider import cider_d
from mmattn.metrics.pairs import check_pairs
from mmattn.metrics.rouge import rouge_l

_WORDS = re.compile(r"[a-z0-9']+")


def normalize_caption(text: str) -> str:
    """Lower-case words [a-z0-9'] with one blank between them: no punctuation, as in the published captioning figures.

    >>> normalize_caption("A man's dog , black-and-white , RUNS .")
    "a man's dog black and white runs"
    """
    return " ".join(_WORDS.findall(text.lower()))


def caption_scores(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], normalize: Callable[[str], str] = normalize_caption
) -> dict[str, float]:
    """Scores of N captions against their references.

    Args:
        hypotheses: N captions, one an image; an empty one scores 0 and counts.
        references: N lists of one or more captions. One in which the normalisation leaves no word is left out.
        normalize: applied to every caption first. `normalize_caption` is for English; for Chinese by characters give
            `" ".join`.

    Returns:
        bleu1, bleu2, bleu3, bleu4: 0 to 100. cider_d: 0 to 10. rouge_l: 0 to 1.
        distinct: share of captions left when equal ones are counted once; 1/N means the same caption for every image.
        mean_length: words a caption. repetition: share of captions that say something twice in a row (see `repeats`).

    Raises:
        ValueError: no hypothesis, other numbers of hypotheses and reference lists, or an image without a reference
            that has a word.

    Example:
        >>> scores = caption_scores(["A dog runs.", "A man man!"], [["a dog runs"], ["A man sits .", "A man"]])
        >>> [round(scores[name], 2) for name in ("bleu1", "distinct", "mean_length", "repetition")]
        [83.33, 1.0, 3.0, 0.5]
    """
    check_pairs(hypotheses, references)
    captions = [normalize(caption) for caption in hypotheses]
    truths = [[text for text in map(normalize, several) if text.split()] for several in references]
    for i, several in enumerate(truths):
        if not several:
            raise ValueError(
                f"No reference of image {i} has a word after normalisation, for example {references[i][0]!r}. "
                'For a script other than Latin give normalize=, for example " ".join to score by characters.'
            )
    bleu = bleu_orders(captions, truths)
    return {
        **{f"bleu{order}": score for order, score in enumerate(bleu, start=1)},
        "cider_d": cider_d(captions, truths),
        "rouge_l": rouge_l(captions, truths),
        "distinct": len(set(captions)) / len(captions),
        "mean_length": sum(len(caption.split()) for caption in captions) / len(captions),
        "repetition": sum(map(repeats, captions)) / len(captions),
    }


def repeats(caption: str, longest: int = 4) -> bool:
    """True if a phrase of one to `longest` words stands twice in a row, as in "a dog a dog runs": a usual fault of
    generated text.

    >>> repeats("a man in a red shirt and a man in a blue shirt"), repeats("a man with a with a hat")
    (False, True)
    """
    words = caption.split()
    return any(
        words[i : i + n] == words[i + n : i + 2 * n]
        for n in range(1, longest + 1)
        for i in range(len(words) - 2 * n + 1)
    )
