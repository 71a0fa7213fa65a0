"""What differs by backend: compiled functions see new weights, count their traces and can be forgotten."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
from keras import ops

from mmattn import backend

TORCH = backend.name() == "torch"


def dense(policy="float32"):
    layer = keras.layers.Dense(3, dtype=policy)
    layer.build((None, 4))
    return layer


def numbers(array):
    return ops.convert_to_numpy(ops.convert_to_tensor(array))


@pytest.mark.parametrize("jit", [True, False])
def test_compiled_function_sees_later_weights(jit):
    layer, x = dense(), np.random.default_rng(0).normal(size=(2, 4)).astype("float32")
    compiled = backend.compile(lambda x: layer(x), jit=jit, variables_of=layer)
    for scale in (1.0, -2.0, 5.0):
        kernel = np.full((4, 3), scale, dtype="float32")
        layer.set_weights([kernel, np.ones(3, "float32")])
        np.testing.assert_allclose(numbers(compiled(x)), x @ kernel + 1, rtol=1e-5)
    assert compiled.traces() == (0 if TORCH else 1)


def test_weights_of_several_models_are_seen():
    first, second, x = dense(), keras.layers.Dense(2), np.ones((2, 4), "float32")
    second.build((None, 3))
    compiled = backend.compile(lambda x: second(first(x)), variables_of=[first, second, first])
    for scale in (1.0, 3.0):
        second.set_weights([np.full((3, 2), scale, "float32"), np.zeros(2, "float32")])
        np.testing.assert_allclose(numbers(compiled(x)), numbers(second(first(x))), rtol=1e-5)


def test_same_shapes_trace_once_and_other_shapes_again():
    compiled = backend.compile(lambda x: x["a"] * 2.0)
    for value in range(3):
        compiled({"a": np.full((2, 3), value, "float32")})
    assert compiled.traces() == (0 if TORCH else 1)
    compiled({"a": np.zeros((4, 3), "float32")})
    assert compiled.traces() == (0 if TORCH else 2)


@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="the warning is TensorFlow's")
def test_many_shapes_of_ours_are_no_warning_and_those_of_others_are(caplog):
    import tensorflow as tf

    ours, others = backend.compile(lambda x: x * 2.0), tf.function(lambda x: x * 2.0)
    for function, warned in ((ours, False), (others, True)):
        caplog.clear()
        for size in range(1, 8):
            function(np.zeros(size, "float32"))
        assert ("retracing" in caplog.text) is warned


def test_nests_with_none_go_in_and_come_out():
    compiled = backend.compile(lambda x: {"twice": x["a"] * 2.0, "none": x["b"]})
    found = compiled({"a": np.ones((1, 2), "float32"), "b": None})
    assert found["none"] is None
    np.testing.assert_array_equal(numbers(found["twice"]), [[2.0, 2.0]])


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_computes_in_the_policy_s_type(policy):
    layer, x = dense(policy), np.random.default_rng(0).normal(size=(2, 4)).astype("float32")
    found = backend.compile(lambda x: layer(x), variables_of=layer)(x)
    assert keras.backend.standardize_dtype(found.dtype) == layer.compute_dtype
    assert keras.backend.standardize_dtype(layer.kernel.dtype) == "float32"
    np.testing.assert_allclose(numbers(ops.cast(found, "float32")), x @ numbers(layer.kernel), atol=0.05)


def test_variables_keep_their_value_though_the_function_draws_from_a_seed_generator():
    layer = keras.layers.Dropout(0.5, seed=3)
    layer.build((None, 4))
    compiled = backend.compile(lambda x: layer(x, training=False), variables_of=layer)
    before = [numbers(variable) for variable in layer.variables]
    compiled(np.ones((2, 4), "float32"))
    assert all(np.array_equal(a, numbers(b)) for a, b in zip(before, layer.variables, strict=True))


def test_a_compiled_function_and_its_model_are_garbage_collected():
    layer = dense()
    compiled = backend.compile(layer.__call__, variables_of=layer)
    compiled(np.ones((2, 4), "float32"))
    gone = weakref.ref(layer)
    del layer, compiled
    gc.collect()
    assert gone() is None


@pytest.mark.skipif(backend.name() != "jax", reason="only JAX needs the variables before the call")
def test_a_model_that_is_not_built_is_refused():
    layer = keras.layers.Dense(3, name="late")
    with pytest.raises(ValueError, match="`late` has no variables yet"):
        backend.compile(lambda x: layer(x), variables_of=layer)(np.ones((2, 4), "float32"))


def test_arrays_are_traced_in_a_compiled_function_only():
    seen = []
    backend.compile(lambda x: (seen.append(backend.is_traced({"x": x})), x)[1])(np.ones(2, "float32"))
    assert seen == [not TORCH]
    assert not backend.is_traced(ops.ones(2))


def test_no_gradient_is_recorded():
    layer = dense()
    with backend.no_gradient():
        found = layer(np.ones((1, 4), "float32"))
    assert not getattr(found, "requires_grad", False)


def test_determinism_repeats_random_numbers():
    draws = []
    for _ in range(2):
        backend.set_determinism(5)
        draws.append((np.random.random(3), numbers(keras.random.normal((3,)))))
    np.testing.assert_array_equal(draws[0], draws[1])


def test_impossible_numbers_of_threads_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        backend.set_threads(0)
    backend.set_threads(None)


@pytest.mark.skipif(backend.name() != "tensorflow", reason="TensorFlow fixes its threads when it starts")
def test_threads_after_the_first_operation_are_refused():
    numbers(ops.ones(2))
    with pytest.raises(RuntimeError, match="before TensorFlow runs its first operation"):
        backend.set_threads(7)


def test_batches_of_any_shape_reach_fit_in_order():
    """Also where the first two are alike, from which Keras would take the shapes of all."""
    widths = [3, 3, 5, 2, 5]
    seen = []

    class Watch(keras.layers.Layer):
        def call(self, x):
            return keras.ops.sum(x, axis=1, keepdims=True)

    def stream():
        for number, width in enumerate(widths * 2):
            seen.append(number)
            yield np.full((2, width), number, "float32"), np.zeros((2, 1), "float32")

    model = keras.Sequential([Watch(), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), loss="mae")
    losses = []
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
    batches = stream()
    model.fit(backend.batch_stream(batches), steps_per_epoch=5, shuffle=False, verbose=0, callbacks=[callback])
    sums = [number * width for number, width in enumerate(widths)]
    np.testing.assert_allclose(losses, np.cumsum(sums) / np.arange(1, 6), rtol=1e-5)
    assert seen[:5] == [0, 1, 2, 3, 4]


def test_gradients_of_inputs_and_variables():
    layer, x = dense(), np.random.default_rng(0).normal(size=(2, 4)).astype("float32")
    other = keras.Variable(np.ones(3, "float32"))
    by_x, by_kernel, by_bias, by_other = backend.gradients(
        lambda x: ops.sum(layer(x) * 2.0), [x], [layer.kernel, layer.bias, other]
    )
    kernel = numbers(layer.kernel.value)
    np.testing.assert_allclose(numbers(by_x), np.tile(2.0 * kernel.sum(axis=1), (2, 1)), rtol=1e-5)
    np.testing.assert_allclose(numbers(by_kernel), np.tile(2.0 * x.sum(axis=0)[:, None], (1, 3)), rtol=1e-5)
    assert numbers(by_bias).tolist() == [4.0] * 3 and numbers(by_other).tolist() == [0.0] * 3


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_scan_is_the_loop_and_gradients_pass_through_it(mode):
    rng = np.random.default_rng(0)
    rows, kernel = rng.normal(size=(5, 2, 3)).astype("float32"), rng.normal(size=(3, 3)).astype("float32")

    def run(rows, kernel):
        def body(carry, given):
            state = ops.tanh(carry["state"] @ kernel + given["row"] * given["share"])
            return {"state": state, "count": carry["count"] + 1.0}, (state, state[:, :1])

        start = {"state": ops.zeros((2, 3)), "count": ops.zeros(())}
        shares = ops.ones((5, 1, 1)) * 0.5
        last, (states, firsts) = backend.scan(body, start, {"row": rows, "share": shares}, ["float32"] * 2)
        return last["count"], last["state"], states, firsts

    def both(rows, kernel):
        return run(rows, kernel), backend.gradients(lambda *a: ops.sum(ops.sin(run(*a)[2])), [rows, kernel])

    if mode == "compiled":
        both = backend.compile(both)
    (count, last, states, firsts), gradients = both(*(ops.convert_to_tensor(a) for a in (rows, kernel)))

    def loop(rows, kernel):
        state, found = np.zeros((2, 3)), []
        for row in rows:
            state = np.tanh(state @ kernel + row * 0.5)
            found.append(state)
        return np.stack(found)

    exact = [rows.astype("float64"), kernel.astype("float64")]
    assert float(numbers(count)) == 5.0
    np.testing.assert_allclose(numbers(states), loop(*exact), atol=1e-5)
    np.testing.assert_allclose(numbers(last), loop(*exact)[-1], atol=1e-5)
    np.testing.assert_allclose(numbers(firsts), loop(*exact)[..., :1], atol=1e-5)
    for which, place in ((0, (1, 0, 2)), (0, (4, 1, 1)), (1, (2, 0))):
        ends = []
        for sign in (1e-6, -1e-6):
            moved = [a.copy() for a in exact]
            moved[which][place] += sign
            ends.append(np.sin(loop(*moved)).sum())
        assert numbers(gradients[which])[place] == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-3)
