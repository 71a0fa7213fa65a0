"""The Transformer-XL decoder: the paper's four terms, a text in segments equals the text in one, steps, resets."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from arrays import FLOAT, MODES, TOLERANCE, WIDE, assert_close, assert_equal, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from mmattn import backend
from mmattn.decoders import TransformerXLDecoder
from mmattn.encoders.text import TextEncoder
from mmattn.layers import SelfAttention, TransformerDecoderBlock
from mmattn.layers.checks import IN_ATTENTION
from mmattn.model import EncoderDecoder

B, T, V, D, N, H = 3, 9, 20, 8, 2, 2
IDS = np.random.default_rng(0).integers(3, V, (B, T)).astype("int32")


def make(dtype="float32", **options):
    """A decoder whose weights are all large enough to count, biases and scales too."""
    options = {"cross_attention": False, "memory_length": T, "positions": "transformer_xl", **options}
    decoder = TransformerXLDecoder(V, D, N, H, dtype=dtype, **options)
    decoder(IDS, np.zeros((B, 4, 6), "float32") if options["cross_attention"] else None)
    rng = np.random.default_rng(1)
    decoder.set_weights([rng.normal(size=w.shape, scale=0.4) for w in decoder.get_weights()])
    return decoder


def read(decoder, ids, bounds, state=None, **options):
    """The logits of segments that end at `bounds`, one call each, and the last state."""
    found = []
    for first, last in zip([0, *bounds], [*bounds, ids.shape[1]], strict=True):
        logits, state = decoder(ids[:, first:last], state=state, **options)
        found.append(numbers(logits))
    return np.concatenate(found, axis=1), state


def random_state(count, dtype="float32", rows=B, seed=5):
    rng = np.random.default_rng(seed)
    return {
        "hidden": [rng.normal(size=(rows, count, D)).astype(dtype) for _ in range(N)],
        "lengths": np.array([count, 0, count // 2][:rows], "int32"),
    }


# The paper's equations, position by position


def norm_of(layer, x):
    mean, deviation = x.mean(), np.sqrt(x.var() + 1e-5)
    return (x - mean) / deviation * numbers(layer.gamma) + numbers(layer.beta)


def attended(attention, i, keys, real, places):
    """Row i of `keys` asks the rows up to it that are real: section 3.3, with the biases of our projections."""
    width, heads = D // H, []
    weights = {
        name: (numbers(dense.kernel), numbers(dense.bias))
        for name, dense in (
            ("q", attention.query_dense),
            ("k", attention.key_dense),
            ("v", attention.value_dense),
            ("o", attention.output_dense),
        )
    }
    relative = attention._relative
    for h in range(H):
        q = keys[i] @ weights["q"][0][:, h] + weights["q"][1][h]
        scores, values = [], []
        for j in [j for j in range(i + 1) if real[j]]:
            distance = min(places[i] - places[j], relative.max_distance or T * T)
            sinusoid = np.array(
                [f(distance / 10000 ** (2 * n / D)) for f in (np.sin, np.cos) for n in range(D // 2)]
            )  # R of i - j
            k = keys[j] @ weights["k"][0][:, h] + weights["k"][1][h]
            r = sinusoid @ numbers(relative.kernel)[:, h]
            u, v = numbers(relative.content_bias)[h], numbers(relative.place_bias)[h]
            scores.append((q @ k + q @ r + u @ k + v @ r) / np.sqrt(width))  # terms (a), (b), (c), (d)
            values.append(keys[j] @ weights["v"][0][:, h] + weights["v"][1][h])
        shares = np.exp(np.array(scores) - max(scores))
        heads.append(sum(share * value for share, value in zip(shares / shares.sum(), values, strict=True)))
    return sum(heads[h] @ weights["o"][0][h] for h in range(H)) + weights["o"][1]


def reference(decoder, ids, hidden, length):
    """The logits (T, V) of one row, after the memories `hidden` (N, M, D) of which the last `length` are real."""
    table = numbers(decoder.token_embedding.embeddings).astype("float64")
    x = [table[i] * np.sqrt(D) for i in ids]
    for block, past in zip(decoder.blocks, hidden, strict=True):
        whole = [*np.asarray(past, "float64"), *x]
        real = [n >= len(past) - length for n in range(len(whole))]
        pre = block.norm == "pre"
        keys = [norm_of(block.self_attention_norm, row) if pre else row for row in whole]
        after = []
        for i in range(len(past), len(whole)):
            y = whole[i] + attended(block.self_attention, i, keys, real, range(len(whole)))
            y = y if pre else norm_of(block.self_attention_norm, y)
            inner, outer = block.feed_forward._inner, block.feed_forward._outer
            z = norm_of(block.feed_forward_norm, y) if pre else y
            z = np.maximum(z @ numbers(inner.kernel) + numbers(inner.bias), 0) @ numbers(outer.kernel)
            z = y + z + numbers(outer.bias)
            after.append(z if pre else norm_of(block.feed_forward_norm, z))
        x = after
    x = [norm_of(decoder.final_norm, row) if decoder.final_norm is not None else row for row in x]
    return np.array([row @ table.T + numbers(decoder.token_embedding.bias) for row in x])


@pytest.mark.parametrize("options", [{"norm": "pre"}, {"norm": "post"}, {"position_options": {"max_distance": 3}}])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), WIDE])
def test_the_logits_are_those_of_the_papers_equations(options, dtype, tolerance):
    decoder = make(dtype, **options)
    state = random_state(4, dtype)
    found, new = decoder(IDS[:, :5], state=state, memory_length=6)
    for row in range(B):
        hidden = [layer[row] for layer in state["hidden"]]
        expected = reference(decoder, IDS[row, :5], hidden, state["lengths"][row])
        assert_close(numbers(found)[row], expected, atol=tolerance)
    assert_equal(new["lengths"], [6, 5, 6])
    assert_equal(numbers(new["hidden"][1])[:, 0], state["hidden"][1][:, 3])  # the last that fits beside five new ones


# Segments


@pytest.mark.parametrize("positions", IN_ATTENTION)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_text_read_in_segments_gives_the_logits_of_one_call(positions, norm):
    decoder = make(positions=positions, norm=norm)
    whole = numbers(decoder(IDS)[0])
    for bounds in ([4], [1, 2, 3], [8]):
        found, state = read(decoder, IDS, bounds)
        assert_close(found, whole, atol=2e-5)
        assert_equal(state["lengths"], [T] * B)
    forgetful, _ = read(decoder, IDS, [4], memory_length=1)
    assert_close(forgetful[:, :4], whole[:, :4], atol=2e-5)
    assert np.abs(forgetful[:, 4:] - whole[:, 4:]).max() > 1e-2


WINDOWED = {positions: make(FLOAT, positions=positions, sliding_window=3) for positions in ("transformer_xl", "rotary")}


@settings(max_examples=6, deadline=None)
@given(bounds=st.sets(st.integers(1, T - 1)).map(sorted), positions=st.sampled_from(sorted(WINDOWED)))
def test_with_a_window_a_short_memory_is_enough_for_any_cut(bounds, positions):
    """Each position sees three, its own included: the paper's code calls it the same length."""
    decoder = WINDOWED[positions]
    found, _ = read(decoder, IDS, bounds, memory_length=2)
    assert_close(found, decoder(IDS)[0], atol=TOLERANCE)


def test_a_longer_memory_at_test_time_sees_more():
    decoder = make(memory_length=2)
    found = {length: read(decoder, IDS, [3, 6], memory_length=length)[0] for length in (0, 2, 6)}
    assert_close(found[6], decoder(IDS)[0], atol=2e-5)
    assert_equal(read(decoder, IDS, [3, 6])[0], found[2])
    assert_close(found[0][:, 3:6], decoder(IDS[:, 3:6])[0], atol=2e-5)
    for one, two in ((0, 2), (2, 6)):
        assert np.abs(found[one][:, 6:] - found[two][:, 6:]).max() > 1e-2


def test_an_empty_state_is_none_at_all():
    decoder = make()
    found, new = decoder(IDS, state=decoder.empty_state(B, 4), memory_length=4)
    expected, plain = decoder(IDS, memory_length=4)
    assert_close(found, expected, atol=1e-5)
    assert_equal(new["lengths"], plain["lengths"])
    for one, two in zip(new["hidden"], plain["hidden"], strict=True):
        assert_close(one, two, atol=1e-5)


# Rows that begin anew


def test_a_reset_row_sees_nothing_of_before():
    decoder = make()
    state = random_state(4)
    state["lengths"][:] = 4
    reset = np.array([True, False, True])
    fresh, kept = numbers(decoder(IDS)[0]), numbers(decoder(IDS, state=state)[0])
    found, new = decoder(IDS[:, :3], state=state, reset=reset)
    assert_close(numbers(found)[reset], fresh[reset, :3], atol=1e-5)
    assert_close(numbers(found)[~reset], kept[~reset, :3], atol=1e-5)
    assert_equal(new["lengths"], [3, 7, 3])
    second, _ = decoder(IDS[:, 3:], state=new)
    assert_close(numbers(second)[reset], fresh[reset, 3:], atol=1e-5)
    for layer in state["hidden"]:  # whatever lies there reaches nothing, now or later
        layer[reset] = np.nan
    spoiled, after = decoder(IDS[:, :3], state=state, reset=reset)
    assert_close(spoiled, found, atol=1e-6)
    assert_close(decoder(IDS[:, 3:], state=after)[0], second, atol=1e-6)


def test_no_gradient_goes_into_the_memory_and_what_is_not_real_spoils_none():
    decoder = make()
    state = random_state(4)
    reset = np.array([True, False, False])

    def loss(*hidden):
        return ops.sum(ops.square(decoder(IDS, state={**state, "hidden": list(hidden)}, reset=reset)[0]))

    found = [numbers(slope) for slope in backend.gradients(loss, state["hidden"], decoder.trainable_variables)]
    assert all(not slope.any() for slope in found[:N])
    paths = [v.path for v in decoder.trainable_variables]
    moved = [path for path, slope in zip(paths, found[N:], strict=True) if np.abs(slope).max() > 1e-4]
    assert {path for path in paths if path not in moved} == {p for p in paths if p.endswith("key/bias")}  # all alike
    for layer in state["hidden"]:
        layer[0] = np.nan
        layer[2, :2] = np.inf
    again = [numbers(slope) for slope in backend.gradients(loss, state["hidden"], decoder.trainable_variables)]
    for one, two in zip(again[N:], found[N:], strict=True):
        assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_the_memory_itself_matters_to_the_gradients_of_what_reads_it():
    """Keys and values of the memory are made by the weights of today: those learn from it."""
    block = TransformerDecoderBlock(H, 16, cross_attention=False)
    x, past = (np.random.default_rng(n).normal(size=(B, 3, D)).astype("float32") for n in (1, 2))
    block(x)

    def slopes(past):
        def loss(*given):
            return ops.sum(ops.square(block(x, past=given[0] if given else None)))

        arrays = [] if past is None else [past]
        return [numbers(s) for s in backend.gradients(loss, arrays, block.trainable_variables)]

    with_past = slopes(past)
    assert not with_past[0].any()
    names = [v.path.rpartition("block")[2] for v in block.trainable_variables]
    moved = [n for n, a, b in zip(names, with_past[1:], slopes(None), strict=True) if np.abs(a - b).max() > 1e-3]
    assert any("value/kernel" in name for name in moved) and any("self_attention_norm/gamma" in n for n in moved)


# Steps


@pytest.mark.parametrize("positions", IN_ATTENTION)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), WIDE])
def test_steps_after_a_state_equal_the_call(positions, window, dtype, tolerance):
    decoder = make(dtype, positions=positions, sliding_window=window)
    state = random_state(4, dtype)
    whole = numbers(decoder(IDS, state=state)[0])
    context, cache = decoder.start(None, None, T + 2, state=state)
    for t in range(T):
        logits, cache = decoder.step(ops.convert_to_tensor(IDS[:, t]), t, context, cache)
        assert_close(logits, whole[:, t], atol=tolerance)


def test_steps_equal_segments_one_after_the_other():
    decoder = make()
    whole = numbers(decoder(IDS)[0])
    _, state = read(decoder, IDS[:, :5], [2])
    context, cache = decoder.start(None, None, 4, state=state)
    for t in range(5, T):
        logits, cache = decoder.step(ops.convert_to_tensor(IDS[:, t]), t - 5, context, cache)
        assert_close(logits, whole[:, t], atol=2e-5)
    with pytest.raises(ValueError, match="The cache holds positions 0 to 3"):
        decoder.step(ops.convert_to_tensor(IDS[:, 0]), 4, context, cache)
    context, cache = decoder.start(None, None, T, batch_size=B)
    for t in range(T):
        logits, cache = decoder.step(ops.convert_to_tensor(IDS[:, t]), t, context, cache)
        assert_close(logits, whole[:, t], atol=2e-5)


def test_in_an_encoder_decoder_it_attends_across_and_remembers():
    encoder = TextEncoder(V, D, 1, H)
    model = EncoderDecoder(encoder, TransformerXLDecoder(V, D, N, H), share_embeddings=True)
    source = np.array([[5, 6, 7, 3], [8, 3, 0, 0], [9, 9, 3, 0]])
    whole = numbers(model({"source_ids": source, "target_ids": IDS}))
    context, cache = model.start({"source_ids": source}, T)
    for t in range(T):
        logits, cache = model.step(ops.convert_to_tensor(IDS[:, t]), t, context, cache)
        assert_close(logits, whole[:, t], atol=2e-5)
    memory, mask = model.encode({"source_ids": source})
    first, state = model.decoder(IDS[:, :4], memory, memory_mask=mask)
    second, _, scores = model.decoder(IDS[:, 4:], memory, memory_mask=mask, state=state, return_attention_scores=True)
    assert_close(np.concatenate([numbers(first), numbers(second)], axis=1), whole, atol=2e-5)
    assert numbers(scores).shape == (B, N, H, 5, 4)
    assert not numbers(scores)[1, ..., 2:].any()
    places = np.array([0, 7, 11])
    some, _ = model.decoder(IDS[:, 4:], memory, memory_mask=mask, state=state, places=places)
    assert_close(some, numbers(second).reshape(-1, V)[places], atol=1e-5)


# Programs, precision, saving


@pytest.mark.parametrize("mode", MODES)
def test_ways_to_run_agree(mode):
    decoder = make()
    state = random_state(4)
    reset = np.array([False, False, True])
    expected, after = decoder(IDS, state=state, reset=reset)

    def call(ids, state, reset):
        return decoder(ids, state=state, reset=reset)

    run = call if mode == "eager" else backend.compile(call, jit=mode in ("xla", "jit"), variables_of=decoder)
    logits, new = run(*keras.tree.map_structure(ops.convert_to_tensor, (IDS, state, reset)))
    assert_close(logits, expected, atol=2e-5)
    for one, two in zip(keras.tree.flatten(new), keras.tree.flatten(after), strict=True):
        assert_close(one, two, atol=2e-5)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_is_near_and_gives_logits_in_single(dtype):
    exact, half = make(), make(dtype)
    half.set_weights(exact.get_weights())
    expected, _ = read(exact, IDS, [4])
    logits, state = half(IDS[:, :4])
    assert keras.backend.standardize_dtype(state["hidden"][0].dtype) == dtype.removeprefix("mixed_")
    second, state = half(IDS[:, 4:], state=state)
    assert keras.backend.standardize_dtype(second.dtype) == "float32"
    found = np.concatenate([numbers(logits), numbers(second)], axis=1)
    assert np.abs(found - expected).max() < 0.15 * np.abs(expected).max()
    context, cache = half.start(None, None, 2, state=half(IDS[:, :4])[1])
    step, _ = half.step(ops.convert_to_tensor(IDS[:, 4]), 0, context, cache)
    assert_close(step, numbers(second)[:, 0], atol=0.1 * np.abs(expected).max())


@pytest.mark.parametrize("length", [T, None])
def test_a_symbolic_call_gives_the_shapes_and_types_of_a_real_one(length):
    decoder = make("mixed_bfloat16")
    state = {
        "hidden": [keras.Input((4, D), dtype="bfloat16") for _ in range(N)],
        "lengths": keras.Input((), dtype="int32"),
    }
    symbolic = decoder(keras.Input((length,), dtype="int32"), state=state, memory_length=5)
    real = decoder(IDS, state=random_state(4), memory_length=5)
    for one, two in zip(keras.tree.flatten(symbolic), keras.tree.flatten(real), strict=True):
        assert one.dtype == keras.backend.standardize_dtype(two.dtype)
        assert all(a in (None, b) for a, b in zip(one.shape, two.shape, strict=True))
    keras.tree.assert_same_structure(symbolic, real)


def test_saved_and_loaded_it_gives_the_same(tmp_path):
    options = {"sliding_window": 4, "memory_length": 3, "position_options": {"max_distance": 2}}
    decoder = make(dropout=0.1, **options)
    ids = keras.Input((None,), dtype="int32")
    model = keras.Model(ids, decoder(ids)[0])
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    twin = next(layer for layer in loaded.layers if isinstance(layer, TransformerXLDecoder))
    assert {name: getattr(twin, name) for name in options} == options and twin.positions == "transformer_xl"
    assert twin.get_config() == decoder.get_config()
    assert_equal(read(twin, IDS, [4, 7])[0], read(decoder, IDS, [4, 7])[0])


def test_what_does_not_fit_is_refused_in_words():
    for positions in ("sinusoidal", "learned"):
        with pytest.raises(ValueError, match=f"keeps no place of its own.*Received '{positions}'"):
            make(positions=positions)
    for length in (-1, 2.0, True):
        with pytest.raises(ValueError, match="memory_length is a whole number, 0 or more"):
            make(memory_length=length)
    decoder = make()
    with pytest.raises(ValueError, match=r"all rows of its state.*token_ids: 2, lengths: 3, hidden\[0\]: 3"):
        decoder(IDS[:2], state=random_state(4))
    for wrong in ({"lengths": np.ones(1, "int32")}, {"hidden": [random_state(4)["hidden"][0], np.zeros((2, 4, 8))]}):
        with pytest.raises(ValueError, match=r"all rows of its state\. Received other numbers.*: [12]"):
            decoder(IDS, state={**random_state(4), **wrong})
        with pytest.raises(ValueError, match="all rows of its state"):
            decoder.start(None, None, 4, state={**random_state(4), **wrong})
    with pytest.raises(ValueError, match="reset: 2"):
        decoder(IDS, state=random_state(4), reset=np.array([True, False]))
    with pytest.raises(ValueError, match="batch_size: 7"):
        decoder.start(None, None, 4, 7, state=random_state(4))
    with pytest.raises(ValueError, match="memory_length is a whole number"):
        decoder(IDS, memory_length=-3)
    with pytest.raises(ValueError, match=r"There is no longest text here\. Received max_length=9"):
        make(max_length=9)
    state = random_state(4)
    with pytest.raises(ValueError, match=r'holds as "hidden" 2 arrays \(B, M, 8\)'):
        decoder(IDS, state={**state, "hidden": state["hidden"][:1]})
    with pytest.raises(ValueError, match="batch_size"):
        decoder.start(None, None, 4)


# The layer below


@pytest.mark.parametrize("positions", [None, *IN_ATTENTION])
@pytest.mark.parametrize("causal", [True, False])
def test_a_layer_with_a_past_gives_the_last_rows_of_the_whole(positions, causal):
    layer = SelfAttention(H, 4, positions=positions)
    x = np.random.default_rng(3).normal(size=(B, T, D)).astype("float32")
    real = np.arange(T) < np.array([[T], [7], [8]])
    real[0, 1] = False
    whole, scores = layer(x, padding_mask=real, use_causal_mask=causal, return_attention_scores=True)
    given = {"past": x[:, :4], "past_mask": real[:, :4], "padding_mask": real[:, 4:]}
    found, weights = layer(x[:, 4:], **given, use_causal_mask=causal, return_attention_scores=True)
    assert_close(found, numbers(whole)[:, 4:], atol=1e-5)
    assert_close(weights, numbers(scores)[:, :, 4:], atol=1e-5)
    x[~real] = np.nan
    spoiled = numbers(layer(x[:, 4:], **{**given, "past": x[:, :4]}, use_causal_mask=causal))
    assert np.isfinite(spoiled).all()
    assert_close(spoiled[real[:, 4:]], numbers(found)[real[:, 4:]], atol=1e-5)
    mask = np.broadcast_to(np.arange(T) % 2 == 0, (1, T - 4, T))
    masked = layer(x[:, 4:], past=np.nan_to_num(x[:, :4]), attention_mask=mask)
    assert masked.shape == (B, T - 4, D)


def test_a_past_of_several_axes_is_refused():
    layer = SelfAttention(H, 4, attention_axes=2)
    x = np.zeros((B, 2, 3, D), "float32")
    layer(x)
    with pytest.raises(ValueError, match="A past goes with inputs"):
        layer(x, past=x)
