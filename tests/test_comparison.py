"""Comparisons: members as processes, what they cost, and the report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from experiments import compare
from experiments.config import CONF, ConfigProblem
from experiments.train import make_parts
from mmattn.bundle import save_bundle
from mmattn.comparison import Member, read_member, write_report
from mmattn.comparison.costs import measure
from mmattn.comparison.runner import MemberRun
from mmattn.decoders import TransformerDecoder
from mmattn.encoders.text import TextEncoder
from mmattn.metrics.translation import bleu_interval, translation_scores
from mmattn.model import EncoderDecoder
from mmattn.preprocess.text import Tokenizer
from mmattn.tasks.translation import TranslationScoring
from mmattn.training.validation import Prediction

# In place of Python: does with a run folder what a training does, as told by the file `how`.
TRAINING = """#!{python}
import json, pathlib, signal, sys, time
words = [word.partition("=") for word in sys.argv[4:]]
given = {{key: value for key, _, value in words}}
how = pathlib.Path({how!r}).read_text().split()
step = how.pop(0)
pathlib.Path({how!r}).write_text(" ".join(how))
folder = pathlib.Path(given["resume"]) if "resume" in given else pathlib.Path(given["run.root"]) / "date_name_1"
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.yaml").write_text("a: 1")
print("resumed" if "resume" in given else "started", flush=True)
if step == "wait":
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(143)))
    time.sleep(60)
if step == "fail":
    sys.exit("no memory left")
(folder / "results.json").write_text(json.dumps({{"test": {{"loss": 1.0}}}}))
"""


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the next trainings do: "done", "fail" or "wait" each."""
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
    costs = {"parameters": 1234, "rows": 8, "lengths": entries}
    return Member(name, None, 12.4, None, config, results, predictions, curve, costs)


def test_the_report_has_the_scores_their_intervals_and_who_is_missing(tmp_path: Path) -> None:
    config = {
        "scoring": {"tokenize": "none", "lowercase": False},
        "tokenizer": {},
        "fit": {"monitor": "bleu"},
        "data": {},
    }
    references = [["a man in a red shirt stands on a ladder"], ["two dogs run over the green grass"]] * 15
    good = [several[0] for several in references]
    poor = [text.replace("a ", "the ").replace("green", "wet") for text in good]
    members = [
        _member("poor", poor, references, config),
        _member("good", good, references, config),
        Member("none", problem="exit code 1: no memory left"),
    ]
    kinds = ("ein mann steht", "zwei hunde laufen schnell über das grüne gras")
    sources = {str(i): kinds[i >= 25] for i in range(30)}
    text = write_report(tmp_path / "made", "A | title", members, sources, None, ["About it."]).read_text("utf-8")
    interval = bleu_interval(poor, references, tokenize="none")
    assert f"| poor | {interval.value:.2f} | {interval.low:.1f} to {interval.high:.1f} |" in text
    assert "| good | 100.00 | 100.0 to 100.0 | 100.00 | 7.50 | 0.40 | 1,234 | 12 |" in text
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


def test_captioners_have_a_table_of_their_own(tmp_path: Path) -> None:
    scores = {"bleu4": 21.536, "cider_d": 0.5204, "rouge_l": 0.463}
    results = {"test": scores, "test_shuffled": {"bleu4": 5.67}}
    member = Member("lstm", None, 48.0, None, {"fit": {"monitor": "cider_d"}}, results, [{"id": "1"}])
    text = write_report(tmp_path, "t", [member]).read_text()
    assert "| lstm | 21.54 | 0.520 | 0.463 | 5.67 | 48 |" in text and "## Translation" not in text


def test_a_report_of_nothing_finished_says_so(tmp_path: Path) -> None:
    text = write_report(tmp_path, "t", [read_member("a", None, {}, problem="not started")]).read_text()
    assert "| a | not started |" in text and "Translation" not in text


def _bundle(folder: Path) -> Any:
    tokenizer = Tokenizer.train(["a red circle", "un cercle rouge"] * 9, vocabulary_size=32, shrink=True)
    sizes = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "positions": "learned", "max_length": 12}
    size = tokenizer.vocabulary_size
    model = EncoderDecoder(TextEncoder(size, **sizes), TransformerDecoder(size, **sizes))
    model.build({"source_ids": (None, None), "target_ids": (None, None)})
    return save_bundle(folder, model, tokenizer, generation={"max_length": 12, "max_source_length": 12}, card={})


def test_costs_are_measured_where_a_model_takes_the_length_and_leave_its_weights(tmp_path: Path) -> None:
    bundle = _bundle(tmp_path / "bundle")
    before = [np.array(weight.numpy()) for weight in bundle.model.weights]
    found = measure(bundle, (16, 8), rows=2, repeats=1)
    assert found["parameters"] == sum(array.size for array in before)
    short, long = found["lengths"]
    assert short["length"] == 8 and long["length"] == 16
    assert all(short[name] > 0 for name in ("train_seconds", "encode_seconds", "generate_seconds"))
    assert "12" in long["problem"]  # the learned positions
    for weight, array in zip(bundle.model.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), array)


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
    assert compare.main([option, "comparison=mine", "only=[c]"]) == 2
    assert "no such member. There are: a, b." in capsys.readouterr().err
    assert compare.main([option, "comparison=mine", "minutes=0"]) == 2
    assert "above 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigProblem, match="members"):
        compare.checked_config(compare.compose("compare", ["comparison=mine", "members=null"], [str(tmp_path)]))


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "comparison").glob("*.yaml")))
def test_every_comparison_that_ships_has_members_that_can_be_made(name: str, tmp_path: Path) -> None:
    config = compare.checked_config(compare.compose("compare", [f"comparison={name}", "folder=x"]))
    for size in ([], ["size=tiny"]):
        runs = compare.member_runs(config, [f"data.root={tmp_path}", *size], tmp_path)
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
