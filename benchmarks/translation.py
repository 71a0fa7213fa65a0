"""Speed of a training step and of translation: mmattn, KerasHub, torch.nn.Transformer and Hugging Face's Marian.

    pip install -e ".[benchmarks]"
    python benchmarks/translation.py --size tiny

All have the same sizes, batches, dtype (float32) and threads; weights are random and each translation has a fixed
number of tokens, so that what is generated does not matter. Each contender has a process of its own and they take
turns, one round after the other, on a machine that should have nothing else to do. Printed are Markdown tables: medians
over the rounds with quartiles, and how many times the time of the table's first row each takes (the median of the
rounds' own ratios). A peer that is not installed is named and left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from processes import Failed, Worker
from tables import TIMES, machine, table, times
from translation_job import ROWS, STEPS, Job, is_greedy


@dataclass(frozen=True)
class Entry:
    """A contender: where it is, what it needs, and what it does."""

    label: str
    module: str
    make: str
    packages: tuple[str, ...]
    variants: dict[str, str]
    translates: dict[int, str]


LOOP = "compiled loop, cached"
ENTRIES = {
    "mmattn": Entry(
        "mmattn", "translation_keras", "Mmattn", ("mmattn", "keras", "tensorflow"),
        {"padded": "logits at all places", "packed": "logits at real tokens, as in its training runs"},
        {1: LOOP, 5: LOOP},
    ),
    "kerashub": Entry(
        "KerasHub", "translation_keras", "KerasHub", ("keras-hub", "keras", "tensorflow"),
        {"": "logits at all places"},
        {1: LOOP + ", GreedySampler", 5: LOOP + ", BeamSampler"},
    ),
    "torch": Entry(
        "torch.nn.Transformer", "translation_torch", "Torch", ("torch",),
        {"": "logits at all places"},
        {1: "Python loop, no cache"},
    ),
    "marian": Entry(
        "HF MarianMT", "translation_torch", "Marian", ("transformers", "torch"),
        {"": "logits at all places"},
        {1: "generate(), cached", 5: "generate(), cached"},
    ),
}  # fmt: skip
OURS = "mmattn"
IMPORTS = {"keras-hub": "keras_hub"}


@dataclass
class Row:
    """One line of a table: `method(argument)` of a contender, and the seconds of each round."""

    name: str
    what: str
    method: str
    argument: Any
    first_call: float = 0.0
    first_loss: float | None = None
    seconds: list[float] = field(default_factory=list)


def main() -> None:
    options = _options()
    rows_to_train, rows_to_translate = ROWS[options.size]
    job = Job.of_size(
        options.size,
        train_rows=options.train_rows or rows_to_train,
        translate_rows=options.translate_rows or rows_to_translate,
        length=options.length,
        dropout=options.dropout,
        threads=options.threads,
        xla=options.xla,
    )
    workers = dict(_start(options.peers, job))
    rows = _rows(workers)
    parameters = {name: worker.run("parameters")[1] for name, worker in workers.items()}
    shares = _warm_up(workers, rows, job)
    about = machine(dict.fromkeys(package for name in workers for package in ENTRIES[name].packages))
    for number in range(options.repeats):
        for row in (row for some in rows.values() for row in some):
            calls = (options.steps or STEPS[options.size]) if row.method == "train" else 1
            row.seconds.append(statistics.mean(workers[row.name].run(row.method, row.argument, times=calls)[0]))
        _say(f"round {number + 1} of {options.repeats}")
    for worker in workers.values():
        worker.stop()
    print(_report(job, rows, parameters, shares, about))
    if options.json:
        found = {method: [asdict(row) for row in some] for method, some in rows.items()}
        record = {"job": asdict(job), "machine": about, "parameters": parameters, "verified": shares, "rows": found}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = [name for name in ENTRIES if name != OURS]
    parser.add_argument("--size", choices=sorted(ROWS), default="tiny", help="conf/size/text_<size>.yaml")
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers, help="whom to compare with; default all")
    parser.add_argument("--repeats", type=int, default=15, help="rounds, at least 2")
    parser.add_argument("--steps", type=int, help="training steps in one measurement")
    parser.add_argument("--train-rows", type=int, help="sentence pairs in the training batch")
    parser.add_argument("--translate-rows", type=int, help="sentences that are translated at once")
    parser.add_argument("--length", type=int, default=32, help="tokens of the padded sentences and of a translation")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--xla", action="store_true", help="XLA for the training steps of mmattn and KerasHub")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    options = parser.parse_args()
    if options.repeats < 2:
        parser.error(f"--repeats must be at least 2, for quartiles, and is {options.repeats}.")
    return options


def _start(peers: list[str], job: Job) -> Iterator[tuple[str, Worker]]:
    """The contenders that there are, mmattn first. A peer that does not work is named and left out."""
    for name in (OURS, *(name for name in ENTRIES if name in peers)):
        entry = ENTRIES[name]
        missing = [p for p in entry.packages if importlib.util.find_spec(IMPORTS.get(p, p)) is None]
        if missing:
            if name == OURS:
                sys.exit(f"{', '.join(missing)} missing: pip install -e . in the repository's folder.")
            print(f"{entry.label} left out: {', '.join(missing)} not installed.")
            continue
        _say(f"building {entry.label}")
        try:
            yield name, Worker(entry.module, entry.make, (job,), job.threads)
        except Failed as error:
            if name == OURS:
                raise
            print(f"{entry.label} left out: {str(error).strip().splitlines()[-1]}")


def _rows(workers: dict[str, Worker]) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {"train": [], "greedy": [], "beam 5": []}
    for name in workers:
        entry = ENTRIES[name]
        rows["train"] += [Row(name, what, "train", key) for key, what in entry.variants.items()]
        for beams, what in entry.translates.items():
            rows["greedy" if beams == 1 else f"beam {beams}"].append(Row(name, what, "translate", beams))
    return rows


def _warm_up(workers: dict[str, Worker], rows: dict[str, list[Row]], job: Job) -> dict[str, float]:
    """Two calls of everything, the first timed by itself. Returns how much of the greedy search each has verified."""
    shares = {}
    for row in (row for some in rows.values() for row in some):
        worker, label = workers[row.name], ENTRIES[row.name].label
        _say(f"first call: {label}, {row.method} {row.argument}")
        [row.first_call], result = worker.run(row.method, row.argument)
        worker.run(row.method, row.argument)
        if row.method == "train":
            row.first_loss = result
            continue
        wanted = (job.translate_rows, job.length)
        if result.shape != wanted or result.min() < 0 or result.max() >= job.vocabulary_size:
            raise Failed(f"{label} made {result.shape} tokens from {result.min()} to {result.max()}, not {wanted}.")
        if row.argument == 1:
            shares[row.name] = worker.apply(is_greedy, job.batch(job.translate_rows).source, result)
    return shares


def _report(
    job: Job, rows: dict[str, list[Row]], parameters: dict[str, int], shares: dict[str, float], about: dict[str, Any]
) -> str:
    batch = job.batch(job.train_rows)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    load = "" if about["load"] is None else f", load {about['load']:.1f} before the first round"
    lines = [
        f"{about['processor']}, {job.threads} threads{load}. {versions}.",
        f"{job.encoder_layers}+{job.decoder_layers} layers, width {job.hidden_dim}, {job.num_heads} heads, FFN "
        f"{job.intermediate_dim}, vocabulary {job.vocabulary_size}, float32, dropout {job.dropout}. "
        f"{len(rows['train'][0].seconds)} rounds.",
        "",
        f"Training step: {job.train_rows} x {job.length} tokens a side, {1 - batch.tokens / batch.labels.size:.0%} of "
        f"them padding; Keras by {'XLA' if job.xla else 'the plain graph'}; log V = {np.log(job.vocabulary_size):.2f}.",
        "",
    ]

    def line(row: Row, cells: list[str], tokens: int, first: Row) -> list[str]:
        timed = times(row.seconds, tokens, first.seconds)
        return [f"{ENTRIES[row.name].label}: {row.what}", *cells, f"{row.first_call:.1f}", *timed]

    lines += table(
        ["", "parameters", "first loss", "first call, s", *TIMES],
        (
            line(row, [f"{parameters[row.name]:,}", f"{row.first_loss:.2f}"], batch.tokens, rows["train"][0])
            for row in rows["train"]
        ),
    )
    made = job.translate_rows * job.length
    for method in ("greedy", "beam 5"):
        head = f"Translation, {method}: {job.translate_rows} sentences of up to {job.length} tokens, {job.length} made"
        lines += ["", f"{head} for each.", ""]
        lines += table(
            ["", "verified", "first call, s", *TIMES],
            (
                line(row, [f"{shares[row.name]:.1%}" if method == "greedy" else ""], made, rows[method][0])
                for row in rows[method]
            ),
        )
    return "\n".join([*lines, "", "verified: tokens that a full pass without a cache finds the likeliest, too."])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
