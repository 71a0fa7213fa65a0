"""Blocks, embeddings, positions: against NumPy, step against call, through saving."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
from arrays import FLOAT, MODES, TOLERANCE, TORCH, WIDE, assert_close, assert_equal, numbers
from keras import ops

from mmattn import backend
from mmattn.layers import (
    FeedForward,
    GridSinusoids,
    LearnedPositions,
    PatchEmbedding,
    SinusoidalPositions,
    TokenEmbedding,
    TransformerDecoderBlock,
    TransformerEncoderBlock,
)

B, T, S, D = 2, 5, 7, 12
RNG = np.random.default_rng(0)
X, MEMORY = RNG.normal(size=(B, T, D)), RNG.normal(size=(B, S, 8))
MASK = np.arange(S)[None] < np.array([[4], [7]])


def randomise(layer):
    rng = np.random.default_rng(3)
    layer.set_weights([rng.normal(size=w.shape, scale=0.4) for w in layer.get_weights()])
    return layer


def norm(layer, x):
    gamma, beta = (numbers(w) for w in layer.get_weights())
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * gamma + beta


def feed_forward(layer, x):
    w1, b1, w2, b2 = layer.get_weights()
    return np.maximum(x @ w1 + b1, 0) @ w2 + b2


@pytest.mark.parametrize("place", ["pre", "post"])
def test_encoder_block_is_its_parts_in_residual_branches(place):
    block = TransformerEncoderBlock(3, 20, norm=place, dtype=FLOAT)
    block.build(X.shape)
    randomise(block)
    padding = np.arange(T)[None] < np.array([[3], [5]])
    x = X.astype(FLOAT)
    for part, run in (
        ("self_attention", lambda y: numbers(block.self_attention(y, padding_mask=padding))),
        ("feed_forward", lambda y: feed_forward(block.feed_forward, y)),
    ):
        layer_norm = getattr(block, f"{part}_norm")
        x = x + run(norm(layer_norm, x)) if place == "pre" else norm(layer_norm, x + run(x))
    assert_close(block(X.astype(FLOAT), padding_mask=padding), x, atol=TOLERANCE)


@pytest.mark.parametrize("place", ["pre", "post"])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), WIDE])
def test_decoder_block_step_equals_call(place, dtype, tolerance):
    block = TransformerDecoderBlock(3, 20, norm=place, dtype=dtype)
    block.build(X.shape, MEMORY.shape)
    randomise(block)
    x, memory = X.astype(dtype), MEMORY.astype(dtype)
    whole = numbers(block(x, memory, memory_mask=MASK))
    context, cache = block.start(memory, MASK, B, T)
    for t in range(T):
        output, cache = block.step(ops.convert_to_tensor(x[:, t]), t, context, cache)
        assert_close(output, whole[:, t], atol=tolerance)


@pytest.mark.parametrize("depth", [1, 6])
def test_padding_of_the_memory_changes_nothing_at_any_depth(depth):
    blocks = [TransformerDecoderBlock(3, 20) for _ in range(depth)]
    encoders = [TransformerEncoderBlock(2, 16) for _ in range(depth)]

    def run(memory, mask):
        for block in encoders:
            memory = block(memory, padding_mask=mask)
        x = ops.convert_to_tensor(X.astype("float32"))
        for block in blocks:
            x = block(x, memory, memory_mask=mask)
        return numbers(x)

    memory = MEMORY.astype("float32")[:, :4]
    longer = np.concatenate([memory, 50 * np.ones((B, 3, 8), "float32")], axis=1)
    assert_close(run(memory, np.ones((B, 4), bool)), run(longer, np.arange(S)[None] < np.array([[4], [4]])), atol=2e-5)


def test_an_implicit_mask_passes_through_a_stack_of_blocks():
    ids = np.array([[3, 4, 0, 0], [5, 6, 7, 0]])
    x = keras.layers.Embedding(10, D, mask_zero=True)(ids)
    for _ in range(3):
        block = TransformerEncoderBlock(3, 16)
        x, scores = block(x, return_attention_scores=True)
        assert not np.any(numbers(scores)[0, :, :, 2:])
    assert_equal(x._keras_mask, ids != 0)


def test_blocks_survive_saving(tmp_path):
    x, memory = keras.Input((None, D)), keras.Input((None, 8))
    encoded = TransformerEncoderBlock(2, 16, activation="gelu", dropout=0.1, norm="post")(memory)
    y = TransformerDecoderBlock(3, 20, key_dim=5, dropout=0.2, attention_dropout=0.1)(x, encoded)
    model = keras.Model([x, memory], y)
    arrays = [X.astype("float32"), MEMORY.astype("float32")]
    before = numbers(model(arrays))
    model.save(tmp_path / "m.keras")
    assert_equal(before, keras.models.load_model(tmp_path / "m.keras")(arrays))


def test_dropout_is_on_in_training_only_and_repeats_with_its_seed():
    def run(seed, training):
        block = TransformerEncoderBlock(3, 16, dropout=0.5, attention_dropout=0.5, seed=seed)
        block.build(X.shape)
        randomise(block)
        return numbers(block(X.astype("float32"), training=training))

    assert_equal(run(1, True), run(1, True))
    assert np.abs(run(1, True) - run(2, True)).max() > 1e-3
    assert_equal(run(1, False), run(2, False))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_blocks_train_in_mixed_precision(policy):
    block = TransformerEncoderBlock(3, 16, dropout=0.1, dtype=policy)
    output = block(X.astype("float32"), training=True)
    assert keras.backend.standardize_dtype(output.dtype) == policy.removeprefix("mixed_")
    assert all(keras.backend.standardize_dtype(v.dtype) == "float32" for v in block.trainable_variables)
    exact = TransformerEncoderBlock(3, 16)
    exact.build(X.shape)
    exact.set_weights(block.get_weights())
    difference = numbers(ops.cast(block(X.astype("float32")), "float32")) - numbers(exact(X.astype("float32")))
    assert np.abs(difference).max() < 0.1


def test_a_memory_that_does_not_go_with_the_block_is_refused_at_every_call():
    x, memory = X.astype("float32"), MEMORY.astype("float32")
    blocks = [TransformerDecoderBlock(3, 16), TransformerDecoderBlock(3, 16, cross_attention=False)]
    for block, right, wrong in zip(blocks, (memory, None), (None, memory), strict=True):
        block(x, right)
        with pytest.raises(ValueError, match="memory"):
            block(x, wrong)
        with pytest.raises(ValueError, match="memory"):
            block.start(wrong, None, B, T)


def test_a_step_takes_what_call_takes_in_mixed_precision():
    block = TransformerDecoderBlock(3, 20, dtype="mixed_bfloat16")
    x, memory = (ops.convert_to_tensor(array.astype("float32")) for array in (X, MEMORY))
    whole = block(x, memory, memory_mask=MASK)
    context, cache = block.start(memory, MASK, B, T)
    for t in range(T):
        output, cache = block.step(x[:, t], t, context, cache)
        assert_close(*(numbers(ops.cast(y, "float32")) for y in (output, whole[:, t])), atol=0.1)


def test_heads_that_do_not_divide_the_width_are_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"num_heads=5 does not divide width=12\. Heads that fit: 1, 2, 3, 4, 6, 12"):
        TransformerEncoderBlock(5, 16).build((None, None, 12))


@pytest.mark.parametrize(
    "make",
    [
        lambda: TransformerEncoderBlock(2, 0).build((None, None, 4)),
        lambda: TransformerEncoderBlock(2, 8, norm="middle"),
        lambda: TransformerEncoderBlock(2, 8, dropout=1.5),
        lambda: TransformerEncoderBlock(2, 8, attention_dropout=1.0),
        lambda: TransformerEncoderBlock(0, 8),
        lambda: TransformerEncoderBlock(2, 8, key_dim=0),
        lambda: FeedForward(8, dropout=-0.1),
        lambda: TransformerDecoderBlock(2, 8).build((None, None, 4)),
        lambda: TransformerDecoderBlock(2, 8, cross_attention=False).build((None, None, 4), (None, None, 4)),
        lambda: FeedForward(-1),
        lambda: TokenEmbedding(0, 4),
        lambda: PatchEmbedding(8, 0),
        lambda: PatchEmbedding(8, 4).build((None, 20, 16, 3)),
        lambda: LearnedPositions(0),
    ],
)
def test_impossible_settings_are_refused_in_words(make):
    with pytest.raises(ValueError, match=r"Received|takes no memory"):
        make()


def test_sinusoids_equal_the_papers_formula():
    table = numbers(SinusoidalPositions(dtype=FLOAT)(np.zeros((1, 50, 6), FLOAT)))[0]
    for t in range(50):
        for i in range(3):
            angle = t / 10000 ** (2 * i / 6)
            assert table[t, 2 * i] == pytest.approx(math.sin(angle), abs=10 * TOLERANCE)
            assert table[t, 2 * i + 1] == pytest.approx(math.cos(angle), abs=10 * TOLERANCE)


@pytest.mark.parametrize("layer", [SinusoidalPositions(), LearnedPositions(9)])
def test_positions_step_equals_call(layer):
    x = X.astype("float32")
    whole = numbers(layer(x))
    for t in range(T):
        assert_close(layer.step(x[:, t], t), whole[:, t], atol=1e-6)


def test_a_sequence_longer_than_the_positions_is_refused_with_both_numbers():
    layer = LearnedPositions(4)
    layer.build((None, None, D))
    with pytest.raises(ValueError, match="knows 4 positions; the sequence has 5"):
        layer(X.astype("float32"))


def test_grid_sinusoids_tell_rows_from_columns():
    table = numbers(GridSinusoids(3, 5)((15, 8))).reshape(3, 5, 8)
    for row, column in np.ndindex(3, 5):
        for half, place in enumerate((row, column)):
            for i in range(2):
                angle = place / 10.0**i  # the lowest rate is 1 / (2 * 5)
                assert table[row, column, 4 * half + i] == pytest.approx(math.sin(angle), abs=1e-6)
                assert table[row, column, 4 * half + 2 + i] == pytest.approx(math.cos(angle), abs=1e-6)
    with pytest.raises(ValueError, match=r"3 x 5 places has a table of the shape \(15, D\)"):
        GridSinusoids(3, 5)((14, 8))


def test_embedding_and_logits_share_one_table():
    layer = TokenEmbedding(10, 4, dtype=FLOAT)
    layer.build((None, None))
    table, bias = layer.get_weights()
    bias = RNG.normal(size=10)
    layer.set_weights([table, bias])
    ids = np.array([[1, 9], [0, 3]])
    assert_close(layer(ids), table[ids] * 2.0, rtol=1e-6)
    vectors = RNG.normal(size=(2, 3, 4)).astype(FLOAT)
    assert_close(layer(vectors, reverse=True), vectors @ table.T + bias, atol=TOLERANCE)


def test_logits_are_float32_under_mixed_precision():
    layer = TokenEmbedding(10, 4, dtype="mixed_float16")
    assert keras.backend.standardize_dtype(layer(layer(np.array([[1]])), reverse=True).dtype) == "float32"


def test_patches_are_cut_row_by_row():
    layer = PatchEmbedding(4, 6, dtype=FLOAT)
    images = RNG.normal(size=(2, 8, 12, 3)).astype(FLOAT)
    output = numbers(layer(images))
    kernel, bias = layer.get_weights()
    for p in range(6):
        row, column = divmod(p, 3)
        patch = images[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].reshape(2, -1)
        assert_close(output[:, p], patch @ kernel + bias, atol=TOLERANCE)


@pytest.mark.skipif(TORCH, reason="torch has no compiled programs: mmattn.backend.compile gives the function itself")
@pytest.mark.parametrize("mode", MODES[1:] or MODES)
def test_compiled_equals_eager(mode):
    block = TransformerDecoderBlock(3, 20)
    x, memory = ops.convert_to_tensor(X.astype("float32")), ops.convert_to_tensor(MEMORY.astype("float32"))
    eager = numbers(block(x, memory, memory_mask=MASK))
    run = backend.compile(lambda a, b: block(a, b, memory_mask=ops.convert_to_tensor(MASK)), jit=mode == "xla")
    assert_close(run(x, memory), eager, atol=1e-5)
