"""Additive and multiplicative attention against loops in NumPy; masks, steps, saving, precisions."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
from arrays import FLOAT, JAX, MODES, TENSORFLOW, TOLERANCE, WIDE, assert_close, assert_equal, numbers
from keras import ops

from mmattn import backend
from mmattn.layers import AdditiveAttention, MultiplicativeAttention

B, T, S, D = 2, 4, 6, 5
RNG = np.random.default_rng(0)
INPUTS, MEMORY, VALUE = RNG.normal(size=(B, T, D)), RNG.normal(size=(B, S, D)), RNG.normal(size=(B, S, 3))
PADDED = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], bool)
BLIND = np.array([[1, 1, 1, 1, 0, 0], [0] * 6], bool)
KINDS = {
    "additive": lambda **o: AdditiveAttention(7, **o),
    "dot": lambda **o: MultiplicativeAttention("dot", **o),
    "general": lambda **o: MultiplicativeAttention("general", **o),
}


def made(kind, dtype=FLOAT, memory_width=D):
    layer = KINDS[kind](dtype=dtype)
    layer.build((None, None, D), (None, None, memory_width))
    rng = np.random.default_rng(1)
    layer.set_weights([rng.normal(size=w.shape, scale=0.6) for w in layer.get_weights()])
    return layer


def reference(kind, layer, inputs, memory, mask=None, value=None):
    """The papers' equations, one row, one query, one key at a time."""
    weights = [w.astype("float64") for w in layer.get_weights()]
    value = memory if value is None else value
    found, scores = np.zeros((B, T, value.shape[-1])), np.zeros((B, 1, T, S))
    for b, t in itertools.product(range(B), range(T)):
        energies = {}
        for s in range(S):
            if mask is not None and not mask[b, s]:
                continue
            q, k = inputs[b, t], memory[b, s]
            if kind == "additive":
                w, u, v = sorted(weights, key=lambda a: a.ndim == 1)
                energies[s] = sum(v[i] * np.tanh(q @ w[:, i] + k @ u[:, i]) for i in range(len(v)))
            else:
                energies[s] = q @ weights[0] @ k if kind == "general" else q @ k
        total = sum(np.exp(e) for e in energies.values())
        for s, energy in energies.items():
            scores[b, 0, t, s] = np.exp(energy) / total
            found[b, t] += scores[b, 0, t, s] * value[b, s]
    return found, scores


def compiled(fn, mode):
    return fn if mode == "eager" else backend.compile(fn, jit=mode == "xla")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mask", [None, PADDED, BLIND], ids=["open", "padded", "blind"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_loop_in_every_mode(kind, mask, mode):
    layer = made(kind)

    def run(inputs, memory):
        return layer(inputs, memory, memory_mask=mask, return_attention_scores=True)

    found = compiled(run, mode)(*(ops.convert_to_tensor(a.astype(FLOAT)) for a in (INPUTS, MEMORY)))
    for one, expected in zip(found, reference(kind, layer, INPUTS, MEMORY, mask), strict=True):
        assert_close(one, expected, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_their_own_are_mixed_by_the_weights_of_the_memory(kind):
    layer = made(kind)
    inputs, memory, value = (a.astype(FLOAT) for a in (INPUTS, MEMORY, VALUE))
    found = layer(inputs, memory, PADDED, value)
    assert_close(found, reference(kind, layer, INPUTS, MEMORY, PADDED, VALUE)[0], atol=TOLERANCE)
    context = layer.start(memory, PADDED, value)
    assert_close(layer.step(inputs[:, 2], context), found[:, 2], atol=TOLERANCE)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), WIDE])
@pytest.mark.parametrize("kind", KINDS)
def test_step_equals_call(kind, dtype, tolerance):
    layer = made(kind, dtype)
    inputs, memory = INPUTS.astype(dtype), MEMORY.astype(dtype)
    whole, scores = layer(inputs, memory, memory_mask=BLIND, return_attention_scores=True)
    context = layer.start(memory, BLIND)
    for t in range(T):
        found, weights = layer.step(inputs[:, t], context, return_attention_scores=True)
        assert_close(found, whole[:, t], atol=tolerance)
        assert_close(weights, scores[:, 0, t], atol=tolerance)


@pytest.mark.parametrize("bad", [1e4, np.inf, np.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_under_the_mask_reaches_no_result_and_no_gradient(kind, bad):
    layer = made(kind, "float32")
    hidden = ~BLIND[..., None]

    def results(memory, value):
        arrays = [a.astype("float32") for a in (INPUTS, memory, value)]

        def total(inputs, memory, value):
            return ops.sum(ops.square(layer(inputs, memory, BLIND, value)))

        found = layer(arrays[0], arrays[1], BLIND, arrays[2])
        return [found, *backend.gradients(total, arrays, layer.trainable_variables)]

    plain = results(MEMORY, VALUE)
    for one, other in zip(plain, results(*(np.where(hidden, bad, a) for a in (MEMORY, VALUE))), strict=True):
        assert_equal(one, other)
    assert not np.any(numbers(plain[0])[1])  # the row that may see nothing
    for gradient in plain[1:4]:
        assert not np.any(numbers(gradient)[1])
    assert not np.any(numbers(plain[2])[0, 4:])


@pytest.mark.parametrize("kind", KINDS)
def test_the_memorys_own_mask_counts(kind):
    layer = made(kind, "float32")
    ids = np.where(PADDED, 4, 0)
    memory = keras.layers.Embedding(9, D, mask_zero=True)(ids)
    found, scores = layer(INPUTS.astype("float32"), memory, return_attention_scores=True)
    assert not np.any(numbers(scores)[0, 0, :, 4:])
    assert_close(layer.step(INPUTS[:, 1].astype("float32"), layer.start(memory)), found[:, 1], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_half_precision_is_near_and_does_not_overflow(policy, kind):
    layer = made(kind, policy)
    inputs, memory = INPUTS.astype("float32"), MEMORY.astype("float32")
    found = layer(inputs, memory, PADDED)
    assert keras.backend.standardize_dtype(found.dtype) == policy.removeprefix("mixed_")
    assert_close(numbers(ops.cast(found, "float32")), reference(kind, layer, inputs, memory, PADDED)[0], atol=0.1)
    large = layer(300 * inputs, 300 * memory, PADDED)
    assert np.isfinite(numbers(ops.cast(large, "float32"))).all()


@pytest.mark.parametrize("kind", KINDS)
def test_is_the_same_after_saving(kind, tmp_path):
    states, memory = keras.Input((None, D)), keras.Input((None, D))
    model = keras.Model([states, memory], KINDS[kind](name="attention")(states, memory))
    arrays = [INPUTS.astype("float32"), MEMORY.astype("float32")]
    before = numbers(model(arrays))
    model.save(tmp_path / "model.keras")
    assert_equal(keras.models.load_model(tmp_path / "model.keras")(arrays), before)


@pytest.mark.parametrize("kind", ["additive", "general"])
def test_memory_may_have_another_width_and_one_place(kind):
    layer = made(kind, "float32", memory_width=3)
    found, scores = layer(INPUTS.astype("float32"), VALUE[:, :1].astype("float32"), return_attention_scores=True)
    assert_close(found, np.repeat(VALUE[:, :1], T, axis=1), atol=1e-6)
    assert_equal(scores, np.ones((B, 1, T, 1), "float32"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdditiveAttention(0), "units=0"),
        (lambda: MultiplicativeAttention("concat"), '"concat" is AdditiveAttention'),
        (lambda: made("dot", memory_width=3), r"Received 5 and 3: score=\"general\" takes any"),
        (lambda: made("dot")(INPUTS, MEMORY, PADDED[:, :4]), r"memory_mask has the shape \(B, 6\)"),
        (lambda: made("dot")(INPUTS, MEMORY, PADDED * 1.0), "memory_mask is boolean"),
        (lambda: made("dot")(INPUTS, MEMORY[:1]), r"one batch B\. .* values \(1, 6, 5\)"),
        (lambda: made("additive")(INPUTS[:1], MEMORY), r"one batch B\. Received inputs \(1, 4, 5\)"),
        (lambda: made("general")(INPUTS, MEMORY, value=VALUE[:, :3]), r"B and S the same.* value \(2, 3, 3\)"),
        (lambda: made("general")(INPUTS, MEMORY, value=VALUE[0, 0]), r"takes inputs.*value \(3,\)"),
        (lambda: made("additive")(INPUTS[0], MEMORY), r"takes inputs \(B, T, D\).*Received inputs \(4, 5\)"),
        (lambda: made("dot")(INPUTS, MEMORY[:1], PADDED), r"memory_mask has the shape \(B, 6\) with B=1"),
        (lambda: made("general")(INPUTS, MEMORY[:1], value=VALUE), r"B and S the same"),
        (lambda: made("dot")([INPUTS, MEMORY]), r"not as a list: layer\(inputs, memory\)\. Received a list of 2"),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.skipif(not (TENSORFLOW or JAX), reason="torch has no compiled programs here")
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_a_compiled_call_equals_that_of_finite_differences(kind):
    layer = made(kind)
    arrays = [ops.convert_to_tensor(a.astype(FLOAT)) for a in (INPUTS, MEMORY)]

    def total(inputs, memory):
        return ops.sum(ops.sin(layer(inputs, memory, PADDED)))

    found = compiled(lambda *a: backend.gradients(total, a), MODES[-1])(*arrays)
    step = 1e-5 if FLOAT == "float64" else 1e-2
    for which, place in ((0, (0, 1, 2)), (1, (0, 3, 1)), (1, (1, 5, 4))):
        ends = []
        for sign in (1, -1):
            moved = [numbers(a).copy() for a in arrays]
            moved[which][place] += sign * step
            ends.append(float(total(*(ops.convert_to_tensor(a) for a in moved))))
        assert numbers(found[which])[place] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=2e-2, abs=1e-3)
