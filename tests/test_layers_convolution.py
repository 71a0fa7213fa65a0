"""Weight-normalised convolutions, their blocks and the multi-step attention, against loops written from the papers."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
from arrays import FLOAT, MODES, TOLERANCE, TORCH, WIDE, assert_close, assert_equal, numbers
from convolutions import attended, convolved, randomised
from keras import ops

from mmattn import backend
from mmattn.layers import ConvolutionalBlock, MultiStepAttention, SinusoidalPositions, WeightNormConvolution
from mmattn.layers.convolution import EMBEDDING_DEVIATION
from mmattn.layers.multi_step_attention import sources
from mmattn.layers.positions import added_positions
from mmattn.training.muon import Muon

B, T, S, C, F = 2, 6, 5, 7, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, C))
MASK = np.arange(T)[None] < np.array([[4], [6]])
KINDS = [(k, gated, causal) for k in (1, 2, 3, 5) for gated in (False, True) for causal in (False, True)]
SOURCE_MASK = np.arange(S)[None] < np.array([[3], [5]])


def made(kernel_size=3, gated=True, causal=True, dtype=FLOAT, **options):
    layer = WeightNormConvolution(F, kernel_size, gated, causal, dtype=dtype, **options)
    layer.build((None, None, C))
    return randomised(layer)


@pytest.mark.parametrize("kernel_size, gated, causal", KINDS)
def test_convolution_is_the_papers_sum(kernel_size, gated, causal):
    layer = made(kernel_size, gated, causal)
    whole = numbers(layer(X.astype(FLOAT)))
    narrow = made(kernel_size, gated, causal, "float32")
    for row, found in zip(X, whole, strict=True):
        assert_close(found, convolved(layer, row), atol=TOLERANCE)
    assert_close(narrow(X.astype("float32")), whole, atol=2e-5)


@pytest.mark.parametrize("kernel_size", [1, 2, 5])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), WIDE])
def test_step_equals_call(kernel_size, dtype, tolerance):
    block = ConvolutionalBlock(kernel_size, causal=True, dtype=dtype)
    block.build((None, None, C))
    randomised(block)
    whole, window = numbers(block(X.astype(dtype))), block.start(B)
    for t in range(T):
        assert tuple(window.shape) == (B, kernel_size - 1, C)
        output, window = block.step(ops.convert_to_tensor(X[:, t].astype(dtype)), window)
        assert_close(output, whole[:, t], atol=tolerance)


def test_causal_sees_nothing_that_follows_and_the_other_as_far_to_either_side():
    changed = X.astype("float32").copy()
    changed[:, 3] += 1.0
    for causal, touched in ((True, [3, 4, 5]), (False, [2, 3, 4])):
        layer = made(3, causal=causal, dtype="float32")
        moved = np.abs(numbers(layer(changed)) - numbers(layer(X.astype("float32")))).max(axis=(0, 2)) > 1e-6
        assert np.flatnonzero(moved).tolist() == touched


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("wrong", [50.0, np.nan, np.inf])
def test_padding_never_leaks_into_outputs_or_gradients(causal, wrong):
    blocks = [ConvolutionalBlock(3, causal, dtype="float32") for _ in range(3)]
    for block in blocks:
        block.build((None, None, C))

    def run(x):
        for block in blocks:
            x = block(x, mask=MASK)
        return x

    def loss(x):
        return ops.sum(ops.square(ops.where(MASK[..., None], run(x), ops.zeros((), "float32"))))

    variables = [v for block in blocks for v in block.trainable_variables]
    clean, dirty = (np.where(MASK[..., None], X, fill).astype("float32") for fill in (0.0, wrong))
    assert_equal(numbers(run(dirty))[MASK], numbers(run(clean))[MASK])
    for one, other in zip(
        backend.gradients(loss, [dirty], variables), backend.gradients(loss, [clean], variables), strict=True
    ):
        assert np.isfinite(numbers(one)).all()
        assert_close(one, other, atol=1e-6)
    short = X.astype("float32")[:1, :4]
    for block in blocks:
        short = block(short)
    assert_close(run(dirty)[:1, :4], short, atol=1e-6)


def test_an_implicit_mask_counts_and_is_passed_on():
    x = keras.layers.Embedding(10, C, mask_zero=True)(np.array([[3, 4, 0], [5, 6, 7]]))
    block = ConvolutionalBlock(3)
    found = block(x)
    assert_close(found, block(ops.convert_to_tensor(numbers(x)), mask=np.array([[1, 1, 0], [1, 1, 1]])), atol=1e-6)
    assert_equal(found._keras_mask, [[True, True, False], [True, True, True]])


def test_length_and_direction_are_apart():
    """Salimans and Kingma 2016, section 2.1: the length of v changes nothing, and its slope is orthogonal to it."""
    layer = made(3, gated=False)
    x = X.astype(FLOAT)
    before = numbers(layer(x))
    (slope,) = backend.gradients(lambda: ops.sum(ops.square(layer(x))), [], [layer.kernel])
    v, g, b = layer.get_weights()
    assert_close(np.sum(numbers(slope) * v, axis=0), np.zeros(F), atol=10 * TOLERANCE * np.abs(numbers(slope)).max())
    layer.set_weights([v * np.array([0.01, 1.0, 3.0, 100.0]), g, b])
    assert_close(layer(x), before, atol=10 * TOLERANCE)
    layer.set_weights([v, 2 * g, b])
    assert_close(numbers(layer(x)) - b, 2 * (before - b), atol=10 * TOLERANCE)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_activations_keep_their_variance_after_the_initialisation(dropout, causal):
    """Section 3.5: within 15 % through 8 blocks, with dropout; without the gates' factor 4 a tenth is left.

    The ends of a sequence, where taps meet zeros, are left out: a sum of two taps has two thirds of the variance.
    """
    depth = 8
    kept = {}
    for factor in (1.0, 0.5):
        shares = []
        for seed in range(4):
            rng = np.random.default_rng(seed)
            x = rng.normal(scale=EMBEDDING_DEVIATION * math.sqrt(2), size=(2, 120, 96)).astype("float32")
            start = float(np.var(x))
            for _ in range(depth):
                block = ConvolutionalBlock(3, causal, dropout=dropout)
                block.build(x.shape)
                block.convolution.gain.assign(block.convolution.gain * factor)
                x = block(x, training=True)
            shares.append(float(np.var(numbers(x)[:, 2 * depth : -depth])) / start)
        kept[factor] = np.mean(shares)
    assert 0.85 < kept[1.0] < 1.15 and kept[0.5] < 0.1


def test_a_gate_alone_and_a_map_alone_keep_the_variance():
    x = ops.convert_to_tensor(np.random.default_rng(6).normal(scale=0.1, size=(4, 100, 200)).astype("float32"))
    for gated, size in ((True, 3), (False, 1)):
        found = numbers(WeightNormConvolution(200, size, gated)(x))[:, 1:-1]
        assert float(np.var(found)) == pytest.approx(0.01, rel=0.1)


def test_an_attention_of_even_weights_keeps_the_variance_whatever_the_length():
    rng = np.random.default_rng(7)
    for length in (1, 10, 60):
        z, e = (rng.normal(scale=0.1, size=(200, length, 64)).astype("float32") for _ in range(2))
        _, values = sources(ops.convert_to_tensor(z), ops.convert_to_tensor(e), num_layers=3)
        assert float(np.var(numbers(ops.mean(values, axis=1)))) == pytest.approx(0.01, rel=0.1)


def attention(dtype=FLOAT):
    layer = MultiStepAttention(dtype=dtype)
    layer.build((None, None, C), (None, None, F), (None, None, F), (None, None, F))
    return randomised(layer)


def arrays(dtype=FLOAT):
    rng = np.random.default_rng(8)
    shapes = (B, T, C), (B, T, F), (B, S, F), (B, S, F)
    return [ops.convert_to_tensor(rng.normal(size=shape).astype(dtype)) for shape in shapes]


@pytest.mark.parametrize("blind", [False, True])
def test_multi_step_attention_is_the_papers_and_of_nothing_seen_zeros(blind):
    layer, (x, g, z, e) = attention(), arrays()
    mask = SOURCE_MASK & np.array([[not blind], [True]])
    keys, values = sources(z, e, 2, mask)
    found, weights = layer(x, g, keys, values, memory_mask=mask, return_attention_scores=True)
    for row in range(B):
        one, shares = attended(layer, *(numbers(a)[row] for a in (x, g, z, e)), mask[row])
        assert_close(found[row], one, atol=TOLERANCE)
        assert_close(weights[row, 0], shares, atol=TOLERANCE)
    if blind:
        assert not np.any(numbers(weights)[0])


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), WIDE])
def test_step_of_the_attention_equals_call(dtype, tolerance):
    layer, (x, g, z, e) = attention(dtype), arrays(dtype)
    keys, values = sources(z, e, 2, SOURCE_MASK)
    whole = layer(x, g, keys, values, memory_mask=SOURCE_MASK)
    context = layer.start(keys, values, SOURCE_MASK)
    for t in range(T):
        assert_close(layer.step(x[:, t], g[:, t], context), whole[:, t], atol=tolerance)


@pytest.mark.parametrize("num_layers", [1, 4])
def test_the_gradient_of_the_encoder_is_divided_by_twice_the_layers_and_that_of_embeddings_is_not(num_layers):
    _, _, z, e = arrays("float32")

    def total(z, e, through):
        keys, values = through(z, e)
        return ops.sum(ops.sin(keys)) + ops.sum(ops.square(values))

    def plain(z, e):
        return z, (z + e) * math.sqrt(0.5) * math.sqrt(S)

    slow = backend.gradients(lambda z, e: total(z, e, lambda z, e: sources(z, e, num_layers)), [z, e])
    fast = backend.gradients(lambda z, e: total(z, e, plain), [z, e])
    assert_close(slow[0], numbers(fast[0]) / (2 * num_layers), rtol=1e-4, atol=1e-6)
    assert_close(slow[1], fast[1], rtol=1e-4, atol=1e-6)
    assert_equal(sources(z, e, num_layers)[0], z)


def test_whatever_stands_at_places_of_no_source_reaches_neither_keys_nor_gradients():
    _, _, z, e = arrays("float32")
    dirty = [ops.where(SOURCE_MASK[..., None], a, ops.full((), math.nan, "float32")) for a in (z, e)]
    for one, other in zip(sources(*dirty, 2, SOURCE_MASK), sources(z, e, 2, SOURCE_MASK), strict=True):
        assert_equal(one, other)
    slopes = backend.gradients(lambda z, e: ops.sum(ops.square(sources(z, e, 2, SOURCE_MASK)[1])), dirty)
    assert all(np.isfinite(numbers(slope)).all() for slope in slopes)


def test_kernels_are_matrices_for_muon():
    block = ConvolutionalBlock(3)
    block.build((None, None, C))
    optimizer = Muon(learning_rate=0.1, weight_decay=None, adam_weight_decay=None)
    optimizer.build(block.trainable_variables)
    kernel, gain, bias = block.trainable_variables
    assert optimizer._matrices == [(3 * C, 2 * C), None, None]
    assert [optimizer._should_use_adamw(v) for v in (kernel, gain, bias)] == [False, True, True]


def test_dropout_is_on_in_training_only_and_repeats_with_its_seed():
    def run(seed, training):
        block = ConvolutionalBlock(3, dropout=0.5, seed=seed)
        block.build((None, None, C))
        return numbers(randomised(block)(X.astype("float32"), training=training))

    assert_equal(run(1, True), run(1, True))
    assert np.abs(run(1, True) - run(2, True)).max() > 1e-3
    assert_equal(run(1, False), run(2, False))


def test_layers_survive_saving(tmp_path):
    x, g, keys, values = (keras.Input((None, width)) for width in (C, F, F, F))
    y = ConvolutionalBlock(2, dropout=0.1, seed=3)(WeightNormConvolution(C, 3, gated=True, retained=0.9)(x))
    y = MultiStepAttention()(SinusoidalPositions(amplitude=0.2)(y), g, keys, values)
    model = keras.Model([x, g, keys, values], y)
    before = numbers(model(arrays("float32")))
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    assert_equal(before, again(arrays("float32")))
    assert again.layers[1].retained == 0.9


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32"])
@pytest.mark.parametrize("length", [1e-6, 1.0, 1e5])
def test_a_step_is_the_call_however_long_its_directions_are(policy, length):
    layer = WeightNormConvolution(4, 3, gated=True, causal=True, dtype=policy)
    layer.build((None, None, C))
    layer.kernel.assign(layer.kernel * length)
    x = np.random.default_rng(0).normal(size=(B, 3, C))
    window = layer.start(B)
    for t in range(3):
        step, window = layer.step(x[:, t], window)
    assert_close(ops.cast(step, "float32"), numbers(layer(x))[:, -1], atol=1e-5 if policy == "float32" else 0.05)
    row = WeightNormConvolution(4, dtype=policy)
    row.build((None, C))
    row.kernel.assign(row.kernel * length)
    assert_close(ops.cast(row(x[:, 0]), "float32"), numbers(row(x))[:, 0], atol=1e-5 if policy == "float32" else 0.05)


def test_another_number_of_sources_is_refused():
    layer = attention("float32")
    x, g, z, e = arrays("float32")
    with pytest.raises(ValueError, match="one batch B"):
        layer(x, g, *(array[:1] for array in sources(z, e, 2)))
    keys, values = sources(z, e, 2)
    with pytest.raises(ValueError, match=r"one batch B\. .* keys \(1, "):
        layer(x, g, keys[:1], values)
    with pytest.raises(ValueError, match="of the same places"):
        layer(x, g[:1], keys, values)
    with pytest.raises(ValueError, match=r"memory_mask has the shape .* with B=1"):
        sources(z[:1], e[:1], 2, np.ones((2, z.shape[1]), bool))


def test_an_empty_sequence_stays_empty():
    for options in ({"causal": True}, {"gated": True}, {"kernel_size": 1}):
        layer = WeightNormConvolution(4, **{"kernel_size": 3, **options})
        for shape in ((2, 0), (0, 3)):
            assert tuple(layer(np.zeros((*shape, C), "float32")).shape) == (*shape, 4)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="only TensorFlow tells a missing slope from zeros")
def test_an_empty_sequence_has_slopes_of_zero():
    import tensorflow as tf

    layer = WeightNormConvolution(4, kernel_size=3, causal=True)
    with tf.GradientTape() as tape:
        total = ops.sum(layer(np.zeros((2, 0, C), "float32")))
    for slope in tape.gradient(total, layer.trainable_variables):
        assert slope is not None and not numbers(slope).any()


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_layers_train_in_mixed_precision(policy):
    layer, exact = attention(policy), attention("float32")
    block, plain = ConvolutionalBlock(3, causal=True, dtype=policy), ConvolutionalBlock(3, causal=True)
    for one in (block, plain):
        one.build((None, None, C))
        randomised(one)
    assert all(keras.backend.standardize_dtype(v.dtype) == "float32" for v in block.trainable_variables)
    x, g, z, e = arrays("float32")
    keys, values = sources(z, e, 2)
    found = layer(block(x), g, keys, values)
    assert keras.backend.standardize_dtype(found.dtype) == policy.removeprefix("mixed_")
    expected = numbers(exact(plain(x), g, keys, values))
    assert_close(ops.cast(found, "float32"), expected, atol=0.1 * np.abs(expected).max())
    step, window = block.step(x[:, 0], block.start(B))
    assert_close(ops.cast(step, "float32"), numbers(plain(x))[:, 0], atol=0.05)
    assert keras.backend.standardize_dtype(window.dtype) == policy.removeprefix("mixed_")


@pytest.mark.skipif(TORCH, reason="torch has no compiled programs: mmattn.backend.compile gives the function itself")
@pytest.mark.parametrize("mode", MODES[1:] or MODES)
def test_compiled_equals_eager(mode):
    layer, block = attention("float32"), ConvolutionalBlock(3, causal=True)
    x, g, z, e = arrays("float32")

    def run(x, g, z, e):
        mask = ops.convert_to_tensor(SOURCE_MASK)
        keys, values = sources(z, e, 2, mask)
        return layer(block(x), g, keys, values, memory_mask=mask)

    eager = numbers(run(x, g, z, e))
    assert_close(backend.compile(run, jit=mode == "xla", variables_of=[layer, block])(x, g, z, e), eager, atol=1e-5)


@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
def test_places_are_as_small_as_the_embeddings(kind):
    layer = added_positions(kind, 200, 0.1, "float32")
    found = numbers(layer(np.zeros((1, 200, 64), "float32")))
    assert float(np.sqrt(np.mean(found**2))) == pytest.approx(0.1, rel=0.05)
    assert added_positions("none", None, 0.1, "float32") is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WeightNormConvolution(0), "filters=0"),
        (lambda: WeightNormConvolution(4, 0), "kernel_size=0"),
        (lambda: WeightNormConvolution(4, retained=0.0), r"share in \(0, 1\]. Received retained=0.0"),
        (lambda: ConvolutionalBlock(3, dropout=1.0), "dropout=1.0"),
        (lambda: ConvolutionalBlock(0), "kernel_size=0"),
        (lambda: made(3, causal=False).start(2), "looks ahead, so it has no steps"),
        (lambda: made(3)(X.astype(FLOAT), mask=MASK[:, :3]), r"mask has the shape \(B, 6\)"),
        (lambda: made(3)(X.astype(FLOAT), mask=MASK * 1.0), "mask is boolean"),
        (lambda: made(3)(X[:1].astype(FLOAT), mask=MASK), r"mask has the shape \(B, 6\) with B=1"),
        (lambda: added_positions("rotary", None, 0.1, None), "one of none, sinusoidal, learned. Received 'rotary'"),
        (lambda: added_positions("learned", None, 0.1, None), "needs max_length"),
    ],
)
def test_impossible_settings_are_refused_in_words(make, message):
    with pytest.raises(ValueError, match=message):
        make()
