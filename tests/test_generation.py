"""The text generator: the same texts as a plain loop, lengths that follow the source, few programs."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_text import JOINT, language_model, plain_greedy, translation_model

from mmattn.bundle_model import generation_of
from mmattn.generation import TextGenerator, longest, longest_source

SENTENCE = [*JOINT.encode("two dogs run"), 3]


@pytest.fixture(scope="module")
def generate() -> TextGenerator:
    return TextGenerator(translation_model(JOINT, JOINT), JOINT)


@pytest.fixture(scope="module")
def writing() -> TextGenerator:
    return TextGenerator(language_model(JOINT), JOINT)


def test_confidence_is_the_mean_of_what_was_generated_not_of_the_prompt(writing: TextGenerator) -> None:
    prompt = JOINT.encode("two dogs")
    model = writing.generator.start.__self__  # type: ignore[attr-defined]
    ids, total = plain_greedy(model, len(prompt) + 4, prompt)
    starts = {"target_ids": np.array([[2]])}
    [text] = writing.best(starts, max_length=len(prompt) + 4, min_length=1, prompt=[prompt], compiled=False)
    count = min(4, len(ids) - len(prompt) + 1)
    assert list(text.ids) == ids
    assert text.log_prob == pytest.approx(total, abs=1e-3)
    assert text.confidence == pytest.approx(math.exp(total / count), rel=1e-3)
    assert text.text == JOINT.decode(ids).strip()


def test_wider_padding_changes_nothing_within_a_width(generate: TextGenerator) -> None:
    settings = {"method": "beam", "num_beams": 3, "max_length": 6, "compiled": False}
    wide = np.zeros((1, 15), "int32")
    wide[0, : len(SENTENCE)] = SENTENCE
    found = generate({"source_ids": np.array([SENTENCE])}, 2, **settings)
    assert [t.ids for t in found[0]] == [t.ids for t in generate({"source_ids": wide}, 2, **settings)[0]]
    assert len({t.ids for t in found[0]}) == 2


@pytest.mark.parametrize(
    ("length", "width", "most"), [(1, 16, 7), (16, 16, 7), (17, 32, 11), (128, 128, 35), (129, 256, 50)]
)
def test_the_limit_follows_the_widened_source(
    generate: TextGenerator, length: int, width: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}

    def note(inputs: dict, method: str, **options: object) -> None:
        seen.update(options, shape=inputs["source_ids"].shape)
        raise StopIteration

    monkeypatch.setattr(generate, "generator", note)
    with pytest.raises(StopIteration):
        generate(
            {"source_ids": np.full((2, length), 5)}, max_length=50, length_factor=0.25, length_offset=3, min_length=9
        )
    assert seen["shape"] == (2, width)
    assert seen["max_length"] == most
    assert seen["min_length"] == min(9, most - 1)
    assert generate.width(length) == width


def test_sources_are_never_widened_beyond_what_the_encoder_reads() -> None:
    short = TextGenerator(translation_model(JOINT, JOINT, positions="learned", max_length=20), JOINT)
    assert [short.width(n) for n in (5, 16, 17, 20)] == [16, 16, 20, 20]
    assert short.best({"source_ids": np.array([[5] * 17])}, max_length=3, compiled=False)[0].ids


def test_a_longest_length_counts_with_learned_positions_alone() -> None:
    for positions, most in (("learned", 20), ("rotary", math.inf), ("sinusoidal", math.inf)):
        model = translation_model(JOINT, JOINT, positions=positions, max_length=20)
        assert (longest(model), longest_source(model)) == (most, most)
    wide = {"max_source_length": 128, "max_length": 64}  # as batches of 128 tokens give them
    assert generation_of(model, wide, "translator").items() >= wide.items()
    assert longest(object()) is None and longest_source(object()) == math.inf
    of_others = SimpleNamespace(decoder=SimpleNamespace(positions=object(), max_length=50))  # may end there, who knows
    assert longest(of_others) == 50


def test_more_texts_than_beams_are_refused(generate: TextGenerator) -> None:
    inputs = {"source_ids": np.array([SENTENCE])}
    with pytest.raises(ValueError, match="nbest=2 texts need as many beams; greedy search"):
        generate(inputs, 2, max_length=3)
    with pytest.raises(ValueError, match="num_return must be from 1 to num_beams=2"):
        generate(inputs, 3, max_length=3, method="beam", num_beams=2)
    with pytest.raises(ValueError, match="greedy has no option temperature"):
        generate(inputs, max_length=3, temperature=2.0)
