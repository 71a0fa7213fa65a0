"""Attention against a loop in NumPy, on every path."""

from __future__ import annotations

import itertools
import math

import keras
import numpy as np
import pytest
from arrays import FLOAT, JAX, MODES, TENSORFLOW, TOLERANCE, WIDE, assert_close, assert_equal, numbers
from keras import ops

from mmattn import backend
from mmattn.layers import (
    CrossAttention,
    MultiHeadAttention,
    SelfAttention,
    TransformerDecoderBlock,
    TransformerEncoderBlock,
    causal_mask,
)

B, T, S, D, M, H, K, V = 2, 5, 7, 12, 10, 3, 4, 6


def reference(layer, query, value, mask=None):
    """Equations (2.1) to (2.3), one head, one row, one query at a time, in float64."""
    weights = [w.astype("float64") for w in layer.get_weights()]
    wq, bq, wk, bk, wv, bv, wo, bo = weights
    batch, targets, sources = query.shape[0], query.shape[1], value.shape[1]
    heads = wq.shape[1]
    output = np.zeros((batch, targets, wo.shape[-1]))
    scores = np.zeros((batch, heads, targets, sources))
    for b, t in itertools.product(range(batch), range(targets)):
        sees = False
        for h in range(heads):
            q = query[b, t] @ wq[:, h] + bq[h]
            logits = np.full(sources, -np.inf)
            for s in range(sources):
                if mask is None or np.broadcast_to(mask, scores.shape)[b, h, t, s]:
                    logits[s] = q @ (value[b, s] @ wk[:, h] + bk[h]) / math.sqrt(wq.shape[-1])
            if np.isfinite(logits).any():
                sees = True
                e = np.exp(logits - logits.max())
                scores[b, h, t] = e / e.sum()
            z = sum(scores[b, h, t, s] * (value[b, s] @ wv[:, h] + bv[h]) for s in range(sources))
            output[b, t] += z @ wo[h]
        if sees:
            output[b, t] += bo
    return output, scores


def randomise(layer, seed=0):
    rng = np.random.default_rng(seed)
    layer.set_weights([rng.normal(size=w.shape, scale=0.5) for w in layer.get_weights()])


def make(dtype=FLOAT, **options):
    rng = np.random.default_rng(1)
    query, value = rng.normal(size=(B, T, D)), rng.normal(size=(B, S, M))
    layer = MultiHeadAttention(H, K, value_dim=V, dtype=dtype, **options)
    layer(query.astype("float32"), value.astype("float32"))
    randomise(layer)
    return layer, query, value


def free_mask(seed=2, shape=(B, H, T, S)):
    mask = np.random.default_rng(seed).random(shape) < 0.5
    mask[1, :, 3] = False  # a query that may see nothing
    return mask


MASKS = {
    "none": (None, None),
    "free": ({"attention_mask": free_mask()}, free_mask()),
    "causal": ({"use_causal_mask": True}, np.tril(np.ones((T, S), bool), S - T)[None, None]),
    "padding": (
        {"key_mask": np.array([[1] * 4 + [0] * 3, [0] * 7], bool)},
        np.array([[1] * 4 + [0] * 3, [0] * 7], bool)[:, None, None],
    ),
    "query": (
        {"query_mask": np.array([[1] * 4 + [0], [1] * 5], bool)},
        np.array([[1] * 4 + [0], [1] * 5], bool)[:, None, :, None],
    ),
    "all": (
        {"attention_mask": free_mask()[:, 0], "use_causal_mask": True, "value_mask": np.arange(S)[None] < [[5], [7]]},
        free_mask()[:, :1] & np.tril(np.ones((T, S), bool), S - T) & (np.arange(S)[None] < [[5], [7]])[:, None, None],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", MASKS)
def test_equals_the_loop_in_every_mode(kind, mode):
    layer, query, value = make()
    options, mask = MASKS[kind]
    options = {k: ops.convert_to_tensor(v) if isinstance(v, np.ndarray) else v for k, v in (options or {}).items()}

    def run(q, v):
        return layer(q, v, return_attention_scores=True, **options)

    output, scores = compiled(run, mode)(*(ops.convert_to_tensor(array.astype(FLOAT)) for array in (query, value)))
    expected, expected_scores = reference(layer, query, value, mask)
    assert_close(output, expected, atol=TOLERANCE)
    assert_close(scores, expected_scores, atol=TOLERANCE)


def compiled(fn, mode, variables_of=None):
    return fn if mode == "eager" else backend.compile(fn, jit=mode == "xla", variables_of=variables_of)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("mixed_bfloat16", 0.08), ("mixed_float16", 0.02)])
def test_equals_the_loop_in_lower_precision(dtype, tolerance):
    layer, query, value = make(dtype)
    options, mask = MASKS["all"]
    output = layer(query.astype("float32"), value.astype("float32"), **options)
    expected, _ = reference(layer, query, value, mask)
    assert_close(numbers(ops.cast(output, "float32")), expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("scores", [False, True])
def test_masked_row_is_zero_forward_and_gradient_in_every_mode(dtype, scores):
    layer, query, value = make(dtype, dropout=0.3)
    query, value = (ops.convert_to_tensor(array.astype("float32")) for array in (query, value))
    for training, mode in itertools.product([False, True], ("jit",) if JAX else MODES):  # JAX is slow one by one

        def row(q, v, training=training):
            output = layer(q, v, attention_mask=free_mask(), return_attention_scores=scores, training=training)
            return ops.cast((output[0] if scores else output)[1, 3], "float32")

        def run(q, v, row=row):
            return row(q, v), backend.gradients(lambda q, v: ops.sum(row(q, v)), [q, v], layer.trainable_variables)

        found, gradients = compiled(run, mode, layer)(query, value)
        assert not np.any(numbers(found))
        for gradient in gradients:
            assert not np.any(numbers(gradient))


def test_padding_never_leaks_into_output_or_gradient():
    layer, query, value = make("float32")
    query, value = query.astype("float32"), value.astype("float32")
    mask = np.arange(S)[None] < np.array([[4], [6]])
    other = np.where(mask[..., None], value, np.float32(1e3))
    first, second = (layer(query, v, key_mask=mask) for v in (value, other))
    assert_equal(first, second)
    [gradient] = backend.gradients(lambda v: ops.sum(layer(query, v, key_mask=mask)), [value])
    assert not np.any(numbers(gradient)[~mask]) and np.all(numbers(gradient)[mask])


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("training", [False, True])
def test_future_never_leaks(scores, dropout, training):
    layer = SelfAttention(H, K, dropout=dropout, seed=3)
    x = np.random.default_rng(0).normal(size=(B, T, D)).astype("float32")
    outputs = []
    for changed in (x, np.concatenate([x[:, :3], x[:, 3:] + 5], axis=1)):
        twin = SelfAttention.from_config(layer.get_config())
        twin.build(x.shape)
        randomise(twin)
        output = twin(changed, use_causal_mask=True, return_attention_scores=scores, training=training)
        outputs.append(numbers(output[0] if scores else output))
    assert_equal(outputs[0][:, :3], outputs[1][:, :3])
    assert np.abs(outputs[0][:, 3:] - outputs[1][:, 3:]).max() > 1e-3


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), WIDE])
def test_self_attention_step_equals_call(dtype, tolerance):
    layer = SelfAttention(H, K, value_dim=V, dtype=dtype)
    x = np.random.default_rng(0).normal(size=(B, T, D)).astype(dtype)
    layer.build(x.shape)
    randomise(layer)
    whole = numbers(layer(x, use_causal_mask=True))
    cache = layer.start(B, T + 3)
    for t in range(T):
        output, cache = layer.step(ops.convert_to_tensor(x[:, t]), t, cache)
        assert_close(output, whole[:, t], atol=tolerance)


def test_cross_attention_step_equals_call():
    layer = CrossAttention(H, K, value_dim=V, dtype=FLOAT)
    rng = np.random.default_rng(0)
    x, memory = rng.normal(size=(B, T, D)).astype(FLOAT), rng.normal(size=(B, S, M)).astype(FLOAT)
    mask = np.arange(S)[None] < np.array([[4], [0]])  # the second row may see nothing
    layer.build(x.shape, memory.shape)
    randomise(layer)
    whole = numbers(layer(x, memory, memory_mask=mask))
    context = layer.start(memory, mask)
    for t in range(T):
        assert_close(layer.step(ops.convert_to_tensor(x[:, t]), context), whole[:, t], atol=TOLERANCE)
    assert not np.any(whole[1])


def test_keras_weights_load_and_give_the_same():
    ours, query, value = make("float32")
    theirs = keras.layers.MultiHeadAttention(H, K, value_dim=V)
    theirs(query.astype("float32"), value.astype("float32"), return_attention_scores=True)  # without, it fails on JAX
    assert [(v.name, tuple(v.shape)) for v in theirs.weights] == [(v.name, tuple(v.shape)) for v in ours.weights]
    theirs.set_weights(ours.get_weights())
    mask = free_mask(shape=(B, T, S, 1))[..., 0] | (np.arange(S) == 0)
    told = {"attention_mask": mask, "return_attention_scores": True}
    for a, b in zip(
        *(m(query.astype("float32"), value.astype("float32"), **told) for m in (ours, theirs)), strict=True
    ):
        assert_close(a, b, atol=1e-5)


def test_weights_files_of_keras_layer_load_both_ways(tmp_path):
    x, memory = np.ones((B, T, D), "float32"), np.random.default_rng(0).normal(size=(B, S, M)).astype("float32")

    def model(layer):
        inputs = keras.Input((T, D)), keras.Input((S, M))
        return keras.Model(inputs, layer(H, K, value_dim=V, dropout=0.1)(*inputs))

    for first, second in itertools.permutations([MultiHeadAttention, keras.layers.MultiHeadAttention]):
        source, target = model(first), model(second)
        randomise(source)
        source.save_weights(tmp_path / "x.weights.h5")
        target.load_weights(tmp_path / "x.weights.h5")
        assert_close(source([x, memory]), target([x, memory]), atol=1e-5)


def test_masks_may_be_given_by_position_in_a_functional_model():
    x, memory = np.random.default_rng(0).normal(size=(2, B, T, D)).astype("float32")
    mask = np.arange(T)[None] < np.array([[2], [4]])
    layers = {
        MultiHeadAttention(H, K): lambda layer, q, v, m: layer(q, v, v, m),
        SelfAttention(H, K): lambda layer, q, v, m: layer(q, m),
        CrossAttention(H, K): lambda layer, q, v, m: layer(q, v, m),
        TransformerEncoderBlock(H, 16): lambda layer, q, v, m: layer(q, m),
        TransformerDecoderBlock(H, 16): lambda layer, q, v, m: layer(q, v, m),
    }
    for layer, call in layers.items():
        inputs = keras.Input((None, D)), keras.Input((None, D)), keras.Input((None,), dtype="bool")
        model = keras.Model(inputs, call(layer, *inputs))
        assert_close(model([x, memory, mask]), call(layer, x, memory, mask), atol=1e-6)


def test_implicit_masks_count_in_a_functional_model_and_in_predict():
    ids, words = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
    embedding = keras.layers.Embedding(10, D, mask_zero=True)
    y, memory = embedding(ids), TransformerEncoderBlock(H, 16)(embedding(words))
    for _ in range(2):
        y = TransformerDecoderBlock(H, 16)(y, memory)
    model = keras.Model([ids, words], y)
    short = [np.array([[3, 4, 5]]), np.array([[6, 7]])]
    padded = [np.array([[3, 4, 5, 0]]), np.array([[6, 7, 0, 0, 0]])]
    for run in (model, lambda arrays: model.predict(arrays, verbose=0)):
        assert_close(numbers(run(padded))[:, :3], run(short), atol=1e-5)


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
def test_big_inputs_stay_finite_in_half_precision(dtype):
    x = (np.random.default_rng(0).normal(size=(2, 16, 128)) * 200).astype("float32")
    layer = SelfAttention(2, 64, dtype=dtype)
    layer.build(x.shape)
    query, key = (
        np.abs(numbers(ops.cast(dense(x), "float32"))).max() for dense in (layer.query_dense, layer.key_dense)
    )
    assert query * key * 64 / 8 > 65504  # a score may leave float16's range
    output, scores = layer(x, return_attention_scores=True)
    assert np.isfinite(numbers(ops.cast(output, "float32"))).all()
    assert_close(numbers(ops.cast(scores, "float32")).sum(-1), 1, atol=0.02)


def test_implicit_masks_are_honoured_and_left_on_the_callers_tensors():
    ids = np.array([[3, 4, 0, 0], [5, 6, 7, 0]])
    embedded = keras.layers.Embedding(10, D, mask_zero=True)(ids)
    layer = SelfAttention(H, K)
    output, scores = layer(embedded, return_attention_scores=True)
    assert not np.any(numbers(scores)[0, :, :, 2:])
    assert_equal(embedded._keras_mask, ids != 0)
    assert_equal(output._keras_mask, ids != 0)
    cross = CrossAttention(H, K)
    for _ in range(3):  # a stack of decoder layers shares one memory
        _, scores = cross(np.ones((2, 3, D), "float32"), embedded, return_attention_scores=True)
        assert not np.any(numbers(scores)[0, :, :, 2:])
    both = layer(embedded, attention_mask=np.ones((1, 4, 4), bool), return_attention_scores=True)[1]
    assert not np.any(numbers(both)[0, :, :, 2:])


def test_layers_survive_saving(tmp_path):
    x, memory = keras.Input((None, D)), keras.Input((S, M))
    y = SelfAttention(H, K, dropout=0.1, seed=1)(x, use_causal_mask=True)
    y, scores = CrossAttention(H, K, value_dim=V)(y, memory, return_attention_scores=True)
    y = MultiHeadAttention(H, K, output_shape=9)(y, memory)
    model = keras.Model([x, memory], [y, scores])
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(B, T, D)).astype("float32"), rng.normal(size=(B, S, M)).astype("float32")]
    before = model(arrays)
    model.save(tmp_path / "m.keras")
    for a, b in zip(before, keras.models.load_model(tmp_path / "m.keras")(arrays), strict=True):
        assert_equal(a, b)


def test_symbolic_scores_have_the_shape_of_the_real_ones():
    x, memory = keras.Input((T, D)), keras.Input((S, M))
    output, scores = MultiHeadAttention(H, K)(x, memory, return_attention_scores=True)
    assert output.shape == (None, T, D) and scores.shape == (None, H, T, S)


@pytest.mark.parametrize(
    "mask, words",
    [
        (np.zeros((B, T, S)), "boolean"),
        (np.ones((B, S, T), bool), r"\(B, T, S\).*\(2, 7, 5\).*B=2, H=3, T=5, S=7"),
        (np.ones((B, S), bool), r"\(2, 7\).*T=5"),
        (np.ones((B, T, 1), bool), r"\(2, 5, 1\)"),
        (np.ones(S, bool), r"\(7,\)"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_in_words(mask, words):
    layer, query, value = make("float32")
    with pytest.raises(ValueError, match=words):
        layer(query.astype("float32"), value.astype("float32"), attention_mask=mask)


@pytest.mark.parametrize(
    "name, mask, words",
    [
        ("key_mask", np.where(np.arange(S) < 4, 0.0, -1e9)[None].repeat(B, 0), r"key_mask is boolean.*additive"),
        ("value_mask", np.ones((B, T), bool), r"value_mask has the shape \(B, 7\) with B=2. Received \(2, 5\)"),
        ("query_mask", np.ones((B, 1), bool), r"query_mask has the shape \(B, 5\) with B=2. Received \(2, 1\)"),
        ("key_mask", np.ones((B, 1, S), bool), r"key_mask has the shape"),
    ],
)
def test_a_padding_mask_that_does_not_fit_is_refused_in_words(name, mask, words):
    layer, query, value = make("float32")
    with pytest.raises(ValueError, match=words):
        layer(query.astype("float32"), value.astype("float32"), **{name: mask})


def test_a_step_beyond_the_cache_is_refused():
    layer = SelfAttention(H, K)
    layer.build((B, T, D))
    with pytest.raises(ValueError, match=r"positions 0 to 3\. Received index=4"):
        layer.step(np.ones((B, D), "float32"), 4, layer.start(B, 4))


def test_the_output_width_of_a_keras_configuration_is_understood():
    theirs = keras.layers.MultiHeadAttention(H, K, output_shape=9).get_config()["output_shape"]
    assert MultiHeadAttention(H, K, output_shape=theirs)(*make("float32")[1:]).shape == (B, T, 9)


def test_a_mask_that_fits_by_accident_is_refused():
    layer = MultiHeadAttention(H, K)
    x = np.ones((4, 4, D), "float32")
    with pytest.raises(ValueError, match=r"\(T, S\) or as the padding mask \(B, S\)"):
        layer(x, x, attention_mask=np.ones((4, 4), bool))


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_heads": 0, "key_dim": 4},
        {"num_heads": 2, "key_dim": -1},
        {"num_heads": 2, "key_dim": 4, "dropout": 1.0},
        {"num_heads": 2, "key_dim": 4, "output_shape": (2, 0)},
    ],
)
def test_impossible_sizes_are_refused(arguments):
    with pytest.raises(ValueError, match="Received"):
        MultiHeadAttention(**arguments)


def test_causal_mask_is_aligned_to_the_bottom_right():
    assert numbers(causal_mask(2, 4))[0].astype(int).tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_gradients_equal_finite_differences():
    layer, query, value = make()
    query, value = query.astype(FLOAT), value.astype(FLOAT)
    [gradient] = backend.gradients(lambda q: ops.sum(ops.sin(layer(q, value, attention_mask=free_mask()))), [query])
    for place in [(0, 0, 0), (1, 4, 7), (1, 3, 2)]:
        step = np.zeros_like(query, "float64")
        step[place] = 1e-6
        up, down = (np.sin(reference(layer, query + s, value, free_mask())[0]).sum() for s in (step, -step))
        assert numbers(gradient)[place] == pytest.approx((up - down) / 2e-6, abs=1e-6 if TENSORFLOW else 1e-4)
