"""The attention on objects, against numbers counted by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mmattn.metrics.grounding import attention_on_objects

RECORD = {"image": "i", "captions": ["red above blue"]}
COVERAGE = np.array([[0.2, 0.0, 0.0, 0.0], [0.0, 0.0, 0.5, 1.0]])


def roles(record, text):
    return list(zip(text.split(), ["colour", "relation", "colour"], [0, None, 1], strict=True))


def run(weights, text="red above blue", words=("red", "above", "blue")):
    looked = SimpleNamespace(words=words, weights=np.array(weights).reshape(3, 2, 2))
    described = [(RECORD, SimpleNamespace(text=text))]
    return attention_on_objects(lambda image, caption: looked, described, roles, lambda record, grid: COVERAGE)


def test_shares_are_those_on_the_objects_own_patches():
    found = run([[0.7, 0.1, 0.1, 0.1], [0.3, 0.4, 0.1, 0.2], [0.0, 0.1, 0.4, 0.5]])
    assert found["colour"] == {"on_object": 0.8, "chance": 0.375, "words": 2}
    assert found["relation"] == {"on_object": 0.6, "chance": 0.75, "words": 1}


def test_even_attention_gives_chance():
    found = run([[0.25] * 4] * 3)
    assert all(entry["on_object"] == entry["chance"] for entry in found.values())


def test_a_wrong_caption_counts_for_nothing():
    assert run([[0.25] * 4] * 3, text="green above blue") == {}


def test_words_that_do_not_match_their_roles_are_an_error():
    with pytest.raises(ValueError, match="The roles are of the words"):
        run([[0.25] * 4] * 3, words=("red", "over", "blue"))
