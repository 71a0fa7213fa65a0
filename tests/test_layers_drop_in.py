"""Our attention layers in the place of Keras' own: the same numbers wherever Keras' are right."""

from __future__ import annotations

import inspect
import itertools
import warnings

import keras
import numpy as np
import pytest
from keras import ops

from mmattn import backend
from mmattn.layers import (
    CrossAttention,
    GroupedQueryAttention,
    MultiHeadAttention,
    SelfAttention,
    TransformerDecoderBlock,
    TransformerEncoderBlock,
)

B, T, S, D, M, H, K = 2, 5, 7, 12, 10, 4, 3
TENSORFLOW = keras.backend.backend() == "tensorflow"


def drawn(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


def masked(shape, seed=1):
    """A mask that leaves each query the first key."""
    mask = np.random.default_rng(seed).random(shape) < 0.5
    mask[..., 0] = True
    return mask


def randomise(layer, seed=2):
    rng = np.random.default_rng(seed)
    layer.set_weights([rng.normal(size=w.shape, scale=0.5) for w in layer.get_weights()])


def twins(options, *shapes, kind=keras.layers.MultiHeadAttention):
    """Ours and theirs, with the same weights."""
    theirs = kind(**options)
    theirs.build(*shapes)
    randomise(theirs)
    return MultiHeadAttention.from_keras(theirs), theirs


def numbers(array):
    return np.asarray(ops.convert_to_numpy(array)).astype("float64")


def assert_same(found, expected, tolerance=2e-5):
    found, expected = keras.tree.flatten(found), keras.tree.flatten(expected)
    for one, other in zip(found, expected, strict=True):
        assert tuple(one.shape) == tuple(other.shape) and one.dtype == other.dtype
        np.testing.assert_allclose(numbers(one), numbers(other), atol=tolerance, rtol=tolerance)


# The arguments of the constructor, and of a call.

OPTIONS = {
    "plain": {},
    "value_dim": {"value_dim": 5},
    "no bias": {"use_bias": False},
    "width of the output": {"output_shape": 6},
    "axes of the output": {"output_shape": (2, 3), "use_gate": True},
    "window": {"sliding_window": 2},
    "gate": {"use_gate": True, "value_dim": 2, "use_bias": False},
    "axes": {"attention_axes": 1},
    "dropout": {"dropout": 0.4, "seed": 3},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_each_argument_of_the_constructor_gives_what_keras_gives(name, causal):
    query, value, key = drawn((B, T, D), (B, T, M), (B, T, 8))
    ours, theirs = twins({"num_heads": H, "key_dim": K, **OPTIONS[name]}, query.shape, value.shape, key.shape)
    for scores, training in itertools.product([False, True], repeat=2):
        told = {"return_attention_scores": scores, "training": training, "use_causal_mask": causal}
        found = ours(query, value, key, **told)
        if "value_dim" in OPTIONS[name]:  # without scores Keras' layer fails at this on JAX
            expected = theirs(query, value, key, **{**told, "return_attention_scores": True})
            assert_same(found, expected if scores else expected[0])
        else:
            assert_same(found, theirs(query, value, key, **told))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", ["plain", "no bias", "window", "dropout"])
def test_grouped_queries_give_what_keras_gives(name, groups):
    query, key = drawn((B, T, D), (B, T, M))
    options = {"head_dim": K, "num_query_heads": H, "num_key_value_heads": groups, "use_gate": True, **OPTIONS[name]}
    ours, theirs = twins(options, query.shape, query.shape, key.shape, kind=keras.layers.GroupQueryAttention)
    named = GroupedQueryAttention.from_keras(theirs)
    assert type(named) is GroupedQueryAttention and type(ours) is MultiHeadAttention
    for layer, causal in itertools.product([ours, named], [False, True]):
        told = {"return_attention_scores": True, "use_causal_mask": causal}
        assert_same(layer(query, query, key, **told), theirs(query, query, key, **told))
    if name == "dropout":
        assert_same(named(query, query, key, training=True), theirs(query, query, key, training=True))


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (MultiHeadAttention, keras.layers.MultiHeadAttention),
        (GroupedQueryAttention, keras.layers.GroupQueryAttention),
    ],
)
def test_arguments_have_the_order_and_the_defaults_of_keras(ours, theirs):
    for method in ("__init__", "build", "call", "compute_output_shape", "compute_output_spec"):
        mine, given = (list(inspect.signature(getattr(each, method)).parameters.values()) for each in (ours, theirs))
        given = [each for each in given if each.kind is not each.VAR_KEYWORD]
        assert [(e.name, e.default) for e in given] == [(e.name, e.default) for e in mine[: len(given)]]


def test_equal_seeds_draw_equal_first_weights():
    query, value = drawn((B, T, D), (B, S, M))
    options = {"use_gate": True, "kernel_initializer": "he_normal", "bias_initializer": keras.initializers.Constant(2)}
    drawn_weights = []
    for kind in (MultiHeadAttention, keras.layers.MultiHeadAttention):
        keras.utils.set_random_seed(11)
        layer = kind(H, K, **options)
        layer.build(query.shape, value.shape)
        drawn_weights.append(layer.weights)
    for ours, theirs in zip(*drawn_weights, strict=True):
        assert (ours.name, ours.shape, ours.trainable) == (theirs.name, theirs.shape, theirs.trainable)
        np.testing.assert_array_equal(numbers(ours), numbers(theirs))


PENALTIES = {
    "kernel_regularizer": keras.regularizers.L2(0.1),
    "bias_regularizer": "l1",
    "activity_regularizer": keras.regularizers.L1L2(0.01, 0.02),
    "kernel_constraint": keras.constraints.MaxNorm(0.7, axis=(0, 1)),
    "bias_constraint": "non_neg",
}


@pytest.mark.parametrize("rank", [3, 4])
def test_losses_are_those_of_keras(rank):
    query, value = drawn((B, 3, T, D)[4 - rank :], (B, 3, S, M)[4 - rank :])
    ours, theirs = twins({"num_heads": H, "key_dim": K, "use_gate": True, **PENALTIES}, query.shape, value.shape)
    for layer in (ours, theirs):
        layer(query, value)
    assert len(ours.losses) == len(theirs.losses) == 5 + 10
    found, expected = (sorted(np.asarray(ops.convert_to_numpy(each.losses))) for each in (ours, theirs))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_step_of_fit_leaves_the_weights_that_keras_leaves():
    query, value, labels = drawn((B, T, D), (B, S, M), (B, T, D))
    options = {"num_heads": H, "key_dim": K, "use_gate": True, "dropout": 0.3, "seed": 5, **PENALTIES}
    results = []
    for layer in twins(options, query.shape, value.shape):
        inputs = keras.Input((None, D)), keras.Input((None, M))
        model = keras.Model(inputs, layer(*inputs))
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        loss = model.fit([query, value], labels, batch_size=B, epochs=2, shuffle=False, verbose=0).history["loss"]
        results.append((np.array(loss), *model.get_weights()))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "policy, tolerance",
    [
        ("float16", 5e-3),
        ("bfloat16", 5e-2),
        ("mixed_float16", 5e-3),
        ("mixed_bfloat16", 5e-2),
        pytest.param("float64", 1e-9, marks=pytest.mark.skipif(not TENSORFLOW, reason="computes in float32")),
    ],
)
def test_each_dtype_policy_gives_what_keras_gives(policy, tolerance):
    query, value = drawn((B, T, D), (B, S, M))
    # key_dim has an exact root: Keras rounds the scale to float32, also in float64.
    ours, theirs = twins({"num_heads": H, "key_dim": 4, "dtype": policy}, query.shape, value.shape)
    assert ours.dtype_policy == theirs.dtype_policy
    assert [w.dtype for w in ours.weights] == [w.dtype for w in theirs.weights]
    for scores in (False, True):
        found, expected = (layer(query, value, return_attention_scores=scores) for layer in (ours, theirs))
        size = np.abs(numbers(keras.tree.flatten(expected)[0])).max()
        assert_same(found, expected, tolerance * size)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_heads": 0},
        {"key_dim": 1.5},
        {"value_dim": -1},
        {"sliding_window": 0},
        {"output_shape": 8.0},
        {"attention_axes": "1"},
    ],
)
def test_what_keras_refuses_is_refused(bad):
    for kind in (MultiHeadAttention, keras.layers.MultiHeadAttention):
        with pytest.raises(ValueError):
            kind(**{"num_heads": H, "key_dim": K, **bad})


# Masks.

MASKS = {
    "(T, S)": masked((T, S)),
    "(T, S) of whole numbers": masked((T, S)).astype("int32"),
    "(1, T, S)": masked((1, T, S)),
    "(B, T, S)": masked((B, T, S)),
    "(B, 1, S)": masked((B, 1, S)),
    "(B, 1, T, S)": masked((B, 1, T, S)),
    "(1, H, T, S)": masked((1, H, T, S)),
    "(B, H, T, S)": masked((B, H, T, S)),
}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_each_shape_of_a_mask_means_what_it_means_to_keras(name, grouped):
    query, value = drawn((B, T, D), (B, S, D))
    options = {"num_heads": H, "key_dim": K}
    kind = keras.layers.MultiHeadAttention
    if grouped:
        options, kind = (
            {"num_query_heads": H, "head_dim": K, "num_key_value_heads": 2},
            keras.layers.GroupQueryAttention,
        )
    ours, theirs = twins(options, query.shape, value.shape, kind=kind)
    for scores in (False, True):
        told = {"attention_mask": MASKS[name], "return_attention_scores": scores}
        assert_same(ours(query, value, **told), theirs(query, value, **told))


@pytest.mark.parametrize("where", ["query", "value", "key", "query value key"])
@pytest.mark.parametrize("more", [{}, {"use_causal_mask": True}, {"attention_mask": masked((B, T, T))}])
def test_masks_that_arrive_with_the_tensors_count_as_with_keras_and_stay(where, more):
    arrays = drawn((B, T, D), (B, T, M), (B, T, 8))
    real = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)
    ours, theirs = twins({"num_heads": H, "key_dim": K}, *(array.shape for array in arrays))
    results = []
    for layer in (ours, theirs):
        tensors = [ops.convert_to_tensor(array) for array in arrays]
        for name, tensor in zip(("query", "value", "key"), tensors, strict=True):
            if name in where:
                tensor._keras_mask = ops.convert_to_tensor(real)
        results.append(layer(*tensors, return_attention_scores=True, **more))
        for name, tensor in zip(("query", "value", "key"), tensors, strict=True):
            if name in where and layer is ours:
                np.testing.assert_array_equal(numbers(tensor._keras_mask), real)
    rows = real if "query" in where else np.ones_like(real)  # Keras lets a query under a mask see everything
    for found, expected in zip(*results, strict=True):
        kept = np.broadcast_to(rows[:, None, :, None] if found.shape[1] == H else rows[:, :, None], found.shape)
        np.testing.assert_allclose(numbers(found)[kept], numbers(expected)[kept], atol=2e-5)
    if "query" in where:
        np.testing.assert_array_equal(numbers(results[0][0]._keras_mask), numbers(results[1][0]._keras_mask))


# Inputs of a higher rank.

RANKS = {
    "all axes": ((B, 2, 3, D), (B, 2, 4, M), {}, ((2, 3, 2, 4), (B, 2, 3, 2, 4), (B, H, 2, 3, 2, 4))),
    "the last": ((B, 3, T, D), (B, 3, S, M), {"attention_axes": 2}, ((T, S), (B, T, S), (B, 3, T, S), (1, 3, H, T, S))),
    "counted from the end": ((B, 3, T, D), (B, 3, S, M), {"attention_axes": -2}, ((B, 3, T, S),)),
    "the first": ((B, T, 3, D), (B, S, 3, M), {"attention_axes": (1,)}, ((B, 1, T, S), (B, 3, H, T, S))),
    "in another order": ((B, 2, 3, D), (B, 2, 4, M), {"attention_axes": (2, 1)}, ((B, 3, 2, 4, 2),)),
    "two of three": ((2, 2, 3, T, D), (2, 2, 2, S, M), {"attention_axes": (2, 3)}, ((2, 2, 3, T, 2, S), (3, T, 2, S))),
    "two apart": ((2, 3, 2, T, D), (2, 2, 2, S, M), {"attention_axes": (1, 3)}, ((2, 3, T, 2, S), (2, 2, 3, T, 2, S))),
    "all of three": ((2, 2, 1, 3, D), (2, 1, 2, 2, M), {"output_shape": (2, 3)}, ()),
}


@pytest.mark.parametrize("name", RANKS)
def test_inputs_of_a_higher_rank_give_what_keras_gives(name):
    query_shape, value_shape, options, masks = RANKS[name]
    query, value = drawn(query_shape, value_shape)
    options = {"num_heads": H, "key_dim": K, "value_dim": 2, "use_gate": True, **options}
    ours, theirs = twins(options, query_shape, value_shape)
    for mask in (None, *(masked(shape) for shape in masks)):
        told = {"attention_mask": mask, "return_attention_scores": True}
        output, scores = ours(query, value, **told)
        assert_same((output, scores), theirs(query, value, **told))
        assert_same(ours(query, value, attention_mask=mask), output)
    symbolic = ours.compute_output_spec(
        *(keras.KerasTensor(a.shape) for a in (query, value)), return_attention_scores=1
    )
    assert [each.shape for each in symbolic] == [tuple(output.shape), tuple(scores.shape)]


def test_padding_of_a_higher_rank_counts_as_with_keras():
    arrays = drawn((B, 3, T, D), (B, 3, S, M))
    ours, theirs = twins({"num_heads": H, "key_dim": K, "attention_axes": 2}, *(array.shape for array in arrays))
    results = []
    for layer in (ours, theirs):
        query, value = (ops.convert_to_tensor(array) for array in arrays)
        value._keras_mask = ops.convert_to_tensor(masked((B, 3, S)))
        results.append(layer(query, value, return_attention_scores=True))
    assert_same(*results)


def test_axes_that_attention_does_not_run_over_must_be_equal():
    query, value = drawn((B, 3, T, D), (B, 2, S, M))
    with pytest.raises(ValueError, match=r"differ in axis 1"):
        MultiHeadAttention(H, K, attention_axes=2)(query, value)


# Models.

LAYERS = {
    "MultiHeadAttention": (MultiHeadAttention, keras.layers.MultiHeadAttention, (H, K)),
    "GroupedQueryAttention": (GroupedQueryAttention, keras.layers.GroupQueryAttention, (K, H, 2)),
}


def functional(layer):
    query, value, mask = keras.Input((None, D)), keras.Input((None, D)), keras.Input((None, None), dtype="bool")
    output, scores = layer(query, value, attention_mask=mask, return_attention_scores=True)
    return keras.Model([query, value, mask], [output, scores, layer(output, value, value)])


class Twice(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.look = layer

    def call(self, inputs):
        query, value, mask = inputs
        output, scores = self.look(query, value, attention_mask=mask, return_attention_scores=True)
        return [output, scores, self.look(query=output, value=value, key=value)]


class LooksAtItself(keras.layers.Layer):
    def __init__(self, layer):
        super().__init__()
        self.supports_masking = True
        self.look = layer

    def build(self, shape):
        self.look.build(shape, shape)

    def call(self, inputs):
        return self.look(inputs, inputs, use_causal_mask=True)


@pytest.mark.parametrize("name", LAYERS)
def test_models_give_what_they_give_with_keras_layer(name):
    ours, theirs, sizes = LAYERS[name]
    arrays = [*drawn((B, T, D), (B, S, D)), masked((B, T, S))]
    expected = functional(theirs(*sizes))
    randomise(expected)
    for model in (functional(ours(*sizes)), Twice(ours(*sizes))):
        model(arrays)
        model.set_weights(expected.get_weights())
        assert_same(model(arrays), expected(arrays))
        for found, wanted in zip(model.predict(arrays, verbose=0), expected(arrays), strict=True):
            np.testing.assert_allclose(found, numbers(wanted), atol=2e-5)
    ids = np.array([[3, 4, 5, 0], [5, 6, 7, 8]])
    results = []
    for kind in (ours, theirs):
        layers = [keras.layers.Embedding(9, D, mask_zero=True), LooksAtItself(kind(*sizes))]
        model = keras.Sequential([*layers, keras.layers.GlobalAveragePooling1D()])
        with warnings.catch_warnings():  # Keras' grouped layer hands its projections the masks, and warns of it
            warnings.simplefilter("ignore")
            model(ids)
            randomise(model)
            results.append(model(ids))
    assert_same(*results)


@pytest.mark.parametrize("name", LAYERS)
def test_symbolic_shapes_are_those_of_keras_and_of_the_result(name):
    ours, theirs, sizes = LAYERS[name]
    for shapes in itertools.product([(None, None, D), (B, T, D)], [(None, None, D), (B, S, D)]):
        assert ours(*sizes).compute_output_shape(*shapes) == theirs(*sizes).compute_output_shape(*shapes)
        given = [keras.KerasTensor(shape) for shape in shapes]
        spec, scores = ours(*sizes, dtype="mixed_bfloat16").compute_output_spec(*given, return_attention_scores=True)
        expected = theirs(*sizes, dtype="mixed_bfloat16").compute_output_spec(*given)
        assert (spec.shape, spec.dtype) == (expected.shape, expected.dtype)
        assert (scores.shape, scores.dtype) == ((shapes[0][0], H, shapes[0][1], shapes[1][1]), "bfloat16")
    model = functional(ours(*sizes))
    assert model.output_shape == [(None, None, D), (None, H, None, None), (None, None, D)]


@pytest.mark.parametrize("name", LAYERS)
def test_a_clone_of_a_model_gives_the_same(name):
    ours, _, sizes = LAYERS[name]
    arrays = [*drawn((B, T, D), (B, S, D)), masked((B, T, S))]
    layer = ours(*sizes, dropout=0.2, kernel_regularizer="l2", seed=4)
    model = functional(layer)
    randomise(model)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert_same(clone(arrays), model(arrays))
    assert clone.get_layer(layer.name).get_config() == layer.get_config()


# From Keras' layer and back to it.


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("options", [{}, {"use_bias": False, "use_gate": True, "dropout": 0.1, "trainable": False}])
def test_from_keras_and_back_keeps_everything(name, options):
    ours, kind, sizes = LAYERS[name]
    query, value = drawn((B, T, D), (B, S, D))
    theirs = kind(*sizes, sliding_window=3, name="look", **options)
    assert not ours.from_keras(theirs).built and not ours.from_keras(theirs).to_keras().built
    theirs.build(query.shape, value.shape)
    randomise(theirs)
    for one in (ours.from_keras(theirs), MultiHeadAttention.from_keras(theirs)):
        back = one.to_keras()
        assert type(back) is kind
        left, right = back.get_config(), theirs.get_config()
        assert left == right
        for first, second, third in zip(theirs.weights, one.weights, back.weights, strict=True):
            assert first.name == second.name == third.name and first.path.split("/")[-2:] == third.path.split("/")[-2:]
            np.testing.assert_array_equal(numbers(first), numbers(second))
            np.testing.assert_array_equal(numbers(first), numbers(third))
        assert back.trainable == one.trainable == theirs.trainable


def test_to_keras_takes_the_layers_of_one_and_of_two_sequences():
    query, value = drawn((B, T, D), (B, S, M))
    first, second = SelfAttention(H, K, use_gate=True), CrossAttention(H, K, output_shape=6)
    assert_same(first(query), first.to_keras()(query, query))
    assert_same(second(query, value), second.to_keras()(query, value))


@pytest.mark.parametrize("mode", ["lora", "int8"])
def test_changed_projections_come_along(mode):
    query, value = drawn((B, T, D), (B, S, M))
    ours, theirs = twins({"num_heads": H, "key_dim": K, "use_gate": True}, query.shape, value.shape)
    for layer in (ours, theirs):
        if mode == "lora":
            layer.query_dense.enable_lora(2)
            randomise(layer.query_dense)
        else:
            layer.value_dense.quantize(mode)
            assert layer.value_dense.quantization_mode == mode
    for found, expected in ((MultiHeadAttention.from_keras(theirs), theirs), (ours.to_keras(), ours)):
        assert_same(found(query, value), expected(query, value))
        assert found.value_dense.quantization_mode == expected.value_dense.quantization_mode


@pytest.mark.parametrize(
    "options, words",
    [
        ({"qk_norm": True, "soft_cap": 5.0}, "qk_norm, soft_cap"),
        ({"num_key_value_heads": 2, "output_shape": 6}, "output_shape"),
        ({"num_key_value_heads": 2, "value_dim": 5}, "value_dim"),
    ],
)
def test_to_keras_refuses_what_keras_layer_cannot_do(options, words):
    with pytest.raises(ValueError, match=f"Keras' layer has no {words}"):
        MultiHeadAttention(H, K, **options).to_keras()


@pytest.mark.parametrize("name", LAYERS)
def test_weights_files_of_a_model_load_both_ways(name, tmp_path):
    ours, theirs, sizes = LAYERS[name]
    arrays = [*drawn((B, T, D), (B, S, D)), masked((B, T, S))]
    options = {"use_gate": True, "dropout": 0.1}
    for first, second in itertools.permutations([ours, theirs]):
        for make in (functional, Twice):
            source, target = make(first(*sizes, **options)), make(second(*sizes, **options))
            source(arrays), target(arrays)
            randomise(source)
            source.save_weights(tmp_path / "x.weights.h5")
            target.load_weights(tmp_path / "x.weights.h5")
            assert_same(target(arrays), source(arrays))


# Padding in a deep model.

DEPTH, WIDTH = 6, 8


class Stack(keras.layers.Layer):
    """Encoder and decoder, of our blocks or of plain attention in residual branches; gives what each layer gives."""

    def __init__(self, plain):
        super().__init__()
        layers = keras.layers
        self.embedding = layers.Embedding(11, WIDTH, mask_zero=True, embeddings_initializer="normal")
        if plain:
            self.parts = [[MultiHeadAttention(2, 4) for _ in range(3)] for _ in range(DEPTH)]
            self.norms = [[layers.LayerNormalization() for _ in range(3)] for _ in range(DEPTH)]
            self.sums = [[layers.Add() for _ in range(3)] for _ in range(DEPTH)]
        else:
            self.parts = [[TransformerEncoderBlock(2, 8), TransformerDecoderBlock(2, 8)] for _ in range(DEPTH)]
        self.plain = plain

    def call(self, inputs):
        source, target = inputs
        x, y, found = self.embedding(source), self.embedding(target), []
        for i, parts in enumerate(self.parts):
            x = self.branch(i, 0, x, x) if self.plain else parts[0](x)
            found.append(x)
        for i, parts in enumerate(self.parts):
            if self.plain:
                y = self.branch(i, 1, y, y, use_causal_mask=True)
                y = self.branch(i, 2, y, x)
            else:
                y = parts[1](y, x)
            found.append(y)
        return found

    def branch(self, i, j, y, x, **told):
        return self.norms[i][j](self.sums[i][j]([y, self.parts[i][j](y, x, **told)]))


def deep(plain, subclassed):
    stack = Stack(plain)
    if subclassed:
        return stack
    inputs = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
    return keras.Model(inputs, stack.call(inputs))


SHORT = [np.array([[3, 4, 5], [6, 7, 0]]), np.array([[6, 7, 8, 9], [3, 0, 0, 0]])]
LONG = [np.pad(ids, [(0, 0), (0, more)]) for ids, more in zip(SHORT, (2, 3), strict=True)]


@pytest.mark.parametrize(
    "plain, subclassed, how",
    [
        (False, False, "graph"),
        (False, True, "eager"),
        (True, False, "eager"),
        (True, True, "xla"),
        pytest.param(True, True, "graph", marks=pytest.mark.slow),
        pytest.param(False, False, "xla", marks=pytest.mark.slow),
    ],
)
def test_padding_further_changes_nothing_in_any_layer_of_a_deep_model(plain, subclassed, how):
    model = deep(plain, subclassed)
    expected = [numbers(layer) for layer in model(SHORT)]
    run = model if how == "eager" else backend.compile(model, variables_of=model, jit=how == "xla")
    found = run([ops.convert_to_tensor(ids) for ids in LONG])
    for i, (long, short) in enumerate(zip(found, expected, strict=True)):
        real = SHORT[i // DEPTH] != 0
        np.testing.assert_allclose(numbers(long)[:, : real.shape[1]][real], short[real], atol=1e-5)
