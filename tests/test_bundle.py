"""Bundles: what is saved comes back, and what is damaged or hostile is refused by name before anything of it runs."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import marshal
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from mmattn import bundle, bundle_files, safe_config, weights
from mmattn.bundle import BundleError, describe, find_bundle, load_bundle, save_bundle, update_bundle
from mmattn.cli import main
from mmattn.decoders import TransformerDecoder
from mmattn.encoders.image import VisionTransformer
from mmattn.model import EncoderDecoder
from mmattn.preprocess.image import ImageReader
from mmattn.preprocess.text import Tokenizer

TOKENIZER = Tokenizer.train(
    ["a red circle left of a blue square", "two dogs run on the beach"] * 9,
    vocabulary_size=60,
    normalization="caption",
    shrink=True,
)
READER = ImageReader((32, 48))
INPUTS = {
    "pixels": np.random.default_rng(0).integers(0, 256, (2, 32, 48, 3)).astype("uint8"),
    "target_ids": np.array([[2, 5, 6, 7], [2, 9, 8, 7]], "int32"),
}


def make_model(seed: int = 0, **decoder: Any) -> EncoderDecoder:
    keras.utils.set_random_seed(seed)
    encoder = VisionTransformer((32, 48), patch_size=16, hidden_dim=32, num_layers=1, num_heads=2, dropout=0.1)
    decoder = {"hidden_dim": 32, "num_layers": 1, "num_heads": 2, "dropout": 0.1} | decoder
    model = EncoderDecoder(encoder, TransformerDecoder(TOKENIZER.vocabulary_size, **decoder))
    model(INPUTS)
    return model


def outputs(model: Any) -> np.ndarray:
    return keras.ops.convert_to_numpy(model(INPUTS, training=False))


@pytest.fixture(scope="module")
def model() -> EncoderDecoder:
    return make_model()


@pytest.fixture(scope="module")
def saved(model: EncoderDecoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "toy"
    card = {
        "title": "Toy",
        "scores": {"test": {"bleu4": 20.123}, "shuffled": {"bleu4": 9.0}},
        "limits": ["dogs"],
        "terms": "research use",
    }
    save_bundle(
        folder,
        model,
        TOKENIZER,
        READER,
        {"num_beams": 2, "low_confidence": 0.25},
        card,
        extra_files={"LICENSE": "free\n"},
    )
    return folder


def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def forged(saved: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], Any], **files: bytes) -> Path:
    """A copy whose bundle.json and files were edited, with all fingerprints made to fit again, as an attacker would."""
    folder = copied(saved, tmp_path)
    info = json.loads((folder / "bundle.json").read_text())
    for name, data in files.items():
        name = name.replace("_", ".")
        (folder / name).write_bytes(data)
        info["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit(info)
    info["digest"] = bundle_files._digest(info)
    (folder / "bundle.json").write_text(json.dumps(info))
    return folder


# What is saved comes back


def test_float32_bundle_gives_the_same_outputs_bit_for_bit(model: EncoderDecoder, tmp_path: Path) -> None:
    loaded = save_bundle(tmp_path / "b", model, TOKENIZER, READER, weights_dtype="float32")
    np.testing.assert_array_equal(outputs(loaded.model), outputs(model))
    assert loaded.info["weights"]["log_prob_error"] == 0.0
    assert loaded.reader == READER
    assert loaded.tokenizer.model_bytes == TOKENIZER.model_bytes
    assert all(v.dtype == "float32" for v in loaded.model.weights)


@pytest.mark.parametrize(("dtype", "most", "share"), [("float16", 5e-4, 0.55), ("int8", 1e-2, 0.40)])
def test_small_weights_lose_what_the_bundle_says_they_lose(
    model: EncoderDecoder, tmp_path: Path, dtype: str, most: float, share: float
) -> None:
    loaded = save_bundle(tmp_path / "b", model, TOKENIZER, READER, weights_dtype=dtype)
    errors = []
    for new, old in zip(loaded.model.weights, model.weights, strict=True):
        a, b = new.numpy(), old.numpy()
        if np.linalg.norm(b):
            errors.append(np.linalg.norm(a - b) / np.linalg.norm(b))
    assert loaded.info["weights"]["relative_error"] == pytest.approx(max(errors), rel=1e-3)
    assert 0 < max(errors) < most
    plain = sum(int(np.prod(v.shape)) for v in model.weights) * 4
    assert (tmp_path / "b" / "weights.npz").stat().st_size < share * plain + 40_000  # zip entries of a tiny model


def test_a_model_built_part_by_part_is_saved_right(tmp_path: Path) -> None:
    """Its variables have other paths than those of a model built as a whole."""
    keras.utils.set_random_seed(3)
    encoder = VisionTransformer((32, 48), patch_size=16, hidden_dim=32, num_layers=1, num_heads=2, name="eyes")
    encoder({"pixels": INPUTS["pixels"]})
    decoder = TransformerDecoder(TOKENIZER.vocabulary_size, hidden_dim=32, num_layers=1, num_heads=2)
    decoder(INPUTS["target_ids"], np.zeros((2, 6, 32), "float32"))
    model = EncoderDecoder(encoder, decoder)
    model(INPUTS)
    loaded = save_bundle(tmp_path / "b", model, TOKENIZER, READER, weights_dtype="float32")
    np.testing.assert_allclose(outputs(loaded.model), outputs(model), atol=1e-6)
    assert all(v.path.startswith(model.name) for v in loaded.model.weights)


def test_mixed_precision_becomes_float32(tmp_path: Path) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = make_model()
    finally:
        keras.config.set_dtype_policy(before)
    loaded = save_bundle(tmp_path / "b", model, TOKENIZER, READER)
    assert "mixed_bfloat16" not in (tmp_path / "b" / "bundle.json").read_text()
    assert keras.backend.standardize_dtype(loaded.model(INPUTS).dtype) == "float32"


def test_the_same_model_gives_the_same_bytes(model: EncoderDecoder, saved: Path, tmp_path: Path) -> None:
    info = load_bundle(saved).info
    save_bundle(
        tmp_path / "b", model, TOKENIZER, READER, info["generation"], info["card"], extra_files={"LICENSE": "free\n"}
    )
    for name in sorted(p.name for p in saved.iterdir()):
        assert (tmp_path / "b" / name).read_bytes() == (saved / name).read_bytes(), name


def test_numpy_opens_the_weights(saved: Path, model: EncoderDecoder) -> None:
    with np.load(saved / "weights.npz", allow_pickle=False) as file:
        names = set(file.files)
        total = sum(file[name].size for name in names)
    assert total == model.count_params()
    assert names == load_bundle(saved).info["weights"]["arrays"].keys()


def test_check_passes_here_and_fails_for_another_model(saved: Path) -> None:
    loaded = load_bundle(saved, check=True)
    assert loaded.check() < 1e-4
    kernel = next(v for v in loaded.model.weights if v.path.endswith("attention_output/kernel"))
    kernel.assign(kernel * 3.0)
    with pytest.raises(BundleError, match="log-probabilities differ"):
        loaded.check()


def test_info_check_prints_the_difference_or_fails(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(saved)]) == 0
    assert "\ncheck " not in capsys.readouterr().out
    assert main(["info", str(saved), "--check"]) == 0
    assert re.search(r"^check       log-probabilities within \S+ of those at its saving", capsys.readouterr().out, re.M)
    other = forged(saved, tmp_path, lambda i: i["check"].update(log_probs=(np.ones((6, 8)) * -50).tolist()))
    assert main(["info", str(other), "--check"]) == 1
    assert "differ by" in capsys.readouterr().err


def test_update_changes_settings_and_card_but_not_the_weights(saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    before = (folder / "weights.npz").read_bytes()
    update_bundle(folder, {"num_beams": 5}, {"data": "drawn shapes"}, {"NOTICE": "thanks"})
    loaded = load_bundle(folder)
    assert loaded.generation["num_beams"] == 5
    assert loaded.generation["low_confidence"] == 0.25
    assert loaded.info["card"]["title"] == "Toy"
    assert "drawn shapes" in (folder / "README.md").read_text()
    assert (folder / "weights.npz").read_bytes() == before
    assert (folder / "LICENSE").read_text() == "free\n"
    assert (folder / "NOTICE").read_text() == "thanks"


def test_card_and_description_tell_what_the_data_say(saved: Path) -> None:
    card, text = load_bundle(saved).card(), describe(saved)
    assert card == (saved / "README.md").read_text()
    for fact in ("# Toy", "research use", "| test | 20.12 |", "32 x 48", "2 beams", "mmattn caption", "0.25"):
        assert fact in card
    for fact in ("Toy", "research use", "20.12", "VisionTransformer -> TransformerDecoder", "weights.npz", "LICENSE"):
        assert fact in text


@pytest.mark.slow
def test_a_fresh_process_describes_loads_and_checks_it(saved: Path) -> None:
    code = (
        "import sys; from mmattn.bundle import describe, load_bundle; "
        "print(describe(sys.argv[1])); load_bundle(sys.argv[1], check=True)"
    )
    root = Path(bundle.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code, str(saved)], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "VisionTransformer -> TransformerDecoder" in done.stdout


# Saving is safe


def test_a_failed_save_leaves_the_old_bundle(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(saved, tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        update_bundle(folder, {"num_beams": 7})
    monkeypatch.undo()
    assert load_bundle(folder).generation["num_beams"] == 2
    assert [p.name for p in folder.parent.iterdir()] == ["copy"]


def test_a_failed_swap_puts_the_old_bundle_back(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(saved, tmp_path)
    rename = os.rename

    def once(source: Any, target: Any) -> None:
        if ".new-" in str(source):
            raise PermissionError(13, "denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", once)
    with pytest.raises(PermissionError):
        update_bundle(folder, {"num_beams": 7})
    monkeypatch.undo()
    assert load_bundle(folder).generation["num_beams"] == 2
    assert [p.name for p in folder.parent.iterdir()] == ["copy"]


def test_a_folder_that_is_no_bundle_is_never_replaced(model: EncoderDecoder, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(BundleError, match="not a bundle: it will not be replaced"):
        save_bundle(tmp_path, model, TOKENIZER, READER)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_only_bundles_with_nothing_beside_them_are_replaced(model: EncoderDecoder, saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "web"  # other programs write a bundle.json too
    other.mkdir()
    (other / "bundle.json").write_text('{"entry": "main.js"}')
    (other / "main.js").write_text("1")
    with pytest.raises(BundleError, match="exists and is not a bundle"):
        save_bundle(other, model, TOKENIZER, READER)
    mixed = copied(saved, tmp_path)
    (mixed / "my notes.txt").write_text("dear diary")
    (mixed / ".DS_Store").write_text("")
    for write in (lambda: save_bundle(mixed, model, TOKENIZER, READER), lambda: update_bundle(mixed, {"num_beams": 1})):
        with pytest.raises(BundleError, match=r"holds 'my notes\.txt' beside a bundle"):
            write()
    assert (other / "main.js").exists() and (mixed / "my notes.txt").exists()


def test_saving_refuses_what_could_not_be_loaded(model: EncoderDecoder, tmp_path: Path) -> None:
    broken = make_model()
    broken.weights[0].assign(broken.weights[0] * float("nan"))
    other = Tokenizer.train(["one two three"] * 5, vocabulary_size=16, shrink=True)
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (broken, TOKENIZER, {}, "NaN or infinity"),
        (model, other, {}, "the tokenizer has"),
        (model, TOKENIZER, {"weights_dtype": "int4"}, "Types that fit: float16, float32, int8"),
        (model, TOKENIZER, {"generation": {"num_beams": 0}}, "num_beams=0 must be a whole number from 1 to 64"),
        (model, TOKENIZER, {"generation": {"beams": 3}}, "beams is not known"),
        (model, TOKENIZER, {"card": {"score": float("nan")}}, "plain data"),
        (model, TOKENIZER, {"extra_files": {"../LICENSE": "x"}}, "not a plain file name"),
        (model, TOKENIZER, {"extra_files": {"weights.npz": "x"}}, "writes this file itself"),
    ]
    for bad, tokenizer, options, message in cases:
        with pytest.raises(ValueError, match=message):
            save_bundle(tmp_path / "b", bad, tokenizer, READER, **options)
    assert list(tmp_path.iterdir()) == []


class Scaled(keras.layers.Layer):
    """A user's own encoder, registered with nobody."""

    grid = (1, 2)

    def __init__(self, factor: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor
        self.dense = keras.layers.Dense(32, name="dense")

    def build(self, shapes: Any) -> None:
        self.dense.build((None, 1, 3))

    def call(self, inputs: Any, training: Any = None) -> Any:
        mean = keras.ops.mean(keras.ops.cast(inputs["pixels"], "float32"), axis=(1, 2))[:, None]
        memory = keras.ops.repeat(self.dense(mean * self.factor), 2, axis=1)
        return memory, keras.ops.ones(keras.ops.shape(memory)[:2], "bool")

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor}


def test_a_users_own_class_needs_to_be_handed_in(tmp_path: Path) -> None:
    decoder = TransformerDecoder(TOKENIZER.vocabulary_size, hidden_dim=32, num_layers=1, num_heads=2)
    model = EncoderDecoder(Scaled(0.01), decoder)
    model(INPUTS)
    with pytest.raises(BundleError, match=r"model\.config\.encoder: nothing is registered with Keras as 'Scaled'"):
        save_bundle(tmp_path / "b", model, TOKENIZER, READER)
    mine = {"Scaled": Scaled}
    save_bundle(tmp_path / "b", model, TOKENIZER, READER, weights_dtype="float32", custom_objects=mine)
    loaded = load_bundle(tmp_path / "b", custom_objects=mine)
    np.testing.assert_allclose(outputs(loaded.model), outputs(model), atol=1e-6)
    with pytest.raises(BundleError, match="'Scaled'"):
        load_bundle(tmp_path / "b")


# Damage is refused by name


def test_every_file_is_missed_when_it_is_gone_and_named_when_it_is_changed(saved: Path, tmp_path: Path) -> None:
    for path in sorted(saved.iterdir()):
        data = path.read_bytes()
        middle = bytearray(data)
        middle[len(data) // 2] ^= 4
        for number, changed in enumerate([None, bytes(middle), data[:-1], data + b" ", b""]):
            folder = Path(shutil.copytree(saved, tmp_path / f"{path.name}-{number}"))
            (folder / path.name).unlink()
            if changed is not None:
                (folder / path.name).write_bytes(changed)
            if path.name == "bundle.json" and changed in (data + b" ", data[:-1]):
                continue  # a blank more or less at its end says nothing else
            with pytest.raises(BundleError, match=rf"^{path.name}: "):
                load_bundle(folder)
            with pytest.raises(BundleError, match=rf"^{path.name}: "):
                describe(folder)


def test_links_and_special_files_are_refused(saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    outside = tmp_path / "outside"
    outside.write_bytes((folder / "weights.npz").read_bytes())
    (folder / "weights.npz").unlink()
    (folder / "weights.npz").symlink_to(outside)
    with pytest.raises(BundleError, match=r"weights\.npz: a link"):
        load_bundle(folder)
    (folder / "weights.npz").unlink()
    os.mkfifo(folder / "weights.npz")
    with pytest.raises(BundleError, match=r"weights\.npz: not a regular file"):
        load_bundle(folder)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "..", "a/b", "a\\b", "", ".hidden", "bundle.json", "c:x"]
)
def test_the_table_of_files_cannot_leave_the_folder(saved: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_bytes(b"secret")
    entry = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    with pytest.raises(BundleError, match="not a plain file name"):
        load_bundle(forged(saved, tmp_path, lambda info: info["files"].update({name: entry})))


def test_a_newer_format_is_refused_in_words(saved: Path, tmp_path: Path) -> None:
    folder = forged(saved, tmp_path, lambda info: info.update(format_version=4, mmattn_version="9.1"))
    with pytest.raises(BundleError, match=r"format version 4, written by mmattn 9\.1; .* reads up to 3"):
        load_bundle(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda i: i["special_ids"].pop("eos"), "special_ids.eos is missing, it must be 3"),
        (lambda i: i["special_ids"].update(bos=True), "special_ids.bos is True"),
        (lambda i: i["generation"].pop("max_length"), "generation: max_length is missing"),
        (lambda i: i["generation"].update(max_length=10**9), "generation.max_length=1000000000 must be"),
        (lambda i: i["generation"].update(length_penalty="1"), "generation.length_penalty='1' must be"),
        (lambda i: i.pop("mmattn_version"), "mmattn_version is missing or no text"),
        (lambda i: i["weights"].update(dtype=["float16"]), r"weights\.dtype is missing or no text"),
        (lambda i: i["weights"].update(parameters="many"), r"weights\.parameters is missing or no number"),
        (lambda i: i["check"].update(log_probs=[[10**400] * 8] * 6), "check must be"),
        (lambda i: i.update(kind="poet"), "kind='poet' is not known. Known: captioner, translator, language_model"),
        (lambda i: i.update(kind=["captioner"]), "kind=.* is not known"),
        (lambda i: i.update(kind="translator"), "kind='translator' needs format version 2, and it has 1"),
        (lambda i: i.update(kind="translator", format_version=2), "generation: low_confidence is not known"),
        (lambda i: i.update(source_tokenizer=i["tokenizer"]), "source_tokenizer belongs to a translator"),
        (lambda i: i.update(format="zip"), "not an mmattn bundle"),
        (lambda i: i.pop("reader"), "reader is missing"),
        (lambda i: i["reader"].update(size=[10**6, 10**6]), "above 4096"),
        (lambda i: i["reader"].update(plugin="x"), "reader: "),
        (lambda i: i["tokenizer"].update(vocabulary_size=7), "check must be|it has"),
        (lambda i: i["check"].update(ids=[[1]]), "check must be"),
        (lambda i: i["weights"].update(arrays=[]), "weights.arrays is missing"),
        (lambda i: i["weights"]["arrays"].popitem(), "arrays unknown"),
        (lambda i: i["weights"]["arrays"].update(x={"shape": [2], "dtype": "float32"}), "arrays missing: x"),
        (lambda i: i["files"].pop("tokenizer.model"), r"files lists no tokenizer\.model"),
        (lambda i: i["files"]["LICENSE"].update(bytes=2**60), "bytes"),
        (lambda i: i["model"]["config"]["decoder"]["config"].update(hidden_dim=64), "its variables hold"),
        (lambda i: i["model"]["config"]["decoder"]["config"].update(hidden_dim=16), "does not fit the model|refuse"),
        (lambda i: i["model"]["config"]["decoder"]["config"].update(num_heads=5), "model: its classes refuse it"),
    ],
)
def test_each_wrong_entry_is_named(saved: Path, tmp_path: Path, edit: Any, message: str) -> None:
    folder = forged(saved, tmp_path, edit)
    with pytest.raises(BundleError, match=message):
        load_bundle(folder)
    with contextlib.suppress(BundleError):  # it makes no model; but nothing else may come out of it
        describe(folder)


def test_a_description_is_one_line_an_entry_whatever_the_card_says(saved: Path, tmp_path: Path) -> None:
    forgery = "Toy\nfile        LICENSE  1 bytes, fingerprint right"
    lines = describe(forged(saved, tmp_path, lambda i: i["card"].update(title=forgery, limits=7))).split("\n")
    assert sum(line.startswith("file ") for line in lines) == 4 + 1
    assert "limits      7" in lines


def test_a_nest_too_deep_for_python_is_refused(saved: Path, tmp_path: Path) -> None:
    for depth in (250, sys.getrecursionlimit() - 60, sys.getrecursionlimit() - 20):
        folder = copied(saved, tmp_path / str(depth))
        info = json.loads((folder / "bundle.json").read_text())
        info["card"] = "HERE"
        text = json.dumps(info).replace('"HERE"', '{"scores": ' + '{"a": ' * depth + "1" + "}" * depth + "}")
        (folder / "bundle.json").write_text(text)
        with pytest.raises(BundleError, match=r"^bundle\.json: (nested deeper than 200 levels|damaged)"):
            describe(folder)


def test_defaults_never_ask_for_more_than_the_model_can_make(tmp_path: Path) -> None:
    short = make_model(positions="learned", max_length=9)
    assert save_bundle(tmp_path / "short", short, TOKENIZER, READER).generation["max_length"] == 9
    with pytest.raises(BundleError, match=r"generation\.max_length=10 exceeds the model's longest sequence, 9"):
        save_bundle(tmp_path / "long", short, TOKENIZER, READER, {"max_length": 10})
    update_bundle(tmp_path / "short", {"max_length": 10})
    with pytest.raises(BundleError, match=r"^bundle\.json: generation\.max_length=10 exceeds"):
        load_bundle(tmp_path / "short")


def test_json_that_is_no_json_is_refused(saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    for text in (
        "{",
        "[]",
        "null",
        '{"a": NaN}',
        "[" * 200_000,
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    ):
        (folder / "bundle.json").write_text(text)
        with pytest.raises(BundleError, match=r"^bundle\.json: "):
            load_bundle(folder)


def test_a_huge_model_is_refused_before_it_gets_memory(saved: Path, tmp_path: Path) -> None:
    def edit(info: dict[str, Any]) -> None:
        info["model"]["config"]["decoder"]["config"].update(intermediate_dim=10**12)

    with pytest.raises(BundleError, match=r"its variables hold|its classes refuse it"):
        load_bundle(forged(saved, tmp_path, edit))
    with keras.StatelessScope():
        pass  # on leaving it, Keras makes the variables that are waiting: none of those is among them


# Nothing of a hostile bundle runs


class Evil:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return (Path.touch, (self.canary,))


def npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=True, **arrays)
    return buffer.getvalue()


def test_a_pickle_in_the_weights_never_runs(saved: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    with np.load(saved / "weights.npz") as file:
        arrays = dict(file)
    name = next(iter(arrays))
    arrays[name] = np.array([Evil(canary), "x" * 50_000], dtype=object)
    folder = forged(saved, tmp_path, lambda info: None, weights_npz=npz(**arrays))
    with pytest.raises(BundleError, match=r"weights\.npz: .*object"):
        load_bundle(folder)
    assert not canary.exists()
    with np.load(folder / "weights.npz", allow_pickle=True) as file:
        file[name]
    assert canary.exists()  # the attack itself works


@pytest.mark.parametrize("kind", ["cut", "compressed", "not a zip", "twice", "wrong shape", "wrong type", "header"])
def test_a_bad_weights_file_is_refused_by_name(saved: Path, tmp_path: Path, kind: str) -> None:
    data = (saved / "weights.npz").read_bytes()
    with np.load(saved / "weights.npz") as file:
        arrays = dict(file)
    name = max(arrays, key=lambda n: arrays[n].size)
    if kind == "cut":
        data = data[: len(data) // 2]
    elif kind == "not a zip":
        data = b"x" * len(data)
    elif kind == "compressed":
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        data = buffer.getvalue() + b"\0" * len(data)
    elif kind == "twice":
        buffer = io.BytesIO(data)
        with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(buffer, "a") as archive:
            archive.writestr(name + ".npy", b"")
        data = buffer.getvalue()
    elif kind == "wrong shape":
        data = npz(**{**arrays, name: arrays[name].reshape(-1)})
    elif kind == "wrong type":
        data = npz(**{**arrays, name: arrays[name].astype("float32")})
    else:
        data = data.replace(b"'descr': '<f2'", b"'descr': 1+1+1")
    folder = forged(saved, tmp_path, lambda info: None, weights_npz=data)
    with pytest.raises(BundleError, match=r"^weights\.npz: "):
        load_bundle(folder)


def lambda_config(canary: Path) -> dict[str, Any]:
    code = (lambda x: __import__("pathlib").Path("CANARY").touch() or x).__code__
    code = code.replace(co_consts=tuple(str(canary) if c == "CANARY" else c for c in code.co_consts))
    text = base64.b64encode(marshal.dumps(code)).decode()
    value = {"code": text, "defaults": None, "closure": None, "value": [text, None, None]}
    return {
        "name": "l",
        "function": {"class_name": "__lambda__", "config": value},
        "arguments": {},
        "output_shape": None,
        "mask": None,
    }


def node(class_name: str, module: Any, registered_name: Any = None, **config: Any) -> dict[str, Any]:
    return {"class_name": class_name, "module": module, "config": config, "registered_name": registered_name}


HOSTILE = {
    "module path": (node("system", "os", command="touch"), "'os.system' is named by a module path"),
    "private keras path": (node("Lambda", "keras.src.layers.core.lambda_layer"), "Lambda"),
    "other package": (node("Thing", "keras_hub.src.models"), "named by a module path"),
    "unknown name": (node("Nobody", None, "mine>Nobody"), "nothing is registered with Keras as 'mine>Nobody'"),
    "path and name": (node("EncoderDecoder", "os", "mmattn>EncoderDecoder"), "module path 'os' beside"),
    "name of another": (node("Lambda", None, "mmattn>EncoderDecoder"), "not the registered class 'Lambda'"),
    "reads a file": (node("StringLookup", "keras.layers", vocabulary="/etc/passwd"), "'keras.layers.StringLookup'"),
    "saved model": (node("TFSMLayer", "keras.layers", filepath="/tmp/x"), "'keras.layers.TFSMLayer'"),
    "loads a model": (node("load_model", "keras.saving", filepath="/tmp/x"), "'keras.saving.load_model'"),
    "function": (
        {**node("function", "os"), "config": "system", "registered_name": "system"},
        "function 'system' of 'os'",
    ),
    "typespec": ({**node("__typespec__", "os"), "spec_name": "x"}, "carries"),
    "no name at all": ({"class_name": "Dense", "config": {}}, "an object needs"),
    "only a class name": (node("Lambda", None), "Lambda"),
    "compile note": ({**node("Dense", "keras.layers", units=3), "compile_config": {}}, "carries 'compile_config'"),
    "build note": ({**node("Dense", "keras.layers", units=3), "build_config": {}}, "carries 'build_config'"),
    "weights elsewhere": (
        node("EfficientNetLite", None, "mmattn>EfficientNetLite", weights="/tmp/x"),
        "weights from '/tmp/x'",
    ),
    "bare model": (node("Model", "keras", layers=[]), "not a functional model"),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("place", ["encoder", "activation", "deep"])
def test_a_name_that_reaches_foreign_code_is_refused_with_its_place(
    saved: Path, tmp_path: Path, case: str, place: str
) -> None:
    bad, message = HOSTILE[case]

    def edit(info: dict[str, Any]) -> None:
        config = info["model"]["config"]
        if place == "encoder":
            config["encoder"] = bad
        elif place == "activation":
            config["decoder"]["config"]["activation"] = bad
        else:
            config["decoder"]["config"]["activation"] = [0, {"any": {"where": bad}}]

    spot = {
        "encoder": r"model\.config\.encoder: ",
        "activation": r"model\.config\.decoder\.config\.activation: ",
        "deep": r"model\.config\.decoder\.config\.activation\[1\]\.any\.where: ",
    }[place]
    folder = forged(saved, tmp_path, edit)
    with pytest.raises(BundleError, match=rf"^bundle\.json: {spot}.*{message}"):
        load_bundle(folder)


def test_a_lambda_never_runs(saved: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    config = lambda_config(canary)
    for number, bad in enumerate([node("Lambda", "keras.layers", **config), config["function"]]):

        def edit(info: dict[str, Any], bad: Any = bad) -> None:
            info["model"]["config"]["encoder"] = bad

        with pytest.raises(BundleError, match=r"model\.config\.encoder.*(Lambda|object needs)"):
            load_bundle(forged(saved, tmp_path / str(number), edit))
    assert not canary.exists()
    layer = keras.saving.deserialize_keras_object(node("Lambda", "keras.layers", **config), safe_mode=False)
    layer(np.zeros((1, 2)))
    assert canary.exists()  # the attack itself works


def test_nothing_is_made_before_the_whole_configuration_is_checked(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(keras.saving, "deserialize_keras_object", lambda *a, **k: made.append(a))

    def edit(info: dict[str, Any]) -> None:
        info["model"]["config"]["decoder"]["config"]["zzz"] = node("system", "os")

    with pytest.raises(BundleError, match="zzz"):
        load_bundle(forged(saved, tmp_path, edit))
    assert made == []


def test_every_listed_keras_class_exists_and_opens_no_file() -> None:
    for module, name in safe_config.KERAS_CLASSES:
        owner = keras if module == "keras" else getattr(keras, module.removeprefix("keras."))
        assert isinstance(getattr(owner, name), type), (module, name)
    unsafe = {"Lambda", "TFSMLayer", "TorchModuleWrapper", "JaxLayer", "FlaxLayer", "StringLookup", "IntegerLookup"}
    assert not {name for _, name in safe_config.KERAS_CLASSES} & (unsafe | {"TextVectorization", "Layer", "Wrapper"})


def test_a_functional_backbone_passes_through_clean_and_check() -> None:
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, activation="relu")(inputs)
    x = keras.layers.Add()([x, keras.layers.ReLU(6.0)(x)])
    backbone = keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(x))
    config = json.loads(json.dumps(safe_config.clean(keras.saving.serialize_keras_object(backbone))))
    again = safe_config.build(config, (None, 8, 8, 3))
    again.set_weights(backbone.get_weights())
    pixels = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
    np.testing.assert_allclose(np.asarray(again(pixels)), np.asarray(backbone(pixels)), atol=1e-6)


def test_paths_of_unnamed_layers_are_the_same_in_every_process() -> None:
    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dense(3)(inputs)), name="m")
    config = safe_config.clean(keras.saving.serialize_keras_object(keras.Sequential([keras.layers.Dense(1)])))
    for layer in config["config"]["layers"]:
        del layer["config"]["name"]
    config["config"]["name"] = "sequential"
    paths = []
    for _ in range(2):
        built = safe_config.build(config, (None, 8))
        paths.append([v.path for v in built.weights])
        keras.layers.Dense(4)  # other work in the same process
    assert paths[0] == paths[1] == ["sequential/dense/kernel", "sequential/dense/bias"]
    assert keras.layers.Dense(4).name != model.layers[1].name  # and other work's names go on where they were


# Weights


def test_scales_cannot_blow_an_array_up() -> None:
    for shape in ((1, 2000), (3, 1), (1,), (2000, 1, 1)):
        arrays = {"w": np.ones((2000, 1), "int8"), "w@scale": np.ones(shape, "float32")}
        with pytest.raises(weights.WeightsError, match="do not fit its shape"):
            weights.unpack(arrays)


def test_a_header_that_no_parser_likes_is_refused() -> None:
    for header in (b"(", b"{'descr': '<f4', 'fortran_order': False, 'shape': (", b"\xff" * 9, b"-" * 9000, b"(" * 9000):
        raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("w.npy", raw)
        with pytest.raises(weights.WeightsError):
            weights.read_npz(buffer.getvalue(), {"w": {"shape": [2], "dtype": "float32"}})


def test_int8_picks_the_axis_that_loses_least() -> None:
    rng = np.random.default_rng(0)
    for axis in range(3):
        shape = [1, 1, 1]
        shape[axis] = 16
        array = (rng.normal(size=(16, 16, 16)) * np.exp(2 * rng.normal(size=shape))).astype("float32")
        packed = weights.pack({"w": array}, "int8")
        errors = []
        for keep in range(3):
            axes = tuple(a for a in range(3) if a != keep)
            scale = np.abs(array).max(axis=axes, keepdims=True) / 127
            errors.append(np.linalg.norm(np.rint(array / scale) * scale - array) / np.linalg.norm(array))
        assert packed.error <= min(errors) * (1 + 1e-5)
        np.testing.assert_allclose(weights.unpack(packed.arrays)["w"], array, atol=np.abs(array).max() / 200)


def test_vectors_integers_and_numbers_beyond_float16_are_kept_exactly() -> None:
    given = {
        "bias": np.array([1e-9, 3.0], "float32"),
        "count": np.array([[7, 8]], "int64"),
        "big": np.full((40, 40), 1e6, "float32"),
    }
    for dtype in ("float16", "int8"):
        back = weights.unpack(weights.pack(given, dtype).arrays)
        for name in ("bias", "count"):
            np.testing.assert_array_equal(back[name], given[name])
        np.testing.assert_allclose(back["big"], given["big"], rtol=1e-6)


def test_find_bundle_takes_folders_and_names_and_lists_what_there_is(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "SHIPPED", tmp_path)
    with pytest.raises(BundleError, match="No bundle of a captioner is shipped"):
        find_bundle()
    shutil.copytree(saved, tmp_path / "photos")
    shutil.copytree(saved, tmp_path / "shapes")
    assert find_bundle() == find_bundle("default") == tmp_path / "photos"
    assert find_bundle("shapes") == tmp_path / "shapes"
    assert find_bundle(saved) == saved
    with pytest.raises(BundleError, match=r"'dogs' is neither a folder nor a shipped bundle\. Shipped: photos, shapes"):
        find_bundle("dogs")
