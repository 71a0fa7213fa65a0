"""Rotary positions: against complex numbers in a loop, and the laws that they are for."""

from __future__ import annotations

import cmath
import itertools
import math

import keras
import numpy as np
import pytest
from keras import ops

from mmattn import backend
from mmattn.encoders.text import TextEncoder
from mmattn.layers import SelfAttention, TransformerDecoderBlock, TransformerEncoderBlock, rotate

B, T, D, H, K = 2, 6, 12, 3, 4
X = np.random.default_rng(0).normal(size=(B, T, D))
PADDING = np.arange(T)[None] < np.array([[4], [6]])


JAX = keras.backend.backend() == "jax"  # has no float64 unless told so
NARROW = keras.backend.backend() != "tensorflow"
WIDE = pytest.param("float64", 1e-10, marks=pytest.mark.skipif(NARROW, reason="a float64 layer computes in float32"))


def array(tensor) -> np.ndarray:
    return ops.convert_to_numpy(ops.cast(tensor, "float32" if JAX else "float64"))


def turned(vector: np.ndarray, place: int) -> np.ndarray:
    """One vector of K channels: the complex number x_i + j x_(i + K/2) times e^(j t / 10000^(2 i / K))."""
    half = len(vector) // 2
    numbers = [
        complex(vector[i], vector[i + half]) * cmath.exp(1j * place / 10000 ** (2 * i / len(vector)))
        for i in range(half)
    ]
    return np.array([z.real for z in numbers] + [z.imag for z in numbers])


def reference(layer: SelfAttention, x: np.ndarray, causal: bool) -> np.ndarray:
    """The layer's output in float64, one row, head and query at a time."""
    wq, bq, wk, bk, wv, bv, wo, bo = (np.asarray(w, "float64") for w in layer.get_weights())
    output = np.zeros((*x.shape[:2], wo.shape[-1])) + bo
    for b, t, h in itertools.product(range(x.shape[0]), range(x.shape[1]), range(wq.shape[1])):
        query = turned(x[b, t] @ wq[:, h] + bq[h], t)
        seen = range(t + 1 if causal else x.shape[1])
        logits = [query @ turned(x[b, s] @ wk[:, h] + bk[h], s) / math.sqrt(wq.shape[-1]) for s in seen]
        weights = np.exp(logits) / np.exp(logits).sum()
        output[b, t] += sum(w * (x[b, s] @ wv[:, h] + bv[h]) for w, s in zip(weights, seen, strict=True)) @ wo[h]
    return output


def randomise(layer):
    rng = np.random.default_rng(3)
    layer.set_weights([rng.normal(size=w.shape, scale=0.4) for w in layer.get_weights()])
    return layer


def make(dtype="float32", positions="rotary"):
    layer = SelfAttention(H, K, value_dim=5, positions=positions, dtype=dtype)
    layer.build((None, None, D))
    return randomise(layer)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "dtype, tolerance", [WIDE, ("float32", 1e-5), ("mixed_float16", 0.02), ("mixed_bfloat16", 0.15)]
)
def test_equals_complex_numbers_in_a_loop(dtype, tolerance, causal):
    layer = make(dtype)
    output = layer(X.astype("float64" if dtype == "float64" else "float32"), use_causal_mask=causal)
    np.testing.assert_allclose(array(output), reference(layer, X, causal), atol=tolerance)


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    query, key = rng.normal(size=(2, 1, 1, 1, 8)).astype("float32" if JAX else "float64")
    table = np.zeros((40, 40))
    for t, s in itertools.product(range(0, 40, 3), range(40)):
        a, b = (array(rotate(vector, np.array([place]))) for vector, place in ((query, t), (key, s)))
        table[t, s] = (a * b).sum()
    for t, s in itertools.product(range(3, 40, 3), range(3, 40)):
        assert table[t, s] == pytest.approx(table[t - 3, s - 3], abs=1e-4 if JAX else 1e-10)
    assert np.ptp(table[0]) > 1


def test_a_shifted_sequence_gives_shifted_outputs_and_a_shuffled_one_does_not():
    layer, plain = make(), make(positions=None)
    x = X.astype("float32")
    mask = np.tril(np.ones((1, T, T), bool)) & ~np.tril(np.ones((T, T), bool), -3)  # each sees the last three
    padded = np.concatenate([np.zeros((B, 5, D), "float32"), x], axis=1)
    wide = np.zeros((1, T + 5, T + 5), bool)
    wide[:, 5:, 5:] = mask
    np.testing.assert_allclose(
        array(layer(padded, attention_mask=wide))[:, 5:], array(layer(x, attention_mask=mask)), atol=1e-5
    )
    order = [2, 0, 1, 5, 4, 3]
    assert np.abs(array(layer(x[:, order])) - array(layer(x))[:, order]).max() > 1e-2
    np.testing.assert_allclose(array(plain(x[:, order])), array(plain(x))[:, order], atol=1e-5)


def test_rotation_keeps_lengths_and_the_first_place():
    heads = np.random.default_rng(2).normal(size=(B, H, T, K)).astype("float32")
    found = array(rotate(heads, np.arange(T)))
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), np.linalg.norm(heads, axis=-1), rtol=1e-6)
    np.testing.assert_array_equal(found[:, :, 0], heads[:, :, 0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_angles_are_exact_in_half_precision_at_far_places(dtype):
    """Half precision cannot even hold place 1001; the result is off by no more than its own rounding."""
    heads = ops.cast(np.random.default_rng(2).normal(size=(1, 1, 1, 64)).astype("float32"), dtype)
    exact = turned(array(heads)[0, 0, 0], 1001)
    found = rotate(heads, np.array([1001]))
    assert keras.backend.standardize_dtype(found.dtype) == dtype
    np.testing.assert_allclose(array(found)[0, 0, 0], exact, atol=0.02, rtol=0.01)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), WIDE, ("mixed_bfloat16", 0.1)])
def test_step_equals_call(dtype, tolerance):
    layer = make(dtype)
    x = X.astype("float64" if dtype == "float64" else "float32")
    whole = array(layer(x, use_causal_mask=True))
    cache = layer.start(B, T + 2)
    for t in range(T):
        output, cache = layer.step(ops.cast(x[:, t], layer.compute_dtype), ops.convert_to_tensor(t), cache)
        np.testing.assert_allclose(array(output), whole[:, t], atol=tolerance)


@pytest.mark.parametrize("place", ["pre", "post"])
def test_decoder_block_step_equals_call_eager_and_compiled(place):
    block = TransformerDecoderBlock(H, 20, norm=place, positions="rotary")
    memory = X[:, :3].astype("float32")
    block.build(X.shape, memory.shape)
    randomise(block)
    x = X.astype("float32")
    whole = array(block(x, memory))
    for step in (block.step, backend.compile(block.step, jit=True)):
        context, cache = block.start(ops.convert_to_tensor(memory), None, B, T)
        for t in range(T):
            output, cache = step(ops.convert_to_tensor(x[:, t]), ops.convert_to_tensor(t), context, cache)
            np.testing.assert_allclose(array(output), whole[:, t], atol=1e-5)


def test_padding_behind_a_sentence_changes_nothing():
    block = TransformerEncoderBlock(H, 16, positions="rotary")
    block.build(X.shape)
    randomise(block)
    x = X.astype("float32")
    other = np.where(PADDING[..., None], x, 30.0).astype("float32")
    first, second, short = (
        array(block(rows, padding_mask=mask)) for rows, mask in ((x, PADDING), (other, PADDING), (x[:1, :4], None))
    )
    np.testing.assert_array_equal(first[PADDING], second[PADDING])
    np.testing.assert_allclose(first[:1, :4], short, atol=1e-5)


def test_any_length_in_a_functional_model_that_survives_saving(tmp_path):
    inputs = keras.Input((None, D))
    y = TransformerEncoderBlock(H, 16, positions="rotary")(inputs)
    y = SelfAttention(2, 4, positions="rotary")(y, use_causal_mask=True)
    model = keras.Model(inputs, y)
    before = {length: array(model(X[:, :length].astype("float32"))) for length in (1, 4, T)}
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    for length, expected in before.items():
        np.testing.assert_array_equal(array(loaded(X[:, :length].astype("float32"))), expected)
        np.testing.assert_allclose(loaded.predict(X[:, :length].astype("float32"), verbose=0), expected, atol=1e-6)
    assert [layer.positions for layer in loaded.layers[1:]] == ["rotary", "rotary"]


def test_no_variable_is_added_or_renamed():
    plain, rotary = (TransformerDecoderBlock(H, 20, positions=positions) for positions in (None, "rotary"))
    for block in (plain, rotary):
        block.build(X.shape, X.shape)
    names = [[variable.path.split("/", 1)[1] for variable in block.variables] for block in (plain, rotary)]
    assert names[0] == names[1]


def test_what_was_saved_before_there_were_rotary_positions_still_loads():
    for layer in (SelfAttention(H, K), TransformerEncoderBlock(H, 16), TransformerDecoderBlock(H, 16)):
        config = layer.get_config()
        assert config.pop("positions") is None
        assert type(layer).from_config(config).positions is None


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: SelfAttention(2, 5, positions="rotary"), r"key_dim, the width of a head, is even\. Received 5"),
        (lambda: TransformerEncoderBlock(4, 16, positions="rotary").build((None, None, 12)), "is even. Received 3"),
        (lambda: TransformerDecoderBlock(4, 16, key_dim=7, positions="rotary"), "is even. Received 7"),
        (lambda: SelfAttention(2, 4, positions="learned"), "rotary, alibi, .* Received 'learned'"),
        (lambda: TransformerEncoderBlock(2, 8, positions="sinusoidal"), "Received 'sinusoidal'"),
        (
            lambda: SelfAttention(2, 4, positions="transformer_xl", position_options={"num_buckets": 8}),
            r"\"t5\" \(num_buckets, max_distance, bidirectional\), .* Received 'transformer_xl' and {'num_buckets': 8}",
        ),
        (lambda: SelfAttention(2, 4, position_options={"max_distance": 8}), "Received None and"),
        (lambda: SelfAttention(2, 4, positions="shaw", position_options=8), "Received 'shaw' and 8"),
        (lambda: TransformerEncoderBlock(2, 8, position_options={"max_distance": 8}), "Received None and"),
        (lambda: TextEncoder(9, 8, 1, 2, position_options={"max_distance": 8}), "Received 'sinusoidal' and"),
        (lambda: SelfAttention(2, 4, positions="t5", position_options={"max_distance": 0}), "Received max_distance=0"),
        (lambda: rotate(np.ones((1, 1, 1, 3)), np.arange(1)), "is even. Received 3"),
    ],
)
def test_impossible_positions_are_refused_in_words(make, words):
    with pytest.raises(ValueError, match=words):
        make()
