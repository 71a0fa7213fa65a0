"""Bundles of translators and language models: saved, loaded, described and refused like a captioner's."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tiny_text import ENGLISH, GERMAN, JOINT, SOURCE, TARGET, language_model, translation_model

from mmattn import bundle, bundle_files
from mmattn.bundle import BundleError, describe, find_bundle, load_bundle, save_bundle, update_bundle
from mmattn.bundle_kinds import KINDS
from mmattn.decoders import TransformerDecoder
from mmattn.encoders.image import VisionTransformer
from mmattn.inference import Captioner, Translator, Writer
from mmattn.model import EncoderDecoder
from mmattn.preprocess.text import Tokenizer

CARD = {"source_language": "English", "target_language": "German", "terms": "none"}
QUICK: dict[str, Any] = {"max_length": 6, "compiled": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One bundle of each kind, float32; the translators also with one vocabulary."""
    root = tmp_path_factory.mktemp("kinds")
    exact = {"weights_dtype": "float32"}
    save_bundle(root / "joint", translation_model(JOINT, JOINT), JOINT, card=CARD, **exact)
    separate = translation_model(SOURCE, TARGET)
    save_bundle(root / "separate", separate, TARGET, None, {"num_beams": 2}, CARD, source_tokenizer=SOURCE, **exact)
    save_bundle(root / "writing", language_model(JOINT), JOINT, generation={"context_length": 8}, **exact)
    return {path.name: path for path in sorted(root.iterdir())}


def forged(folder: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], Any], **files: bytes) -> Path:
    """A copy whose bundle.json and files were edited, with all fingerprints made to fit again, as an attacker would."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True))
    info = json.loads((copy / "bundle.json").read_text())
    for name, data in files.items():
        (copy / f"{name}.model").write_bytes(data)
        info["files"][f"{name}.model"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit(info)
    info["digest"] = bundle_files._digest(info)
    (copy / "bundle.json").write_text(json.dumps(info))
    return copy


@pytest.mark.parametrize("name", ["joint", "separate"])
def test_a_loaded_translator_says_what_the_saved_one_said(folders: dict[str, Path], name: str) -> None:
    source, target = (JOINT, JOINT) if name == "joint" else (SOURCE, TARGET)
    before = Translator(translation_model(source, target), target, source, {"num_beams": 2})
    loaded = load_bundle(folders[name], check=True)
    assert (loaded.kind, loaded.reader) == ("translator", None)
    assert (loaded.source_tokenizer is None) == (name == "joint")
    keras.utils.clear_session()
    after = Translator.load(folders[name])
    assert after.generation == {**KINDS["translator"].generation, "num_beams": 2 if name == "separate" else 5}
    assert after.source_tokenizer.model_bytes == source.model_bytes
    lines = [*ENGLISH, ""]
    for a, b in zip(after.translate(lines, num_beams=2, **QUICK), before.translate(lines, **QUICK), strict=True):
        assert (a.text, a.ids) == (b.text, b.ids)
        assert a.score == pytest.approx(b.score, abs=1e-5)


def test_a_loaded_writer_writes_what_the_saved_one_wrote(folders: dict[str, Path]) -> None:
    before = Writer(language_model(JOINT), JOINT, {"context_length": 8})
    after = Writer.load(folders["writing"])
    assert load_bundle(folders["writing"]).kind == "language_model"
    settings: dict[str, Any] = {"seed": 5, "count": 2, "max_length": 12, "compiled": False}
    assert after.write("two", **settings) == before.write("two", **settings)


@pytest.mark.slow
def test_a_fresh_process_translates_alike(folders: dict[str, Path]) -> None:
    code = (
        "import sys, mmattn; t = mmattn.Translator.load(sys.argv[1]);"
        "print(t.translate(sys.argv[2], max_length=6, compiled=False)[0].ids)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folders["joint"]), ENGLISH[0]],
        cwd=Path(bundle.__file__).parents[1],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr
    [here] = Translator.load(folders["joint"]).translate(ENGLISH[0], **QUICK)
    assert done.stdout.strip() == str(here.ids)


def test_the_check_fails_for_another_encoder_or_source_vocabulary(folders: dict[str, Path]) -> None:
    for name, layer in (("separate", "text_encoder"), ("writing", "transformer_decoder")):
        loaded = load_bundle(folders[name])
        assert loaded.check() < 1e-4
        kernel = next(v for v in loaded.model.weights if layer in v.path and v.path.endswith("outer/kernel"))
        kernel.assign(kernel * 3.0)
        with pytest.raises(BundleError, match="log-probabilities differ"):
            loaded.check()


def test_files_and_cards_tell_the_kind_and_how_it_is_used(folders: dict[str, Path]) -> None:
    assert {p.name for p in folders["joint"].iterdir()} == {
        "README.md",
        "bundle.json",
        "tokenizer.model",
        "weights.npz",
    }
    assert (folders["separate"] / "source_tokenizer.model").read_bytes() == SOURCE.model_bytes
    facts = {
        "joint": ("From English to German.", "mmattn translate", "Translator.load", "for both languages", "5 beams"),
        "separate": (f"source has {SOURCE.vocabulary_size} tokens", f"target {TARGET.vocabulary_size} tokens", "bpe"),
        "writing": ("mmattn generate", "Writer.load", "temperature 1.0", "looks back on 8 tokens"),
    }
    for name, folder in folders.items():
        card, text = (folder / "README.md").read_text(), describe(folder)
        assert all(fact in card for fact in facts[name]), card
        assert card.count("English") == (name != "writing")
        kind = load_bundle(folder).kind
        assert f"{kind}, format 2" in text
        assert ("English -> German" in text) == (kind == "translator")
    assert "TextEncoder -> TransformerDecoder" in describe(folders["joint"])
    assert f"{SOURCE.vocabulary_size} tokens" in describe(folders["separate"])


def test_each_class_opens_its_own_kind_alone(folders: dict[str, Path]) -> None:
    with pytest.raises(
        BundleError, match=r"this is the bundle of a translator, and a captioner is needed\. mmattn\.Tr"
    ):
        Captioner.load(folders["joint"])
    with pytest.raises(BundleError, match=r"a translator is needed\. mmattn\.Writer\.load opens it"):
        Translator.load(folders["writing"])
    with pytest.raises(BundleError, match=r"a language model is needed\. mmattn\.Captioner\.load opens it"):
        Writer.load("flickr8k_lite0")


def test_the_default_is_the_shipped_bundle_of_its_kind(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "SHIPPED", tmp_path)
    for name in ("joint", "writing"):
        shutil.copytree(folders[name], tmp_path / name)
    assert find_bundle(None, "language_model") == tmp_path / "writing"
    assert find_bundle("default", "translator") == tmp_path / "joint"
    with pytest.raises(BundleError, match="No bundle of a captioner is shipped"):
        find_bundle()


def test_update_checks_the_settings_of_the_kind(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["separate"], tmp_path / "copy"))
    update_bundle(folder, {"max_source_length": 40}, {"scores": {"test": {"bleu": 41.0}}})
    loaded = load_bundle(folder, check=True)
    assert (loaded.generation["max_source_length"], loaded.generation["num_beams"]) == (40, 2)
    assert "41" in (folder / "README.md").read_text()
    with pytest.raises(BundleError, match="low_confidence is not known"):
        update_bundle(folder, {"low_confidence": 0.5})


def test_saving_refuses_parts_that_do_not_fit(tmp_path: Path) -> None:
    translating, writing = translation_model(SOURCE, TARGET), language_model(JOINT)
    image = VisionTransformer((16, 16), patch_size=16, hidden_dim=16, num_layers=1, num_heads=2)
    seeing = EncoderDecoder(image, TransformerDecoder(JOINT.vocabulary_size, 16, 1, 2))
    cases: list[tuple[Any, Tokenizer, dict[str, Any], str]] = [
        (translating, TARGET, {}, rf"the tokenizer has {TARGET.vocabulary_size} tokens, the model's encoder"),
        (translating, TARGET, {"source_tokenizer": JOINT}, r"the source tokenizer has .* the model's encoder"),
        (translating, SOURCE, {"source_tokenizer": SOURCE}, r"the tokenizer has .* the model's decoder"),
        (writing, JOINT, {"source_tokenizer": SOURCE}, "belongs to a translator, and these parts make a language mod"),
        (writing, JOINT, {"generation": {"num_beams": 3}}, "num_beams is not known"),
        (translating, TARGET, {"extra_files": {"source_tokenizer.model": "x"}}, "writes this file itself"),
        (seeing, JOINT, {}, "sees pictures: give the reader"),
    ]
    for model, tokenizer, options, message in cases:
        with pytest.raises(BundleError, match=message):
            save_bundle(tmp_path / "b", model, tokenizer, **options)
    assert list(tmp_path.iterdir()) == []


def test_the_same_tokenizer_twice_is_one_vocabulary(tmp_path: Path) -> None:
    again = Tokenizer(JOINT.model_bytes)
    saved = save_bundle(tmp_path / "b", translation_model(JOINT, JOINT), JOINT, source_tokenizer=again)
    assert saved.source_tokenizer is None
    assert not (tmp_path / "b" / "source_tokenizer.model").exists()


# Damage and malice


def test_every_file_of_a_translator_is_missed_and_its_changes_are_named(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    for path in sorted(folders["separate"].iterdir()):
        data = path.read_bytes()
        middle = bytearray(data)
        middle[len(data) // 2] ^= 4
        for number, changed in enumerate([None, bytes(middle), data[:-3]]):
            folder = Path(shutil.copytree(folders["separate"], tmp_path / f"{path.name}-{number}"))
            (folder / path.name).unlink()
            if changed is not None:
                (folder / path.name).write_bytes(changed)
            with pytest.raises(BundleError, match=rf"^{path.name}: "):
                Translator.load(folder)


FOREIGN = {"class_name": "system", "module": "os", "config": {}, "registered_name": None}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda i: i["model"]["config"].update(encoder=FOREIGN), r"model\.config\.encoder: 'os\.system' is named by"),
        (lambda i: i["model"]["config"]["decoder"]["config"].update(activation=FOREIGN), r"decoder.*'os\.system'"),
        (lambda i: i.update(format_version=1), "kind='translator' needs format version 2, and it has 1"),
        (lambda i: i["source_tokenizer"].update(vocabulary_size="9"), r"source_tokenizer\.vocabulary_size is missing"),
        (lambda i: i.update(source_tokenizer=7), r"source_tokenizer\.vocabulary_size is missing"),
        (lambda i: i["source_tokenizer"].update(vocabulary_size=9), r"^source_tokenizer\.model: it has .* not the 9"),
        (lambda i: i["files"].pop("source_tokenizer.model"), r"files lists no source_tokenizer\.model"),
        (lambda i: i.pop("source_tokenizer"), "the tokenizer has .* the model's encoder"),
        (lambda i: i["generation"].update(max_source_length=10**9), "max_source_length=1000000000 must be"),
        (lambda i: i["generation"].update(length_factor=float(10**300)), "length_factor=.* must be a number from"),
        (lambda i: i["generation"].pop("length_offset"), "length_offset is missing"),
        (lambda i: i["generation"].update(method="sample"), r"method='sample' is not known\. Known: beam, greedy"),
        (lambda i: i.update(kind="language_model"), "source_tokenizer belongs to a translator"),
        (lambda i: i.update(kind="captioner", tokenizer=i.pop("source_tokenizer")), "reader is missing"),
        (lambda i: i["model"]["config"]["encoder"]["config"].update(hidden_dim=64), "its variables hold|refuse"),
    ],
)
def test_each_wrong_entry_of_a_translator_is_named(
    folders: dict[str, Path], tmp_path: Path, edit: Any, message: str
) -> None:
    folder = forged(folders["separate"], tmp_path, edit)
    with pytest.raises(BundleError, match=message):
        Translator.load(folder)


def test_another_source_tokenizer_is_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    other = Tokenizer.train(GERMAN * 9, vocabulary_size=40, shrink=True)
    for data in (other.model_bytes, b"", b"no model", SOURCE.model_bytes[:200]):
        folder = forged(folders["separate"], tmp_path, lambda info: None, source_tokenizer=data)
        with pytest.raises(BundleError, match=r"^source_tokenizer\.model: "):
            Translator.load(folder)


def test_a_text_model_of_another_shape_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with np.load(folders["writing"] / "weights.npz") as file:
        assert any("output_bias" in name for name in file.files)

    def edit(info: dict[str, Any]) -> None:
        info["model"]["config"]["decoder"]["config"].update(cross_attention=True)

    with pytest.raises(BundleError, match=r"bundle\.json: model|weights\.npz: "):
        Writer.load(forged(folders["writing"], tmp_path, edit))


def test_a_bundle_of_before_patience_searches_as_it_did(folders: dict[str, Path], tmp_path: Path) -> None:
    assert load_bundle(folders["joint"]).generation["patience"] == 2.0
    old = forged(folders["joint"], tmp_path, lambda info: info["generation"].pop("patience"))
    assert load_bundle(old).generation == {**KINDS["translator"].generation, "patience": 0.0}
