"""Speed of a training step and of translation: mmattn, KerasHub, torch.nn.Transformer and Hugging Face's Marian.

    pip install -e ".[benchmarks]"
    python benchmarks/translation.py --size tiny

All have the same sizes, batches, dtype (float32) and threads; weights are random and each translation has a fixed number
of tokens, so that what is generated does not matter. Each contender has a process of its own and they take turns, one
round after the other, on a machine that should have nothing else to do. Printed are Markdown tables: medians over the
rounds with quartiles, and how many times mmattn's time each takes (the median of the rounds' own ratios). A peer that
is not installed is named and left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from processes import Failed, Worker
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
    """One line of a table."""

    name: str
    label: str
    what: str
    method: str
    argument: Any
    first_call: float = 0.0
    first_result: Any = None
    seconds: list[float] = field(default_factory=list)


def main() -> None:
    options = _options()
    job = Job.of_size(
        options.size, train_rows=options.train_rows or ROWS[options.size][0],
        translate_rows=options.translate_rows or ROWS[options.size][1], length=options.length,
        dropout=options.dropout, threads=options.threads, xla=options.xla,
    )  # fmt: skip
    workers = dict(_start(options.peers, job))
    tables = _rows(workers)
    parameters = {name: worker.run("parameters")[1] for name, worker in workers.items()}
    shares = _warm_up(workers, tables, job)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    for number in range(options.repeats):
        for title, rows in tables.items():
            times = options.steps or STEPS[options.size] if title == "train" else 1
            for row in rows:
                seconds, _ = workers[row.name].run(row.method, row.argument, times=times)
                row.seconds.append(statistics.mean(seconds))
        _say(f"round {number + 1} of {options.repeats}")
    for worker in workers.values():
        worker.stop()
    machine = {"processor": _processor(), "load_before": load, **_versions(workers)}
    print(_report(job, tables, parameters, shares, machine, options.repeats))
    if options.json:
        found = {title: [_plain(row) for row in rows] for title, rows in tables.items()}
        record = {"job": asdict(job), "machine": machine, "parameters": parameters, "greedy": shares, "rows": found}
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
    """The contenders that there are, mmattn first. One that does not work is named and left out, unless it is mmattn."""
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
    tables: dict[str, list[Row]] = {"train": [], "greedy": [], "beam 5": []}
    for name in workers:
        entry = ENTRIES[name]
        tables["train"] += [Row(name, entry.label, what, "train", key) for key, what in entry.variants.items()]
        for beams, what in entry.translates.items():
            tables["greedy" if beams == 1 else f"beam {beams}"].append(Row(name, entry.label, what, "translate", beams))
    return tables


def _warm_up(workers: dict[str, Worker], tables: dict[str, list[Row]], job: Job) -> dict[str, float]:
    """Two calls of everything, the first timed by itself, and checks that all do what they should."""
    shares = {}
    for row in (row for rows in tables.values() for row in rows):
        _say(f"first call: {row.label}, {row.method} {row.argument}")
        worker = workers[row.name]
        [row.first_call], result = worker.run(row.method, row.argument)
        worker.run(row.method, row.argument)
        if row.method == "train":
            row.first_result = result
            continue
        shape, wanted = result.shape, (job.translate_rows, job.length)
        if shape != wanted or result.min() < 0 or result.max() >= job.vocabulary_size:
            raise Failed(f"{row.label} made {shape} tokens from {result.min()} to {result.max()}, not {wanted}.")
        if row.argument == 1:
            shares[row.name] = worker.apply(is_greedy, job.batch(job.translate_rows).source, result.astype("int32"))
    return shares


def _report(
    job: Job, tables: dict[str, list[Row]], parameters: dict[str, int], shares: dict[str, float],
    machine: dict[str, Any], repeats: int,
) -> str:  # fmt: skip
    batch = job.batch(job.train_rows)
    padding = 1 - batch.tokens / batch.labels.size
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"{machine['processor']}, {job.threads} threads, load {_number(machine['load_before'])} before the first round. "
        f"Python {machine['python']}, {versions}.",
        f"{job.encoder_layers}+{job.decoder_layers} layers, width {job.hidden_dim}, {job.num_heads} heads, FFN "
        f"{job.intermediate_dim}, vocabulary {job.vocabulary_size}, float32, dropout {job.dropout}. {repeats} rounds.",
    ]
    head = f"Training step: {job.train_rows} x {job.length} tokens a side, {padding:.0%} padding. Keras by "
    head += "XLA." if job.xla else "TensorFlow's graph."
    columns = ["", "parameters", "first loss", "first call, s", "ms a step", "quartiles", "target tokens/s", "x mmattn"]
    lines += ["", head + f" log V = {np.log(job.vocabulary_size):.2f}.", "", *_header(columns)]
    for row in tables["train"]:
        cells = [f"{parameters[row.name]:,}", f"{row.first_result:.2f}"]
        lines.append(_line(row, cells, batch.tokens, tables["train"][0]))
    for title in ("greedy", "beam 5"):
        tokens = job.translate_rows * job.length
        head = (
            f"Translation, {title}: {job.translate_rows} sentences of up to {job.length} tokens to {job.length} each."
        )
        columns = ["", "verified", "first call, s", "ms a batch", "quartiles", "tokens/s", "x mmattn"]
        lines += ["", head, "", *_header(columns)]
        for row in tables[title]:
            cells = [f"{shares[row.name]:.1%}" if title == "greedy" else ""]
            lines.append(_line(row, cells, tokens, tables[title][0]))
    lines += ["", "verified: share of the tokens that a full pass without a cache finds the likeliest as well."]
    return "\n".join(lines)


def _header(columns: list[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]


def _line(row: Row, cells: list[str], tokens: int, ours: Row) -> str:
    low, median, high = statistics.quantiles(row.seconds, n=4, method="inclusive")
    ratio = statistics.median(theirs / own for theirs, own in zip(row.seconds, ours.seconds, strict=True))
    cells = [
        f"{row.label}: {row.what}", *cells, f"{row.first_call:.1f}", _number(median * 1000),
        f"{_number(low * 1000)} to {_number(high * 1000)}", f"{tokens / median:,.0f}", f"{ratio:.2f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _plain(row: Row) -> dict[str, Any]:
    result = row.first_result
    return {**asdict(row), "first_result": result}


def _versions(workers: dict[str, Worker]) -> dict[str, Any]:
    packages = dict.fromkeys(package for name in workers for package in ENTRIES[name].packages)
    return {"python": platform.python_version(), "versions": {p: importlib.metadata.version(p) for p in packages}}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
