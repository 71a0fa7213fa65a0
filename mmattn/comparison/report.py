"""The report of a comparison: report.md, report.html (one file, pictures inside) and the pictures beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from mmattn.comparison import plots
from mmattn.comparison.members import Member
from mmattn.comparison.page import Page
from mmattn.comparison.tables import number, percent, same_tokens, size, three_digits
from mmattn.comparison.translations import translation
from mmattn.training.checkpoint import atomic_file


def write_report(
    folder: Path,
    title: str,
    members: Sequence[Member],
    sources: Mapping[str, str] | None = None,
    sentence: str | None = None,
    about: Sequence[str] = (),
    command: str | None = None,
) -> Path:
    """Writes what there is so far; a member without results is named with its reason.

    Args:
        folder: where it goes; made when it is missing.
        title: of the report.
        members: in the order of the table.
        sources: the test split's sources by id, for translators: BLEU by length needs them.
        sentence: a source whose translations and alignments are shown, of members that have them; None shows none.
        about: paragraphs to begin with, such as the data.
        command: that made the report.

    Returns:
        the path of report.md.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page = Page(title)
    for paragraph in about:
        page.text(paragraph)
    if command:
        page.code(command, "Made by")
    done = [member for member in members if member.finished]
    tables: dict[str, tuple[str, Callable[[Page, Sequence[Member]], None]]] = {  # and what each cannot do without
        "translator": ("bleu", partial(translation, folder=folder, sources=sources, sentence=sentence)),
        "captioner": ("bleu4", _captions),
        "language_model": ("perplexity", _language),
        "masked_language_model": ("accuracy", _masked),
        "classifier": ("accuracy", _classes),
    }
    others = list(done)
    for kind, (score, table) in tables.items():
        some = [member for member in done if member.kind == kind and score in member.results.get("test", {})]
        if some:
            table(page, some)
            others = [member for member in others if member not in some]
    if others:
        _other(page, others)
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


def _language(page: Page, members: Sequence[Member]) -> None:
    page.heading("Language models")
    same = same_tokens(page, members, "loss, perplexity and bits a token")
    rows = []
    for member in members:
        test = member.results["test"] if same else {}
        scores = [("loss", ".4f"), ("perplexity", ".3f"), ("bits_per_token", ".4f")]
        rows.append((member.name, *(number(test.get(name), form) for name, form in scores), *size(member)))
    page.table(("model", "loss, nats a token", "perplexity", "bits a token", "parameters", "minutes"), rows)


def _masked(page: Page, members: Sequence[Member]) -> None:
    page.heading("Masked language models")
    same = same_tokens(page, members, "accuracy and perplexity of hidden tokens")
    rows = []
    for member in members:
        test = member.results["test"] if same else {}
        counted = member.results.get("accuracy_by_counting", {}).get("test", {}) if same else {}
        rows.append((member.name, percent(test.get("accuracy")), percent(counted.get("bigram")),
                     number(test.get("perplexity"), ".3f"), *size(member)))  # fmt: skip
    page.table(
        ("model", "accuracy of hidden tokens, %", "by counting neighbours, %", "perplexity", "parameters", "minutes"),
        rows,
    )


def _classes(page: Page, members: Sequence[Member]) -> None:
    page.heading("Classification")
    rows = []
    for member in members:
        test, usual = member.results["test"], member.results.get("test_of_most_frequent_class")
        rows.append((member.name, percent(test["accuracy"]), percent(test.get("top5")),
                     number(test.get("loss"), ".4f"), percent(usual), *size(member)))  # fmt: skip
    page.table(
        ("model", "accuracy, %", "among the five likeliest, %", "loss, nats", "of the most frequent class, %",
         "parameters", "minutes"),
        rows,
    )  # fmt: skip


def _other(page: Page, members: Sequence[Member]) -> None:
    page.heading("Other models")
    rows = []
    for member in members:
        scores = member.results.get("test", {}).items()
        said = ", ".join(f"{name} {value:.4g}" for name, value in scores if isinstance(value, int | float))
        rows.append((member.name, said or "-", *size(member)))
    page.table(("model", "scores on the test split", "parameters", "minutes"), rows)


def _captions(page: Page, members: Sequence[Member]) -> None:
    page.heading("Captions")
    rows = []
    for member in members:
        test, shuffled = member.results["test"], member.results.get("test_shuffled", {})
        scores = [f"{test['bleu4']:.2f}", f"{test['cider_d']:.3f}", f"{test['rouge_l']:.3f}"]
        rows.append((member.name, *scores, number(shuffled.get("bleu4"), ".2f"), *size(member)))
    page.table(("model", "BLEU-4", "CIDEr-D", "ROUGE-L", "pictures shuffled", "parameters", "minutes"), rows)


def _curves(page: Page, folder: Path, members: Sequence[Member]) -> None:
    groups: dict[str, dict[str, list[Member]]] = {}
    for member in members:
        of_score = groups.setdefault(member.config["fit"]["monitor"], {})
        of_score.setdefault(member.kind or "other", []).append(member)
    drawn = []
    for score, kinds in sorted(groups.items()):
        for kind, some in kinds.items():  # a score of one kind says nothing of another
            alone = len(kinds) == 1
            path = folder / (f"validation_{score}.png" if alone else f"validation_{score}_{kind}.png")
            if plots.curves(path, some, score):
                drawn.append((path, f"Validation {score} by epoch{'' if alone else f', {kind}'}"))
    if drawn:
        page.heading("While training")
    for path, about in drawn:
        page.picture(path, about)


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
