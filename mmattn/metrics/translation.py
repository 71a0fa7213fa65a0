"""Scores of translations, equal to sacrebleu's own, with its signatures: BLEU and chrF; an interval for BLEU; and the
two ways to words that papers on tokenized text need beside it, Moses' detokenizer and spaCy's tokenizer.

Post 2018, https://arxiv.org/abs/1804.08771 (sacrebleu); Popovic 2015, https://aclanthology.org/W15-3049 (chrF).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from mmattn.metrics.bootstrap import Interval, bootstrap
from mmattn.metrics.pairs import check_pairs

TOKENIZERS = ("13a", "intl", "none", "char", "zh", "ja-mecab", "ko-mecab")  # sacrebleu's, less those it has to download
_ORDERS = 4


def translation_scores(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], tokenize: str = "13a", lowercase: bool = False
) -> dict[str, Any]:
    """Scores of N translations of a whole test set.

    Args:
        hypotheses: N strings; an empty one is allowed.
        references: N lists of one or more strings.
        tokenize: How BLEU finds words. sacrebleu's "13a" (raw text), "intl", "none" (text that is tokenized already,
            split at blanks), "char", "zh", "ja-mecab" and "ko-mecab" (need sacrebleu[ja], sacrebleu[ko]); or "spacy:"
            and a language, see `words_for_bleu`. chrF always sees the text as it is.
        lowercase: Compare without case, in both scores.

    Returns:
        bleu, chrf: 0 to 100. bp: BLEU's brevity penalty, 1 where the translations are not shorter than the references.
        mean_length: words a translation, as BLEU counts them. bleu_line: sacrebleu's line, with the precisions of the
        four orders and the lengths, which tell whether two papers used the same references. signatures: {"bleu": ..,
        "chrf": ..}, to be printed beside the scores.

    Raises:
        ValueError: no hypothesis, other numbers of hypotheses and reference lists, a hypothesis without a reference, or
            an unknown tokenizer.
        ModuleNotFoundError: a tokenizer whose package is not installed.

    Example:
        >>> references = [["The dog runs fast."], ["A cat.", "One cat"]]
        >>> scores = translation_scores(["The dog runs fast.", "A cat"], references)
        >>> [round(scores[name], 2) for name in ("bleu", "chrf", "bp", "mean_length")]
        [100.0, 95.65, 1.0, 3.5]
        >>> scores["signatures"]["bleu"].rsplit("|", 1)[0]
        'nrefs:var|case:mixed|eff:no|tok:13a|smooth:exp'
    """
    check_pairs(hypotheses, references)
    metric, words, name = _bleu(tokenize, lowercase)
    bleu = metric.corpus_score([words(text) for text in hypotheses], _streams(references, words))
    signature = str(metric.get_signature()).replace("|tok:none|", f"|tok:{name}|")
    chrf = CHRF(lowercase=lowercase)
    return {
        "bleu": bleu.score,
        "chrf": chrf.corpus_score(list(hypotheses), _streams(references, str)).score,
        "bp": bleu.bp,
        "mean_length": bleu.sys_len / len(hypotheses),
        "bleu_line": str(bleu),
        "signatures": {"bleu": signature, "chrf": str(chrf.get_signature())},
    }


def bleu_interval(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    against: Sequence[str] | None = None,
    tokenize: str = "13a",
    lowercase: bool = False,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Corpus BLEU with its bootstrap interval, or the difference of two systems' BLEU by the paired bootstrap.

    Args:
        hypotheses, references, tokenize, lowercase: As in `translation_scores`.
        against: The N translations of another system. The interval is then of ours minus theirs on the same sentences,
            and the difference is real at this confidence where it leaves 0 out.
        resamples, confidence, seed: As in `bootstrap`.

    Example:
        >>> references = [["a dog runs on the grass"], ["two men sit in a boat"], ["the sun is low"]] * 10
        >>> worse = ["a dog runs on grass", "two men in a boat", "a sun is low"] * 10
        >>> difference = bleu_interval([several[0] for several in references], references, against=worse)
        >>> round(difference.value, 2), difference.low > 0
        (55.81, True)
    """
    metric, words, _ = _bleu(tokenize, lowercase)
    systems = [_statistics(metric, words, system, references) for system in (hypotheses, against) if system is not None]

    def score(rows: np.ndarray) -> float:
        ours, *theirs = (_bleu_of(counts[rows].sum(axis=0)) for counts in systems)
        return ours - theirs[0] if theirs else ours

    return bootstrap(len(hypotheses), score, resamples=resamples, confidence=confidence, seed=seed)


def words_for_bleu(tokenizer: str) -> Callable[[str], str]:
    """A function from text to text with one blank between words, for BLEU with tokenize="none".

    Args:
        tokenizer: "spacy:" and a language code, such as "spacy:en": the rules of spaCy's tokenizer for that language,
            which need no trained model (`spacy.blank`). Papers that say "spaCy tokens" mean them.

    Raises:
        ValueError: another name, or a language that spaCy does not have.
        ModuleNotFoundError: spaCy is not installed (`pip install "mmattn[spacy]"`).
    """
    kind, _, language = tokenizer.partition(":")
    if kind != "spacy" or not language:
        raise ValueError(f"{tokenizer!r} is unknown. It is spacy: and a language code, such as 'spacy:en'.")
    split = _spacy(language)
    return lambda text: " ".join(token.text for token in split(text) if not token.is_space)


def detokenize(text: str, language: str) -> str:
    """Raw text from Moses' tokens: blanks before punctuation removed, `&apos;` and its like turned back.

    For BLEU on raw text ("13a") of a model that writes tokens. Case is not restored. It is the detokenizer of
    sacremoses; on the 1,000 sentences of Multi30k's test_2016_flickr it gives the lower-cased raw text for 998 in
    English and 997 in German.

    Args:
        text: One sentence, tokens separated by blanks.
        language: Code of its language, such as "en" or "de".

    Raises:
        ModuleNotFoundError: sacremoses is not installed (`pip install "mmattn[moses]"`).
    """
    return str(_moses(language).detokenize(text.split()))


def _bleu(tokenize: str, lowercase: bool) -> tuple[BLEU, Callable[[str], str], str]:
    """sacrebleu's metric, what each text goes through before it, and the tokenizer's name in the signature."""
    if tokenize.startswith("spacy:"):
        words = words_for_bleu(tokenize)
        metric = BLEU(tokenize="none", lowercase=lowercase, force=True)
        return metric, lambda text: words(text.lower() if lowercase else text), _spacy_name(tokenize)
    if tokenize not in TOKENIZERS:
        raise ValueError(f"tokenize={tokenize!r} is unknown. It is one of {', '.join(TOKENIZERS)}, or spacy:LANGUAGE.")
    try:  # force: no warning that text ends in " ."
        return BLEU(tokenize=tokenize, lowercase=lowercase, force=True), str, tokenize
    except RuntimeError as error:
        needed = f'"sacrebleu[{tokenize[:2]}]"'
        raise ModuleNotFoundError(f"tokenize={tokenize!r} needs: pip install {needed}") from error


def _streams(references: Sequence[Sequence[str]], words: Callable[[str], str]) -> Any:
    """sacrebleu's layout: stream k has the k-th reference of each hypothesis, None where there is none."""
    width = max(map(len, references))
    return [[words(several[k]) if k < len(several) else None for several in references] for k in range(width)]


def _statistics(
    metric: BLEU, words: Callable[[str], str], hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> np.ndarray:
    """What corpus BLEU sums over sentences, int64 (N, 10): matches and n-grams of four orders, the two lengths."""
    check_pairs(hypotheses, references)
    metric.effective_order = True  # sentence_score warns without it; the counts are the same
    scores = [
        metric.sentence_score(words(text), [words(reference) for reference in several])
        for text, several in zip(hypotheses, references, strict=True)
    ]
    return np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores])


def _bleu_of(counts: np.ndarray) -> float:
    whole = [int(count) for count in counts]
    return BLEU.compute_bleu(whole[:_ORDERS], whole[_ORDERS:-2], whole[-2], whole[-1], smooth_method="exp").score


@lru_cache
def _spacy(language: str) -> Callable[[str], Any]:
    try:
        import spacy
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('spaCy tokens need spaCy: pip install "mmattn[spacy]"') from error
    try:
        return spacy.blank(language).tokenizer
    except ImportError as error:
        raise ValueError(f"spaCy has no tokenizer for the language {language!r}: {error}") from error


def _spacy_name(tokenizer: str) -> str:
    import spacy

    return f"{tokenizer.replace(':', '.')}-{spacy.__version__}"


@lru_cache
def _moses(language: str) -> Any:
    try:
        from sacremoses import MosesDetokenizer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('Moses\' detokenizer needs sacremoses: pip install "mmattn[moses]"') from error
    return MosesDetokenizer(lang=language)
