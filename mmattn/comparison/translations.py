"""The part of a report that is about translators: their scores, the sentences behind them and their alignments."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmattn.comparison import plots
from mmattn.comparison.members import Member
from mmattn.comparison.page import Page
from mmattn.comparison.tables import number, percent, same_tokens, size
from mmattn.metrics.bootstrap import Interval
from mmattn.metrics.translation import bleu_interval
from mmattn.tasks.translation import TranslationScoring

BINS = ((1, 8), (9, 12), (13, 16), (17, 24), (25, 1000))  # words of a source
LONG = 4  # letters of a word whose repetition tells something
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")  # no blanks between words
LEAST = 20  # sentences of a bin whose BLEU is worth a point


def translation(
    page: Page, members: Sequence[Member], folder: Path, sources: Mapping[str, str] | None, sentence: str | None
) -> None:
    page.heading("Translation")
    scored = [_scored(member) for member in members]
    scores = {one.name: one.bleu() for one in scored}
    same = same_tokens(page, members, "perplexity")
    page.table(
        ("model", "BLEU", "95 % interval", "chrF", "perplexity", "say a word again, %", "sources shuffled",
         "parameters", "minutes"),
        [
            (
                member.name,
                f"{scores[member.name].value:.2f}",
                f"{scores[member.name].low:.1f} to {scores[member.name].high:.1f}",
                f"{member.results['test']['chrf']:.2f}",
                number(member.results.get("perplexity") if same else None, ".2f"),
                percent(one.repeating(), ".1f"),
                number(member.results.get("test_shuffled", {}).get("bleu"), ".2f"),
                *size(member),
            )
            for member, one in zip(members, scored, strict=True)
        ],
    )  # fmt: skip
    counts = sorted({len(one.sentences) for one in scored})
    page.text(f"Test split: {' or '.join(f'{count:,}' for count in counts)} sentences.")
    page.text(
        f"Say a word again: translations in which a word of {LONG} letters or more comes twice, and more often than in "
        "any reference; - where fewer than half have such a word."
    )
    for signature in dict.fromkeys(member.results["signatures"]["bleu"] for member in members):
        page.text(f"BLEU: {signature}. Intervals: bootstrap over the sentences, 1,000 samples.")
    path = folder / "bleu.png"
    plots.score_bars(path, scores, "BLEU on the test split, 95 % interval")
    page.picture(path, "BLEU of each model with its interval")
    if len(members) > 1:
        page.text("Each model against the one above it, on the same sentences (paired bootstrap):")
        page.table(
            ("pair", "difference in BLEU", "95 % interval", ""),
            [_pair(worse, better) for worse, better in itertools.pairwise(scored)],
        )
    if sources:
        _by_length(page, folder, scored, sources)
    if sentence:
        _alignments(page, folder, members, sentence)


@dataclass(frozen=True)
class _Scored:
    """A member's sentences as its run has scored them: the text and its references by id."""

    name: str
    scoring: TranslationScoring
    sentences: Mapping[str, tuple[str, list[str]]]

    def bleu(self, ids: Sequence[str] | None = None, against: _Scored | None = None, resamples: int = 1000) -> Interval:
        """BLEU of all sentences or those of `ids`, or its difference from another's."""
        ids = list(self.sentences) if ids is None else ids
        return bleu_interval(
            [self.sentences[name][0] for name in ids],
            [self.sentences[name][1] for name in ids],
            against=None if against is None else [against.sentences[name][0] for name in ids],
            tokenize=self.scoring.tokenize,
            lowercase=self.scoring.lowercase,
            resamples=resamples,
        )

    def repeating(self) -> float | None:
        """The share of the texts that say a long word again; None where fewer than half have one at all."""
        if 2 * sum(bool(long_words(text)) for text, _ in self.sentences.values()) < len(self.sentences):
            return None
        return sum(says_again(text, references) for text, references in self.sentences.values()) / len(self.sentences)


def says_again(text: str, references: Sequence[str]) -> bool:
    """Whether a long word comes at least twice in a text, and more often than in each reference.

    >>> says_again("a fence in front of a fence .", ["grass in front of a fence ."])
    True
    >>> says_again("a man and a man", ["a man and a woman"])  # short words often have to come again
    False
    """
    least = [long_words(reference) for reference in references]
    return any(count > max([1, *(one[word] for one in least)]) for word, count in long_words(text).items())


def long_words(text: str) -> Counter[str]:
    """How often each word of LONG letters or more comes, without case; none of a script that leaves no blanks between
    words.

    >>> long_words("The fence, in front of a Fence.")
    Counter({'fence': 2, 'front': 1})
    """
    words = re.findall(r"\w+", text.casefold())
    return Counter(word for word in words if len(word) >= LONG and not UNSPACED.search(word))


def _scored(member: Member) -> _Scored:
    options = {name: value for name, value in member.config["scoring"].items() if name != "_target_"}
    joiner = options.pop("joiner", None) or member.config["tokenizer"].get("joiner")
    scoring = TranslationScoring(**options, joiner=joiner)
    made = member.predictions
    pairs = zip(*scoring.prepared([p["text"] for p in made], [p["references"] for p in made]), strict=True)
    return _Scored(member.name, scoring, dict(zip([p["id"] for p in made], pairs, strict=True)))


def _common(scored: Sequence[_Scored]) -> list[str]:
    """The ids of the sentences that all have, with the same references: test sets may differ and have the same ids."""
    first, *others = [one.sentences for one in scored]
    return [
        name
        for name, (_, references) in first.items()
        if all(name in other and other[name][1] == references for other in others)
    ]


def _pair(worse: _Scored, better: _Scored) -> tuple[str, ...]:
    pair, common = f"{better.name} against {worse.name}", _common([better, worse])
    if not common:
        return pair, "-", "-", "no sentence in common"
    found = better.bleu(common, worse)
    said = "better" if found.low > 0 else "worse" if found.high < 0 else "no clear difference"
    if len(common) < max(len(better.sentences), len(worse.sentences)):
        said += f", on the {len(common)} sentences that both have"
    if (better.scoring.tokenize, better.scoring.lowercase) != (worse.scoring.tokenize, worse.scoring.lowercase):
        said += f", both scored as {better.name}"
    return pair, f"{found.value:+.2f}", f"{found.low:+.1f} to {found.high:+.1f}", said


def _by_length(page: Page, folder: Path, scored: Sequence[_Scored], sources: Mapping[str, str]) -> None:
    words = {name: len(sources[name].split()) for name in _common(scored) if name in sources}
    bins = [[name for name, count in words.items() if low <= count <= high] for low, high in BINS]
    kept = [(f"{low} to {high}" if high < BINS[-1][1] else f"{low} or more", ids)
            for (low, high), ids in zip(BINS, bins, strict=True) if len(ids) >= LEAST]  # fmt: skip
    if not kept:
        return
    lines = {one.name: [one.bleu(ids, resamples=1).value for _, ids in kept] for one in scored}
    labels = [f"{label} ({len(ids)})" for label, ids in kept]
    page.heading("By length of the source")
    page.table(("model", *labels), [(name, *(f"{score:.1f}" for score in row)) for name, row in lines.items()])
    path = folder / "bleu_by_length.png"
    plots.by_length(path, lines, labels)
    page.picture(path, "BLEU by the number of words of the source")


def _alignments(page: Page, folder: Path, members: Sequence[Member], sentence: str) -> None:
    """What each member's own process has found, see `mmattn.comparison.sentence`."""
    found = {member.name: member.alignment for member in members if member.alignment.get("sentence") == sentence}
    if not found:
        return
    page.heading("One sentence through all")
    page.text(f"Source: {sentence}")
    rows = [(name, one.get("translation", f"none: {one.get('problem')}")) for name, one in found.items()]
    page.table(("model", "translation"), rows, numbers=False)
    drawn = {name: one for name, one in found.items() if one.get("source_words") and one.get("target_words")}
    if drawn:
        path = folder / "alignments.png"
        plots.alignments(path, drawn)
        page.picture(path, "Which source word each word was made from, for each model")
