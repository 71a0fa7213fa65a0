"""Corpus BLEU by sacrebleu (Papineni et al. 2002; Post 2018, https://arxiv.org/abs/1804.08771)."""

from __future__ import annotations

from collections.abc import Sequence

from sacrebleu.metrics.bleu import BLEU, BLEUScore

from mmattn.metrics.pairs import check_pairs


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], *, tokenize: str = "none", lowercase: bool = False
) -> float:
    """BLEU-4 of a whole corpus, 0 to 100.

    Args:
        hypotheses: N strings; an empty one is allowed.
        references: N lists of one or more strings.
        tokenize: sacrebleu's tokenizer. "none" splits at blanks and is right for text that is normalised already
            (`normalize_caption`) or tokenised; "13a" is usual for translations, "char", "zh" or "ja-mecab" for
            Chinese and Japanese. Report it: see `bleu_signature`.
        lowercase: compare without case.

    Raises:
        ValueError: no hypothesis, other numbers of hypotheses and reference lists, or a hypothesis without a reference.

    Example:
        >>> round(corpus_bleu(["a dog runs on the grass"], [["a dog runs on the green grass", "the dog runs"]]), 2)
        67.32
    """
    return _score(hypotheses, references, tokenize, lowercase)[0].score


def bleu_orders(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], *, tokenize: str = "none", lowercase: bool = False
) -> list[float]:
    """[BLEU-1, BLEU-2, BLEU-3, BLEU-4], 0 to 100. Takes what `corpus_bleu` takes.

    >>> [round(score, 1) for score in bleu_orders(["a dog runs fast"], [["a dog runs"]])]
    [75.0, 70.7, 63.0, 59.5]
    """
    full, _ = _score(hypotheses, references, tokenize, lowercase)
    return [
        BLEU.compute_bleu(
            full.counts[:order],
            full.totals[:order],
            full.sys_len,
            full.ref_len,
            smooth_method="exp",
            max_ngram_order=order,
        ).score
        for order in range(1, 5)
    ]


def bleu_signature(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], *, tokenize: str = "none", lowercase: bool = False
) -> str:
    """sacrebleu's signature of `corpus_bleu` with the same arguments: print it beside the score, so that others can
    reproduce it.

    >>> bleu_signature(["a dog"], [["a dog"]]).rsplit("|", 1)[0]
    'nrefs:1|case:mixed|eff:no|tok:none|smooth:exp'
    """
    return str(_score(hypotheses, references, tokenize, lowercase)[1].get_signature())


def _score(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], tokenize: str, lowercase: bool
) -> tuple[BLEUScore, BLEU]:
    check_pairs(hypotheses, references)
    metric = BLEU(tokenize=tokenize, lowercase=lowercase, force=True)  # force: no warning that text ends in " ."
    width = max(map(len, references))
    streams = [
        [several[k] if k < len(several) else None for several in references] for k in range(width)
    ]  # None: no such reference
    return metric.corpus_score(list(hypotheses), streams), metric  # type: ignore[arg-type]
