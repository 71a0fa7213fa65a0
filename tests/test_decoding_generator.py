"""The Generator: filling never shows, nothing is traced twice, compiled and uncompiled loops agree."""

from __future__ import annotations

import gc
import math
import weakref

import keras
import numpy as np
import pytest
from keras import ops
from toy_steps import BOS, END, PAD, ToyModel

from mmattn import backend
from mmattn.decoding import Generator, generator

TOY = ToyModel(content=12)
SETTINGS = [
    ("greedy", {"min_length": 3}),
    ("beam", {"num_beams": 3, "num_return": 2, "length_penalty": 0.8, "no_repeat_ngram": 2}),
    ("sample", {"seed": 8, "temperature": 0.9, "top_k": 6, "top_p": 0.8}),
]
compiles = pytest.mark.skipif(backend.name() == "torch", reason="torch has no compiled loop")


def toy_generator(toy=TOY, **options):
    return Generator(toy.start, toy.step, bos_id=BOS, eos_id=END, **options)


@pytest.fixture(scope="module")
def shared():
    return toy_generator(max_positions=20)


def inputs(rows, seed=1, toy=TOY):
    return {"memory": toy.memory(rows, seed)}


def assert_same(a, b):
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_array_equal(a.lengths, b.lengths)
    np.testing.assert_allclose(a.token_log_probs, b.token_log_probs, atol=1e-5)
    np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)
    np.testing.assert_allclose(a.scores, b.scores, atol=1e-5)


@compiles
@pytest.mark.parametrize("compiled", [True, "step"])
def test_a_model_without_a_limit_shares_its_programs_among_lengths(compiled):
    generate = toy_generator(max_positions=math.inf)
    found = [generate(inputs(2), max_length=length, compiled=compiled) for length in (5, 9, 16)]
    assert generate.traces() == (2 if compiled is True else 1)  # start and loop, or step
    for one, length in zip(found, (5, 9, 16), strict=True):
        assert_same(one, generate(inputs(2), max_length=length, compiled=False))


@compiles
@pytest.mark.parametrize("method,options", SETTINGS)
def test_compiled_and_uncompiled_loops_agree_and_nothing_is_traced_twice(shared, method, options):
    shared(inputs(3), method, max_length=9, compiled=True, **options)
    traces = shared.traces()
    assert traces > 0
    for rows, max_length, seed in ((3, 9, 1), (1, 16, 2), (4, 5, 3), (2, 12, 4)):
        moved = {**options, "min_length": seed % 3, "length_penalty": 0.1 * seed}
        if method == "sample":
            moved |= {"seed": seed, "temperature": 0.5 * seed}
        one = shared(inputs(rows, seed), method, max_length=max_length, compiled=True, **moved)
        assert_same(one, shared(inputs(rows, seed), method, max_length=max_length, compiled=False, **moved))
        assert one.ids.shape[::2] == (rows, max_length) and isinstance(one.ids, np.ndarray)
    assert shared.traces() == traces


@compiles
@pytest.mark.parametrize("method,options", SETTINGS)
def test_a_compiled_step_agrees_and_is_traced_once_a_bucket(method, options):
    generate = toy_generator(max_positions=20)
    for rows, max_length in ((3, 9), (4, 12), (2, 16)):
        one = generate(inputs(rows), method, max_length=max_length, compiled="step", **options)
        assert_same(one, generate(inputs(rows), method, max_length=max_length, compiled=False, **options))
    assert generate.traces() == 1


@compiles
def test_a_captioner_generates_the_same_compiled_by_steps_and_eagerly():
    from mmattn.decoders import TransformerDecoder
    from mmattn.encoders.image import VisionTransformer
    from mmattn.model import EncoderDecoder

    encoder = VisionTransformer((32, 32), patch_size=16, hidden_dim=8, num_layers=1, num_heads=2)
    decoder = TransformerDecoder(vocabulary_size=20, hidden_dim=8, num_layers=2, num_heads=2)
    model = EncoderDecoder(encoder, decoder)
    photos = {"pixels": np.random.default_rng(0).integers(0, 256, size=(3, 32, 32, 3)).astype("uint8")}
    model({**photos, "target_ids": np.full((3, 2), 2)})
    generate = Generator(model.start, model.step, bos_id=BOS, eos_id=END, max_positions=12)
    for method, options in (("greedy", {}), ("beam", {"num_beams": 3})):
        eager = generate(photos, method, max_length=7, compiled=False, **options)
        assert_same(generate(photos, method, max_length=7, compiled=True, **options), eager)
        assert_same(generate(photos, method, max_length=7, compiled="step", **options), eager)
        ids = np.concatenate([np.full((3, 1), BOS), eager.ids[:, 0, :-1]], axis=1)
        logits = ops.log_softmax(model({**photos, "target_ids": ids}), axis=-1)  # all at once, by the training call
        expected = np.take_along_axis(ops.convert_to_numpy(logits), eager.ids[:, 0, :, None], axis=-1)[..., 0]
        real = np.arange(7) < eager.lengths
        np.testing.assert_allclose(eager.token_log_probs[:, 0][real], expected[real], atol=1e-5)


@compiles
@pytest.mark.parametrize("method,options", SETTINGS[1:2])
def test_prompts_of_other_lengths_need_no_new_program(shared, method, options):
    prompts = [[], [5, 6], [4]]
    first = shared(inputs(3), method, max_length=9, compiled=True, prompt=prompts, **options)
    traces = shared.traces()
    assert_same(first, shared(inputs(3), method, max_length=9, compiled=False, prompt=prompts, **options))
    longer = [[4, 5, 6, 7, 8], [9], [], [5]]
    found = shared(inputs(4), method, max_length=12, compiled=True, prompt=longer, **options)
    assert_same(found, shared(inputs(4), method, max_length=12, compiled=False, prompt=longer, **options))
    assert shared.traces() == traces
    assert found.ids[0, 0, :5].tolist() == longer[0]


@pytest.mark.parametrize("method,options", SETTINGS)
def test_a_row_of_a_generator_s_batch_equals_the_row_alone(method, options):
    generate = toy_generator()
    together = generate(inputs(5), method, max_length=8, compiled=False, **options)
    for row in range(5):
        one = {"memory": inputs(5)["memory"][row : row + 1]}
        if method == "sample":
            options = {**options, "rows": [row]}
        alone = generate(one, method, max_length=8, compiled=False, **options)
        assert_same(alone, type(together)(*(array[row : row + 1] for array in together)))


class Recurrent(keras.Model):
    """A model with weights: a GRU cell over an embedding."""

    def __init__(self, policy="float32"):
        super().__init__(dtype=policy)
        self.embed = keras.layers.Embedding(9, 6, dtype=policy)
        self.cell = keras.layers.GRUCell(6, dtype=policy)
        self.head = keras.layers.Dense(9, dtype=policy)
        self.embed.build((None,))
        self.cell.build((None, 6))
        self.head.build((None, 6))
        self.built = True

    def start(self, inputs, max_length):
        return None, ops.cast(inputs["h"], self.compute_dtype)

    def step(self, ids, index, context, state):
        h, _ = self.cell(self.embed(ids), [state])
        return self.head(h), ops.cast(h, self.compute_dtype)


def recurrent_generator(policy="float32"):
    model = Recurrent(policy)
    return model, Generator(model.start, model.step, bos_id=BOS, eos_id=END, max_positions=8)


@compiles
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_programs_see_new_weights(policy):
    model, generate = recurrent_generator(policy)
    x = {"h": np.random.default_rng(0).normal(size=(4, 6)).astype("float32")}
    found = []
    for scale in (1.0, 3.0):
        model.head.set_weights([scale * np.random.default_rng(int(scale)).normal(size=(6, 9)), np.zeros(9)])
        found.append(generate(x, max_length=8, compiled=True))
        if policy == "float32":
            assert_same(found[-1], generate(x, max_length=8, compiled=False))
    assert found[0].log_probs.dtype == np.float32
    assert not np.allclose(found[0].log_probs, found[1].log_probs, atol=0.1)
    assert generate.traces() == 2  # one start, one loop


@compiles
def test_a_generator_and_its_model_are_garbage_collected():
    model, generate = recurrent_generator()
    generate({"h": np.zeros((1, 6), "float32")}, max_length=8, compiled=True)
    gone = weakref.ref(model)
    del model, generate
    gc.collect()
    assert gone() is None


@compiles
@pytest.mark.skipif(backend.name() == "jax", reason="JAX always compiles the loop")
def test_auto_compiles_the_loop_when_the_jobs_are_big_enough_to_pay(monkeypatch):
    monkeypatch.setattr(generator, "COMPILE_PAYS", 100)
    generate = toy_generator()
    for _ in range(9):
        generate(inputs(1), max_length=10)
    assert generate.traces() == 1  # the step as a plain graph
    generate(inputs(1), max_length=10)  # position 100
    assert generate.traces() == 3  # the start and the loop
    generate(inputs(1), max_length=10)
    assert generate.traces() == 3
    other = toy_generator()
    other(inputs(2), max_length=10, batches=10)
    assert other.traces() == 2
    other(inputs(1), max_length=10)  # a program of 4 rows is there: it is used
    assert other.traces() == 2


@pytest.mark.parametrize(
    "ids,words",
    [
        ({"bos_id": None, "eos_id": 3}, "bos_id must be a token id"),
        ({"bos_id": 2, "eos_id": None}, "eos_id must be a token id"),
        ({"bos_id": 2, "eos_id": -1}, "eos_id must be a token id"),
        ({"bos_id": 2, "eos_id": 2}, "must differ, and are bos_id=2, eos_id=2, pad_id=0"),
        ({"bos_id": 0, "eos_id": 3}, "must differ"),
    ],
)
def test_missing_or_equal_special_ids_are_refused(ids, words):
    with pytest.raises(ValueError, match=words):
        Generator(TOY.start, TOY.step, **ids)


@pytest.mark.parametrize(
    "method,options,words",
    [
        ("greedily", {}, "method must be one of greedy, sample, beam"),
        ("greedy", {"num_beams": 2}, "greedy has no option num_beams. Its options: min_length"),
        ("greedy", {"max_length": 21}, "max_length=21 exceeds the model's longest sequence, 20"),
        ("greedy", {"max_length": 0}, "max_length must be at least 1"),
        ("greedy", {"min_length": 6}, "min_length can be 0 to 5"),
        ("greedy", {"compiled": "yes"}, "compiled must be True,"),
        ("sample", {}, "sample needs a whole number as its seed"),
        ("sample", {"seed": 1, "rows": [1]}, "rows must be 2 numbers"),
        ("beam", {"num_beams": 2, "num_return": 4}, "num_return must be from 1 to num_beams=2"),
        ("greedy", {"prompt": [[4] * 6, [4]]}, "row 0 has 6 tokens, and max_length=6 must exceed that"),
        ("greedy", {"prompt": [[4]]}, "prompt has 1 rows and the inputs have 2"),
        ("greedy", {"prompt": [[4], [5, PAD, 5]]}, "row 1 holds 0"),
        ("greedy", {"prompt": [[4], [END]]}, "row 1 holds 3"),
        ("greedy", {"prompt": [[4], [32]]}, "prompt holds token 32, and the model has 32 tokens"),
    ],
)
def test_calls_that_do_not_fit_are_refused_in_words(method, options, words):
    with pytest.raises(ValueError, match=words):
        toy_generator(max_positions=20)(inputs(2), method, **{"max_length": 6, "compiled": False, **options})


def test_inputs_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match=r"same number of rows, at least one. They have \[2, 3\]"):
        toy_generator()({"a": np.zeros((2, 1)), "b": np.zeros((3, 1))}, max_length=4)


def test_a_model_that_gives_nan_is_reported():
    toy = ToyModel()
    toy.output[:] = np.nan
    for method in ("greedy", "beam"):
        with pytest.raises(FloatingPointError, match="row 0 are NaN"):
            toy_generator(toy)(inputs(2, toy=toy), method, max_length=4, compiled=False)
