"""Whole runs of masked language modelling and classification: what they leave, what is refused, exact resume."""

from __future__ import annotations

import json
import random
import re
import signal

import numpy as np
import pytest
import yaml
from PIL import Image

from experiments import evaluate, train
from mmattn import Classifier, MaskFiller
from mmattn.training.callbacks import Interrupted
from mmattn.training.checkpoint import read
from mmattn.training.fit import TrainingLoop

QUICK = ["size=tiny", "schedule.warmup_steps=0", "fit.epochs=2", "fit.validate_every=1"]
WORDS = ["a", "man", "two", "dogs", "in", "the", "red", "blue", "shirt", "run", "on", "green", "grass", "and", "ball"]


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """A file of sentences, one of which is too long."""
    path, rng = tmp_path_factory.mktemp("text") / "a.txt", random.Random(1)
    lines = [" ".join(rng.choices(WORDS, k=rng.randint(3, 7))) for _ in range(120)]
    lines[5] = " ".join(["dogs"] * 40)
    path.write_text("\n".join(lines))
    return path


def masked_settings(sentences, runs):
    data = ["data=sentences", f"data.path={sentences}", "data.shares=[0.6,0.2,0.2]", f"run.root={runs}"]
    return [*QUICK, "experiment=multi30k_bert", *data]


@pytest.fixture(scope="module")
def masked(sentences, tmp_path_factory):
    runs = tmp_path_factory.mktemp("masked")
    assert train.main([*masked_settings(sentences, runs), "limit.train=null"]) == 0
    (made,) = runs.iterdir()
    return made


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Photos of three classes, told by their colour, and one that is none."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for place, name in enumerate(("cat", "dog", "emu")):
        (root / name).mkdir()
        for number in range(20):
            pixels = rng.integers(0, 60, (20, 20, 3), "uint8")
            pixels[..., place] += 150
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    (root / "dog" / "7.png").write_bytes(b"no photo")
    return root


def photo_settings(photos, runs):
    data = ["data=photos", f"data.root={photos}", "data.shares=[0.6,0.2,0.2]", f"run.root={runs}"]
    return [*QUICK, "experiment=shapes_classifier", *data]


@pytest.fixture(scope="module")
def classified(photos, tmp_path_factory):
    runs = tmp_path_factory.mktemp("classified")
    more = [
        "limit.train=null",
        "limit.valid=null",
        "limit.test=null",
        "fit.epochs=6",
        "batches.flip=true",
        "optimizer.use_ema=false",
    ]
    assert train.main([*photo_settings(photos, runs), *more]) == 0
    (made,) = runs.iterdir()
    return made


def test_a_masked_run_leaves_all_that_it_promises(masked):
    results = json.loads((masked / "results.json").read_text())
    assert {"log_likelihood", "loss", "perplexity", "accuracy"} <= results["test"].keys()
    assert results["test"]["perplexity"] == pytest.approx(np.exp(results["test"]["loss"]))
    assert results["test_tokens"] > 8 * 3
    assert {"unigram", "bigram"} == results["accuracy_by_counting"]["test"].keys()
    rejected = [json.loads(line) for line in (masked / "rejected.jsonl").read_text().splitlines()]
    assert [entry["id"] for entry in rejected] == ["a.txt:6"] and "at most max_length=16 fit: cut" in str(rejected)
    card = (masked / "bundle" / "README.md").read_text()
    assert "accuracy of bigram counts" in card and "mmattn fill" in card
    assert MaskFiller.load(masked / "bundle").generation == {"max_source_length": 16}


def test_the_bundle_gives_the_scores_of_the_masked_run(masked, sentences, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ["data=sentences", f"data.path={sentences}", "data.shares=[0.6,0.2,0.2]", "limit=8", "batch_size=3"]
    code = evaluate.main([f"bundle={masked / 'bundle'}", *data, "output=s.json"])
    found, results = json.loads((tmp_path / "s.json").read_text()), json.loads((masked / "results.json").read_text())
    assert found["scores"] == pytest.approx(results["test"], rel=1e-4)
    assert code == (1 if found["unreadable"] else 0)


def test_a_classification_run_leaves_all_that_it_promises(classified):
    results = json.loads((classified / "results.json").read_text())
    assert results["test"]["accuracy"] > 0.8 and "top5" not in results["test"]
    assert results["test_of_most_frequent_class"] == pytest.approx(1 / 3, abs=0.05)
    assert results["test_per_class"].keys() == {"cat", "dog", "emu"}
    lines = [json.loads(line) for line in (classified / "predictions.jsonl").read_text().splitlines()]
    assert len(lines) == results["test_examples"]
    confusion = json.loads((classified / "confusion.json").read_text())
    matrix = np.zeros((3, 3), int)
    for line in lines:
        matrix[confusion["classes"].index(line["label"]), confusion["classes"].index(line["said"])] += 1
    assert matrix.tolist() == confusion["rows_true_columns_said"]
    assert results["test"]["accuracy"] == pytest.approx(np.trace(matrix) / matrix.sum())
    with Image.open(classified / "confusion.png") as picture:
        assert min(picture.size) > 60
    rejected = (classified / "rejected.jsonl").read_text().splitlines()
    assert len(rejected) == 1 and "dog/7.png" in rejected[0]


def test_the_bundle_gives_the_scores_of_the_classification(classified, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ["data=photos", f"data.root={photos}", "data.shares=[0.6,0.2,0.2]", "output=s.json"]
    evaluate.main([f"bundle={classified / 'bundle'}", *data])
    found = json.loads((tmp_path / "s.json").read_text())
    results = json.loads((classified / "results.json").read_text())
    assert found["scores"] == pytest.approx(results["test"], rel=1e-4)
    assert found["per_class"] == results["test_per_class"]
    lines = [json.loads(line) for line in (classified / "predictions.jsonl").read_text().splitlines()]
    said = Classifier.load(classified / "bundle").classify([photos / line["id"] for line in lines])
    assert [one.label for one in said] == [line["said"] for line in lines]


def test_a_bundle_is_not_scored_on_classes_that_it_does_not_know(classified, capsys):
    assert evaluate.main([f"bundle={classified / 'bundle'}", "data=shape_classes", "limit=4"]) == 2
    assert re.search(r"data: .* classes here that are not among the 3 known: cat, dog, emu", capsys.readouterr().err)
    assert evaluate.main([f"bundle={classified / 'bundle'}", "data=shapes"]) == 2
    assert "for a classifier: records with image and label are wanted" in capsys.readouterr().err


def test_other_records_are_refused(tmp_path, capsys):
    quick = [*QUICK, f"run.root={tmp_path}"]
    assert train.main([*quick, "experiment=shapes_classifier", "data=shapes"]) == 2
    assert "data.train: records with image and label are wanted" in capsys.readouterr().err
    assert train.main([*quick, "experiment=multi30k_bert", "data=shape_classes"]) == 2
    assert "data.train: records with text are wanted" in capsys.readouterr().err


def test_splits_in_folders_of_their_own_are_trained_on(photos, tmp_path):
    for split in ("train", "valid", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "d" / split / name).mkdir(parents=True)
            for number in range(3):
                (tmp_path / "d" / split / name / f"{number}.png").write_bytes(
                    (photos / name / f"{number}.png").read_bytes()
                )
    data = ["data=photo_splits", f"data.root={tmp_path / 'd'}", "image_size=[16,16]", "fit.epochs=1"]
    assert train.main([*QUICK, "experiment=shapes_classifier", *data, f"run.root={tmp_path / 'runs'}"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("task", ["masked", "classification"])
def test_a_stopped_run_ends_with_the_same_weights(task, sentences, photos, tmp_path, monkeypatch):
    settings = masked_settings if task == "masked" else photo_settings
    file = sentences if task == "masked" else photos

    def weights(root):
        (path,) = root.glob("*/best.npz")
        return {name: array.tobytes() for name, array in read(path)[0].items()}

    assert train.main(settings(file, tmp_path / "whole")) == 0
    done = TrainingLoop._batch_done

    def stopping(loop, logs):
        done(loop, logs)
        if loop.state.step == 2:
            loop._save()
            raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(TrainingLoop, "_batch_done", stopping)
    assert train.main(settings(file, tmp_path / "stopped")) == 130
    monkeypatch.undo()
    (folder,), (whole,) = (list((tmp_path / name).iterdir()) for name in ("stopped", "whole"))
    one, two = (yaml.safe_load((each / "config.yaml").read_text()) for each in (folder, whole))
    assert one["run"].pop("root") != two["run"].pop("root") and one == two
    assert train.main([f"resume={folder}"]) == 0
    assert weights(tmp_path / "whole") == weights(tmp_path / "stopped")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["encoder=vit", "~encoder.positions"],
            r"encoder: this task needs an encoder of tokens: encoder=text\. Received VisionTransformer",
        ),
        (["decoder=transformer"], "decoder: this task needs no decoder: decoder=none"),
        (["batches.share=1.5"], r"batches: share=1\.5 must be in \(0, 1\)"),
        (["batches.replace=[1,1,0]"], "batches: .*sum 1"),
        (["batches.max_length=5000"], r"batches\.max_length: .*max_source_length=5000 must be .* from 2 to 4096"),
        (["fit.monitor=bleu"], r"fit\.monitor=bleu is no score\. Scores: log_likelihood"),
        (["encoder.num_heads=3"], "model: num_heads=3 does not divide hidden_dim=16"),
        (["model=classifier"], "model: "),
    ],
)
def test_wrong_settings_of_a_masked_run_are_refused_in_words(overrides, message, sentences, tmp_path, capsys):
    assert train.main([*masked_settings(sentences, tmp_path / "runs"), *overrides]) == 2
    shown = capsys.readouterr().err
    assert re.search(message, shown) and "Traceback" not in shown, shown


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["encoder=text"], r"encoder: this task needs an encoder of pictures, such as vit\. Received TextEncoder"),
        (["decoder=transformer"], "decoder: this task needs no decoder: decoder=none"),
        (["model.pooling=cls"], "model: pooling is one of mean, max, first"),
        (["reader.size=[32,32]"], r"reader\.size=\[32, 32\] must be encoder\.image_size=\[64, 64\]"),
        (["batches.batch_size=0"], "batches: batch_size=0 is too small"),
        (["data.root=nowhere"], "no such folder"),
    ],
)
def test_wrong_settings_of_a_classification_are_refused_in_words(overrides, message, photos, tmp_path, capsys):
    assert train.main([*photo_settings(photos, tmp_path / "runs"), *overrides]) == 2
    shown = capsys.readouterr().err
    assert re.search(message, shown) and "Traceback" not in shown, shown


@pytest.mark.slow
def test_photos_are_classified_by_the_features_of_a_frozen_backbone(photos, tmp_path):
    cache = (
        "{_target_: mmattn.encoders.features.FeatureCache, _partial_: true, folder: " + f"{tmp_path}, mirrored: true}}"
    )
    backbone = ["encoder=lite0", "encoder.backbone.weights=null", "image_size=[64,64]", f"features={cache}"]
    settings = photo_settings(photos, tmp_path / "runs")
    assert train.main([*settings, *backbone, "batches.flip=true", "limit.train=10", "fit.epochs=1"]) == 0
    (made,) = (tmp_path / "runs").iterdir()
    assert 0 <= json.loads((made / "results.json").read_text())["test"]["accuracy"] <= 1
    Classifier.load(made / "bundle").classify(photos / "cat" / "1.png")
