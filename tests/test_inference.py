"""The captioner: every kind of input, the same caption whatever the batch, and attention that lies where it should."""

from __future__ import annotations

import io
import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from PIL import Image

from mmattn.bundle import save_bundle
from mmattn.decoders import TransformerDecoder
from mmattn.encoders.image import VisionTransformer
from mmattn.inference import Attention, Caption, Captioner
from mmattn.model import EncoderDecoder
from mmattn.preprocess.image import ImageReader, ImageReadError
from mmattn.preprocess.text import Tokenizer

TOKENIZER = Tokenizer.train(
    ["a red circle left of a blue square", "two dogs run on the beach"] * 9, vocabulary_size=60, shrink=True
)
EAGER = {"compiled": False, "max_length": 6}


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    keras.utils.set_random_seed(1)
    encoder = VisionTransformer((32, 48), patch_size=16, hidden_dim=32, num_layers=1, num_heads=2)
    decoder = TransformerDecoder(TOKENIZER.vocabulary_size, hidden_dim=32, num_layers=2, num_heads=2)
    model = EncoderDecoder(encoder, decoder)
    model({"pixels": np.zeros((1, 32, 48, 3), "uint8"), "target_ids": np.array([[2, 5]])})
    for v in model.weights:  # larger weights, so that the captions depend on the photo
        if v.path.endswith("kernel"):
            v.assign(v * 2.0)
    return Captioner(model, TOKENIZER, ImageReader((32, 48)), {"num_beams": 3, "min_length": 2})


@pytest.fixture(scope="module")
def photos() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [np.kron(rng.integers(0, 256, (4, 5, 3)), np.ones((8 + i, 9, 1))).astype("uint8") for i in range(3)]


def same(a: Caption, b: Caption) -> None:
    assert a.ids == b.ids
    assert a.text == b.text
    assert a.score == pytest.approx(b.score, abs=1e-4)


def test_path_bytes_pil_and_array_of_one_photo_give_one_caption(
    captioner: Captioner, photos: list[np.ndarray], tmp_path: Path
) -> None:
    image = Image.fromarray(photos[0])
    path = tmp_path / "photo.png"
    image.save(path)
    forms: list[Any] = [path, str(path), path.read_bytes(), image, photos[0]]
    captions = captioner.caption(forms, **EAGER)
    for caption in captions[1:]:
        same(caption, captions[0])
    for form in forms:
        single = captioner.caption(form, **EAGER)
        assert len(single) == 1
        same(single[0], captions[0])


def test_a_caption_does_not_depend_on_its_batch(captioner: Captioner, photos: list[np.ndarray]) -> None:
    alone = [captioner.caption(photo, **EAGER)[0] for photo in photos]
    assert len({c.ids for c in alone}) > 1
    for batch_size in (2, 3):
        for a, b in zip(captioner.caption(photos, batch_size=batch_size, **EAGER), alone, strict=True):
            same(a, b)


def test_a_batch_of_arrays_is_a_list_of_photos(captioner: Captioner, photos: list[np.ndarray]) -> None:
    stack = np.stack([photos[0], photos[0][::-1]])
    for a, b in zip(captioner.caption(stack, **EAGER), captioner.caption(list(stack), **EAGER), strict=True):
        same(a, b)
    assert captioner.caption([], **EAGER) == []
    with pytest.raises(TypeError, match="not int"):
        captioner.caption(7)


def test_confidence_is_the_geometric_mean_of_the_token_probabilities(
    captioner: Captioner, photos: list[np.ndarray]
) -> None:
    """Compared with one full pass over the caption, not with the search."""
    for beams in (1, 3):
        caption = captioner.caption(photos[1], num_beams=beams, **EAGER)[0]
        tokens = [*caption.ids, 3][:6]
        inputs = {
            "pixels": captioner.reader(photos[1])[None],
            "target_ids": np.array([[2, *tokens[:-1]]], "int32"),
        }
        logits = keras.ops.convert_to_numpy(captioner.model(inputs))[0].astype("float64")
        probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        chosen = probabilities[np.arange(len(tokens)), tokens]
        assert caption.confidence == pytest.approx(np.prod(chosen) ** (1 / len(tokens)), rel=1e-3)
        alpha = captioner.generation["length_penalty"]
        expected = np.log(chosen).sum() / ((5 + len(tokens)) / 6) ** alpha
        assert caption.score == pytest.approx(expected, abs=1e-3)


def test_low_confidence_is_below_the_threshold(captioner: Captioner, photos: list[np.ndarray]) -> None:
    confidence = captioner.caption(photos[0], **EAGER)[0].confidence
    above, below = min(1.0, confidence + 1e-3), confidence - 1e-3
    assert captioner.caption(photos[0], low_confidence=above, **EAGER)[0].low_confidence
    assert not captioner.caption(photos[0], low_confidence=below, **EAGER)[0].low_confidence


def test_nbest_gives_further_captions_best_first(captioner: Captioner, photos: list[np.ndarray]) -> None:
    best = captioner.caption(photos[0], nbest=5, **EAGER)[0]
    scores = [best.score, *(c.score for c in best.alternatives)]
    assert len(scores) == 5
    assert scores == sorted(scores, reverse=True)
    assert len({best.ids, *(c.ids for c in best.alternatives)}) == 5
    assert all(c.alternatives == () for c in best.alternatives)
    same(captioner.caption(photos[0], num_beams=5, **EAGER)[0], best)
    assert str(best) == best.text
    with pytest.raises(ValueError, match=r"nbest=4 captions need at least as many beams; there are 2"):
        captioner.caption(photos[0], nbest=4, num_beams=2)
    with pytest.raises(ValueError, match="there are 1"):
        captioner.caption(photos[0], nbest=2, method="greedy")


def test_settings_that_do_not_exist_or_fit_are_refused(captioner: Captioner, photos: list[np.ndarray]) -> None:
    for bad, message in [
        ({"beams": 3}, "beams is not known. Known: method, num_beams"),
        ({"max_length": 0}, "max_length=0 must be a whole number from 1"),
        ({"num_beams": 61, "nbest": 61}, "num_beams=61 exceeds the"),
        ({"min_length": 9, "max_length": 5}, "min_length=9 tokens and the end token do not fit into max_length=5"),
        ({"nbest": 0}, "nbest=0 must be at least 1"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"on_error": "skip"}, "on_error='skip' is not known"),
    ]:
        with pytest.raises(ValueError, match=message):
            captioner.caption(photos[0], **bad)


def test_another_length_needs_no_new_program(photos: list[np.ndarray], captioner: Captioner) -> None:
    fresh = Captioner(captioner.model, TOKENIZER, captioner.reader)
    fresh.caption(photos[0], max_length=6, compiled="step")
    traces = fresh.generator.traces()
    fresh.caption(photos[0], max_length=9, compiled="step")
    assert fresh.generator.traces() == traces


def test_defaults_fit_a_model_of_limited_length(photos: list[np.ndarray], captioner: Captioner) -> None:
    sizes = {"hidden_dim": 32, "num_layers": 1, "num_heads": 2}
    decoder = TransformerDecoder(TOKENIZER.vocabulary_size, positions="learned", max_length=7, **sizes)
    model = EncoderDecoder(captioner.model.encoder, decoder)
    model({"pixels": np.zeros((1, 32, 48, 3), "uint8"), "target_ids": np.array([[2, 5]])})
    short = Captioner(model, TOKENIZER, captioner.reader)
    assert short.generation["max_length"] == 7
    assert len(short.caption(photos[0], compiled=False)[0].ids) <= 7
    with pytest.raises(ValueError, match="max_length=8 exceeds the model's longest sequence, 7"):
        Captioner(short.model, TOKENIZER, captioner.reader, {"max_length": 8})


def test_unreadable_photos_keep_their_place_or_stop_the_work(
    captioner: Captioner, photos: list[np.ndarray], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"\xff\xd8\xff no photo")
    seen: list[tuple[int, int]] = []
    mixed = [bad, photos[0], bad, bad, photos[1]]
    results = captioner.caption(mixed, on_error="return", batch_size=2, progress=lambda *p: seen.append(p), **EAGER)
    assert [isinstance(r, ImageReadError) for r in results] == [True, False, True, True, False]
    assert results[0].name == str(bad)
    same(results[4], captioner.caption(photos[1], **EAGER)[0])
    assert seen == [(2, 5), (4, 5), (5, 5)]
    with pytest.raises(ImageReadError, match=r"bad\.jpg"):
        captioner.caption(mixed, **EAGER)


def test_a_loaded_captioner_says_what_the_saved_one_said(
    captioner: Captioner, photos: list[np.ndarray], tmp_path: Path
) -> None:
    save_bundle(
        tmp_path / "b", captioner.model, TOKENIZER, captioner.reader, captioner.generation, weights_dtype="float32"
    )
    loaded = Captioner.load(tmp_path / "b")
    assert loaded.generation == captioner.generation
    for a, b in zip(loaded.caption(photos, **EAGER), captioner.caption(photos, **EAGER), strict=True):
        same(a, b)


# Attention


def test_attention_is_the_last_layers_mean_over_heads_and_pieces(
    captioner: Captioner, photos: list[np.ndarray]
) -> None:
    photo = photos[2]
    caption = captioner.caption(photo, **EAGER)[0]
    found = captioner.attention(photo, caption)
    ids = list(caption.ids)
    inputs = {
        "pixels": captioner.reader(photo)[None],
        "target_ids": np.array([[2, *ids, 3]], "int32"),  # longer than what attention() feeds
    }
    scores = keras.ops.convert_to_numpy(captioner.model.attention(inputs))  # (1, N, H, T, S)
    expected = []
    for _, places in TOKENIZER.words(ids):
        total = np.zeros(6)
        for place in places:
            for head in range(2):
                total += scores[0, 1, head, place]
        expected.append((total / total.sum()).reshape(2, 3))
    np.testing.assert_allclose(found.weights, expected, atol=1e-5)
    np.testing.assert_allclose(found.weights.sum(axis=(1, 2)), 1.0, atol=1e-5)
    assert found.size == (45, 40)
    assert found.box == (0.0, 0.0, 45.0, 40.0)


class Looker:
    """A stand-in model: token t of layer l and head h looks at patch (t + 10 l + 100 h) % 12 alone."""

    encoder = types.SimpleNamespace(grid=(3, 4), name="stub")
    start = step = staticmethod(lambda *_: (None, None))

    def attention(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        length = inputs["target_ids"].shape[1]
        scores = np.zeros((1, 2, 3, length, 13), "float32")  # one more place than patches: a class token
        for layer in range(2):
            for head in range(3):
                for t in range(length):
                    scores[0, layer, head, t, (t + 10 * layer + 100 * head) % 12] = 0.5
        scores[..., 12] = 0.5
        return scores


def caption_of(text: str) -> Caption:
    return Caption(text, 0.0, 1.0, False, tuple(TOKENIZER.encode(text)))


@pytest.mark.parametrize(("layer", "head"), [(-1, 0), (0, 1), (1, 2)])
def test_each_word_gets_the_rows_that_predict_its_pieces(layer: int, head: int) -> None:
    looker = Captioner(Looker(), TOKENIZER, ImageReader((30, 40)))
    caption = caption_of("two red dogs")
    found = looker.attention(np.zeros((60, 80, 3), "uint8"), caption, layer=layer, head=head)
    assert found.words == ("two", "red", "dogs")
    np.testing.assert_allclose(found.weights.sum(axis=(1, 2)), 1.0, atol=1e-6)
    for word, (_, places) in zip(found.weights, TOKENIZER.words(caption.ids), strict=True):
        cells = {(t + 10 * (layer % 2) + 100 * head) % 12 for t in places}
        assert {int(i) for i in np.flatnonzero(word)} == cells
        assert word.max() == pytest.approx(1 / len(cells))
    mean = looker.attention(np.zeros((60, 80, 3), "uint8"), caption, layer=None, head=None)
    assert np.count_nonzero(mean.weights[0]) > len(cells)
    with pytest.raises(ValueError, match="layer=2 doesn't exist: there are 2"):
        looker.attention(np.zeros((60, 80, 3), "uint8"), caption, layer=2)


@pytest.mark.parametrize(
    ("resize", "box"),
    [
        ("squash", (0, 0, 400, 100)),
        ("pad", (0, -100, 400, 200)),  # the model's input is 4:3
        ("crop", (400 / 3, 0, 800 / 3, 100)),
    ],
)
def test_the_box_is_the_models_input_on_the_photo(resize: str, box: tuple[float, ...]) -> None:
    looker = Captioner(Looker(), TOKENIZER, ImageReader((30, 40), resize=resize))
    found: Attention = looker.attention(np.zeros((100, 400, 3), "uint8"), caption_of("two dogs"))
    assert found.size == (400, 100)
    np.testing.assert_allclose(found.box, box, atol=0.5)


def test_attention_refers_to_the_upright_photo(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 20), "red")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    looker = Captioner(Looker(), TOKENIZER, ImageReader((30, 40)))
    assert looker.attention(buffer.getvalue(), caption_of("a dog")).size == (20, 40)


def test_an_empty_caption_has_no_words(tmp_path: Path) -> None:
    looker = Captioner(Looker(), TOKENIZER, ImageReader((30, 40)))
    found = looker.attention(np.zeros((60, 80, 3), "uint8"), Caption("", 0.0, 1.0, True, ()))
    assert found.words == ()
    assert found.weights.shape == (0, 3, 4)
    looker.save_attention(np.zeros((60, 80, 3), "uint8"), tmp_path / "a.png", found.caption)


def test_save_attention_writes_one_picture_or_none(
    captioner: Captioner, photos: list[np.ndarray], tmp_path: Path
) -> None:
    caption = captioner.caption(photos[0], **EAGER)[0]
    captioner.save_attention(photos[0], tmp_path / "sheet.png", caption)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.format == "PNG"
        assert sheet.width > 200
    with pytest.raises(ImageReadError):
        captioner.save_attention(b"no photo", tmp_path / "other.png")
    with pytest.raises(FileNotFoundError):
        captioner.save_attention(photos[0], tmp_path / "missing" / "sheet.png", caption)
    assert [p.name for p in tmp_path.iterdir()] == ["sheet.png"]
