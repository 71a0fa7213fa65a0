"""The convolutional encoder against loops from the paper, its memory in other decoders, padding, shared tables."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from arrays import FLOAT, TOLERANCE, assert_close, assert_equal, numbers
from convolutions import encoded, randomised
from keras import ops

from mmattn import backend
from mmattn.decoders import ConvolutionalDecoder, TransformerDecoder
from mmattn.encoders import ConvolutionalEncoder
from mmattn.model import EncoderDecoder

V, D, F = 20, 10, 6
SOURCE = np.array([[7, 9, 5, 3, 0, 0], [5, 4, 8, 6, 7, 3]], "int32")
SIZES = {"hidden_dim": D, "num_layers": 2, "embedding_dim": F}
KINDS = [
    {"positions": "learned", "max_length": 12},
    {"positions": "none", "kernel_size": 2},
    {"kernel_size": 5, "num_layers": 1},
    {"embedding_dim": None},
]


def made(dtype="float32", **options):
    encoder = ConvolutionalEncoder(V, **{**SIZES, **options}, dtype=dtype)
    encoder.build()
    return randomised(encoder)


@pytest.mark.parametrize("options", KINDS)
def test_memory_is_the_papers_outputs_beside_its_embeddings(options):
    encoder = made(FLOAT, **options)
    memory, mask = encoder({"source_ids": SOURCE})
    narrow = made("float32", **options)({"source_ids": SOURCE})[0]
    assert_equal(mask, SOURCE != 0)
    for row, length in ((0, 4), (1, 6)):
        expected = np.concatenate(encoded(encoder, SOURCE[row, :length]), axis=-1)
        assert_close(memory[row, :length], expected, atol=TOLERANCE)
        assert_close(narrow[row, :length], expected, atol=2e-5)


@pytest.mark.parametrize("options", KINDS)
def test_padding_changes_no_memory(options):
    encoder = made(**options)
    whole = numbers(encoder({"source_ids": SOURCE})[0])
    wide = encoder({"source_ids": np.pad(SOURCE, ((0, 0), (0, 5)))})[0]
    narrow = encoder({"source_ids": SOURCE[:1, :4]})[0]
    assert_close(wide[:, :6], np.where(SOURCE[..., None] != 0, whole, numbers(wide)[:, :6]), atol=1e-6)
    assert_close(whole[:1, :4], narrow, atol=1e-6)


def test_not_even_a_nan_in_the_padding_token_leaks_into_memory_or_gradients():
    encoder = made()
    variables = encoder.trainable_variables

    def loss():
        memory, mask = encoder({"source_ids": SOURCE})
        return ops.sum(ops.square(ops.where(mask[..., None], memory, ops.zeros((), "float32"))))

    clean = numbers(encoder({"source_ids": SOURCE})[0]), [numbers(g) for g in backend.gradients(loss, [], variables)]
    table = encoder.token_embedding.embeddings
    table.assign(np.where(np.arange(V)[:, None] == 0, np.nan, numbers(table)))
    dirty = numbers(encoder({"source_ids": SOURCE})[0]), [numbers(g) for g in backend.gradients(loss, [], variables)]
    assert_equal(dirty[0][SOURCE != 0], clean[0][SOURCE != 0])
    for one, other in zip(dirty[1], clean[1], strict=True):
        assert_close(one, other, atol=1e-6)


def test_a_place_sees_half_of_the_taps_of_all_layers_to_either_side():
    encoder = made(num_layers=2, kernel_size=3)
    ids = np.full((1, 11), 5)
    changed = ids.copy()
    changed[0, 5] = 6
    one, two = (numbers(encoder({"source_ids": x})[0]) for x in (ids, changed))
    moved = np.abs(one - two)[0]
    assert np.flatnonzero(moved[:, :F].max(-1) > 1e-7).tolist() == [3, 4, 5, 6, 7]
    assert np.flatnonzero(moved[:, F:].max(-1) > 1e-7).tolist() == [5]


def test_a_transformer_decoder_reads_its_memory():
    model = EncoderDecoder(ConvolutionalEncoder(V, **SIZES), TransformerDecoder(V, 8, num_layers=1, num_heads=2))
    model.build({"source_ids": (None, None), "target_ids": (None, None)})
    targets = np.array([[2, 5], [2, 6]])
    whole = numbers(model({"source_ids": SOURCE, "target_ids": targets}))
    assert_close(model({"source_ids": SOURCE[:1, :4], "target_ids": targets[:1]}), whole[:1], atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_a_symbolic_call_gives_the_shapes_and_types_of_a_real_one(dtype):
    encoder = made(dtype)
    symbolic = encoder({"source_ids": keras.Input((None,), dtype="int32")})
    for a, b in zip(symbolic, encoder({"source_ids": SOURCE}), strict=True):
        assert a.shape[2:] == tuple(b.shape)[2:] and len(a.shape) == len(b.shape)
        assert a.dtype == keras.backend.standardize_dtype(b.dtype)


def test_mixed_precision_is_near():
    exact = numbers(made()({"source_ids": SOURCE})[0])
    for policy in ("mixed_float16", "mixed_bfloat16"):
        found = numbers(ops.cast(made(policy)({"source_ids": SOURCE})[0], "float32"))
        assert_close(found, exact, atol=0.05 * np.abs(exact).max())


def test_dropout_is_on_in_training_alone_and_repeats_with_its_seed():
    def run(seed, training):
        return numbers(made(dropout=0.5, seed=seed)({"source_ids": SOURCE}, training=training)[0])

    assert_equal(run(1, True), run(1, True))
    assert np.abs(run(1, True) - run(2, True)).max() > 1e-3
    assert_equal(run(1, False), run(2, False))


@pytest.mark.parametrize("share", [True, False])
def test_a_shared_table_is_one_variable_and_survives_saving(share, tmp_path):
    sizes = {**SIZES, "positions": "learned", "max_length": 12}
    model = EncoderDecoder(ConvolutionalEncoder(V, **sizes), ConvolutionalDecoder(V, **sizes), share_embeddings=share)
    model.build({"source_ids": (None, None), "target_ids": (None, None)})
    randomised(model)
    tables = [v for v in model.trainable_variables if v.path.endswith("token_embedding/embeddings")]
    assert len(tables) == (1 if share else 2)
    assert (model.encoder.token_embedding is model.decoder.token_embedding) == share
    inputs = {"source_ids": SOURCE, "target_ids": np.array([[2, 5], [2, 6]])}
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    assert_equal(model(inputs), again(inputs))
    assert len(again.trainable_variables) == len(model.trainable_variables)
    assert again.encoder.get_config() == model.encoder.get_config()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConvolutionalEncoder(0, D, 1), "vocabulary_size=0"),
        (lambda: ConvolutionalEncoder(V, D, 1, kernel_size=0), "kernel_size=0"),
        (lambda: ConvolutionalEncoder(V, D, 1, embedding_dim=0), "embedding_dim=0"),
        (lambda: ConvolutionalEncoder(V, D, 1, dropout=1.0), "dropout=1.0"),
        (lambda: ConvolutionalEncoder(V, D, 1, positions="rotary"), "one of none, sinusoidal, learned"),
        (lambda: ConvolutionalEncoder(V, D, 1, positions="learned"), "needs max_length"),
        (lambda: made(positions="learned", max_length=5)({"source_ids": SOURCE}), "knows 5 positions; .* has 6"),
        (lambda: made()({"target_ids": SOURCE}), 'reads a dict with "source_ids"'),
        (lambda: made().share_embedding(ConvolutionalDecoder(V, D, 1, embedding_dim=F).token_embedding), "of its own"),
        (
            lambda: EncoderDecoder(ConvolutionalEncoder(V, D, 1), ConvolutionalDecoder(V, D, 1, embedding_dim=F), True),
            r"one vocabulary_size and width\. The encoder has \(20, 10\), the decoder \(20, 6\)",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
