"""Bundles of classifiers and masked language models; what they say, in Python and as commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from PIL import Image
from test_bundle_kinds import FOREIGN, forged
from tiny_text import ENGLISH, JOINT, language_model, masked_model

import mmattn
from mmattn.bundle import BundleError, describe, load_bundle, save_bundle, update_bundle
from mmattn.cli import main
from mmattn.encoders.image import VisionTransformer
from mmattn.encoders.text import TextEncoder
from mmattn.heads import EncoderClassifier
from mmattn.inference import Classifier, MaskFiller, SourceError
from mmattn.inference.filler import MASK
from mmattn.preprocess.image import ImageReader, ImageReadError
from mmattn.preprocess.text import Tokenizer

CLASSES = ["cat", "big dog", "emu"]
READER = ImageReader((16, 24), resize="pad")


def picture_model(seed: int = 5) -> EncoderClassifier:
    keras.utils.set_random_seed(seed)
    encoder = VisionTransformer((16, 24), patch_size=8, hidden_dim=8, num_layers=1, num_heads=2)
    model = EncoderClassifier(encoder, 3)
    model.build({"pixels": (None, 16, 24, 3)})
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One bundle of each of the two kinds, float32."""
    root = tmp_path_factory.mktemp("heads")
    exact: dict[str, Any] = {"weights_dtype": "float32"}
    save_bundle(root / "masked", masked_model(JOINT), JOINT, generation={"max_source_length": 20}, **exact)
    save_bundle(root / "classes", picture_model(), None, READER, classes=CLASSES, **exact)
    return {path.name: path for path in sorted(root.iterdir())}


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{number}.png" for number in range(5)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), "uint8")).save(path)
    return paths


# Bundles


def test_a_loaded_model_is_the_saved_one(folders: dict[str, Path], photos: list[Path]) -> None:
    for name, kind in (("masked", "masked_language_model"), ("classes", "classifier")):
        loaded = load_bundle(folders[name], check=True)
        assert loaded.kind == kind and f"{kind}, format 3" in describe(folders[name])
    assert loaded.classes == tuple(CLASSES) and loaded.tokenizer is None and loaded.reader == READER
    texts = [f"a red {MASK} left of", f"{MASK} dogs run"]
    before = MaskFiller(masked_model(JOINT), JOINT).fill(texts, nbest=3)
    for one, two in zip(before, mmattn.MaskFiller.load(folders["masked"]).fill(texts, nbest=3), strict=True):
        assert one.text == two.text
        assert [w for w, _ in one.masks[0]] == [w for w, _ in two.masks[0]]
    found = mmattn.Classifier.load(folders["classes"]).classify(photos, nbest=3)
    assert found == Classifier(picture_model(), READER, CLASSES).classify(photos, nbest=3)


def test_half_precision_and_int8_weights_load_too(tmp_path: Path) -> None:
    for dtype in ("float16", "int8"):
        save_bundle(tmp_path / dtype, masked_model(JOINT), JOINT, weights_dtype=dtype)
        assert load_bundle(tmp_path / dtype, check=True).info["weights"]["dtype"] == dtype


def test_cards_tell_how_the_bundle_is_used(folders: dict[str, Path], tmp_path: Path) -> None:
    facts = {
        "masked": (
            "mmattn fill",
            "MaskFiller.load",
            "more than 20 tokens is refused",
            f"{JOINT.vocabulary_size} tokens",
        ),
        "classes": ("mmattn classify photo.jpg", "Classifier.load", "3 classes: cat, big dog, emu", "16 x 24 pixels"),
    }
    for name, wanted in facts.items():
        card = (folders[name] / "README.md").read_text()
        assert all(fact in card for fact in wanted), card
    assert {path.name for path in folders["classes"].iterdir()} == {"README.md", "bundle.json", "weights.npz"}
    assert "classes     3: cat, big dog, emu" in describe(folders["classes"])
    assert "tokenizer" not in describe(folders["classes"])
    save_bundle(tmp_path / "b", picture_model(), None, READER, classes=CLASSES)
    update_bundle(tmp_path / "b", card={"scores": {"test": {"accuracy": 0.75}}})
    assert "0.75" in (tmp_path / "b" / "README.md").read_text()


def test_saving_refuses_parts_that_do_not_fit(tmp_path: Path) -> None:
    masked, classes = masked_model(JOINT), picture_model()
    small = Tokenizer.train(ENGLISH * 9, vocabulary_size=50, shrink=True)
    words = EncoderClassifier(TextEncoder(20, 8, 1, 2), 3)
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (
            masked,
            small,
            {},
            rf"the tokenizer and the mask have {small.vocabulary_size + 1} tokens, the model's encoder",
        ),
        (masked, None, {}, "a masked language model holds tokenizer: tokenizer is missing"),
        (masked, JOINT, {"classes": ["a"]}, "classes does not belong to it"),
        (classes, None, {"reader": READER}, "a classifier holds reader and classes: classes is missing"),
        (classes, None, {"reader": READER, "classes": ["a", "b"]}, "there are 2 classes, the model has 3"),
        (classes, JOINT, {"reader": READER, "classes": CLASSES}, "tokenizer does not belong to it"),
        (classes, None, {"classes": CLASSES}, "sees pictures: give the reader"),
        (words, None, {"classes": CLASSES}, "has no reader"),
        (language_model(JOINT), None, {}, "tokenizer is missing"),
        (masked, JOINT, {"generation": {"num_beams": 2}}, "num_beams is not known"),
    ]
    for model, tokenizer, options, message in cases:
        with pytest.raises(BundleError, match=message):
            save_bundle(tmp_path / "b", model, tokenizer, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("classes", lambda i: i.pop("classes"), "classes is missing or no list of names"),
        ("classes", lambda i: i.update(classes=[1, 2, 3]), "classes is missing or no list of names"),
        ("classes", lambda i: i.update(classes=["a", "a", "b"]), "classes names one twice"),
        ("classes", lambda i: i["classes"].append("more"), "there are 4 classes, the model has 3"),
        ("classes", lambda i: i["classes"].pop(), "check must be ids|there are 2 classes"),
        ("classes", lambda i: i.update(format_version=2), "kind='classifier' needs format version 3, and it has 2"),
        ("classes", lambda i: i.pop("reader"), "reader is missing"),
        ("classes", lambda i: i.update(kind="masked_language_model"), "tokenizer is missing"),
        ("masked", lambda i: i.update(kind="translator"), "num_beams|is not known|is missing"),
        ("masked", lambda i: i["generation"].update(max_source_length=1), "max_source_length=1 must be"),
        ("masked", lambda i: i["model"]["config"].update(activation=FOREIGN), r"'os\.system'"),
        ("masked", lambda i: i["check"]["ids"].pop(), "check must be ids"),
    ],
)  # fmt: skip
def test_each_wrong_entry_is_named(
    folders: dict[str, Path], tmp_path: Path, name: str, edit: Any, message: str
) -> None:
    with pytest.raises(BundleError, match=message):
        load_bundle(forged(folders[name], tmp_path, edit))


def test_the_check_finds_other_weights(folders: dict[str, Path]) -> None:
    for name, part in (("masked", "transform/kernel"), ("classes", "scores/kernel")):
        loaded = load_bundle(folders[name])
        kernel = next(v for v in loaded.model.weights if v.path.endswith(part))
        kernel.assign(kernel * 3.0 + 0.5)
        with pytest.raises(BundleError, match="log-probabilities differ"):
            loaded.check()


def test_each_class_opens_its_own_kind_alone(folders: dict[str, Path]) -> None:
    with pytest.raises(BundleError, match=r"a classifier, and a masked language model is needed\. mmattn\.Classifier"):
        MaskFiller.load(folders["classes"])
    with pytest.raises(BundleError, match=r"a classifier is needed\. mmattn\.MaskFiller\.load opens it"):
        Classifier.load(folders["masked"])
    with pytest.raises(BundleError, match="No bundle of a classifier is shipped"):
        Classifier.load()


# Filling in


def plain(text: str) -> np.ndarray:
    """Probabilities (M, V) at the masks of a sentence whose masks are words of their own, by one call of one row: the
    whole sentence is encoded with another word in their place, whose pieces a mask then replaces."""
    ids = JOINT.encode(text.replace(MASK, "dogs"))
    for word, places in reversed(JOINT.words(ids)):
        if word == "dogs":
            ids[places[0] : places[-1] + 1] = [JOINT.vocabulary_size]
    row = np.array([[*ids, 3]], "int32")
    logits = keras.ops.convert_to_numpy(masked_model(JOINT)({"source_ids": row}))[0].astype("float64")
    found = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (found / found.sum(axis=1, keepdims=True))[row[0] == JOINT.vocabulary_size][:, : JOINT.vocabulary_size]


def test_masks_get_the_likeliest_words() -> None:
    text = f"two {MASK} run on the {MASK}"
    [filling] = MaskFiller(masked_model(JOINT), JOINT).fill(text, nbest=4)
    begins = [i for i, piece in enumerate(JOINT.pieces(range(JOINT.vocabulary_size))) if i > 3 and piece[0] == "\u2581"]
    for row, found in zip(plain(text), filling.masks, strict=True):
        best = sorted(begins, key=lambda i, row=row: -row[i])[:4]
        assert [word for word, _ in found] == [JOINT.pieces([i])[0].strip("\u2581") for i in best]
        np.testing.assert_allclose([p for _, p in found], row[best], rtol=1e-4)
    first, second = (found[0][0] for found in filling.masks)
    assert filling.text == " ".join(f"two {first} run on the {second}".split())


def test_a_sentence_is_filled_in_whatever_its_batch() -> None:
    filler = MaskFiller(masked_model(JOINT), JOINT)
    texts = [f"the {MASK} eats", f"{MASK}", f"two {MASK} run on the {MASK}", f"a red circle left of a blue {MASK}"]
    steps: list[tuple[int, int]] = []
    together = filler.fill(texts, nbest=2, progress=lambda *step: steps.append(step), batch_size=3)
    assert steps == [(3, 4), (4, 4)]
    for text, found in zip(texts, together, strict=True):
        [alone] = filler.fill(text, nbest=2)
        assert alone.text == found.text
        for one, two in zip(alone.masks, found.masks, strict=True):
            np.testing.assert_allclose([p for _, p in one], [p for _, p in two], atol=1e-5)


def test_inside_a_word_only_pieces_that_begin_none_are_given() -> None:
    filler = MaskFiller(masked_model(JOINT), JOINT)
    pieces = JOINT.pieces(range(JOINT.vocabulary_size))
    [inside] = filler.fill(f"the bo{MASK} eats", nbest=5)
    assert all(word in pieces for word, _ in inside.masks[0])
    assert inside.text.startswith("the bo" + inside.masks[0][0][0])
    chars = Tokenizer.train(["ab"] * 3, model_type="char")
    [filling] = MaskFiller(masked_model(chars), chars).fill(f"a{MASK}", nbest=9)
    assert {word for word, _ in filling.masks[0]} == {"a", "b"}


@pytest.mark.parametrize(("kind", "more"), [("bpe", {}), ("bpe", {"byte_fallback": True}), ("unigram", {})])
def test_text_that_adjoins_a_mask_goes_on_with_its_word(kind: Any, more: dict[str, Any]) -> None:
    size = 340 if more else 60
    joint = Tokenizer.train(["sing ring ing", "ring king ing ing"] * 9, size, kind, shrink=True, **more)
    assert joint.pieces(joint.encode("ing")) == ["\u2581ing"]
    filler = MaskFiller(masked_model(joint), joint)

    def pieces(text: str) -> list[str]:
        ids, _ = filler._read(text, 1, 99)
        return [joint.pieces([i])[0] if i < filler.mask_id else MASK for i in ids[:-1]]

    assert "".join(pieces(f"{MASK}ing king")) == f"{MASK}ing▁king"
    assert "".join(pieces(f"{MASK} ing")) == f"{MASK}▁ing"
    assert "".join(pieces(f"a{MASK}{MASK}")).endswith(f"{MASK}{MASK}")
    unknown = pieces(f"{MASK}éing")
    assert unknown[1] == ("<0xC3>" if more else "<unk>") and unknown[-1].endswith("g")
    assert pieces(f"{MASK}é")[1:] == (["<0xC3>", "<0xA9>"] if more else ["<unk>"])
    assert filler.fill(f"k{MASK}g")[0].text.startswith("k")


def test_a_sign_that_is_a_blank_to_the_tokenizer_ends_a_word() -> None:
    joint = Tokenizer.train(["sing, ring", "ring king"] * 9, 40, normalization="caption", shrink=True)
    filler = MaskFiller(masked_model(joint), joint)
    for one, two in ((f"{MASK}, king", f"{MASK} king"), (f"king,{MASK}", f"king {MASK}"), (f"{MASK}, {MASK}",) * 2):
        assert filler._read(one, 1, 99) == filler._read(two, 1, 99)
    assert filler._read(f"{MASK},{MASK}", 1, 99)[1] == [True, True]


def test_any_character_but_the_blank_can_begin_a_word() -> None:
    chars = Tokenizer.train(["ab ba"] * 3, model_type="char")
    filler = MaskFiller(masked_model(chars), chars)
    for text in (f"{MASK}b", f"a {MASK}", f"a{MASK}"):
        [filling] = filler.fill(text, nbest=9)
        assert {word for word, _ in filling.masks[0]} == {"a", "b"}


def test_sentences_that_cannot_be_filled_in_are_named() -> None:
    filler = MaskFiller(masked_model(JOINT), JOINT, {"max_source_length": 6})
    texts = [f"a {MASK}", "a dog", f"{'a ' * 9}{MASK}"]
    first, second, third = filler.fill(texts, on_error="return")
    assert first.text.startswith("a") and isinstance(second, SourceError) and second.number == 2
    assert "tokens with the end token, and 6 are allowed" in str(third)
    with pytest.raises(SourceError, match=r"text 2: it has no \[MASK\]"):
        filler.fill(texts)
    for options, message in (
        ({"nbest": 0}, "nbest=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"on_error": "skip"}, "on_error='skip'"),
        ({"beams": 3}, "beams is not known"),
    ):
        with pytest.raises(ValueError, match=message):
            filler.fill(texts[0], **options)


def test_useless_weights_are_told_and_not_shown(photos: list[Path]) -> None:
    masked, classes = masked_model(JOINT), picture_model()
    for model in (masked, classes):
        model.weights[-1].assign(model.weights[-1] * np.nan)
    with pytest.raises(FloatingPointError, match="NaN"):
        MaskFiller(masked, JOINT).fill(f"a {MASK}")
    with pytest.raises(FloatingPointError, match="NaN"):
        Classifier(classes, READER, CLASSES).classify(photos)


# Classifying


def test_classes_are_the_models_own_whatever_the_batch(photos: list[Path]) -> None:
    classifier = Classifier(picture_model(), READER, CLASSES)
    pixels = np.stack([READER(photo) for photo in photos])
    logits = keras.ops.convert_to_numpy(classifier.model({"pixels": pixels})).astype("float64")
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    steps: list[tuple[int, int]] = []
    found = classifier.classify(photos, nbest=9, batch_size=2, progress=lambda *step: steps.append(step))
    assert steps == [(2, 5), (4, 5), (5, 5)]
    for row, one in zip(expected, found, strict=True):
        order = np.argsort(-row)
        ranked = [(one.label, one.probability), *one.alternatives]
        assert [label for label, _ in ranked] == [CLASSES[place] for place in order]
        np.testing.assert_allclose([p for _, p in ranked], row[order], rtol=1e-4)
    assert classifier.classify(photos[0])[0].alternatives == ()


def test_a_photo_that_cannot_be_read_is_raised_or_returned(photos: list[Path]) -> None:
    classifier = Classifier(picture_model(), READER, CLASSES)
    photos[1].write_bytes(b"no photo")
    found = classifier.classify(photos, on_error="return", batch_size=2)
    assert [isinstance(entry, ImageReadError) for entry in found] == [False, True, False, False, False]
    with pytest.raises(ImageReadError):
        classifier.classify(photos)
    with pytest.raises(ValueError, match="nbest=0"):
        classifier.classify(photos, nbest=0)


# The commands


def test_fill_writes_sentences_words_or_json(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    text, bundle = f"two {MASK} run", ["--bundle", str(folders["masked"])]
    [filling] = MaskFiller.load(folders["masked"]).fill(text, nbest=2)
    assert main(["fill", text, f"{MASK} dogs", *bundle]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == filling.text and len(out) == 2
    assert main(["fill", text, *bundle, "--nbest", "2"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert rows == [["1", "1", word, f"{p:.4f}"] for word, p in filling.masks[0]]
    assert main(["fill", text, "no mask", *bundle, "--json"]) == 1
    shown = capsys.readouterr()
    one, two = map(json.loads, shown.out.splitlines())
    assert one["text"] == filling.text and one["masks"][0][0]["word"] == filling.masks[0][0][0]
    assert two == {"sentence": "no mask", "error": "it has no [MASK]"}
    assert "mmattn: sentence 2: it has no [MASK]" in shown.err


def test_classify_writes_a_line_a_photo_or_json(
    folders: dict[str, Path], photos: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = ["--bundle", str(folders["classes"])]
    found = Classifier.load(folders["classes"]).classify(photos, nbest=2)
    assert main(["classify", str(tmp_path), *bundle]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{p}\t{one.label}\t{one.probability:.4f}" for p, one in zip(photos, found, strict=True)]
    (tmp_path / "bad.jpg").write_bytes(b"no photo")
    assert main(["classify", str(photos[0]), str(tmp_path / "bad.jpg"), *bundle, "--json", "--nbest", "2"]) == 1
    shown = capsys.readouterr()
    one, bad = map(json.loads, shown.out.splitlines())
    assert one["label"] == found[0].label and len(one["alternatives"]) == 1
    assert bad["image"].endswith("bad.jpg") and bad["error"] and "bad.jpg" in shown.err
    assert main(["classify", str(photos[0]), *bundle, "--nbest", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_commands_name_the_command_of_another_bundle(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["classify", "x.jpg", "--bundle", str(folders["masked"])]) == 2
    assert "Its command is: mmattn fill" in capsys.readouterr().err
    assert main(["fill", MASK, "--bundle", str(folders["classes"])]) == 2
    assert "Its command is: mmattn classify" in capsys.readouterr().err
    assert main(["classify", "x.jpg"]) == 1
    assert "No bundle of a classifier is shipped" in capsys.readouterr().err
    assert main(["info", str(folders["classes"]), "--check"]) == 0
    assert "big dog" in capsys.readouterr().out
    assert main(["fill", "\udcff", "--bundle", str(folders["masked"])]) == 2
