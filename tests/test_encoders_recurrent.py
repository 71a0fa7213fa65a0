"""Laws of the recurrent encoder: the equations, padding, the summary, sharing, saving."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from arrays import FLOAT, MODES, TOLERANCE, TORCH, assert_close, assert_equal, numbers
from keras import ops

from mmattn import backend
from mmattn.decoders import RecurrentDecoder, TransformerDecoder
from mmattn.encoders import RecurrentEncoder
from mmattn.model import EncoderDecoder

IDS = np.array([[7, 9, 5, 3, 0, 0], [5, 3, 0, 0, 0, 0], [0] * 6], "int32")
MASK = IDS != 0
FORMS = [
    {},
    {"cell": "gru"},
    {"num_layers": 2, "embedding_dim": 5},
    {"bidirectional": False, "cell": "gru", "num_layers": 2},
    {"summary": True},
    {"summary": True, "num_layers": 2, "cell": "gru"},
    {"summary": True, "bidirectional": False},
]


def made(dtype="float32", **options):
    encoder = RecurrentEncoder(12, **{"hidden_dim": 8, "num_layers": 1, "dtype": dtype, **options})
    encoder.build({"source_ids": (None, None)})
    rng = np.random.default_rng(5)
    for variable in encoder.trainable_variables:  # biases too: zeros would hide a fault
        variable.assign(rng.normal(size=variable.shape, scale=0.5))
    return encoder


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def run_layer(layer, rows, cell):
    """A layer's outputs over the rows in their order."""
    kernel, recurrent, bias = (w.astype("float64") for w in layer.get_weights())
    h = c = np.zeros(recurrent.shape[0])
    outputs = []
    for x in rows:
        if cell == "lstm":
            i, f, g, o = np.split(x @ kernel + h @ recurrent + bias, 4)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
        else:
            (xz, xr, xh), (hz, hr, hh) = np.split(x @ kernel + bias[0], 3), np.split(h @ recurrent + bias[1], 3)
            z = sigmoid(xz + hz)
            h = z * h + (1 - z) * np.tanh(xh + sigmoid(xr + hr) * hh)
        outputs.append(h)
    return outputs


def reference(encoder, ids):
    """The memory of one row of real tokens, `(S, D)` or `(1, D)`."""
    table = numbers(encoder.token_embedding.embeddings).astype("float64")
    rows, ends = [table[i] * np.sqrt(table.shape[1]) for i in ids], None
    for layer in encoder.layers:
        if encoder.bidirectional:
            forward = run_layer(layer.forward_layer, rows, encoder.cell)
            backward = run_layer(layer.backward_layer, rows[::-1], encoder.cell)
            ends = np.concatenate([forward[-1], backward[-1]])
            rows = [np.concatenate(pair) for pair in zip(forward, backward[::-1], strict=True)]
        else:
            rows = run_layer(layer, rows, encoder.cell)
            ends = rows[-1]
    return np.stack([ends] if encoder.summary else rows)


@pytest.mark.parametrize("options", FORMS)
def test_equals_the_equations_and_reads_real_tokens_alone(options):
    encoder = made(FLOAT, **options)
    memory, mask = encoder({"source_ids": IDS})
    assert_equal(mask, MASK.any(1, keepdims=True) if encoder.summary else MASK)
    for row, ids in enumerate(IDS[:2]):
        expected = reference(encoder, ids[ids != 0])
        assert_close(memory[row, : len(expected)], expected, atol=TOLERANCE)
    assert not np.any(numbers(memory)[2])  # an empty source


@pytest.mark.parametrize("options", FORMS)
def test_padding_changes_nothing(options):
    encoder = made(**options)
    narrow, _ = encoder({"source_ids": IDS[:1, :4]})
    wide, _ = encoder({"source_ids": np.pad(IDS[:1], ((0, 0), (0, 5)))})
    assert_close(wide[:, : narrow.shape[1]], narrow, atol=1e-6)


@pytest.mark.parametrize("options", FORMS)
def test_not_even_a_nan_in_the_padding_token_leaks_into_memory_or_gradients(options):
    encoder = made(**options)
    variables = encoder.trainable_variables

    def loss():
        memory, mask = encoder({"source_ids": IDS})
        return ops.sum(ops.square(ops.where(mask[..., None], memory, ops.zeros((), "float32"))))

    clean = numbers(encoder({"source_ids": IDS})[0]), [numbers(g) for g in backend.gradients(loss, [], variables)]
    table = encoder.token_embedding.embeddings
    table.assign(np.where(np.arange(12)[:, None] == 0, np.nan, numbers(table)))
    dirty = numbers(encoder({"source_ids": IDS})[0]), [numbers(g) for g in backend.gradients(loss, [], variables)]
    assert_close(dirty[0], clean[0], atol=1e-6)
    for one, other in zip(dirty[1], clean[1], strict=True):
        assert_close(one, other, atol=1e-6)


@pytest.mark.parametrize("options", FORMS)
def test_output_spec_is_what_a_call_gives(options):
    encoder = made(**options)
    spec = encoder.compute_output_spec({"source_ids": keras.KerasTensor(IDS.shape, dtype="int32")})
    for one, other in zip(spec, encoder({"source_ids": IDS}), strict=True):
        assert tuple(one.shape) == tuple(other.shape)
        assert one.dtype == keras.backend.standardize_dtype(other.dtype)


@pytest.mark.skipif(TORCH, reason="torch has no compiled programs: mmattn.backend.compile gives the function itself")
@pytest.mark.parametrize("mode", MODES[1:] or MODES)
def test_compiled_equals_eager(mode):
    encoder = made(num_layers=2)
    run = backend.compile(lambda ids: encoder({"source_ids": ids})[0], jit=mode == "xla", variables_of=encoder)
    assert_close(run(ops.convert_to_tensor(IDS)), encoder({"source_ids": IDS})[0], atol=1e-6)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_half_precision_is_near(policy):
    exact, half = made(), made(policy)
    memory, _ = half({"source_ids": IDS})
    assert keras.backend.standardize_dtype(memory.dtype) == policy[6:]
    assert_close(numbers(ops.cast(memory, "float32"))[MASK], numbers(exact({"source_ids": IDS})[0])[MASK], atol=0.05)


@pytest.mark.parametrize("name", ["dropout", "token_dropout"])
def test_dropouts_work_in_training_alone_and_repeat_with_their_seed(name):
    def run(training, **options):
        return numbers(made(num_layers=2, **options)({"source_ids": IDS}, training=training)[0])

    assert_equal(run(False, **{name: 0.5}), run(False))
    assert_equal(run(True, **{name: 0.5}, seed=1), run(True, **{name: 0.5}, seed=1))
    assert np.abs(run(True, **{name: 0.5}, seed=1) - run(True, **{name: 0.5}, seed=2)).max() > 1e-3


@pytest.mark.parametrize("options", FORMS[:5])
def test_any_decoder_may_look_at_it_and_share_its_table(options, tmp_path):
    width = options.get("embedding_dim", 8)
    decoders = [RecurrentDecoder(12, 6, 1, attention="bahdanau", embedding_dim=width)]
    if width == 8:
        decoders.append(TransformerDecoder(12, hidden_dim=8, num_layers=1, num_heads=2))
    for number, decoder in enumerate(decoders):
        encoder = RecurrentEncoder(12, **{"hidden_dim": 8, "num_layers": 1, **options})
        model = EncoderDecoder(encoder, decoder, share_embeddings=True)
        model.build({"source_ids": (None, None), "target_ids": (None, None)})
        assert len([v for v in model.trainable_variables if v.path.endswith("embeddings")]) == 1
        inputs = {"source_ids": IDS[:2], "target_ids": np.array([[2, 5, 6], [2, 8, 0]], "int32")}
        model.save(tmp_path / f"{number}.keras")
        assert_equal(keras.models.load_model(tmp_path / f"{number}.keras")(inputs), model(inputs))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RecurrentEncoder(12, 7, 1), "Received hidden_dim=7"),
        (lambda: RecurrentEncoder(12, 8, 1, "rnn"), "cell is one of lstm, gru"),
        (lambda: RecurrentEncoder(12, 8, 0), "num_layers=0"),
        (lambda: RecurrentEncoder(12, 8, 1, embedding_dim=0), "embedding_dim=0"),
        (lambda: RecurrentEncoder(12, 8, 1, dropout=1.0), "dropout is a share"),
        (lambda: made()({"ids": IDS}), 'reads a dict with "source_ids"'),
        (
            lambda: EncoderDecoder(RecurrentEncoder(12, 8, 1), RecurrentDecoder(12, 8, 1, embedding_dim=4), True),
            r"The encoder has \(12, 8\), the decoder \(12, 4\)",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_no_rows_and_no_tokens_give_an_empty_memory(options):
    encoder = made(**options)
    for ids in (IDS[:, :0], IDS[:0]):
        memory, mask = encoder({"source_ids": ids})
        length = 1 if encoder.summary else ids.shape[1]
        assert tuple(memory.shape) == (len(ids), length, 8) and tuple(mask.shape) == (len(ids), length)
        assert not numbers(mask).any() and not numbers(memory).any()
