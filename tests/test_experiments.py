"""Every experiment can be made, wrong settings are refused in words, a whole run leaves what it promises."""

from __future__ import annotations

import json
import re
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image

from experiments import evaluate, train
from experiments.checks import fits, parameters
from experiments.config import CONF, ConfigProblem, compose, resolve, split_arguments
from mmattn.training import folder as folders
from mmattn.training.checkpoint import read

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
PICTURES = {"flickr8k_lite0", "flickr8k_lite0_lstm", "shapes_caption", "shapes_classifier"}
TEXT_DATA = {"parallel", "tsv", "multi30k", "multi30k_bpe", "enja", "spa_eng"}
CLASSES = {"classification", "shape_classes", "photos", "photo_splits"}
MASKED = {"masked_language_model", "sentences", "multi30k_sentences"}
QUICK = ["size=tiny", "final.num_beams=[1]"]


@pytest.fixture
def flickr(tmp_path):
    """A folder in Flickr8k's layout: 12 small pictures with five captions each, one of them broken."""
    rng = np.random.default_rng(0)
    root = tmp_path / "Flickr8k"
    (root / "images").mkdir(parents=True)
    names = [f"{n}.jpg" for n in range(12)]
    for name in names:
        Image.fromarray(rng.integers(0, 255, (24, 32, 3), "uint8")).save(root / "images" / name)
    (root / "images" / names[1]).write_bytes(b"\xff\xd8\xff not a photo")
    words = re.findall(r"\w+", "a dog runs over the green field while two men in red shirts watch it jump")
    lines = [f"{name}#{k}\tA {' '.join(rng.choice(words, 6))} ." for name in names for k in range(5)]
    (root / "Flickr8k.token.txt").write_text("\n".join(lines) + "\n")
    for split, part in (("train", names[:6]), ("dev", names[6:9]), ("test", names[9:])):
        (root / f"Flickr_8k.{split}Images.txt").write_text("\n".join(part) + "\n")
    return root


def overrides_for(experiment, tmp_path):
    """What each experiment needs beside its name to be made without downloads."""
    extra = {
        "shapes_caption": [],
        "shapes_classifier": [],
        **{name: [f"data.root={tmp_path}", "encoder.backbone.weights=null"] for name in PICTURES if "lite0" in name},
        "pairs": [f"data.path={tmp_path}"],
        "transformer_base": [f"data.root={tmp_path}", "data.source_language=en", "data.target_language=de"],
    }
    return [f"experiment={experiment}", *extra.get(experiment, [f"data.root={tmp_path}"])]


@pytest.mark.parametrize("size", ["tiny", None])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_its_parts_can_be_made(experiment, size, tmp_path):
    cfg = compose("train", [*overrides_for(experiment, tmp_path), *([f"size={size}"] if size else [])])
    config = train.checked_config(cfg)
    assert config["run"]["name"] == experiment
    parts = train.make_parts(config)
    if experiment in PICTURES:
        assert isinstance(parts["encoder"], keras.layers.Layer)


@pytest.mark.parametrize(
    ("group", "option"),
    [
        (path.parent.name, path.stem)
        for path in sorted(CONF.glob("*/*.yaml"))
        if path.parent.name not in ("experiment", "encoder", "comparison")
    ],
)
def test_every_option_of_every_group_composes_and_passes_the_checks(group, option, tmp_path):
    pictures = {"flickr8k": ["data.root=x"], "coco": ["data.root=x"], "jsonl": ["data.path=x"], "csv": ["data.path=x"]}
    texts = {
        "parallel": ["data.root=x", "data.source_language=en", "data.target_language=de"],
        "tsv": ["data.path=x"],
    }
    if option in CLASSES or (group, option) in {("tokenizer", "none"), ("decoder", "none"), ("model", "classifier")}:
        needed = ["experiment=shapes_classifier", *(["data.root=x"] if option.startswith("photo") else [])]
    elif option in MASKED:
        needed = ["experiment=multi30k_bert", "data.path=x" if option == "sentences" else "data.root=x"]
    elif option in ("tinyshakespeare", "language_model", "char", "text_chars"):
        needed = ["experiment=shakespeare_chars", "data.root=x"]
    elif option in ("language_stream", "transformer_xl"):
        needed = ["experiment=shakespeare_xl", "data.root=x"]
    elif option in TEXT_DATA or option in ("translation", "segmented") or option.startswith("text_"):
        needed = ["experiment=multi30k_en_de_tiny", *texts.get(option, ["data.root=x"])]
    else:
        needed = pictures.get(option, [])
    train.checked_config(compose("train", [*needed, f"{group}={option}"]))


WRONG = [
    (["decoder.num_layerz=3"], r"decoder\.num_layerz is not in the configuration\. Did you mean decoder\.num_layers"),
    (
        ["+decoder.num_layerz=3"],
        r"decoder\.num_layerz is unknown\. Did you mean num_layers or num_heads\? \(mmattn\.decoders",
    ),
    (["+optimizer.learning_rat=3"], r"optimizer\.learning_rat is unknown\. Did you mean learning_rate"),
    (["decoder.num_layers=two"], r"decoder\.num_layers='two' does not fit: int is wanted"),
    (["decoder.num_heads=5"], r"decoder: num_heads=5 does not divide hidden_dim=128"),
    (["encoder.num_heads=5"], r"encoder: num_heads=5 does not divide hidden_dim=128"),
    (["encoder.patch_size=7"], r"encoder: image_size .* multiple of patch_size\. Received \(64, 64\) and 7"),
    (["loss.label_smoothing=1.5"], r"loss: label_smoothing=1\.5 is not in \[0, 1\)"),
    (["schedule.peak=-1"], r"schedule: peak=-1 is not a learning rate"),
    (["schedule.decay=linear"], r"schedule: decay='linear' is unknown\. Known: cosine"),
    (["fit.epochs=0"], r"fit: epochs=0 must be at least 1"),
    (["fit.monitor=bleu5"], r"fit\.monitor=bleu5 is no score\. Scores: bleu1"),
    (["batches.batch_size=0"], r"batches: batch_size=0 is too small"),
    (["reader.size=[32,32]"], r"reader\.size=\[32, 32\] must be encoder\.image_size=\[64, 64\]"),
    (["reader.resize=stretch"], r"reader: resize='stretch'"),
    (
        ["decoder.positions=learned", "+decoder.max_length=8"],
        r"batches\.max_length=\d+ is more than decoder\.max_length=8",
    ),
    (
        ["optimizer._target_=keras.optimizers.AdamX"],
        r"optimizer\._target_: 'keras\.optimizers\.AdamX' cannot be imported\. .* Did you mean Adam or AdamW",
    ),
    (
        ["optimizer.global_clipnorm=high"],
        r"optimizer: TypeError: '>' not supported between instances of 'str' and 'int'",
    ),
    (["runtime.dtype=float8"], r"runtime: dtype='float8' is unknown\. Known: float32"),
    (["tokenizer.model_type=words"], r"tokenizer\.model_type='words' does not fit"),
    (["experiment=shapes"], r"experiment=shapes does not exist\. There are: .*flickr8k_lite0, .*shapes_caption"),
    (["data=flickr8k"], r"data\.root has no value: give one, as in data\.root="),
    (["+data.rot=3"], r"data\.rot is unknown"),
    (["+runn.name=x"], r"runn is unknown\. Did you mean run"),
    (["+run.nam=x"], r"run\.nam is unknown\. Did you mean name"),
    (["run.seed=-1"], r"run\.seed=-1 must be a whole number from 0"),
    (["limit.test=0"], r"limit\.test=0 must be a whole number of examples, at least 1"),
    (["decoder.num_layers=[1"], r"\[1"),
    (["decoder.num_layers"], r"'decoder\.num_layers' is no setting: KEY=VALUE is wanted"),
    (["--fast"], r"--fast is unknown\. Options: --cfg job"),
]


@pytest.mark.parametrize(("overrides", "message"), WRONG, ids=[" ".join(o) for o, _ in WRONG])
def test_wrong_setting_is_refused_with_its_path_before_anything_is_read(
    overrides, message, tmp_path, capsys, monkeypatch
):
    def read(*args, **kwargs):
        pytest.fail("data were read")

    monkeypatch.setattr("mmattn.data.shapes.ShapesSource.__getitem__", read)
    monkeypatch.setattr("mmattn.data.shapes.ShapesSource.training_captions", read)
    monkeypatch.setattr("mmattn.data.captions.CaptionSource.__init__", read)
    monkeypatch.chdir(tmp_path)
    assert train.main(overrides) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err), captured.err
    assert "Traceback" not in captured.err
    assert not list(tmp_path.iterdir())  # neither a run folder nor Hydra's outputs


def test_all_problems_are_told_at_once(capsys):
    assert train.main(["decoder.num_layers=two", "fit.epochs=many", "run.seed=x"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 3


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, float, True),
        (1.5, int, False),
        ("a", str | None, True),
        ([1, 2], tuple[int, int], True),
        ([1], tuple[int, int], False),
    ],
)
def test_values_are_compared_with_type_hints(value, hint, expected):
    assert fits(value, hint) is expected


def test_arguments_that_a_parent_class_takes_are_known():
    known, open_ended = parameters(keras.optimizers.AdamW)
    assert {"learning_rate", "weight_decay", "use_ema", "global_clipnorm", "amsgrad"} <= known.keys()
    assert not open_ended
    known, open_ended = parameters(keras.layers.Dense)
    assert {"units", "dtype", "name", "trainable"} <= known.keys()
    assert not open_ended


def test_two_runs_in_the_same_second_get_two_folders(tmp_path, monkeypatch):
    tokens = iter(["aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr(folders.secrets, "token_hex", lambda n: next(tokens))
    first, second = (folders.new_run_folder(tmp_path, "x/y z") for _ in range(2))
    assert first != second
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d{6}_x-y-z_\w{4}", second.name)


def test_relative_paths_are_relative_to_where_the_command_is_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = resolve(compose("train", ["data=flickr8k", "data.root=../photos"]))
    assert config["data"]["train"]["folder"] == str(tmp_path.parent / "photos")


def test_configuration_folder_of_the_user_adds_experiments(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /size: tiny\nfit:\n  epochs: 7\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    options, overrides = split_arguments(["--config-dir", str(tmp_path), "experiment=mine"])
    config = train.checked_config(compose("train", overrides, options.folders))
    assert (config["fit"]["epochs"], config["size"]["hidden_dim"], config["run"]["name"]) == (7, 16, "mine")


def test_missing_configuration_folder_is_refused():
    with pytest.raises(ConfigProblem, match="--config-dir /nowhere: there is no such folder"):
        split_arguments(["--config-dir=/nowhere", "a=b"])


def test_cfg_prints_the_configuration_and_runs_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--cfg", "job", "decoder.num_layers=9"]) == 0
    assert "num_layers: 9" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a whole run of drawn shapes."""
    root = tmp_path_factory.mktemp("runs")
    assert train.main([*QUICK, "fit.epochs=1", f"run.root={root}"]) == 0
    (folder,) = root.iterdir()
    return folder


def test_run_folder_holds_all_that_it_promises(finished):
    names = {path.name for path in finished.iterdir()}
    promised = "config.yaml run.json versions.json metrics.jsonl checkpoints bundle results.json predictions.jsonl"
    assert set(promised.split()) <= names
    assert json.loads((finished / "run.json").read_text())["seed"] == 1
    assert "keras" in json.loads((finished / "versions.json").read_text())
    assert "${" not in (finished / "config.yaml").read_text()
    entries = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [e["epoch"] for e in entries] == [1]
    assert {"loss", "accuracy", "learning_rate", "val_bleu4", "val_cider_d", "val_exact"} <= entries[0].keys()
    results = json.loads((finished / "results.json").read_text())
    assert results["test_examples"] == len((finished / "predictions.jsonl").read_text().splitlines()) == 8
    assert {"test", "test_shuffled", "valid", "generation", "tried"} <= results.keys()


def test_complete_run_is_not_done_again(finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.name != "lock"}
    assert train.main([f"resume={finished}"]) == 0
    assert "This run is complete" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.name != "lock"}


def test_evaluation_of_the_bundle_gives_the_scores_of_the_run(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert evaluate.main([f"bundle={finished / 'bundle'}", "limit=8", "output=scores.json"]) == 0
    found = json.loads((tmp_path / "scores.json").read_text())
    results = json.loads((finished / "results.json").read_text())
    assert found["scores"] == pytest.approx(results["test"])
    assert found["scores_shuffled"] == pytest.approx(results["test_shuffled"])


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["bundle=/nowhere"], 1, "neither a folder nor a shipped bundle"),
        ([], 2, "bundle has no value"),
        (["bundle=x", "split=dev"], 2, r"split=dev is not in data\. There are: train, valid, test"),
        (["bundle=x", "batch_size=0"], 2, "batch_size=0 must be a whole number, at least 1"),
        (["bundle=default", "+generation.num_beams=0"], 2, r"generation\.num_beams=0 must be"),
    ],
)
def test_evaluation_refuses_in_words(overrides, code, message, capsys):
    assert evaluate.main(overrides) == code
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["fit.epochs=9"],
            r"fit\.epochs cannot be set together with resume: .* What can be changed: fit\.checkpoint_minutes",
        ),
        (["decoder=transformer"], "decoder cannot be set together with resume"),
    ],
)
def test_resume_refuses_to_change_the_run(finished, overrides, message, capsys):
    assert train.main([f"resume={finished}", *overrides]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_what_has_changed_since_a_run_began_is_told(tmp_path):
    folder = train.start_folder({"run": {"root": str(tmp_path), "name": "x", "seed": 1}}, [])
    assert train.changed_since(folder) == [] == train.changed_since(tmp_path)
    run, before = (json.loads((folder / f"{name}.json").read_text()) for name in ("run", "versions"))
    (folder / "run.json").write_text(json.dumps({**run, "git_commit": "0123"}))
    (folder / "versions.json").write_text(json.dumps({**before, "keras": "3.0", "extra": "1"}))
    now = f"commit {run['git_commit']} (was 0123)", f"keras {before['keras']} (was 3.0)", "extra None (was 1)"
    assert sorted(train.changed_since(folder)) == sorted(now)


def test_resume_of_another_folder_is_refused(tmp_path, capsys):
    assert train.main([f"resume={tmp_path}"]) == 2
    assert "no run folder of a training" in capsys.readouterr().err


def test_second_process_on_a_run_folder_is_refused_and_the_lock_dies_with_its_holder(finished, capsys):
    with folders.RunLock(finished):
        assert train.main([f"resume={finished}"]) == 1
    assert re.search(r"in use by another process \(process \d+ on ", capsys.readouterr().err)
    folders.RunLock(finished).release()


@pytest.mark.slow
def test_flickr8k_run_with_a_broken_photo_skips_it_lists_it_and_ends(flickr, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MMATTN_CACHE", str(tmp_path / "cache"))
    settings = [
        "experiment=flickr8k_lite0",
        f"data.root={flickr}",
        "encoder.backbone.weights=null",
        "image_size=[64,64]",
        "schedule.warmup_steps=0",
    ]
    assert train.main([*QUICK, *settings, f"run.root={tmp_path / 'runs'}"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    rejected = [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]
    assert [entry["id"] for entry in rejected] == ["1.jpg"]
    assert Path(folder / "bundle" / "bundle.json").is_file()


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [("weight_decay", -1, "0 or more"), ("beta_2", 5, r"in \[0, 1\)"), ("global_clipnorm", -1, "more than 0")],
)
def test_what_the_optimizer_would_take_and_cannot_work_with_is_refused(name, value, rule, capsys):
    assert train.main([*QUICK, f"optimizer.{name}={value}"]) == 2
    assert re.search(rf"optimizer\.{name}={value} must be {rule}", capsys.readouterr().err)


def test_a_refusal_before_training_leaves_no_run_folder(tmp_path, capsys):
    assert train.main([*QUICK, "schedule.warmup_steps=1000", f"run.root={tmp_path / 'runs'}"]) == 2
    shown = capsys.readouterr().err
    assert "needs total_steps > warmup_steps=1000" in shown and "Continue with" not in shown
    assert not list((tmp_path / "runs").iterdir())


def test_a_missing_photo_is_named_and_with_skip_listed(tmp_path, capsys):
    lines = []
    for number, split in enumerate(("train", "train", "valid", "test")):
        Image.new("RGB", (70, 70), (60 * number, 0, 0)).save(tmp_path / f"{number}.jpg")
        lines += [json.dumps({"image": f"{number}.jpg", "captions": ["a dog", "a brown dog"], "split": split})]
    (tmp_path / "1.jpg").unlink()
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    data = ["data=jsonl", f"data.path={tmp_path / 'c.jsonl'}", f"run.root={tmp_path / 'runs'}"]
    assert train.main([*QUICK, *data]) == 2
    assert "1.jpg" in capsys.readouterr().err
    assert train.main([*QUICK, *data, "data.problems=skip", "final.shuffled=false", "schedule.warmup_steps=0"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert "1.jpg" in (folder / "rejected.jsonl").read_text()
    assert json.loads((folder / "bundle" / "bundle.json").read_text())["card"]["data"].endswith("c.jsonl")


def test_a_run_without_any_readable_photo_ends_in_words(tmp_path, capsys):
    (tmp_path / "images").mkdir()
    lines = []
    for number in range(3):
        (tmp_path / "images" / f"{number}.jpg").write_bytes(b"no photo")
        split = ("train", "valid", "test")[number]
        captions = ["a dog on the grass", "a brown dog runs"]
        lines += [json.dumps({"image": f"{number}.jpg", "captions": captions, "split": split})]
    (tmp_path / "captions.jsonl").write_text("\n".join(lines))
    data = ["data=jsonl", f"data.path={tmp_path / 'captions.jsonl'}"]
    assert train.main([*QUICK, *data, f"run.root={tmp_path / 'runs'}"]) == 1
    assert "None of the source's 1 images can be read" in capsys.readouterr().err


@pytest.mark.slow
def test_same_seed_gives_the_same_weights_and_another_seed_gives_others(tmp_path):
    weights = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert train.main([*QUICK, f"run.root={tmp_path / name}", f"run.seed={seed}"]) == 0
        (path,) = (tmp_path / name).glob("*/best.npz")
        weights[name] = [array.tobytes() for array in read(path)[0].values()]
    assert weights["a"] == weights["b"] != weights["c"]


def test_a_path_with_any_letter_needs_no_quotes(tmp_path):
    for name in ("päare.tsv", "a=b.tsv", "mit blank ü.tsv", "a,b.tsv", "it's.tsv", "wörld\\'s.tsv", "end\\"):
        _, [override] = split_arguments([f"data.path={tmp_path}/{name}"])
        cfg = compose("train", ["experiment=pairs", override])
        assert cfg.data.path == f"{tmp_path}/{name}"
    kept = ["final.num_beams=[1,2]", "data.path='x y'", "size=tiny", "+a.b=null", "~card", "fit.patience=3"]
    assert split_arguments(kept)[1] == kept


def test_a_misspelt_key_is_compared_with_those_of_the_chosen_groups(capsys):
    assert train.main(["experiment=pairs", "data.paht=x"]) == 2
    assert "Did you mean data.path" in capsys.readouterr().err


def test_a_root_that_can_hold_no_runs_is_a_fault_of_the_configuration(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert train.main([*QUICK, f"run.root={tmp_path}/file"]) == 2
    assert f"run.root={tmp_path}/file: no folder can be made there" in capsys.readouterr().err
