"""Comparisons: members as processes, what they cost, and the report."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from experiments import compare, train
from experiments.config import CONF, ConfigProblem, compose
from experiments.train import make_parts
from mmattn.bundle import save_bundle
from mmattn.comparison import Member, costs, read_member, runner, write_report
from mmattn.comparison.costs import measure, random_batch
from mmattn.comparison.page import Page
from mmattn.comparison.runner import MemberRun
from mmattn.comparison.sentence import translated
from mmattn.comparison.translations import long_words, says_again
from mmattn.decoders import RecurrentDecoder, TransformerDecoder
from mmattn.encoders.text import TextEncoder
from mmattn.inference import Translator
from mmattn.metrics.translation import bleu_interval, translation_scores
from mmattn.model import EncoderDecoder
from mmattn.preprocess.text import Tokenizer
from mmattn.tasks.translation import TranslationScoring
from mmattn.training.callbacks import Interrupted
from mmattn.training.folder import RunLock
from mmattn.training.validation import Prediction

# In place of Python: does with a run folder what a training does, as told by the file `how`, and says what a
# measurement says: the words that it got, or nothing for the length 13.
TRAINING = """#!{python}
import json, os, pathlib, signal, sys, time
if sys.argv[2] != "mmattn":
    if "--length=13" in sys.argv:
        sys.exit("killed")
    print("noise", json.dumps({{"words": sys.argv[2:], "translation": "made"}}), sep=chr(10))
    sys.exit()
words = [word.partition("=") for word in sys.argv[4:]]
given = {{key: value for key, _, value in words}}
how = pathlib.Path({how!r}).read_text().split()
step = how.pop(0)
pathlib.Path({how!r}).write_text(" ".join(how))
folder = pathlib.Path(given["resume"]) if "resume" in given else pathlib.Path(given["run.root"]) / "date_name_1"
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.yaml").write_text("a: 1")
signals = []
def stop(number, frame):
    if signals:
        os._exit(1)
    signals.append(number)
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(143)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN if step == "deaf" else stop)
print("resumed" if "resume" in given else "started", flush=True)
if step in ("wait", "deaf"):
    time.sleep(60)
if step == "fail":
    sys.exit("no memory left")
(folder / "bundle").mkdir()
(folder / "bundle" / "bundle.json").write_text('{{"kind": "translator"}}')
(folder / "results.json").write_text(json.dumps({{"test": {{"loss": 1.0}}}}))
"""
INTERPRETER = sys.executable


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the next trainings do: "done", "fail", "wait", or "deaf" to signals, each."""
    how, program = tmp_path / "how", tmp_path / "python"
    program.write_text(TRAINING.format(python=sys.executable, how=str(how)))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return lambda *steps: how.write_text(" ".join(steps))


def test_a_member_that_failed_goes_on_and_one_that_finished_does_not(tmp_path: Path, training: Any) -> None:
    training("fail", "done")
    said: list[str] = []
    run = MemberRun("a", tmp_path / "a", ["experiment=x"], {"seed": 1})
    assert run.run_folder is None and not run.finished
    run.train(60, said.append)
    assert run.state["problem"] == "exit code 1: no memory left" and not run.finished
    run = MemberRun("a", tmp_path / "a", ["experiment=x"], {"seed": 1})  # another process, another day
    assert run.state["problem"] == "exit code 1: no memory left" and run.state["minutes"] > 0
    run.train(60, said.append)
    assert run.finished and run.state["problem"] is None
    assert [line for line in said if "ed" in line] == ["[a] started", "[a] resumed"]
    log = (tmp_path / "a" / "log.txt").read_text()
    assert log.splitlines() == ["started", "no memory left", "resumed"]


def test_a_member_of_another_configuration_is_refused(tmp_path: Path, training: Any) -> None:
    training("done")
    MemberRun("a", tmp_path, ["x=1"], {"seed": 1, "size": {"epochs": 2}}).train(60, print)
    with pytest.raises(ValueError, match=r"another configuration \(size.epochs\)"):
        MemberRun("a", tmp_path, ["x=2"], {"seed": 1, "size": {"epochs": 3}})
    (tmp_path / "member.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no member.json says with what configuration"):
        MemberRun("a", tmp_path, ["x=2"], {"seed": 1})
    (tmp_path / "member.json").write_text('{"minutes"')
    with pytest.raises(ValueError, match=r"member.json is damaged"):
        MemberRun("a", tmp_path, ["x=2"], {"seed": 1})


def test_a_member_that_never_had_a_run_takes_another_configuration(tmp_path: Path, training: Any) -> None:
    (tmp_path / "member.json").write_text(
        json.dumps({"minutes": 60.0, "problem": "exit code 2: x=1: no such file", "config": {"x": 1}})
    )
    training("done")
    run = MemberRun("a", tmp_path, ["x=2"], {"x": 2})
    run.train(60, print)
    assert run.finished and json.loads((tmp_path / "member.json").read_text())["config"] == {"x": 2}


def test_what_a_member_says_of_itself_counts_more_than_its_limit(tmp_path: Path) -> None:
    run = MemberRun("a", tmp_path, [], {})

    def process(*words: Any) -> tuple[int, bool]:
        (tmp_path / "log.txt").write_text("mmattn: data.path=/nope.tsv: no such file.\n")
        return 2, True

    run._process = process  # type: ignore[method-assign]
    run.train(1, print)
    assert run.state["problem"] == "exit code 2: data.path=/nope.tsv: no such file."


def test_a_member_stops_at_its_limit_and_needs_more_to_go_on(tmp_path: Path, training: Any) -> None:
    training("wait", "done")
    run = MemberRun("a", tmp_path, [], {})
    begin = time.monotonic()
    run.train(0.02, print)
    assert time.monotonic() - begin < 30
    assert "it can go on with more" in run.state["problem"] and "saved" in (tmp_path / "log.txt").read_text()
    run.train(0.02, print)  # the time is used up: nothing starts
    assert (tmp_path / "log.txt").read_text().count("started") == 1 and not run.finished
    run.train(60, print)
    assert run.finished


def test_a_member_that_hears_no_signal_is_killed_after_the_grace(
    tmp_path: Path, training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "GRACE", 0.5)
    training("deaf")
    run = MemberRun("a", tmp_path, [], {})
    begin = time.monotonic()
    run.train(0.02, print)
    assert time.monotonic() - begin < 30 and "it can go on with more" in run.state["problem"]


def test_a_member_is_told_to_stop_once() -> None:
    class Process:
        told = 0

        def terminate(self) -> None:
            self.told += 1

    process: Any = Process()
    ending = runner._Ending(process)
    ending.begin()
    ending.begin()
    ending.over()
    assert process.told == 1


def test_ctrl_c_in_a_terminal_reaches_a_member_as_one_signal(tmp_path: Path, training: Any) -> None:
    training("wait")
    script = (
        "import sys; from pathlib import Path; from mmattn.comparison.runner import MemberRun\n"
        f"from mmattn.training.callbacks import StopSignals; sys.executable = {sys.executable!r}\n"
        f"with StopSignals(): MemberRun('a', Path({str(tmp_path / 'a')!r}), [], {{}}).train(60, print)"
    )
    process = subprocess.Popen(
        [INTERPRETER, "-uc", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "[a] started\n"
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert (tmp_path / "a" / "log.txt").read_text().splitlines() == ["started", "saved"]
    assert json.loads((tmp_path / "a" / "member.json").read_text())["problem"] == "interrupted"


def test_a_members_configuration_is_noted_before_its_run_begins(tmp_path: Path) -> None:
    run, noted = MemberRun("a", tmp_path / "a", [], {"seed": 1}), []

    def process(*words: Any) -> tuple[int, bool]:
        noted.append(json.loads((tmp_path / "a" / "member.json").read_text())["config"])
        (tmp_path / "a" / "run" / "one").mkdir(parents=True)
        (tmp_path / "a" / "run" / "one" / "config.yaml").write_text("a: 1")
        raise KeyboardInterrupt

    run._process = process  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.train(60, print)
    assert noted == [{"seed": 1}]
    with pytest.raises(ValueError, match=r"another configuration \(seed\)"):
        MemberRun("a", tmp_path / "a", [], {"seed": 2})
    (tmp_path / "a" / "member.json").unlink()
    with pytest.raises(ValueError, match=r"holds a run, and no member.json says with what configuration it was begun"):
        MemberRun("a", tmp_path / "a", [], {"seed": 2})


def test_costs_are_measured_anew_only_where_they_are_missing_or_were_measured_otherwise(
    tmp_path: Path, training: Any
) -> None:
    training("done")
    run, said = MemberRun("a", tmp_path, [], {}), []
    run.train(60, said.append)
    assert run.run_folder is not None
    path = run.run_folder / "costs.json"
    path.write_text(json.dumps({"rows": 8, "parameters": 5, "lengths": [{"length": 8}]}))  # an older one
    options: dict[str, Any] = {"lengths": [16, 8, 13], "rows": 2, "repeats": 1, "threads": None}
    run.measure(options, said.append)
    costs = json.loads(path.read_text())
    assert costs["options"] == {"rows": 2, "repeats": 1, "threads": None}
    assert [entry["length"] for entry in costs["lengths"]] == [8, 13, 16]
    assert costs["lengths"][1]["problem"] == "exit code 1: killed" and costs["lengths"][0]["words"][2:] == [
        "--length=8",
        "--rows=2",
        "--repeats=1",
    ]
    assert [line for line in said if "not measured" in line] == ["a: 13 tokens not measured: exit code 1: killed"]
    costs["lengths"][0]["mark"] = True
    path.write_text(json.dumps(costs))
    run.measure({**options, "lengths": [8, 13, 32]}, said.append)
    again = json.loads(path.read_text())["lengths"]
    assert [entry["length"] for entry in again] == [8, 13, 32] and again[0]["mark"]
    assert sum("not measured" in line for line in said) == 1  # what failed is not tried again
    run.measure({**options, "rows": 4}, said.append)
    assert "mark" not in json.loads(path.read_text())["lengths"][0]


@pytest.mark.parametrize("printed", ["", "noise\n", "5\n", '{"a": 1}\nnoise'])
def test_a_measurement_that_prints_no_result_has_a_problem(
    printed: str, tmp_path: Path, training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training("done")
    run = MemberRun("a", tmp_path, [], {})
    run.train(60, print)
    done = SimpleNamespace(returncode=0, stdout=printed, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *words, **more: done)
    last = (printed.split() or ["no output"])[-1]
    problem = f"exit code 0, and its last line is no JSON object: {last}"
    said: list[str] = []
    run.translate("a b", said.append)
    assert run.run_folder is not None
    found = json.loads((run.run_folder / "alignment.json").read_text())
    assert found == {"sentence": "a b", "problem": problem}
    assert said == [f"a: the sentence is not translated: {problem}"]


def test_a_measurement_that_never_ends_is_stopped(
    tmp_path: Path, training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training("done")
    run = MemberRun("a", tmp_path, [], {})
    run.train(60, print)
    monkeypatch.setattr(runner, "LONGEST", 0.0)
    run.measure({"lengths": [8], "rows": 2, "repeats": 1, "threads": None}, print)
    assert run.run_folder is not None
    [entry] = json.loads((run.run_folder / "costs.json").read_text())["lengths"]
    assert entry == {"length": 8, "problem": "longer than 0 minutes"}


def _member(name: str, texts: list[str], references: list[list[str]], config: dict[str, Any]) -> Member:
    scores = translation_scores(texts, references, tokenize="none")
    predictions = [
        {"id": str(i), "text": text, "references": several}
        for i, (text, several) in enumerate(zip(texts, references, strict=True))
    ]
    curve = [{"epoch": 1, "val_bleu": 3.0}, {"epoch": 2, "val_bleu": 9.0}]
    entries = [
        {"length": 8, "train_seconds": 0.1, "train_mebibytes": 10.0, "encode_seconds": 0.01, "generate_seconds": 0.2},
        {"length": 16, "problem": "too long | for it"},
    ]
    results = {"test": scores, "signatures": scores["signatures"], "perplexity": 7.5, "test_shuffled": {"bleu": 0.4}}
    costs = {"options": {"rows": 8, "repeats": 5, "threads": None}, "lengths": entries}
    bundle = {"kind": "translator", "weights": {"parameters": 1234}, "files": {"tokenizer.model": {"sha256": "a1"}}}
    return Member(name, None, 12.4, None, config, results, predictions, curve, costs, bundle)


CONFIG = {"scoring": {"tokenize": "none", "lowercase": False}, "tokenizer": {}, "fit": {"monitor": "bleu"}}


def test_the_report_has_the_scores_their_intervals_and_who_is_missing(tmp_path: Path) -> None:
    config = {
        "scoring": {"tokenize": "none", "lowercase": False},
        "tokenizer": {},
        "fit": {"monitor": "bleu"},
        "data": {},
    }
    references = [["a man in a red shirt stands on a ladder"], ["two dogs run over the green grass"]] * 15
    good = [several[0] for several in references]
    poor = [text.replace("a ", "the ").replace("green", "wet").replace("ladder", "shirt") for text in good]
    members = [
        _member("poor", poor, references, config),
        _member("good", good, references, config),
        Member("none", problem="exit code 1: no memory left"),
    ]
    kinds = ("ein mann steht", "zwei hunde laufen schnell über das grüne gras")
    sources = {str(i): kinds[i >= 25] for i in range(30)}
    text = write_report(tmp_path / "made", "A | title", members, sources, None, ["About it."]).read_text("utf-8")
    interval = bleu_interval(poor, references, tokenize="none")
    row = next(line for line in text.splitlines() if line.startswith("| poor | "))
    assert row.startswith(f"| poor | {interval.value:.2f} | {interval.low:.1f} to {interval.high:.1f} |")
    assert row.endswith("| 7.50 | 50.0 | 0.40 | 1,234 | 12 |")  # "in the red shirt stands on the shirt", every second
    assert "| good | 100.00 | 100.0 to 100.0 | 100.00 | 7.50 | 0.0 | 0.40 | 1,234 | 12 |" in text
    assert "| good against poor | +" in text and "| better |" in text
    assert "| none | exit code 1: no memory left |" in text
    assert "| poor | 8 | 640 | 320 |" in text  # 8 rows of 8 tokens in 0.1 and 0.2 s
    assert "too long \\| for it" in text
    page = (tmp_path / "made" / "report.html").read_text("utf-8")
    assert page.count("data:image/png;base64,") == 4 and "A | title" in page and "&lt;" not in page
    for name in ("bleu.png", "bleu_by_length.png", "growth.png", "validation_bleu.png"):
        assert (tmp_path / "made" / name).stat().st_size > 2000 and f"({name})" in text


def test_the_report_scores_segmented_and_detokenized_text_as_the_runs_do(tmp_path: Path) -> None:
    references = [["a man in a re@@ d shirt stan@@ ds here ."], ["the dog does n't run over green grass ."]] * 12
    texts = ["a man in a red shirt stands here .", "a dog does n't run over green grass ."] * 12
    for options, tokenizer in (
        ({"tokenize": "none", "lowercase": False, "detokenize": None}, {"joiner": "@@"}),
        ({"tokenize": "13a", "lowercase": True, "detokenize": "en", "joiner": "@@"}, {}),
    ):
        scored = TranslationScoring(**{"joiner": "@@", **options})
        predictions = [Prediction(str(i), *pair, 1.0) for i, pair in enumerate(zip(texts, references, strict=True))]
        expected = scored(predictions)["bleu"]
        config = {"scoring": {"_target_": "x", **options}, "tokenizer": tokenizer, "fit": {"monitor": "bleu"}}
        member = _member("one", texts, references, config)
        text = write_report(tmp_path, "t", [member]).read_text()
        assert f"| one | {expected:.2f} |" in text and 30 < expected < 99


def _report_of(folder: Path, *members: Member, **more: Any) -> str:
    return write_report(folder, "t", members, **more).read_text("utf-8")


def test_only_sentences_that_members_share_are_compared(tmp_path: Path) -> None:
    references = [[f"the dog number {i} runs over green grass"] for i in range(30)]
    texts = [several[0].replace("green", "wet") for several in references]
    all_of_them = _member("all", texts, references, CONFIG)
    few = _member("few", texts[:8], references[:8], CONFIG)
    others = _member("other", texts, [[f"{several[0]} now"] for several in references], CONFIG)
    sources = {str(i): "ein hund läuft" for i in range(30)}
    text = _report_of(tmp_path, all_of_them, few, sources=sources)
    assert "| few against all | +0.00 | +0.0 to +0.0 | no clear difference, on the 8 sentences that both have |" in text
    cased = _member("cased", texts, references, {**CONFIG, "scoring": {**CONFIG["scoring"], "lowercase": True}})
    assert "| no clear difference, both scored as cased |" in _report_of(tmp_path, all_of_them, cased, sources=sources)
    assert "By length" not in text  # 8 are too few
    text = _report_of(tmp_path, all_of_them, others, sources=sources)
    assert "| other against all | - | - | no sentence in common |" in text and "By length" not in text
    part = _member("part", texts[:25], references[:25], CONFIG)
    assert "| model | 1 to 8 (25) |" in _report_of(tmp_path, all_of_them, part, sources=sources)


def test_scores_by_token_are_shown_for_members_of_one_tokenizer_alone(tmp_path: Path) -> None:
    references = [["a man in a red shirt stands on a ladder"]] * 3
    one, two = (_member(name, [several[0] for several in references], references, CONFIG) for name in "ab")
    text = _report_of(tmp_path, one, two)
    assert "| a | 100.00 | 100.0 to 100.0 | 100.00 | 7.50 |" in text and "Not shown" not in text
    two = dataclasses.replace(two, bundle={**two.bundle, "files": {"tokenizer.model": {"sha256": "b2"}}})
    text = _report_of(tmp_path, one, two)
    assert "| a | 100.00 | 100.0 to 100.0 | 100.00 | - |" in text
    assert (
        "Not shown: perplexity. It is counted by token, and these models have other tokens for the same text." in text
    )
    results = {"test": {"loss": 1.5, "perplexity": 4.4817, "bits_per_token": 2.164}}
    one, two = (
        dataclasses.replace(
            member, results=results, predictions=[], costs={}, bundle={**member.bundle, "kind": "language_model"}
        )
        for member in (one, two)
    )
    assert "| a | 1.5000 | 4.482 | 2.1640 | 1,234 | 12 |" in _report_of(tmp_path, one)
    assert "| a | - | - | - | 1,234 | 12 |" in _report_of(tmp_path, one, two)


def test_costs_have_three_digits_and_each_members_own_rows(tmp_path: Path) -> None:
    entry = {"length": 16, "train_seconds": 0.01234, "train_mebibytes": 0.5, "encode_seconds": 0.0004}
    entry["generate_seconds"] = 2.5
    one = _member("one", ["a b c d"], [["a b c d"]], CONFIG)
    made = {rows: {"options": {"rows": rows, "repeats": 5, "threads": None}, "lengths": [entry]} for rows in (8, 2)}
    one, two = (dataclasses.replace(one, name=name, costs=made[rows]) for name, rows in (("one", 8), ("two", 2)))
    old = dataclasses.replace(one, name="old", costs={"rows": 8, "lengths": [{**entry, "length": 99}]})
    text = _report_of(tmp_path, one, old, two)
    assert "| one | 12.3 |" in text and "| one | 0.500 |" in text and "| one | 0.400 |" in text
    assert "| one | 2,500 |" in text
    assert "| one | 16 | 10,373 | 51.2 |" in text and "| two | 16 | 2,593 | 12.8 |" in text
    assert "Not all were measured alike. one: 8 rows" in text and "two: 2 rows" in text and "99 tokens" not in text
    assert "Not all" not in _report_of(tmp_path, one)


def test_the_sentence_is_shown_as_each_members_process_has_translated_it(tmp_path: Path) -> None:
    one = _member("one", ["a b c d"], [["a b c d"]], CONFIG)
    drawn = {"source_words": ["un", "chien"], "target_words": ["a", "dog"], "weights": [[0.9, 0.1], [0.2, 0.8]]}
    members = [
        dataclasses.replace(one, alignment={"sentence": "un chien", "translation": "a dog", **drawn}),
        dataclasses.replace(one, name="plain", alignment={"sentence": "un chien", "translation": "the dog"}),
        dataclasses.replace(one, name="poor", alignment={"sentence": "un chien", "problem": "too long"}),
        dataclasses.replace(one, name="stale", alignment={"sentence": "un chat", "translation": "a cat"}),
    ]
    text = _report_of(tmp_path, *members, sentence="un chien")
    assert "| one | a dog |" in text and "| plain | the dog |" in text and "| poor | none: too long |" in text
    assert "| stale | a cat |" not in text and (tmp_path / "alignments.png").stat().st_size > 1000
    assert "One sentence" not in _report_of(tmp_path, members[3], sentence="un chien")


def test_captioners_have_a_table_of_their_own(tmp_path: Path) -> None:
    scores = {"bleu4": 21.536, "cider_d": 0.5204, "rouge_l": 0.463}
    results = {"test": scores, "test_shuffled": {"bleu4": 5.67}}
    bundle = {"kind": "captioner", "weights": {"parameters": 1234}}
    member = Member("lstm", None, 48.0, None, {"fit": {"monitor": "cider_d"}}, results, [{"id": "1"}], bundle=bundle)
    text = write_report(tmp_path, "t", [member]).read_text()
    assert "| lstm | 21.54 | 0.520 | 0.463 | 5.67 | 1,234 | 48 |" in text and "## Translation" not in text


def _of_kind(name: str, kind: str, test: dict[str, Any], **more: Any) -> Member:
    bundle = {"kind": kind, "weights": {"parameters": 1234}, "files": {"tokenizer.model": {"sha256": "a1"}}}
    curve = [{"epoch": 1, "val_loss": 3.0}]
    return Member(
        name, None, 12.4, None, {"fit": {"monitor": "loss"}}, {"test": test, **more}, curve=curve,
        bundle=bundle,
    )  # fmt: skip


def _section(text: str, heading: str) -> str:
    return text.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def test_models_are_reported_by_their_kind(tmp_path: Path) -> None:
    tokens = {"loss": 1.5, "perplexity": 4.4817, "bits_per_token": 2.164, "accuracy": 0.5}
    counted = {"accuracy_by_counting": {"test": {"unigram": 0.1, "bigram": 0.25}}}
    classes = {"accuracy": 0.98765, "top5": 1.0, "log_likelihood": -0.1, "loss": 0.1}
    text = _report_of(
        tmp_path,
        _of_kind("causal", "language_model", tokens),
        _of_kind("masked", "masked_language_model", tokens, **counted),
        _of_kind("photos", "classifier", classes, test_of_most_frequent_class=0.2),
        _of_kind("two", "classifier", {"accuracy": 0.5, "loss": 0.7}),
        _of_kind("new", "a_kind_to_come", {"loss": 0.25, "note": "x"}),
    )
    assert "| masked | 50.00 | 25.00 | 4.482 | 1,234 | 12 |" in _section(text, "Masked language models")
    language = _section(text, "Language models")
    assert "| causal | 1.5000 | 4.482 | 2.1640 | 1,234 | 12 |" in language and "masked" not in language
    classified = _section(text, "Classification")
    assert "| photos | 98.77 | 100.00 | 0.1000 | 20.00 | 1,234 | 12 |" in classified
    assert "| two | 50.00 | - | 0.7000 | - | 1,234 | 12 |" in classified
    assert "| new | loss 0.25 | 1,234 | 12 |" in _section(text, "Other models")
    names = [f"validation_loss_{kind}.png" for kind in ("language_model", "masked_language_model", "classifier")]
    assert all((tmp_path / name).exists() and f"({name})" in text for name in names)


def test_words_are_said_again_whatever_their_case_and_their_punctuation() -> None:
    assert says_again("Fence, a (fence).", ["a fence"])
    assert not says_again("Fence, a (fence).", ["Fence: fence!"])
    assert not says_again("dogs, cats.", ["dogs"])
    assert not long_words("私は猫が好きです、私は猫が好きです")  # a clause is no word


def test_a_share_of_words_said_again_is_shown_where_there_are_words(tmp_path: Path) -> None:
    for texts, shown in (
        (["the Fence, a fence."] * 2 + ["a dog."] * 2, "50.0"),
        (["the Fence, a fence."] + ["a dog."] * 2, "-"),
        (["私は猫が好きです。"] * 3, "-"),
    ):
        member = _member("one", texts, [["the old fence."]] * len(texts), CONFIG)
        [row] = [line for line in _report_of(tmp_path, member).splitlines() if line.startswith("| one | ")][:1]
        assert row.endswith(f"| 7.50 | {shown} | 0.40 | 1,234 | 12 |")


def test_texts_of_a_report_are_no_markdown(tmp_path: Path) -> None:
    page = Page("# A <b> #")
    page.heading("of a_b and *c*")
    for text in ("- no\nlist, `x`", "1. no list", "1.", "a <b> *c* _d_ __e__ f_g \\ [h](i) ~~j~~ &amp; k|l & m; -1.5"):
        page.text(text)
    page.table(("model|s", "-"), [("ein <unk> * x *", "-1.50"), ("a\nb", "1 < 2")])
    page.code("mmattn compare 'only=[a_b]' `x`", "Made by")
    page.picture(tmp_path / "a_b_.png", "of *d*")
    assert page.markdown().split("\n\n") == [
        "# # A \\<b> \\#",
        "## of a_b and \\*c\\*",
        "\\- no list, \\`x\\`",
        "1\\. no list",
        "1\\.",
        r"a \<b> \*c\* \_d\_ \_\_e\_\_ f_g \\ \[h\](i) \~\~j\~\~ \&amp; k|l & m; -1.5",
        "| model\\|s | - |\n| --- | ---: |\n| ein \\<unk> \\* x \\* | -1.50 |\n| a b | 1 \\< 2 |",
        "Made by `` mmattn compare 'only=[a_b]' `x` ``",
        "![of \\*d\\*](a_b_.png)\n",
    ]


def test_a_report_of_nothing_finished_says_so(tmp_path: Path) -> None:
    text = write_report(tmp_path, "t", [read_member("a", None, {}, problem="not started")]).read_text()
    assert "| a | not started |" in text and "Translation" not in text


def _bundle(folder: Path, source_tokenizer: Tokenizer | None = None, decoder: Any = None) -> Any:
    tokenizer = Tokenizer.train(["a red circle", "un cercle rouge"] * 9, vocabulary_size=32, shrink=True)
    sizes = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "positions": "learned", "max_length": 12}
    encoder = TextEncoder((source_tokenizer or tokenizer).vocabulary_size, **sizes)
    decoder = decoder or TransformerDecoder(tokenizer.vocabulary_size, **sizes)
    model = EncoderDecoder(encoder, decoder)
    model.build({"source_ids": (None, None), "target_ids": (None, None)})
    generation = {"max_length": 12, "max_source_length": 12}
    return save_bundle(
        folder, model, tokenizer, generation=generation, card={}, source_tokenizer=source_tokenizer
    )  # fmt: skip


def test_costs_are_measured_where_a_model_takes_the_length_and_leave_its_weights(tmp_path: Path) -> None:
    bundle = _bundle(tmp_path / "bundle")
    before = [np.array(weight.numpy()) for weight in bundle.model.weights]
    found = measure(bundle, 8, rows=2, repeats=1)
    assert all(found[name] > 0 for name in ("train_seconds", "encode_seconds", "generate_seconds"))
    with pytest.raises(ValueError, match=r"not take 16 tokens: its encoder has 12 positions"):
        measure(bundle, 16, rows=2, repeats=1)
    for weight, array in zip(bundle.model.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), array)


def test_a_measurement_that_runs_out_of_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class ResourceExhaustedError(Exception):  # as a backend has one
        pass

    def refuse(*words: Any) -> None:
        raise ResourceExhaustedError("OOM when allocating\nmore")

    monkeypatch.setattr(costs, "load_bundle", lambda folder: SimpleNamespace(kind="translator"))
    monkeypatch.setattr(costs, "measure", refuse)
    monkeypatch.setattr(sys, "argv", ["costs", "bundle", "--length=8"])
    costs.main()
    assert json.loads(capsys.readouterr().out) == {"problem": "OOM when allocating"}


def test_random_tokens_are_those_of_their_side(tmp_path: Path) -> None:
    small = Tokenizer.train(["aa b", "b aa"] * 9, vocabulary_size=10, shrink=True)
    bundle = _bundle(tmp_path / "bundle", small)
    inputs, labels = random_batch(bundle, 64, 8)
    assert small.vocabulary_size < bundle.tokenizer.vocabulary_size
    assert inputs["source_ids"].max() == small.vocabulary_size - 1
    assert inputs["target_ids"].max() == labels.max() == bundle.tokenizer.vocabulary_size - 1


def test_memory_that_was_freed_hides_none_that_is_needed_later() -> None:
    def pages() -> list[np.ndarray]:
        return [np.ones(1000, "float32") for _ in range(16_000)]  # 61 MiB in small pieces

    last = pages()[-1]  # what is before it stays with the allocator
    first = costs._memory()
    again = pages()
    second = costs._memory()
    if first is None or second is None:
        pytest.skip("the system does not tell")
    assert 50 < second[1] - first[0] < 80 and len(again) == 16 * last.size


def test_a_sentence_has_an_alignment_where_the_model_has_attention(tmp_path: Path) -> None:
    found = translated(Translator.load(_bundle(tmp_path / "a").folder), "un cercle")
    assert found["source_words"] == ["un", "cercle"] and len(found["weights"]) == len(found["target_words"])
    size = Tokenizer.train(["a red circle", "un cercle rouge"] * 9, vocabulary_size=32, shrink=True).vocabulary_size
    without = _bundle(tmp_path / "b", decoder=RecurrentDecoder(size, 8, num_layers=1, attention=None))
    assert translated(Translator.load(without.folder), "un cercle").keys() == {"translation"}
    long = subprocess.run(
        [INTERPRETER, "-m", "mmattn.comparison.sentence", str(without.folder), "un cercle " * 40],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(long.stdout)["problem"].endswith("sentence by sentence")


def _comparison(folder: Path, members: dict[str, list[str]]) -> str:
    text = {"comparison_name": "mine", "title": "Mine", "about": None, "sentence": "a b", "members": members}
    (folder / "comparison").mkdir()
    (folder / "comparison" / "mine.yaml").write_text(f"# @package _global_\n{yaml.safe_dump(text)}")
    return f"--config-dir={folder}"


def test_every_fault_of_a_comparison_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option = _comparison(tmp_path, {"a": ["experiment=shapes_caption"], "b": ["experiment=missing"]})
    assert compare.main([option, "comparison=mine", f"folder={tmp_path}/out"]) == 2
    assert "b: experiment=missing does not exist." in capsys.readouterr().err
    assert compare.main([option, "comparison=mine", "decoder.num_leyers=1", f"folder={tmp_path}/out"]) == 2
    assert "num_layers" in capsys.readouterr().err
    assert compare.main([option, "comparison=mine", "run.root=x"]) == 2
    assert "decided by folder=DIR" in capsys.readouterr().err
    (tmp_path / "good").mkdir()
    (tmp_path / "file").write_text("mine")
    good = _comparison(tmp_path / "good", {"a": ["experiment=shapes_caption"]})
    for taken in ("file", "file/below"):
        assert compare.main([good, "comparison=mine", f"folder={tmp_path}/{taken}"]) == 2
        assert f"folder={tmp_path}/{taken}: no folder can be made there. " in capsys.readouterr().err
    assert compare.main([good, "comparison=mine", "folder=~nobody-of-that-name/x"]) == 2
    assert "folder=~nobody-of-that-name/x: no folder can be made there. " in capsys.readouterr().err
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "a").write_text("mine")
    assert compare.main([good, "comparison=mine", f"folder={tmp_path}/taken"]) == 2
    assert f"a: {tmp_path}/taken/a is no folder" in capsys.readouterr().err
    (tmp_path / "closed" / "lock").mkdir(parents=True)
    assert compare.main([good, "comparison=mine", f"folder={tmp_path}/closed"]) == 1
    assert f"Nothing can be written into {tmp_path}/closed. " in capsys.readouterr().err
    assert compare.main([option, "comparison=mine", "members=[a.b=1]"]) == 2
    assert "members=[a.b=1]: no setting such as key=value (" in capsys.readouterr().err
    assert compare.main([option, "comparison=mine", "costs.lengths=8"]) == 2
    assert "costs.lengths is a list" in capsys.readouterr().err
    assert compare.main([option, "comparison=mine", "only=[c]"]) == 2
    assert "only is a list of members, or null for all. There are: a, b. Received ['c']." in capsys.readouterr().err
    for setting, words in (
        ("minutes=0", "minutes=0 must be a number above 0"),
        ("minutes=inf", "minutes=inf must be a number above 0"),
        ("minutes=1e12", "must be a number above 0, "),
        ("minutes=nan", "minutes=nan must be a number above 0"),
        ("minutes=true", "minutes=True must be a number above 0"),
        ("only=ab", "There are: a, b. Received 'ab'"),
        ("only=5", "There are: a, b. Received 5"),
        ("only=0", "There are: a, b. Received 0"),
        ("only=false", "There are: a, b. Received False"),
        ("only=[]", "There are: a, b. Received []"),
        ("folder=null", "folder is a path, such as runs/mine. Received None"),
        ("folder=''", "folder is a path, such as runs/mine. Received ''"),
        ("~minutes", "minutes is missing. A comparison has: comparison_name, title"),
        ("~costs", "costs is missing. A comparison has: "),
        ("~every", "every is missing. A comparison has: "),
        ("title=2024", "title is a text. Received 2024"),
        ("about=[a,b]", "about is a text, or null. Received ['a', 'b']"),
        ("sentence=5", "sentence is a text, or null. Received 5"),
        ("costs.rows=0", "costs.rows is a whole number, at least 1. Received 0"),
        ("~costs.repeats", "costs.repeats is a whole number, at least 1. Received None"),
        ("costs.threads=-1", "costs.threads is a whole number, at least 1. Received -1"),
    ):
        assert compare.main([option, "comparison=mine", setting]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigProblem, match="members"):
        compare.checked_config(compare.compose("compare", ["comparison=mine", "members=null"], [str(tmp_path)]))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../evil", "'../evil' is no name of a folder"),
        ("a/b", "'a/b' is no name of a folder"),
        ("a\\b", "is no name of a folder"),
        (".", "'.' is no name of a folder"),
        ("", "'' is no name of a folder"),
        ("a ", "'a ' is no name of a folder"),
        (True, "True is no text. In quotes, it is one"),
        (1.5, "1.5 is no text. In quotes, it is one"),
        ("_a", "'_a' is no name of a folder"),
        ("lock", "'lock' is for the comparison's own files"),
        ("Report.md", "'Report.md' is for the comparison's own files"),
        ("bleu.png", "bleu_png_model would do"),
    ],
)
def test_a_member_is_named_as_a_folder_of_its_own_can_be(
    name: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option = _comparison(tmp_path, {name: ["experiment=shapes_caption"]})
    assert compare.main([option, "comparison=mine", f"folder={tmp_path}/out"]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_members_may_have_numbers_for_names(tmp_path: Path, training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    option = _comparison(tmp_path, {2014: ["experiment=shapes_caption"], "lr=1,2 (b)": ["experiment=shapes_caption"]})
    training("done")
    command = [option, "comparison=mine", f"folder={tmp_path}/out", "costs=null", "sentence=null"]
    assert compare.main([*command, "only=[2014]"]) == 0
    assert "1 of the 1 chosen members, 1 of 2 finished" in capsys.readouterr().out
    assert (tmp_path / "out" / "2014" / "member.json").exists()
    config = compose("compare", ["comparison=mine"], [str(tmp_path)])
    config.members = {2014: [], "2014": []}
    with pytest.raises(ConfigProblem, match=r"two have the same name; .*Received 2014, '2014'"):
        compare.checked_config(config)
    config.members = {"LSTM": [], "lstm": []}
    with pytest.raises(ConfigProblem, match=r"two have the same name; capitals make no difference"):
        compare.checked_config(config)


def test_settings_of_members_are_quoted_as_those_of_the_command_line_are(tmp_path: Path) -> None:
    _comparison(tmp_path, {"a": ["experiment=pairs", "data.path=/päare, (neu).tsv"]})
    config = compare.checked_config(compose("compare", ["comparison=mine"], [str(tmp_path)]))
    [(words, made)] = compare.member_settings(config, [], [str(tmp_path)]).values()
    assert made["data"]["path"] == "/päare, (neu).tsv" and "data.path='/päare, (neu).tsv'" in words


@pytest.mark.parametrize("name", ["ü", "a,b", "a (1)", "it's"])
def test_folders_of_any_name_are_continued_and_searched(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    assert train.main([f"resume={folder}"]) == 2
    assert f"resume={folder}: no run folder" in capsys.readouterr().err
    _comparison(folder, {"a": ["experiment=pairs"]})
    assert compose("compare", ["comparison=mine"], [str(folder)]).title == "Mine"


def test_a_seed_is_a_setting_of_the_members(tmp_path: Path, training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    option = _comparison(tmp_path, {"a": ["experiment=shapes_caption"]})
    command = [option, "comparison=mine", f"folder={tmp_path}/out", "costs=null"]
    training("done")
    assert compare.main([*command, "run.seed=2"]) == 0
    assert json.loads((tmp_path / "out" / "a" / "member.json").read_text())["config"]["run"]["seed"] == 2
    assert compare.main([*command, "run.seed=3"]) == 2
    assert "another configuration (run.seed)" in capsys.readouterr().err


def test_what_members_remember_is_read_under_the_lock(
    tmp_path: Path, training: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    option = _comparison(tmp_path, {"a": ["experiment=shapes_caption"]})
    (tmp_path / "out" / "a").mkdir(parents=True)
    (tmp_path / "out" / "a" / "member.json").write_text('{"config": {}}')  # another process may be writing
    with RunLock(tmp_path / "out"):
        assert compare.main([option, "comparison=mine", f"folder={tmp_path}/out"]) == 1
    assert "in use by another process" in capsys.readouterr().err


def test_the_report_is_written_when_a_member_has_changed_and_loads_no_model(
    tmp_path: Path, training: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    option = _comparison(tmp_path, {name: ["experiment=shapes_caption"] for name in "abc"})
    command = [option, "comparison=mine", f"folder={tmp_path}/out", "costs.lengths=[8]"]
    written: list[Any] = []
    real = compare.write_report
    monkeypatch.setattr(compare, "write_report", lambda *words: written.append(words) or real(*words))
    training("done", "done", "fail", "fail")
    assert compare.main([*command, "only=[a,b]"]) == 0
    assert len(written) == 2
    assert "\n2 of the 2 chosen members, 2 of 3 finished. Report: " in capsys.readouterr().out
    made = {name: next((tmp_path / "out" / name).glob("run/*/alignment.json")) for name in "ab"}
    assert json.loads(made["a"].read_text())["sentence"] == "a b"
    assert compare.main([*command, "only=[a,b]"]) == 0
    assert len(written) == 3  # nothing has changed
    made["a"].unlink()
    assert compare.main([*command, "only=[b]"]) == 0
    assert len(written) == 4 and made["a"].exists()
    assert compare.main([*command, "sentence=null"]) == 1
    assert len(written) == 5  # c has failed
    assert "mmattn.comparison.costs" in next((tmp_path / "out").glob("a/run/*/costs.json")).read_text()


def test_a_report_is_written_without_data_that_have_moved(
    tmp_path: Path, training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"the dog {i}\tle chien {i}\n" for i in range(1000)))
    option = _comparison(tmp_path, {"a": ["experiment=pairs", f"data.path={pairs}"]})
    command = [option, "comparison=mine", f"folder={tmp_path}/out", "costs=null", "sentence=null"]
    training("done", "done")
    assert compare.main(command) == 0
    report = tmp_path / "out" / "report.md"
    assert "Left out" not in report.read_text()
    pairs.rename(tmp_path / "moved.tsv")
    assert compare.main(command) == 0
    assert "Left out: BLEU by length of the source, which needs the test split. data.test" in report.read_text()

    def interrupted(*words: Any) -> None:
        words[1].state["minutes"] += 1.0
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(compare, "_advance", interrupted)
    assert compare.main(command) == 143


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "comparison").glob("*.yaml")))
def test_every_comparison_that_ships_has_members_that_can_be_made(name: str, tmp_path: Path) -> None:
    config = compare.checked_config(compare.compose("compare", [f"comparison={name}", "folder=x"]))
    for size in ([], ["size=tiny"]):
        runs = compare.member_runs(compare.member_settings(config, [f"data.root={tmp_path}", *size]), tmp_path)
        assert [run.name for run in runs] == list(config["members"]) and not any(run.finished for run in runs)
        for run in runs:
            make_parts({**run.state["config"], "run": {"seed": 1}})


@pytest.mark.slow
def test_a_comparison_is_stopped_continued_and_reported(tmp_path: Path) -> None:
    lines = [f"the {a} {b}\tle {b} {a}" for a in ("red", "blue", "big") for b in ("dog", "cat", "car", "house")] * 6
    (tmp_path / "pairs.tsv").write_text("".join(f"{line} {i}\n" for i, line in enumerate(lines)))
    member = ["experiment=pairs", f"data.path={tmp_path}/pairs.tsv", "size=tiny", "scoring.tokenize=none"]
    option = _comparison(tmp_path, {"one": member, "two": [*member, "run.seed=2"]})
    command = [sys.executable, "-m", "mmattn", "compare", option, "comparison=mine", f"folder={tmp_path}/out"]
    command += ["costs.lengths=[8]", "costs.repeats=1"]
    names = {key: value for key, value in os.environ.items() if not key.startswith("TF_CPP")}
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=names)
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith("[one] epoch"):
            first.send_signal(signal.SIGTERM)
            break
    error = first.communicate(timeout=120)[1]
    assert first.returncode == 143, error
    assert "The same command goes on." in error
    second = subprocess.run(command, capture_output=True, text=True, env=names, timeout=600)
    assert second.returncode == 0, second.stderr
    assert "[one] Continues after step" in second.stdout and "cuda" not in second.stdout
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| one |" in report and "| two |" in report and "Without results" not in report
    third = subprocess.run(command, capture_output=True, text=True, env=names, timeout=120)
    assert third.returncode == 0 and "[one]" not in third.stdout
    state = json.loads((tmp_path / "out" / "one" / "member.json").read_text())
    assert state["problem"] is None and state["minutes"] > 0


def test_a_failed_member_says_all_that_was_wrong(tmp_path: Path) -> None:
    run = MemberRun("a", tmp_path / "a", [], {})
    run.folder.mkdir()
    process = run._process
    for script, problem in (
        ("print('mmattn: encoder: no'); print('mmattn: model: neither'); raise SystemExit(2)",
         "exit code 2: encoder: no model: neither"),
        ("print('mmattn: a warning'); raise MemoryError('no room')", "exit code 1: MemoryError: no room"),
        ("raise SystemExit(3)", "exit code 3: no output"),
    ):  # fmt: skip
        command = [sys.executable, "-c", script]
        run._process = lambda _, seconds, say, command=command: process(command, seconds, say)  # type: ignore[method-assign]
        run.train(60.0, lambda text: None)
        assert run.state["problem"] == problem


def test_a_member_that_finished_unseen_has_no_problem(tmp_path: Path, training: Any) -> None:
    option = _comparison(tmp_path, {"a": ["experiment=shapes_caption"]})
    training("done")
    command = [option, "comparison=mine", f"folder={tmp_path}/out", "costs=null"]
    assert compare.main(command) == 0
    path = tmp_path / "out" / "a" / "member.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "problem": "not started"}))
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "say", said.append)
        assert compare.main(command) == 0
    assert said[0].startswith("a, ") and said[0].endswith(" minutes: finished")
