"""The report of a comparison: report.md, report.html (one file, pictures inside) and the pictures beside them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmattn.comparison import plots
from mmattn.comparison.members import Member
from mmattn.comparison.page import Page
from mmattn.metrics.bootstrap import Interval
from mmattn.metrics.translation import bleu_interval
from mmattn.tasks.translation import TranslationScoring
from mmattn.training.checkpoint import atomic_file

BINS = ((1, 8), (9, 12), (13, 16), (17, 24), (25, 1000))  # words of a source
LONG = 4  # letters of a word whose repetition tells something
LEAST = 20  # sentences of a bin whose BLEU is worth a point


def write_report(
    folder: Path,
    title: str,
    members: Sequence[Member],
    sources: Mapping[str, str] | None = None,
    sentence: str | None = None,
    about: Sequence[str] = (),
) -> Path:
    """Writes what there is so far; a member without results is named with its reason.

    Args:
        folder: where it goes; made when it is missing.
        title: of the report.
        members: in the order of the table.
        sources: the test split's sources by id, for translators: BLEU by length needs them.
        sentence: a source whose translations and alignments are shown, of members that have them; None shows none.
        about: paragraphs to begin with: the data, the command.

    Returns:
        the path of report.md.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page = Page(title)
    for paragraph in about:
        page.text(paragraph)
    done = [member for member in members if member.finished]
    translators = [member for member in done if "bleu" in member.results.get("test", {})]
    if translators:
        _translation(page, folder, translators, sources, sentence)
    captioners = [member for member in done if "bleu4" in member.results.get("test", {})]
    if captioners:
        _captions(page, captioners)
    models = [member for member in done if "perplexity" in member.results.get("test", {})]
    if models:
        _language(page, models)
    _curves(page, folder, done)
    _costs(page, folder, done)
    missing = [member for member in members if not member.finished]
    if missing:
        page.heading("Without results")
        page.table(("model", "why"), [(member.name, member.problem or "not finished") for member in missing], False)
    for name, text in (("report.md", page.markdown()), ("report.html", page.html())):
        with atomic_file(folder / name) as file:
            file.write(text.encode())
    return folder / "report.md"


def _translation(
    page: Page, folder: Path, members: Sequence[Member], sources: Mapping[str, str] | None, sentence: str | None
) -> None:
    page.heading("Translation")
    scored = [_scored(member) for member in members]
    scores = {one.name: one.bleu() for one in scored}
    same = _same_tokens(page, members, "perplexity")
    page.table(
        ("model", "BLEU", "95 % interval", "chrF", "perplexity", "say a word again, %", "sources shuffled",
         "parameters", "minutes"),
        [
            (
                member.name,
                f"{scores[member.name].value:.2f}",
                f"{scores[member.name].low:.1f} to {scores[member.name].high:.1f}",
                f"{member.results['test']['chrf']:.2f}",
                _number(member.results.get("perplexity") if same else None, ".2f"),
                f"{100 * one.repeating():.1f}",
                _number(member.results.get("test_shuffled", {}).get("bleu"), ".2f"),
                _number(member.parameters, ",d"),
                f"{member.minutes:.0f}",
            )
            for member, one in zip(members, scored, strict=True)
        ],
    )  # fmt: skip
    page.text(
        f"Say a word again: translations in which a word of {LONG} letters or more comes twice, and more often than in "
        "any reference. Mostly it is a source word that was translated two times."
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


def _same_tokens(page: Page, members: Sequence[Member], what: str) -> bool:
    """Whether the members write with the same tokens; where they do not, the page says what cannot be compared."""
    if len({member.tokenizer for member in members}) == 1:
        return True
    page.text(f"Not shown: {what}. It is counted by token, and these models have other tokens for the same text.")
    return False


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

    def repeating(self) -> float:
        """The share of the texts that say a longer word again, more often than any reference does."""
        return sum(says_again(text, references) for text, references in self.sentences.values()) / len(self.sentences)


def says_again(text: str, references: Sequence[str]) -> bool:
    """Whether a word of 4 letters or more comes at least twice in a text, and more often than in each reference.

    >>> says_again("a fence in front of a fence .", ["grass in front of a fence ."])
    True
    >>> says_again("a man and a man", ["a man and a woman"])  # short words often have to come again
    False
    """
    counts = Counter(word for word in text.split() if len(word) >= LONG)
    least = {word: max([1, *(reference.split().count(word) for reference in references)]) for word in counts}
    return any(count > least[word] for word, count in counts.items())


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


def _language(page: Page, members: Sequence[Member]) -> None:
    page.heading("Language models")
    same = _same_tokens(page, members, "loss, perplexity and bits a token")
    rows = []
    for member in members:
        test = member.results["test"] if same else {}
        scores = [("loss", ".4f"), ("perplexity", ".3f"), ("bits_per_token", ".4f")]
        rows.append((member.name, *(_number(test.get(name), form) for name, form in scores),
                     _number(member.parameters, ",d"), f"{member.minutes:.0f}"))  # fmt: skip
    page.table(("model", "loss, nats a token", "perplexity", "bits a token", "parameters", "minutes"), rows)


def _captions(page: Page, members: Sequence[Member]) -> None:
    page.heading("Captions")
    rows = []
    for member in members:
        test, shuffled = member.results["test"], member.results.get("test_shuffled", {})
        scores = [f"{test['bleu4']:.2f}", f"{test['cider_d']:.3f}", f"{test['rouge_l']:.3f}"]
        rows.append((member.name, *scores, _number(shuffled.get("bleu4"), ".2f"),
                     _number(member.parameters, ",d"), f"{member.minutes:.0f}"))  # fmt: skip
    page.table(("model", "BLEU-4", "CIDEr-D", "ROUGE-L", "pictures shuffled", "parameters", "minutes"), rows)


def _curves(page: Page, folder: Path, members: Sequence[Member]) -> None:
    monitors = {member.config["fit"]["monitor"] for member in members}
    for score in sorted(monitors):
        path = folder / f"validation_{score}.png"
        same = [member for member in members if member.config["fit"]["monitor"] == score]
        if plots.curves(path, same, score):
            page.heading("While training")
            page.picture(path, f"Validation {score} by epoch")


def _costs(page: Page, folder: Path, members: Sequence[Member]) -> None:
    measured = [member for member in members if "options" in member.costs]
    if not measured:
        return
    page.heading("What it costs, and how that grows")
    page.text(
        f"{_how_measured(measured)} A training step (Adam; the same loss for all), the main memory that it needs above "
        "what the process holds between steps, encoding, and greedy generation of as many tokens. One process for each "
        "model and length, one after the other."
    )
    lengths = sorted({entry["length"] for member in measured for entry in member.costs["lengths"]})
    for key, unit, factor in plots.GROWTH:
        lines = []
        for member in measured:
            by_length = {entry["length"]: entry.get(key) for entry in member.costs["lengths"]}
            values = [by_length.get(length) for length in lengths]
            lines.append((member.name, *("-" if v is None else three_digits(factor * v) for v in values)))
        page.table((unit, *(f"{length} tokens" for length in lengths)), lines)
    rates = []
    for member in measured:
        entry = next((e for e in member.costs["lengths"] if "train_seconds" in e), None)
        if entry is not None:
            tokens = member.costs["options"]["rows"] * entry["length"]
            made = [three_digits(tokens / entry[key]) for key in ("train_seconds", "generate_seconds")]
            rates.append((member.name, str(entry["length"]), *made))
    page.table(("model", "tokens a side", "target tokens/s in training", "tokens/s in generation"), rates)
    path = folder / "growth.png"
    if plots.growth(path, measured):
        page.picture(path, "Time and memory by length, logarithmic axes")
    problems = [
        (m.name, str(e["length"]), e["problem"]) for m in measured for e in m.costs["lengths"] if "problem" in e
    ]
    if problems:
        page.table(("not measured", "tokens a side", "why"), problems, numbers=False)


def _how_measured(members: Sequence[Member]) -> str:
    """With what options, and whose they are where not all have the same."""
    names: dict[str, list[str]] = {}
    for member in members:
        options = member.costs["options"]
        threads = "all" if options["threads"] is None else options["threads"]
        text = f"{options['rows']} rows of random tokens a side, medians of {options['repeats']}, threads: {threads}"
        names.setdefault(text, []).append(member.name)
    if len(names) == 1:
        return f"{next(iter(names))}."
    return "Not all were measured alike. " + " ".join(f"{', '.join(who)}: {text}." for text, who in names.items())


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def three_digits(value: float) -> str:
    """
    >>> three_digits(0.40312), three_digits(9.996), three_digits(12345.6), three_digits(0.0)
    ('0.403', '10.0', '12,346', '0')
    """
    if not value:
        return "0"
    value = float(f"{value:.3g}") if abs(value) < 1000 else value
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
