"""The translator and the writer: what a plain loop gives, whatever the batch and the order, and honest alignments."""

from __future__ import annotations

import math
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_text import ENGLISH, JOINT, SOURCE, TARGET, language_model, plain_greedy, translation_model

from mmattn.inference import SourceError, Translation, Translator, Writer
from mmattn.preprocess.text import Tokenizer

LONG = "two dogs run on the beach left of a red circle and a blue square"  # wider than 16 tokens
LINES = ["two dogs run", LONG, "a red circle", "the boy eats green apples", "apples", "on the beach", LONG + " two"]
QUICK: dict[str, Any] = {"max_length": 6, "compiled": False}


@pytest.fixture(scope="module", params=["joint", "separate"])
def translator(request: pytest.FixtureRequest) -> Translator:
    if request.param == "joint":
        return Translator(translation_model(JOINT, JOINT), JOINT)
    return Translator(translation_model(SOURCE, TARGET), TARGET, SOURCE)


@pytest.fixture(scope="module")
def joint() -> Translator:
    return Translator(translation_model(JOINT, JOINT), JOINT)


def same(a: Translation, b: Translation) -> None:
    assert (a.text, a.ids, a.source_ids) == (b.text, b.ids, b.source_ids)
    assert a.score == pytest.approx(b.score, abs=1e-4)


def test_greedy_translations_equal_a_plain_loop_of_full_calls(translator: Translator) -> None:
    found = translator.translate(LINES[:3], method="greedy", **QUICK)
    for line, one in zip(LINES, found, strict=False):
        source = translator.source_tokenizer.encode(line)
        ids, total = plain_greedy(translator.model, 6, source_ids=[*source, 3])
        assert (list(one.ids), list(one.source_ids)) == (ids, source)
        count = min(6, len(ids) + 1)
        assert one.confidence == pytest.approx(math.exp(total / count), rel=1e-3)
        assert one.score == pytest.approx(total / ((5 + count) / 6), rel=1e-3)
        assert one.text == translator.tokenizer.decode(ids).strip()
    assert len({one.ids for one in found}) == 3
    assert {len(one.ids) < 6 for one in found} == {True, False}


def test_batch_and_order_do_not_matter(joint: Translator) -> None:
    alone = [joint.translate(line, num_beams=3, nbest=2, **QUICK)[0] for line in LINES]
    assert len({one.ids for one in alone}) > 3
    assert [len(JOINT.encode(line)) > 15 for line in LINES] == ["left" in line for line in LINES]
    for batch_size in (2, 32):
        order = np.random.default_rng(batch_size).permutation(len(LINES))
        mixed = [LINES[i] for i in order]
        found = joint.translate(mixed, batch_size=batch_size, num_beams=3, nbest=2, **QUICK)
        for place, one in zip(order, found, strict=True):
            same(one, alone[place])
            same(one.alternatives[0], alone[place].alternatives[0])
            assert one.score >= one.alternatives[0].score


def test_equal_texts_are_translated_once_and_blank_ones_never(joint: Translator, monkeypatch: Any) -> None:
    rows: list[int] = []
    run = joint.generator.generator

    def count(inputs: Any, *args: Any, **options: Any) -> Any:
        rows.append(len(inputs["source_ids"]))
        return run(inputs, *args, **options)

    monkeypatch.setattr(joint.generator, "generator", count)
    seen: list[tuple[int, int]] = []
    lines = ["", "apples", " \t\n", "apples", "on the beach"]
    found = joint.translate(lines, method="greedy", progress=lambda *p: seen.append(p), **QUICK)
    assert rows == [2]
    assert seen == [(2, 5), (5, 5)]
    assert found[1] == found[3] != found[4]
    for blank in (found[0], found[2]):
        assert blank == Translation("", 0.0, 1.0, (), ())
    assert joint.translate(["", ""], progress=lambda *p: seen.append(p)) == [blank, blank]
    assert joint.translate([]) == []
    assert (rows, seen) == ([2], [(2, 5), (5, 5), (2, 2)])


def test_other_lengths_and_numbers_of_texts_need_no_new_program(joint: Translator) -> None:
    fresh = Translator(joint.model, JOINT)
    few = {"method": "greedy", "compiled": "step", "max_length": 3, "batch_size": 4}
    fresh.translate(LINES, **few)
    traces = fresh.generator.traces()
    fresh.translate([*LINES[::-1], "two red dogs", "a boy on the beach"], **few)
    assert fresh.generator.traces() == traces


def test_a_text_that_is_too_long_is_refused_by_its_number_never_cut(joint: Translator) -> None:
    most = len(JOINT.encode(LINES[0])) + 1
    lines = [LINES[0], "", LINES[1], LINES[4]]
    found = joint.translate(lines, max_source_length=most, on_error="return", **QUICK)
    assert [type(one) for one in found] == [Translation, Translation, SourceError, Translation]
    count = len(JOINT.encode(LONG)) + 1
    words = rf"^text 3: {count} tokens with the end token, and {most} are allowed \(max_source_length\)"
    with pytest.raises(SourceError, match=words):
        joint.translate(lines, max_source_length=most, **QUICK)
    short = Translator(translation_model(JOINT, JOINT, positions="learned", max_length=9), JOINT)
    assert (short.generation["max_source_length"], short.generation["max_length"]) == (9, 9)
    with pytest.raises(SourceError, match="9 are allowed"):
        short.translate(LONG, max_source_length=200)
    with pytest.raises(ValueError, match=r"max_source_length=10 exceeds the model's longest source, 9"):
        Translator(short.model, JOINT, None, {"max_source_length": 10})


def test_settings_that_do_not_exist_or_fit_are_refused(joint: Translator) -> None:
    for bad, message in [
        ({"temperature": 3}, "temperature is not known. Known: method, num_beams"),
        ({"length_factor": -1}, "length_factor=-1 must be a number from 0.0 to 100.0"),
        ({"nbest": 4, "num_beams": 2}, "nbest=4 translations need at least as many beams; there are 2"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"on_error": "skip"}, "on_error='skip' is not known"),
    ]:
        with pytest.raises(ValueError, match=message):
            joint.translate(LINES[0], **bad)
    for bad in (b"apples", 7, None):
        with pytest.raises(TypeError, match=f"must be a str, not {type(bad).__name__}"):
            joint.translate([bad])  # type: ignore[list-item]


# Alignment


class Looker:
    """A stand-in model: target token t looks at source token (t + head) % 4 with 0.6, at the end token with 0.4."""

    encoder = decoder = types.SimpleNamespace(max_length=None)
    start = step = staticmethod(lambda *_: (None, None))

    def attention(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        length, source = inputs["target_ids"].shape[1], inputs["source_ids"].shape[1]
        scores = np.zeros((1, 2, 2, length, source), "float32")
        for head in range(2):
            for t in range(length):
                scores[0, 1, head, t, (t + head) % (source - 1)] = 0.6
        scores[..., -1] = 1.0 - scores.sum(axis=-1)
        return scores


MARKED = Tokenizer.train(["brea@@ king new@@ s room"], model_type="word", joiner="@@")


def test_pieces_become_words_on_both_axes_and_the_end_token_is_set_apart() -> None:
    looker = Translator(Looker(), MARKED)
    source, target = "brea@@ king new@@ s", "room brea@@ king"
    source_ids, ids = (tuple(MARKED.encode(text)) for text in (source, target))
    found = looker.attention(source, Translation(target, 0.0, 1.0, ids, source_ids), head=0)
    assert found.source_words == ("breaking", "news")
    assert found.target_words == ("room", "breaking")
    # "room" is piece 0 and looks at piece 0; "breaking" is pieces 1 and 2, which look at pieces 1 and 2.
    np.testing.assert_allclose(found.weights, [[1.0, 0.0], [0.5, 0.5]], atol=1e-6)
    np.testing.assert_allclose(found.end, [0.4, 0.4], atol=1e-6)
    mean = looker.attention(source, Translation(target, 0.0, 1.0, ids, source_ids))
    np.testing.assert_allclose(mean.weights, [[1.0, 0.0], [0.25, 0.75]], atol=1e-6)
    all_end = looker.attention(source, Translation(target, 0.0, 1.0, ids, source_ids), layer=0)
    np.testing.assert_allclose(all_end.end, 1.0)
    assert not all_end.weights.any()
    with pytest.raises(ValueError, match="layer=2 doesn't exist: there are 2"):
        looker.attention(source, Translation(target, 0.0, 1.0, ids, source_ids), layer=2)


def test_attention_equals_a_full_pass_and_fits_its_translation_alone(translator: Translator, tmp_path: Path) -> None:
    [one] = translator.translate(LINES[3], **QUICK)
    found = translator.attention(LINES[3], one)
    inputs = {
        "source_ids": np.array([[*one.source_ids, 3, 0]], "int32"),
        "target_ids": np.array([[2, *one.ids]], "int32"),
    }
    scores = np.asarray(translator.model.attention(inputs))[0, -1].mean(axis=0)  # (T, S)
    for row, (word, rows) in enumerate(translator.tokenizer.words(one.ids)):
        assert found.target_words[row] == word
        for column, (_, columns) in enumerate(translator.source_tokenizer.words(one.source_ids)):
            total = sum(scores[r][:-2].sum() for r in rows)
            share = sum(scores[r][c] for r in rows for c in columns) / total
            assert found.weights[row, column] == pytest.approx(share, abs=1e-5)
        assert found.end[row] == pytest.approx(np.mean([scores[r][-2] for r in rows]), abs=1e-5)
    with pytest.raises(ValueError, match="this translation is of another text"):
        translator.attention(LINES[0], one)
    assert translator.save_attention(LINES[3], tmp_path / "a.png", one) is one
    with Image.open(tmp_path / "a.png") as sheet:
        assert sheet.format == "PNG"
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]


def test_a_blank_text_has_no_words(joint: Translator) -> None:
    found = joint.attention(" ")
    assert (found.source_words, found.target_words, found.weights.shape) == ((), (), (0, 0))
    silent = Translation("", 0.0, 1.0, (), tuple(JOINT.encode("apples")))
    assert joint.attention("apples", silent).weights.shape == (0, 1)


# Language models


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer(language_model(JOINT), JOINT)


def test_a_greedy_text_equals_a_plain_loop_window_by_window(writer: Writer) -> None:
    prompt = JOINT.encode("a red")
    window, most = len(prompt) + 3, len(prompt) + 7
    expected = list(prompt)
    read = expected
    while True:
        made, _ = plain_greedy(writer.model, min(window, len(read) + most - len(expected)), read)
        expected += made[len(read) :]
        if len(made) < window or len(expected) >= most:
            break
        read = expected[-(window // 2) :]
    settings = {"method": "greedy", "max_length": most, "compiled": False}
    assert writer.write("a red", context_length=window, **settings) == [JOINT.decode(expected)]
    whole, _ = plain_greedy(writer.model, most, prompt)
    assert writer.write("a red", **settings) == [JOINT.decode(whole)]
    assert len(expected) > window


def test_a_seed_gives_the_same_texts_whatever_their_number(writer: Writer) -> None:
    settings: dict[str, Any] = {"max_length": 9, "context_length": 5, "compiled": False}
    three = writer.write("a", count=3, seed=4, **settings)
    assert writer.write("a", count=1, seed=4, **settings) == three[:1]
    assert len(set(three)) > 1
    assert writer.write("a", seed=5, count=3, **settings) != three
    assert writer.write("a", top_k=1, seed=6, **settings) == writer.write("a", top_k=1, seed=7, **settings)


def test_prompts_that_the_model_cannot_read_are_refused(writer: Writer) -> None:
    short = Writer(language_model(JOINT, positions="learned", max_length=6), JOINT)
    assert short.write(max_length=14, seed=1, compiled=False)  # windows move on
    count = len(JOINT.encode(ENGLISH[0]))
    assert count > 6
    [text] = short.write(ENGLISH[0], max_length=count + 5, seed=1, compiled=False)  # its last tokens are the window's
    assert text.startswith(ENGLISH[0])
    with pytest.raises(ValueError, match="context_length=7 exceeds the model's longest sequence, 6"):
        short.write(context_length=7)
    with pytest.raises(ValueError, match="the prompt holds '犬', which the model's vocabulary lacks"):
        writer.write("two 犬")
    with pytest.raises(ValueError, match=f"the prompt has {count} tokens, and max_length={count} must exceed that"):
        writer.write(ENGLISH[0], max_length=count)
    for bad, message in [
        ({"num_beams": 3}, "num_beams is not known"),
        ({"method": "beam"}, "Known: sample, greedy"),
        ({"count": 0}, "count=0 must be at least 1"),
        ({"temperature": 0}, "temperature=0 must be a number from 0.001"),
    ]:
        with pytest.raises(ValueError, match=message):
            writer.write(**bad)
