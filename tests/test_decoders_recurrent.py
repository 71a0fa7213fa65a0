"""Laws of the recurrent decoder: the papers' equations, step and call, masks, searches, saving, precisions."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
from arrays import FLOAT, MODES, TENSORFLOW, TOLERANCE, TORCH, WIDE, assert_close, assert_equal, numbers
from keras import ops
from tiny_text import JOINT, sharpened

from mmattn import backend
from mmattn.bundle import load_bundle, save_bundle
from mmattn.decoders import RecurrentDecoder
from mmattn.decoding import Generator
from mmattn.encoders import RecurrentEncoder, VisionTransformer
from mmattn.inference import Translator
from mmattn.layers import RecurrentStack
from mmattn.model import EncoderDecoder, LanguageModel
from mmattn.training.losses import MaskedCrossEntropy

B, T, S, M, V = 3, 4, 5, 6, 11  # M: the memory's width
IDS = np.array([[2, 5, 6, 7], [2, 8, 9, 4], [2, 4, 4, 10]], "int32")
MEMORY = np.random.default_rng(0).normal(size=(B, S, M))
MASK = np.array([[1, 1, 1, 0, 0], [1] * 5, [0] * 5], bool)  # padded, full, and nothing to see
KINDS = {
    "bahdanau": {"attention": "bahdanau"},
    "luong_dot": {"attention": "luong_dot", "hidden_dim": M},
    "luong_general": {"attention": "luong_general"},
    "luong_concat": {"attention": "luong_concat"},
    "luong_unfed": {"attention": "luong_general", "input_feeding": False},
    "concat_unfed": {"attention": "luong_concat", "input_feeding": False},
    "cho": {"attention": None},
    "sutskever": {"attention": None, "input_feeding": False},
}
FORMS = {
    "plain": {},
    "gru": {"cell": "gru"},
    "deep": {"num_layers": 2, "embedding_dim": 3},
    "own_output": {"tied": False, "embedding_dim": 3, "output_bias": False, "cell": "gru", "num_layers": 2},
}
CASES = [
    *itertools.product(KINDS, ["plain"]),
    *itertools.product(["bahdanau", "luong_general"], ["gru", "deep", "own_output"]),
    *itertools.product(["luong_unfed", "cho"], ["deep"]),
]
FEW = ["bahdanau", "luong_general", "luong_unfed", "cho"]


def randomised(layer, scale=0.5):
    rng = np.random.default_rng(5)
    for variable in layer.trainable_variables:  # biases too: zeros would hide a fault
        variable.assign(rng.normal(size=variable.shape, scale=scale))
    return layer


def made(kind, form="plain", dtype="float32", **changes):
    options = {"vocabulary_size": V, "hidden_dim": 8, "num_layers": 1, **KINDS[kind], **FORMS[form], **changes}
    decoder = RecurrentDecoder(dtype=dtype, **options)
    decoder.build((None, None), (None, None, M))
    return randomised(decoder)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def cell_step(decoder, layer, x, state):
    """One step of an LSTM (i, f, g, o) or a GRU (z, r, h, the reset after the product), of one row."""
    kernel, recurrent, bias = (w.astype("float64") for w in layer.get_weights())
    if decoder.cell == "lstm":
        i, f, g, o = np.split(x @ kernel + state[0] @ recurrent + bias, 4)
        c = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(g)
        return [sigmoid(o) * np.tanh(c), c]
    xz, xr, xh = np.split(x @ kernel + bias[0], 3)
    hz, hr, hh = np.split(state[0] @ recurrent + bias[1], 3)
    z = sigmoid(xz + hz)
    return [z * state[0] + (1 - z) * np.tanh(xh + sigmoid(xr + hr) * hh)]


def look(decoder, query, memory):
    """What is found, and the weights, over the real positions of one row."""
    weights = (
        [numbers(w).astype("float64") for w in decoder.stack.asking.get_weights()]
        if decoder.stack.asking.weights
        else []
    )
    if decoder.attention in ("bahdanau", "luong_concat"):
        direction = next(w for w in weights if w.ndim == 1)
        w, u = (w for w in weights if w.ndim == 2)
        scores = [direction @ np.tanh(query @ w + k @ u) for k in memory]
    else:
        scores = [(query if decoder.attention == "luong_dot" else query @ weights[0]) @ k for k in memory]
    shares = np.exp(scores - np.max(scores)) if len(memory) else np.zeros(0)
    shares = shares / shares.sum() if len(memory) else shares
    return sum((a * k for a, k in zip(shares, memory, strict=True)), np.zeros(M)), shares


def dense(layer, x):
    kernel, bias = (w.astype("float64") for w in layer.get_weights())
    return np.tanh(x @ kernel + bias)


def reference(decoder, ids, memory, mask):
    """Logits and weights, one row and one token at a time, as the papers have it."""
    table = numbers(decoder.token_embedding.embeddings).astype("float64")
    logits, scores = np.zeros((B, T, V)), np.zeros((B, 1, 1, T, S))
    for b in range(B):
        real = memory[b][mask[b]]
        mean = real.mean(0) if len(real) else np.zeros(M)
        count = 2 if decoder.cell == "lstm" else 1
        parts = np.split(dense(decoder.stack.initial, mean), decoder.num_layers * count)
        states = [parts[i : i + count] for i in range(0, len(parts), count)]
        fed = np.zeros(decoder.hidden_dim)
        for t in range(T):
            word = table[ids[b, t]] * np.sqrt(table.shape[1])
            found, shares = mean, np.zeros(len(real))
            if decoder.attention == "bahdanau":
                found, shares = look(decoder, states[-1][0], real)
            x = word
            if decoder.input_feeding:
                x = np.concatenate([word, fed if str(decoder.attention).startswith("luong") else found])
            for i, layer in enumerate(decoder.stack.stack.layers):
                states[i] = cell_step(decoder, layer, x, states[i])
                x = states[i][0]
            read = x
            if str(decoder.attention).startswith("luong"):
                found, shares = look(decoder, x, real)
                fed = read = dense(decoder.stack.readout, np.concatenate([found, x]))
            elif decoder.input_feeding:
                read = dense(decoder.stack.readout, np.concatenate([x, word, found]))
            if decoder.projection is not None:
                read = read @ decoder.projection.get_weights()[0]
            output = decoder.output_embedding.get_weights()
            logits[b, t] = output[0] @ read + (output[1] if decoder.output_bias else 0)
            scores[b, 0, 0, t, np.flatnonzero(mask[b])] = shares
    return logits, scores


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_equals_the_papers_equations(kind, form):
    decoder = made(kind, form, FLOAT)
    looks = decoder.attention is not None
    found = decoder(IDS, MEMORY.astype(FLOAT), memory_mask=MASK, return_attention_scores=looks)
    logits, scores = reference(decoder, IDS, MEMORY, MASK)
    assert_close(found[0], logits, atol=TOLERANCE)
    if looks:
        assert_close(found[2], scores, atol=TOLERANCE)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), WIDE])
@pytest.mark.parametrize(("kind", "form"), CASES)
def test_step_equals_call(kind, form, dtype, tolerance):
    decoder, memory = made(kind, form, dtype), MEMORY.astype(dtype)
    logits, last = decoder(IDS, memory, memory_mask=MASK)
    context, state = decoder.start(ops.convert_to_tensor(memory), MASK, T)
    shapes = keras.tree.map_structure(lambda a: (tuple(a.shape), keras.backend.standardize_dtype(a.dtype)), state)
    for t in range(T):
        step, state = decoder.step(IDS[:, t], t, context, state)
        assert_close(step, logits[:, t], atol=tolerance)
    for one, other in zip(keras.tree.flatten(state), keras.tree.flatten(last), strict=True):
        assert_close(one, other, atol=tolerance)
    assert shapes == keras.tree.map_structure(
        lambda a: (tuple(a.shape), keras.backend.standardize_dtype(a.dtype)), state
    )


@pytest.mark.parametrize("kind", FEW)
def test_a_text_in_two_calls_is_that_of_one(kind):
    decoder, memory = made(kind, "deep"), MEMORY.astype("float32")
    whole, last = decoder(IDS, memory, memory_mask=MASK)
    first, state = decoder(IDS[:, :3], memory, memory_mask=MASK)
    second, state = decoder(IDS[:, 3:], memory, memory_mask=MASK, state=state)
    assert_close(np.concatenate([numbers(first), numbers(second)], axis=1), whole, atol=1e-6)
    for one, other in zip(keras.tree.flatten(state), keras.tree.flatten(last), strict=True):
        assert_close(one, other, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_under_the_mask_not_even_a_nan_reaches_a_logit_or_a_gradient(kind):
    decoder = made(kind)

    def results(memory):
        memory = ops.convert_to_tensor(memory.astype("float32"))

        def total(memory):
            return ops.sum(ops.square(decoder(IDS, memory, memory_mask=MASK)[0]))

        gradients = backend.gradients(total, [memory], decoder.trainable_variables)
        return [decoder(IDS, memory, memory_mask=MASK)[0], *gradients]

    plain = results(MEMORY)
    for one, other in zip(plain, results(np.where(MASK[..., None], MEMORY, np.nan)), strict=True):
        assert_equal(one, other)
    assert all(np.isfinite(numbers(one)).all() for one in plain)
    assert not np.any(numbers(plain[1])[~MASK])


@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_changes_nothing_before(kind):
    decoder, memory = made(kind), MEMORY.astype("float32")
    other = IDS.copy()
    other[:, 2:] = 1
    logits = numbers(decoder(IDS, memory)[0])
    assert_close(decoder(other, memory)[0][:, :2], logits[:, :2], atol=1e-6)
    assert np.abs(numbers(decoder(other, memory)[0])[:, 2:] - logits[:, 2:]).max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_logits_at_places_are_those_of_the_whole(kind):
    decoder, memory = made(kind, "deep"), MEMORY.astype("float32")
    places = np.array([0, 2, 7])
    whole = numbers(decoder(IDS, memory, memory_mask=MASK)[0])
    some = decoder(IDS, memory, memory_mask=MASK, places=places)[0]
    assert_close(some, whole.reshape(-1, V)[places], atol=1e-6)


@pytest.mark.skipif(TORCH, reason="torch has no compiled programs: mmattn.backend.compile gives the function itself")
@pytest.mark.parametrize("mode", MODES[1:] or MODES)
@pytest.mark.parametrize("kind", ["bahdanau", "luong_general"])
def test_compiled_logits_and_gradients_equal_eager_ones(kind, mode):
    decoder, memory = made(kind, "deep"), ops.convert_to_tensor(MEMORY.astype("float32"))
    ids = ops.convert_to_tensor(IDS)

    def run(memory):
        def total(memory):
            return ops.sum(ops.sin(decoder(ids, memory, memory_mask=MASK)[0]))

        return decoder(ids, memory, memory_mask=MASK)[0], backend.gradients(
            total, [memory], decoder.trainable_variables
        )

    eager = run(memory)
    compiled = backend.compile(run, jit=mode == "xla", variables_of=decoder)(memory)
    for one, other in zip(keras.tree.flatten(eager), keras.tree.flatten(compiled), strict=True):
        assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["bahdanau", "luong_general"])
def test_gradient_equals_finite_differences(kind):
    if not TENSORFLOW:
        pytest.skip("float64 is for TensorFlow here")
    decoder, memory = made(kind, "gru", "float64"), ops.convert_to_tensor(MEMORY)
    variables = decoder.trainable_variables

    def total(memory):
        return ops.sum(ops.sin(decoder(IDS, memory, memory_mask=MASK)[0]))

    found = backend.gradients(total, [memory], variables)[1:]
    for variable, gradient in zip(variables, found, strict=True):
        before, flat = numbers(variable).copy(), numbers(gradient).ravel()
        place = int(np.abs(flat).argmax())
        ends = []
        for sign in (1e-5, -1e-5):
            moved = before.copy()
            moved.ravel()[place] += sign
            variable.assign(moved)
            ends.append(float(total(memory)))
        variable.assign(before)
        assert flat[place] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5), variable.path


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("kind", FEW)
def test_half_precision_trains_and_is_near(kind, policy):
    exact, half = made(kind, "deep"), made(kind, "deep", policy, dropout=0.2)
    half.set_weights(exact.get_weights())
    memory = MEMORY.astype("float32")
    logits, state = half(IDS, memory, memory_mask=MASK)
    assert keras.backend.standardize_dtype(logits.dtype) == "float32"
    assert {keras.backend.standardize_dtype(a.dtype) for a in keras.tree.flatten(state)} == {policy[6:]}
    assert_close(logits, exact(IDS, memory, memory_mask=MASK)[0], atol=0.15)
    context, state = half.start(memory, MASK, T)
    assert_close(half.step(IDS[:, 0], 0, context, state)[0], logits[:, 0], atol=0.05)

    def total(memory):
        return ops.sum(half(IDS, memory, memory_mask=MASK, training=True)[0])

    for gradient in backend.gradients(total, [ops.convert_to_tensor(memory)], half.trainable_variables):
        assert np.isfinite(numbers(ops.cast(gradient, "float32"))).all()


@pytest.mark.parametrize("kind", FEW)
def test_dropouts_work_in_training_alone_and_repeat_with_their_seed(kind):
    def run(training, **options):
        decoder = made(kind, "deep", **options)
        return numbers(decoder(IDS, MEMORY.astype("float32"), memory_mask=MASK, training=training)[0])

    plain = run(False)
    for option in ({"dropout": 0.5}, {"token_dropout": 0.5}):
        assert_equal(run(False, **option, seed=1), plain)
        assert_equal(run(True, **option, seed=1), run(True, **option, seed=1))
        assert np.abs(run(True, **option, seed=1) - run(True, **option, seed=2)).max() > 1e-3


def test_dropout_drops_what_goes_up_at_each_place_anew_and_never_what_goes_on():
    stack = RecurrentStack(64, 3, dropout=0.5, seed=1)
    stack.build((None, None, 4))
    masks = [numbers(mask) for mask in stack.masks(ops.ones((5, 2, 4)))]
    assert [mask.shape for mask in masks] == [(5, 2, 64)] * 2
    assert set(np.unique(masks)) == {0.0, 2.0}
    assert not np.array_equal(masks[0], masks[1]) and not np.array_equal(masks[0][0], masks[0][1])
    states = stack.zeros(2)
    row = [ops.convert_to_tensor(np.zeros_like(mask[0])) for mask in masks]
    top, after = stack.step(ops.ones((2, 4)), states, row)
    dark, _ = stack.layers[2].cell(ops.zeros((2, 64)), states[2])
    assert_close(top, dark, atol=1e-6)  # nothing went up
    assert np.abs(numbers(after[0][0])).max() > 1e-3


def translator(kind="bahdanau", share=True, size=V, **changes):
    options = {**KINDS[kind], "hidden_dim": 8, "num_layers": 1, "embedding_dim": 6, **changes}
    summary = options["attention"] is None
    encoder = RecurrentEncoder(size, 8, 1, options.get("cell", "lstm"), embedding_dim=6, summary=summary)
    model = EncoderDecoder(encoder, RecurrentDecoder(size, **options), share_embeddings=share)
    model.build({"source_ids": (None, None), "target_ids": (None, None)})
    return sharpened(model)


SOURCE = np.array([[7, 9, 5, 3, 0, 0], [5, 3, 0, 0, 0, 0]], "int32")


@pytest.mark.parametrize(("kind", "compiled"), [("bahdanau", "step"), ("luong_general", True), ("cho", False)])
def test_beam_search_finds_the_best_of_all_texts(kind, compiled):
    """Of three words and at most three tokens with the end; 40 beams hold every beginning."""
    model, source = translator(kind, size=40), np.array([[6, 4, 5, 3, 0], [5, 3, 0, 0, 0]], "int32")
    model.decoder.token_embedding.bias.assign(np.where(np.isin(np.arange(40), (3, 4, 5, 6)), 0.0, -1e4))
    texts = [text for n in range(3) for text in itertools.product((4, 5, 6), repeat=n)]
    ids = np.zeros((len(texts), 3), "int32")
    for row, text in enumerate(texts):
        ids[row, : len(text) + 1] = [2, *text]
    generate = Generator(model.start, model.step, bos_id=2, eos_id=3, max_positions=3)
    options = {"num_beams": 40, "length_penalty": 0.0, "max_length": 3, "compiled": compiled}
    found = generate({"source_ids": source}, "beam", **options)
    for row in range(len(source)):
        inputs = {"source_ids": np.repeat(source[row : row + 1], len(texts), 0), "target_ids": ids}
        logits = numbers(model(inputs)).astype("float64")
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        totals = {}
        for text, log in zip(texts, logs, strict=True):
            ended = (*text, 3)
            totals[ended] = sum(log[t, token] for t, token in enumerate(ended))
        best = max(totals, key=totals.__getitem__)
        assert tuple(found.ids[row, 0, : found.lengths[row, 0]].tolist()) == best
        assert found.log_probs[row, 0] == pytest.approx(totals[best], abs=1e-4)


@pytest.mark.parametrize("kind", ["luong_general", "cho"])
def test_a_model_of_it_learns_to_copy(kind):
    model = translator(kind, hidden_dim=8)
    rng = np.random.default_rng(0)
    words = rng.integers(4, V, size=(64, 2))
    ends = np.full((64, 1), 3)
    inputs = {
        "source_ids": np.concatenate([words, ends], 1).astype("int32"),
        "target_ids": np.concatenate([np.full((64, 1), 2), words], 1).astype("int32"),
    }
    labels = np.concatenate([words, ends], 1)
    model.compile(keras.optimizers.Adam(0.03), loss=MaskedCrossEntropy(), jit_compile=keras.backend.backend() == "jax")
    history = model.fit(inputs, labels, sample_weight=np.ones(labels.shape), batch_size=32, epochs=60, verbose=0)
    assert history.history["loss"][0] > 1.5
    assert history.history["loss"][-1] < 0.2


@pytest.mark.parametrize(("kind", "share"), [("bahdanau", True), ("luong_general", True), ("cho", False)])
def test_saved_model_is_the_same_after_reload(kind, share, tmp_path):
    model = translator(kind, share, cell="gru")
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    inputs = {"source_ids": SOURCE, "target_ids": IDS[:2]}
    assert_equal(model(inputs), again(inputs))
    assert len(again.trainable_variables) == len(model.trainable_variables)


def test_a_bundle_of_it_translates_and_shows_where_it_looked(tmp_path):
    model = translator("luong_general", size=JOINT.vocabulary_size)
    before = Translator(model, JOINT)
    save_bundle(tmp_path / "bundle", model, JOINT)
    bundle = load_bundle(tmp_path / "bundle")
    after = Translator(bundle.model, bundle.tokenizer)
    text = "two dogs run on the beach"
    first, second = (each.translate(text, max_length=6, num_beams=3, compiled=False)[0] for each in (before, after))
    assert first.ids == second.ids and first.text
    found = after.attention(text, second)
    assert found.source_words == tuple(text.split()) and found.target_words
    assert found.weights.shape == (len(found.target_words), 6)
    np.testing.assert_allclose(found.weights.sum(axis=1), 1.0, atol=1e-5)
    after.save_attention(text, tmp_path / "attention.png", second)
    assert (tmp_path / "attention.png").stat().st_size > 1000


def test_patches_of_a_picture_start_a_text_too():
    encoder = VisionTransformer((32, 32), patch_size=16, hidden_dim=8, num_layers=1, num_heads=2)
    model = EncoderDecoder(encoder, RecurrentDecoder(V, 8, 1, attention="bahdanau"))
    pixels = np.random.default_rng(0).integers(0, 255, (2, 32, 32, 3)).astype("uint8")
    model.build({"pixels": pixels.shape, "target_ids": (None, None)})
    several = np.stack([IDS[:2], IDS[1:]], axis=1)  # two captions of each photo
    logits = numbers(model({"pixels": pixels, "target_ids": several}))
    assert logits.shape == (2, 2, T, V)
    context, state = model.start({"pixels": pixels}, T)
    for t in range(T):
        step, state = model.step(several[:, 1, t], t, context, state)
        assert_close(step, logits[:, 1, t], atol=1e-5)
    assert tuple(model.attention({"pixels": pixels, "target_ids": IDS[:2]}).shape) == (2, 1, 1, T, 4)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_language_model_steps_as_it_calls_and_is_the_same_after_reload(cell, tmp_path):
    decoder = RecurrentDecoder(V, 8, 2, cell, attention=None, cross_attention=False)
    model = LanguageModel(decoder)
    model.build({"target_ids": (None, None)})
    randomised(decoder)
    logits = numbers(model({"target_ids": IDS}))
    context, state = model.start({"target_ids": IDS[:, :1]}, T)
    for t in range(T):
        step, state = model.step(IDS[:, t], t, context, state)
        assert_close(step, logits[:, t], atol=1e-5)
    model.save(tmp_path / "model.keras")
    assert_equal(keras.models.load_model(tmp_path / "model.keras")({"target_ids": IDS}), logits)


@pytest.mark.parametrize("kind", KINDS)
def test_output_spec_is_what_a_call_gives(kind):
    decoder = made(kind, "deep")
    looks = decoder.attention is not None
    memory = keras.KerasTensor((B, S, M))
    ids = keras.KerasTensor((B, T), dtype="int32")
    spec = decoder.compute_output_spec(ids, memory, return_attention_scores=looks)
    found = decoder(IDS, MEMORY.astype("float32"), return_attention_scores=looks)
    keras.tree.assert_same_structure(spec, found)
    for one, other in zip(keras.tree.flatten(spec), keras.tree.flatten(found), strict=True):
        assert tuple(one.shape) == tuple(other.shape)
        assert one.dtype == keras.backend.standardize_dtype(other.dtype)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RecurrentDecoder(0, 8, 1), "vocabulary_size=0"),
        (lambda: RecurrentDecoder(V, 8, 0), "num_layers=0"),
        (lambda: RecurrentDecoder(V, 8, 1, "rnn"), "cell is one of lstm, gru. Received 'rnn'"),
        (lambda: RecurrentDecoder(V, 8, 1, attention="dot"), "attention is one of bahdanau, .* Received 'dot'"),
        (lambda: RecurrentDecoder(V, 8, 1, attention="bahdanau", input_feeding=False), "Received input_feeding=False"),
        (lambda: RecurrentDecoder(V, 8, 1, cross_attention=False), "no memory to look at"),
        (lambda: RecurrentDecoder(V, 8, 1, dropout=1.0), "dropout is a share"),
        (lambda: RecurrentDecoder(V, 8, 1, token_dropout=-1), "token_dropout is a share"),
        (lambda: made("luong_dot", hidden_dim=8), 'score="dot" multiplies queries and a memory of one width'),
        (lambda: made("luong_general")(IDS), "looks at a memory"),
        (lambda: made("luong_general").start(None, None, 3, batch_size=2), "looks at a memory"),
        (lambda: made("luong_general").start(None, None, 3), "needs batch_size"),
        (lambda: made("cho")(IDS, MEMORY, return_attention_scores=True), "has no attention"),
        (lambda: made("cho")(IDS, MEMORY, memory_mask=MASK[:, :3]), r"memory_mask has the shape \(B, 5\)"),
        (
            lambda: RecurrentDecoder(V, 8, 1, attention=None, cross_attention=False)(IDS, MEMORY),
            r"is a language model's: memory=None. Received memory of shape \(3, 5, 6\)",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_and_no_tokens_give_nothing_and_keep_the_state(kind):
    decoder = made(kind)
    _, state = decoder(IDS, MEMORY, MASK)
    logits, after, *weights = decoder(
        IDS[:, :0], MEMORY, MASK, state=state, return_attention_scores=decoder.attention is not None
    )
    assert tuple(logits.shape) == (B, 0, V) and all(tuple(w.shape) == (B, 1, 1, 0, S) for w in weights)
    for one, two in zip(keras.tree.flatten(state), keras.tree.flatten(after), strict=True):
        assert_equal(one, two)
    assert tuple(decoder(IDS[:0], MEMORY[:0], MASK[:0])[0].shape) == (0, T, V)


@pytest.mark.parametrize("kind", ["luong_general", "bahdanau", "sutskever"])
def test_a_state_of_other_rows_or_of_another_form_is_refused(kind):
    decoder = made(kind)
    _, state = decoder(IDS, MEMORY, MASK)
    for other in ("x", {}, [MEMORY], {**state, "more": state["cells"]}, {**state, "cells": state["cells"] * 2}):
        with pytest.raises(ValueError, match=r"goes on with the state of an earlier call.*\(3, \d\)"):
            decoder(IDS, MEMORY, MASK, state=other)
    with pytest.raises(ValueError, match=r"shape \(1, \d\).*Received a dict of .*\(3, \d\)"):
        decoder(IDS[:1], MEMORY[:1], MASK[:1], state=state)
    alone = keras.tree.map_structure(lambda array: array[:1], state)
    with pytest.raises(ValueError, match=r"shape \(3, \d\).*Received a dict of .*\(1, \d\)"):
        decoder(IDS, MEMORY, MASK, state=alone)
