"""The report of a comparison: report.md, report.html (one file, pictures inside) and the pictures beside them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmattn.comparison import plots
from mmattn.comparison.members import Member
from mmattn.comparison.page import Page
from mmattn.inference import Translator
from mmattn.metrics.bootstrap import Interval
from mmattn.metrics.translation import bleu_interval
from mmattn.tasks.translation import TranslationScoring
from mmattn.training.checkpoint import atomic_file

BINS = ((1, 8), (9, 12), (13, 16), (17, 24), (25, 1000))  # words of a source
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
        sentence: a source whose alignments are drawn; None draws none.
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
    models = [member for member in done if "loss" in member.results.get("test", {})]
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
    scores = {member.name: _bleu(member) for member in members}
    page.table(
        ("model", "BLEU", "95 % interval", "chrF", "perplexity", "sources shuffled", "parameters", "minutes"),
        [
            (
                member.name,
                f"{scores[member.name].value:.2f}",
                f"{scores[member.name].low:.1f} to {scores[member.name].high:.1f}",
                f"{member.results['test']['chrf']:.2f}",
                _number(member.results.get("perplexity"), ".2f"),
                _number(member.results.get("test_shuffled", {}).get("bleu"), ".2f"),
                _number(member.costs.get("parameters"), ",d"),
                f"{member.minutes:.0f}",
            )
            for member in members
        ],
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
            [_pair(worse, better) for worse, better in itertools.pairwise(members)],
        )
    if sources:
        _by_length(page, folder, members, sources)
    if sentence:
        _alignments(page, folder, members, sentence)


def _bleu(member: Member, against: Member | None = None, ids: set[str] | None = None) -> Interval:
    """BLEU as the run has scored it, of some sentences, or its difference from another member's."""
    chosen = [p for p in member.predictions if ids is None or p["id"] in ids]
    theirs = None
    if against is not None:
        made = {p["id"]: p["text"] for p in against.predictions}
        chosen = [p for p in chosen if p["id"] in made]
        theirs, _ = _scoring(against).prepared([made[p["id"]] for p in chosen], [p["references"] for p in chosen])
    scoring = _scoring(member)
    texts, references = scoring.prepared([p["text"] for p in chosen], [p["references"] for p in chosen])
    return bleu_interval(
        texts, references, against=theirs, tokenize=scoring.tokenize, lowercase=scoring.lowercase,
        resamples=1 if ids is not None else 1000,
    )  # fmt: skip


def _scoring(member: Member) -> TranslationScoring:
    options = {name: value for name, value in member.config["scoring"].items() if name != "_target_"}
    joiner = options.pop("joiner", None) or member.config["tokenizer"].get("joiner")
    return TranslationScoring(**options, joiner=joiner)


def _pair(worse: Member, better: Member) -> tuple[str, ...]:
    found = _bleu(better, worse)
    said = "better" if found.low > 0 else "worse" if found.high < 0 else "no clear difference"
    interval = f"{found.low:+.1f} to {found.high:+.1f}"
    return f"{better.name} against {worse.name}", f"{found.value:+.2f}", interval, said


def _by_length(page: Page, folder: Path, members: Sequence[Member], sources: Mapping[str, str]) -> None:
    words = {name: len(text.split()) for name, text in sources.items()}
    bins = [{name for name, count in words.items() if low <= count <= high} for low, high in BINS]
    kept = [(f"{low} to {high}" if high < BINS[-1][1] else f"{low} or more", ids)
            for (low, high), ids in zip(BINS, bins, strict=True) if len(ids) >= LEAST]  # fmt: skip
    if not kept:
        return
    lines = {m.name: [_bleu(m, ids=ids).value for _, ids in kept] for m in members}
    labels = [f"{label} ({len(ids)})" for label, ids in kept]
    page.heading("By length of the source")
    page.table(("model", *labels), [(name, *(f"{score:.1f}" for score in row)) for name, row in lines.items()])
    path = folder / "bleu_by_length.png"
    plots.by_length(path, lines, labels)
    page.picture(path, "BLEU by the number of words of the source")


def _alignments(page: Page, folder: Path, members: Sequence[Member], sentence: str) -> None:
    found, rows = {}, []
    for member in members:
        assert member.folder is not None
        translator = Translator.load(member.folder / "bundle")
        translation = translator.translate(sentence)[0]
        rows.append((member.name, translation.text))
        try:
            found[member.name] = translator.attention(sentence, translation)
        except ValueError:  # a model without attention
            continue
    page.heading("One sentence through all")
    page.text(f"Source: {sentence}")
    page.table(("model", "translation"), rows, numbers=False)
    if found := {name: a for name, a in found.items() if a.target_words and a.source_words}:
        path = folder / "alignments.png"
        plots.alignments(path, found)
        page.picture(path, "Which source word each word was made from, for each model")


def _language(page: Page, members: Sequence[Member]) -> None:
    page.heading("Language models")
    rows = []
    for member in members:
        test = member.results["test"]
        costs = (_number(member.costs.get("parameters"), ",d"), f"{member.minutes:.0f}")
        rows.append((member.name, f"{test['loss']:.4f}", f"{test['perplexity']:.3f}", f"{test['bits_per_token']:.4f}",
                     *costs))  # fmt: skip
    page.table(("model", "loss, nats a token", "perplexity", "bits a token", "parameters", "minutes"), rows)


def _captions(page: Page, members: Sequence[Member]) -> None:
    page.heading("Captions")
    rows = []
    for member in members:
        test, shuffled = member.results["test"], member.results.get("test_shuffled", {})
        scores = [f"{test['bleu4']:.2f}", f"{test['cider_d']:.3f}", f"{test['rouge_l']:.3f}"]
        rows.append((member.name, *scores, _number(shuffled.get("bleu4"), ".2f"), f"{member.minutes:.0f}"))
    page.table(("model", "BLEU-4", "CIDEr-D", "ROUGE-L", "pictures shuffled", "minutes"), rows)


def _curves(page: Page, folder: Path, members: Sequence[Member]) -> None:
    monitors = {member.config["fit"]["monitor"] for member in members}
    for score in sorted(monitors):
        path = folder / f"validation_{score}.png"
        same = [member for member in members if member.config["fit"]["monitor"] == score]
        if plots.curves(path, same, score):
            page.heading("While training")
            page.picture(path, f"Validation {score} by epoch")


def _costs(page: Page, folder: Path, members: Sequence[Member]) -> None:
    measured = [member for member in members if member.costs]
    if not measured:
        return
    page.heading("What it costs, and how that grows")
    rows = measured[0].costs["rows"]
    page.text(
        f"{rows} rows of random tokens, the same number on both sides: a training step (Adam; the same loss for all), "
        "its memory above the idle process, encoding, and greedy generation of as many tokens. One process a model, "
        "one after the other; medians."
    )
    lengths = sorted({entry["length"] for member in measured for entry in member.costs["lengths"]})
    for key, unit, factor in plots.GROWTH:
        lines = []
        for member in measured:
            by_length = {entry["length"]: entry.get(key) for entry in member.costs["lengths"]}
            values = [by_length.get(length) for length in lengths]
            lines.append((member.name, *("-" if v is None else f"{factor * v:,.0f}" for v in values)))
        page.table((unit, *(f"{length} tokens" for length in lengths)), lines)
    rates = []
    for member in measured:
        entry = next((e for e in member.costs["lengths"] if "train_seconds" in e), None)
        if entry is not None:
            tokens = rows * entry["length"]
            made = [_number(tokens / entry[key], ",.0f") for key in ("train_seconds", "generate_seconds")]
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


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
