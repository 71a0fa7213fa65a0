"""What is misread or broken easily: masks of two meanings, NaN in hidden places, steps, inputs that don't fit."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from arrays import assert_close, assert_equal, numbers
from keras import ops

from mmattn import backend
from mmattn.layers import (
    CrossAttention,
    GroupedQueryAttention,
    MultiHeadAttention,
    SelfAttention,
    TransformerDecoderBlock,
    TransformerEncoderBlock,
    attend,
    causal_mask,
    combine_masks,
    explain_path,
    padding_mask,
    segment_mask,
    window_mask,
)
from mmattn.layers.paths import choose_path

B, T, S, D, H, K = 2, 3, 6, 8, 2, 4
RNG = np.random.default_rng(7)
QUERY = RNG.normal(size=(B, T, D)).astype("float32")
MEMORY = RNG.normal(size=(B, S, D)).astype("float32")
TENSORFLOW = keras.backend.backend() == "tensorflow"


def broken(array, *places):
    """A copy with NaN and infinity in the rows at these places."""
    array = array.copy()
    for number, place in enumerate(places):
        array[:, place] = (np.nan, np.inf)[number % 2]
    return array


def kernel_gradients(layer, call, arrays, pick=lambda output: output):
    """Of the sum of what is picked from the output, by the layer's variables."""
    found = backend.gradients(lambda *given: ops.sum(pick(call(*given))), arrays, layer.trainable_variables)
    return [numbers(slope) for slope in found[len(arrays) :]]


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_out_of_every_window_reach_no_gradient(flash, causal):
    layer = MultiHeadAttention(H, K, sliding_window=2, flash_attention=flash)
    layer.build(QUERY.shape, MEMORY.shape)

    def call(query, memory):
        return layer(query, memory, use_causal_mask=causal)

    plain = kernel_gradients(layer, call, (QUERY, MEMORY))
    memory = broken(MEMORY, 0, 1)  # the queries have the places 3 to 5
    assert_close(numbers(call(QUERY, memory)), numbers(call(QUERY, MEMORY)), atol=1e-6)
    for found, expected in zip(kernel_gradients(layer, call, (QUERY, memory)), plain, strict=True):
        assert np.isfinite(found).all() and found.shape == expected.shape


@pytest.mark.parametrize("positions", [None, "rotary", "alibi"])
def test_a_step_hides_what_the_call_hides(positions):
    layer = SelfAttention(H, K, sliding_window=2, positions=positions)
    x = broken(MEMORY, 0)
    whole = numbers(layer(x, use_causal_mask=True))
    assert np.isnan(whole[:, :2]).all() and np.isfinite(whole[:, 2:]).all()
    cache = layer.start(B, S)
    for t in range(S):
        output, cache = layer.step(ops.convert_to_tensor(x[:, t]), t, cache)
        assert_close(numbers(output), whole[:, t], atol=1e-5)


def test_padding_that_is_no_number_reaches_no_gradient_of_self_attention():
    layer = SelfAttention(H, K)
    layer.build(MEMORY.shape)
    real = np.arange(S) < np.array([[4], [S]])
    x = np.where(real[..., None], MEMORY, np.nan).astype("float32")

    def call(x):
        return layer(x, padding_mask=real)

    def pick(output):
        return ops.where(real[..., None], output, ops.zeros_like(output))

    clean = np.where(real[..., None], MEMORY, 0).astype("float32")
    pairs = zip(kernel_gradients(layer, call, (x,), pick), kernel_gradients(layer, call, (clean,), pick), strict=True)
    for found, expected in pairs:
        assert_close(found, expected, atol=1e-5)
    assert_close(numbers(call(x))[real], numbers(call(clean))[real], atol=1e-6)


@pytest.mark.parametrize("flash", [False, True])
def test_an_infinite_key_that_may_be_seen_is_not_traded_for_hidden_ones(flash):
    layer = MultiHeadAttention(H, K, flash_attention=flash)
    memory = broken(MEMORY, 1, 0)  # infinity at place 0
    seen = np.zeros((1, T, S), bool)
    seen[..., 0] = True
    assert np.isnan(numbers(layer(QUERY, memory, attention_mask=seen))).all()
    key = np.full((1, 1, 3, 1), -3e30, "float32")
    key[..., 1:, :] = 0.0
    value = np.array([1.0, 100.0, 200.0], "float32").reshape(1, 1, 3, 1)
    found, _ = attend(np.ones((1, 1, 1, 1), "float32"), key, value, np.array([[[[True, False, False]]]]))
    assert_equal(numbers(found), np.ones((1, 1, 1, 1)))


def test_a_start_hides_the_padding_that_keras_knows_of():
    ids = np.array([[3, 4, 5, 0], [6, 0, 0, 0]])
    memory = keras.layers.Embedding(9, D, mask_zero=True)(ids)
    layer = CrossAttention(H, K)
    whole = numbers(layer(QUERY, memory))
    plain = numbers(layer(QUERY, numbers(memory)))
    assert np.abs(whole - plain).max() > 1e-4
    for t in range(T):
        assert_close(
            numbers(layer.step(ops.convert_to_tensor(QUERY[:, t]), layer.start(memory))), whole[:, t], atol=1e-6
        )


def test_the_equation_alone_checks_its_mask_too():
    heads = ops.ones((2, 2, 3, 4)), ops.ones((2, 2, 5, 4)), ops.reshape(ops.arange(20, dtype="float32"), (1, 1, 5, 4))
    heads = (*heads[:2], ops.broadcast_to(heads[2], (2, 2, 5, 4)))
    rule = np.tri(3, 5, 1, dtype=bool)
    expected, _ = attend(*heads, np.broadcast_to(rule, (2, 2, 3, 5)))
    for shaped in (rule, rule[None], rule[None, None]):
        assert_equal(numbers(attend(*heads, shaped)[0]), numbers(expected))
    with pytest.raises(ValueError, match="An attention mask is boolean"):
        attend(*heads, np.where(rule, 0.0, -1e9))
    with pytest.raises(ValueError, match=r"does not fit B=2, H=2, T=3, S=5"):
        attend(*heads, rule[:2])


BOARD = RNG.normal(size=(B, 3, 3, D)).astype("float32")  # N = T = S = 3


@pytest.mark.parametrize(
    "shape, heads, words",
    [
        ((B, 3, 3), 2, "the padding mask of the keys"),
        ((B, 3, 3, 3), 3, "a mask for each of H=3 heads"),
        ((B, 3, 2, 3, 1), 2, r"Received \(2, 3, 2, 3, 1\)"),
    ],
)
def test_a_mask_of_higher_rank_that_reads_two_ways_is_refused(shape, heads, words):
    layer = MultiHeadAttention(heads, K, attention_axes=2)
    with pytest.raises(ValueError, match=words):
        layer(BOARD, BOARD, attention_mask=np.ones(shape, bool))
    assert layer(BOARD, BOARD, attention_mask=np.ones((B, 3, 1, 3, 3), bool)).shape == BOARD.shape


@pytest.mark.skipif(not TENSORFLOW, reason="shapes are unknown in TensorFlow's programs alone")
def test_a_mask_of_two_axes_is_refused_where_the_first_is_not_known():
    import tensorflow as tf

    layer = MultiHeadAttention(H, K)
    layer(QUERY, MEMORY)
    spec = tf.TensorSpec((None, None), "bool")

    @tf.function(input_signature=[spec])
    def masked(mask):
        return layer(QUERY, MEMORY, attention_mask=mask)

    with pytest.raises(ValueError, match="can be read as"):
        masked(np.ones((T, S), bool))
    assert_close(numbers(layer(QUERY, MEMORY, attention_mask=np.ones((T, S), bool))), numbers(layer(QUERY, MEMORY)))


class Own(GroupedQueryAttention):
    def _compute_attention(self, query, key, value, *args, **kwargs):
        assert query.shape[2] == key.shape[2] == value.shape[2]
        return super()._compute_attention(query, key, value, *args, **kwargs)


def test_a_subclass_with_an_attention_of_its_own_keeps_the_laws():
    layer = Own(K, 4, 2, bias_initializer="ones")
    seen = np.ones((B, T, S), bool)
    seen[:, 1] = False
    found = numbers(layer(QUERY, MEMORY, attention_mask=seen))
    plain = GroupedQueryAttention(K, 4, 2)
    plain.build(QUERY.shape, MEMORY.shape)
    plain.set_weights(layer.get_weights())
    assert_close(found, numbers(plain(QUERY, MEMORY, attention_mask=seen)), atol=1e-6)
    assert not found[:, 1].any()


@pytest.mark.parametrize("index", [4, -1, np.int64(9), np.int32(4), np.array(7)])
def test_a_step_beyond_the_cache_is_refused(index):
    layer = SelfAttention(H, K)
    layer.build(QUERY.shape)
    with pytest.raises(ValueError, match="The cache holds positions 0 to 3"):
        layer.step(ops.convert_to_tensor(QUERY[:, 0]), index, layer.start(B, 4))


LONG = ["int64"] if keras.backend.backend() != "jax" else []  # JAX has none
NUMBERS = [1, np.int64(1), np.array(1), "int32", *LONG]


@pytest.mark.parametrize("index", NUMBERS)
def test_a_step_takes_any_whole_number(index):
    layer = SelfAttention(H, K)
    layer.build(QUERY.shape)
    expected, _ = layer.step(ops.convert_to_tensor(QUERY[:, 0]), 1, layer.start(B, 4))
    given = ops.convert_to_tensor(1, dtype=index) if isinstance(index, str) else index
    assert_equal(
        numbers(layer.step(ops.convert_to_tensor(QUERY[:, 0]), given, layer.start(B, 4))[0]), numbers(expected)
    )


@pytest.mark.parametrize(
    "query, value, key",
    [((1, T, D), (3, S, D), None), ((2, T, D), (3, S, D), None), ((2, T, D), (2, S, D), (2, S + 1, D))],
)
def test_inputs_that_do_not_fit_each_other_are_refused(query, value, key):
    layer = MultiHeadAttention(H, K)
    layer.build((None, None, D), (None, None, D))
    arrays = [None if shape is None else np.zeros(shape, "float32") for shape in (query, value, key)]
    with pytest.raises(ValueError, match="have one batch B, and value and key one length S"):
        layer(*arrays)


def test_a_mask_for_another_batch_is_refused_by_its_number():
    layer = MultiHeadAttention(H, K)
    with pytest.raises(ValueError, match=r"key_mask has the shape \(B, 6\) with B=2. Received \(3, 6\)"):
        layer(QUERY, MEMORY, key_mask=np.ones((3, S), bool))
    axes = MultiHeadAttention(H, K, attention_axes=2)
    one = np.ones((1, 3, 3), bool)
    one[:, :, 2] = False
    assert_close(
        numbers(axes(BOARD, BOARD, key_mask=one)), numbers(axes(BOARD, BOARD, key_mask=np.repeat(one, B, axis=0)))
    )


@pytest.mark.parametrize("layer", [SelfAttention(H, K), TransformerEncoderBlock(H, 16), TransformerDecoderBlock(H, 16)])
def test_the_shape_of_an_output_is_known_from_the_shape_of_the_input(layer):
    assert tuple(layer.compute_output_shape((2, 3, D))) == (2, 3, D)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_heads": True}, "num_heads"),
        ({"soft_cap": "3"}, "soft_cap is a positive number"),
        ({"soft_cap": True}, "soft_cap is a positive number"),
        ({"dropout": "0.1"}, "dropout is a share"),
        ({"dropout": None}, "dropout is a share"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_their_rule(options, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**{"num_heads": H, "key_dim": K, **options})


def test_what_cannot_be_converted_says_what_to_do():
    theirs = keras.layers.MultiHeadAttention(H, K)
    for kind in (SelfAttention, CrossAttention):
        with pytest.raises(ValueError, match=r"Use\s+MultiHeadAttention.from_keras"):
            kind.from_keras(theirs)
    ours = MultiHeadAttention(H, K, flash_attention=True, dropout=0.1)
    expected = numbers(ours(QUERY, MEMORY))
    assert_close(numbers(ours.to_keras()(QUERY, MEMORY)), expected, atol=1e-5)
    with pytest.raises(ValueError, match="is not built"):
        explain_path(MultiHeadAttention(H, K), QUERY, MEMORY)
    with pytest.raises(ValueError, match='"no", "keys" or "plane"'):
        explain_path(ours, QUERY, MEMORY, masked="some")


class TestKernels:
    """When the backends' own kernels are taken; the rules of those that are not here are asked all the same."""

    def test_torch(self, monkeypatch):
        monkeypatch.setattr(backend, "name", lambda: "torch")
        path = lambda **more: choose_path(2, 2, 4096, 4096, "float32", **more)  # noqa: E731
        assert path().name == path(masked="keys").name == "fused"
        assert path(masked="plane").name == path(widths=(8, 16)).name == "chunked"
        assert "(T, S) array" in str(path(masked="plane")) and "as wide as keys" in str(path(widths=(8, 16)))
        assert choose_path(2, 2, 64, 64, "float32", masked="plane").name == "fused"

    def test_jax(self, monkeypatch):
        jax = pytest.importorskip("jax")
        monkeypatch.setattr(backend, "name", lambda: "jax")
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        path = lambda size=64, dtype="bfloat16", **more: choose_path(2, 2, size, size, dtype, **more)  # noqa: E731
        assert path().name == path(masked="keys").name == path(7).name == "fused"
        for other in (path(dtype="float32"), path(7, masked="keys"), path(widths=(20, 20)), path(widths=(8, 16))):
            assert other.name == "explicit" and "cuDNN" in str(other)
        assert path(4096, masked="keys").name == "chunked"

    @pytest.mark.skipif(keras.backend.backend() != "jax", reason="cuDNN's kernel is called through JAX")
    @pytest.mark.parametrize("options", [{}, {"key_mask": True}, {"attention_mask": True}, {"use_causal_mask": True}])
    def test_cudnn_takes_the_shapes_that_are_handed_to_it(self, monkeypatch, options):
        """Traced alone: nothing runs, so no GPU is needed."""
        import jax

        kernels = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
        for name, given in (("check_cudnn_version", lambda: 91000), ("check_compute_capability", lambda _: True)):
            monkeypatch.setattr(kernels, name, given)
        monkeypatch.setattr(kernels, "is_cuda_compute_capability_equal", lambda _: False)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        masks = {"key_mask": np.ones((2, 8), bool), "attention_mask": np.tri(8, dtype=bool)[None]}
        layer = MultiHeadAttention(2, 8, dtype="bfloat16")
        layer.build((2, 8, 16), (2, 8, 16))
        options = {name: masks.get(name, value) for name, value in options.items()}
        assert explain_path(layer, (2, 8, 16), (2, 8, 16), masked="plane").name == "fused"
        x = jax.ShapeDtypeStruct((2, 8, 16), "bfloat16")
        call = lambda q, m: layer(q, m, **options)  # noqa: E731
        assert jax.eval_shape(call, x, x).shape == (2, 8, 16)
        slopes = jax.eval_shape(jax.grad(lambda q, m: call(q, m).astype("float32").sum()), x, x)
        assert slopes.shape == (2, 8, 16)


@pytest.mark.parametrize("width", [2 * D, D // 2, D + 1])
def test_another_width_than_the_built_one_is_refused(width):
    """TensorFlow would fold twice the width into a batch of another size."""
    narrow, wide = np.ones((2, 5, D), "float32"), np.ones((2, 5, width), "float32")
    layer = MultiHeadAttention(2, 4)
    layer(narrow, narrow)
    for query, value in ((wide, narrow), (narrow, wide), (wide, wide)):
        with pytest.raises(ValueError, match=rf"of width {D}. Received \(2, 5, {width}\)"):
            layer(query, value)
    itself = SelfAttention(2, 4)
    itself(narrow)
    cache = itself.start(2, 5)
    across = CrossAttention(2, 4)
    across(narrow, narrow)
    for call in (
        lambda: itself(wide),
        lambda: itself.step(wide[:, 0], 0, cache),
        lambda: across(narrow, wide),
        lambda: across.start(wide),
        lambda: across.step(wide[:, 0], across.start(narrow)),
    ):
        with pytest.raises(ValueError, match=f"of width {D}"):
            call()


def test_masks_of_other_ranks_are_not_combined():
    real = padding_mask(np.array([[5, 0, 0], [1, 1, 1], [1, 1, 1]]))
    with pytest.raises(ValueError, match=r"same number of axes. Received \(1, 3, 3\), \(3, 3\)"):
        combine_masks(causal_mask(3), real)
    combined = np.asarray(combine_masks(causal_mask(3), None, real[:, None, :]))
    assert combined.astype(int).tolist()[0] == [[1, 0, 0]] * 3


def test_a_whole_number_below_zero_is_no_mask():
    x = np.ones((2, 3, 8), "float32")
    added = np.where(np.tril(np.ones((3, 3), bool)), 0, -(10**9)).astype("int32")
    with pytest.raises(ValueError, match="boolean"):
        MultiHeadAttention(2, 4)(x, x, attention_mask=added[None])
    MultiHeadAttention(2, 4)(x, x, attention_mask=np.tril(np.ones((1, 3, 3), "int32")))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: MultiHeadAttention.from_keras(keras.layers.Attention()), "from_keras takes .* Received Attention"),
        (lambda: MultiHeadAttention.from_keras(None), "Received NoneType"),
        (
            lambda: MultiHeadAttention.from_keras(type("Mine", (keras.layers.MultiHeadAttention,), {})(2, 4)),
            "Received Mine",
        ),
        (lambda: explain_path(keras.layers.Dense(3), (1, 2, 3), (1, 2, 3)), "Received Dense"),
        (lambda: causal_mask(-1), "query_length is a whole number"),
        (lambda: window_mask(3, 1.5), "key_length is a whole number"),
        (lambda: segment_mask(np.array([1, 1, 2])), r"\(B, length\). Received \(3,\)"),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused_in_words(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((1, 5, 9), (1, 5, 8)), "query of width 8"),
        (((1, 5, 8), (1, 5, 7)), "value of width 8"),
        (((5, 8), (5, 8)), "batch, length, width"),
        (((1, 2, 5, 8), (1, 2, 5, 8)), "3 axes"),
        ((5, 5), "arrays or shapes"),
    ],
)
def test_a_path_is_explained_for_shapes_that_fit(shapes, words):
    layer = MultiHeadAttention(2, 4)
    layer.build((None, None, 8), (None, None, 8))
    with pytest.raises(ValueError, match=words):
        explain_path(layer, *shapes)
