"""Laws of the text encoder, of models that share their embeddings, of logits at some places, of language models."""

from __future__ import annotations

import re
from pathlib import Path

import keras
import numpy as np
import pytest
from arrays import assert_close, assert_equal, numbers
from keras import ops

from mmattn import backend
from mmattn.data.pair_batches import PairBatches
from mmattn.decoders import TransformerDecoder
from mmattn.encoders.text import TextEncoder
from mmattn.model import EncoderDecoder, LanguageModel
from mmattn.training.losses import MaskedCrossEntropy

CONF = Path(__file__).resolve().parent.parent / "conf"
SIZES = {"hidden_dim": 16, "num_layers": 2, "num_heads": 2, "intermediate_dim": 24}
KINDS = [{}, {"positions": "rotary"}, {"positions": "learned", "max_length": 12}, {"norm": "post"}]
SHAPES = {"source_ids": (None, None), "target_ids": (None, None)}
SOURCE = np.array([[7, 9, 5, 3, 0, 0], [5, 3, 0, 0, 0, 0]], "int32")
TARGET = np.array([[2, 5, 6, 7], [2, 8, 0, 0]], "int32")


def translator(share: bool = True, vocabulary_size: int = 20, **options) -> EncoderDecoder:
    model = EncoderDecoder(
        TextEncoder(vocabulary_size, **SIZES, **options),
        TransformerDecoder(vocabulary_size, **SIZES, **options),
        share_embeddings=share,
    )
    model.build(SHAPES)
    for variable in model.trainable_variables:  # biases and norms too: zeros and ones would hide a fault
        variable.assign(numbers(variable) + 0.1 * np.random.default_rng(len(variable.path)).normal(size=variable.shape))
    return model


@pytest.mark.parametrize("options", KINDS)
def test_padding_of_either_side_changes_no_logit(options):
    model = translator(**options)
    whole = model({"source_ids": SOURCE, "target_ids": TARGET})
    narrow = model({"source_ids": SOURCE[1:, :2], "target_ids": TARGET[1:, :2]})
    wide = model({"source_ids": np.pad(SOURCE, ((0, 0), (0, 5))), "target_ids": np.pad(TARGET, ((0, 0), (0, 5)))})
    assert_close(whole[1:, :2], narrow, atol=1e-5)
    assert_close(whole, wide[:, :4], atol=1e-5)


@pytest.mark.parametrize("options", KINDS)
def test_step_equals_call(options):
    model = translator(**options)
    logits = model({"source_ids": SOURCE, "target_ids": TARGET})
    context, state = model.start({"source_ids": SOURCE}, 4)
    for t in range(4):
        step, state = model.step(TARGET[:, t], t, context, state)
        assert_close(step, logits[:, t], atol=2e-5)


def test_memory_mask_is_true_at_tokens_alone():
    memory, mask = translator().encode({"source_ids": SOURCE})
    assert_equal(mask, SOURCE != 0)
    assert tuple(memory.shape) == (2, 6, 16)


def test_shared_embedding_is_one_variable_and_gets_the_gradient_of_all_three_uses():
    shared, apart = translator(share=True), translator(share=False)
    tables = [v for v in shared.trainable_variables if v.path.endswith("embeddings")]
    assert len(tables) == 1
    assert shared.encoder.token_embedding is shared.decoder.token_embedding
    assert apart.count_params() - shared.count_params() == 20 * 16
    before = numbers(tables[0]).copy()
    shared.compile(keras.optimizers.SGD(1.0), loss=MaskedCrossEntropy())
    labels = np.where(TARGET == 0, 0, 4)
    shared.train_on_batch({"source_ids": SOURCE, "target_ids": TARGET}, labels, sample_weight=(TARGET != 0) * 1.0)
    moved = np.abs(numbers(tables[0]) - before).sum(axis=1) > 0
    assert moved.all()  # the output layer reaches every row; the next test tells the uses apart


def test_gradient_of_the_shared_table_is_the_sum_over_its_uses():
    shared, apart = translator(share=True), translator(share=False)

    def plain(variable) -> str:  # Keras counts up the names of the layers of a process
        path = re.sub(r"_\d+(?=/)", "", variable.path.replace("block_", "block"))
        return path.rsplit("/", 1)[-1] if "token_embedding" in path else path  # shared, it lies in the encoder

    table = numbers(shared.decoder.token_embedding.embeddings)
    by_path = {plain(v): numbers(v) for v in shared.trainable_variables}
    for variable in apart.trainable_variables:
        variable.assign(table if variable.path.endswith("embeddings") else by_path[plain(variable)])

    def table_gradient(model):
        def loss():
            logits = model({"source_ids": SOURCE, "target_ids": TARGET})
            return ops.sum(logits[..., 5] * ops.cast(TARGET != 0, "float32"))

        tables = [v for v in model.trainable_variables if v.path.endswith("embeddings")]
        return sum(numbers(gradient) for gradient in backend.gradients(loss, [], tables))

    assert_close(table_gradient(shared), table_gradient(apart), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("share", [True, False])
def test_saved_model_is_the_same_after_reload(share, tmp_path):
    model = translator(share)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    inputs = {"source_ids": SOURCE, "target_ids": TARGET}
    assert_equal(model(inputs), again(inputs))
    assert len(again.trainable_variables) == len(model.trainable_variables)


def test_logits_at_places_are_those_of_the_whole_and_so_is_the_loss():
    model = translator()
    whole = numbers(model({"source_ids": SOURCE, "target_ids": TARGET}))
    places = np.array([0, 1, 3, 4, 5])
    some = model({"source_ids": SOURCE, "target_ids": TARGET, "label_places": places})
    assert_close(some, whole.reshape(-1, 20)[places], atol=1e-6)


def test_a_batch_of_places_trains_as_the_padded_batch_does():
    pairs = [
        {"id": str(n), "source": " ".join("789"[: n % 3 + 1]), "targets": [" ".join("5678"[: n % 4 + 1])]}
        for n in range(12)
    ]
    batches = PairBatches(pairs, lambda text: [int(w) for w in text.split()], tokens_per_batch=60, max_shapes=1)
    inputs, labels, weights = next(batches.iterate())
    rows, length = inputs["target_ids"].shape
    padded, real = np.zeros(rows * length, "int32"), np.zeros(rows * length, "float32")
    padded[inputs["label_places"][weights > 0]], real[inputs["label_places"][weights > 0]] = labels[weights > 0], 1.0
    plain = {name: inputs[name] for name in SHAPES}
    results = []
    for x, y, w in ((inputs, labels, weights), (plain, padded.reshape(rows, length), real.reshape(rows, length))):
        keras.utils.set_random_seed(0)
        model = translator()
        model.compile(keras.optimizers.SGD(0.1), loss=MaskedCrossEntropy(0.1))
        results.append((model.train_on_batch(x, y, sample_weight=w), [numbers(v) for v in model.trainable_variables]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert_close(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TextEncoder(20, 16, num_layers=1, num_heads=3), "num_heads=3 does not divide hidden_dim=16"),
        (lambda: TextEncoder(0, 16, 1, 2), "vocabulary_size=0"),
        (lambda: TextEncoder(20, 16, 1, 2, positions="learned"), "needs max_length"),
        (lambda: TextEncoder(20, 16, 1, 2, positions="relative"), "'relative'"),
        (lambda: EncoderDecoder(TextEncoder(21, **SIZES), TransformerDecoder(20, **SIZES), True),
         r"one vocabulary_size and hidden_dim. The encoder has \(21, 16\), the decoder \(20, 16\)"),
        (lambda: translator()({"target_ids": TARGET}), 'reads a dict with "source_ids"'),
        (lambda: translator()({"source_ids": SOURCE}), 'reads a dict with "target_ids"'),
        (lambda: EncoderDecoder(keras.layers.Dense(2), TransformerDecoder(20, **SIZES), True), "an encoder of tokens"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_published_tiny_transformer_has_2_57_million_parameters():
    sizes = {"hidden_dim": 128, "num_layers": 4, "num_heads": 4, "intermediate_dim": 256}
    model = EncoderDecoder(TextEncoder(9713, **sizes), TransformerDecoder(9713, output_bias=False, **sizes), True)
    model.build(SHAPES)
    table = 9713 * 128
    attention, dense, norm = 4 * (128 * 128 + 128), 128 * 256 + 256 + 256 * 128 + 128, 2 * 128
    encoder, decoder = 4 * (attention + dense + 2 * norm), 4 * (2 * attention + dense + 3 * norm)
    assert model.count_params() == table + encoder + decoder + 2 * norm == 2_568_832


@pytest.mark.parametrize(("size", "millions"), [("text_tiny", 2.57), ("text_base", 63.08), ("text_big", 214.25)])
def test_published_sizes_have_their_parameters(size, millions):
    """Counted from the shapes alone: the paper says 65 M for base and 213 M for big (about 37,000 tokens)."""
    yaml = pytest.importorskip("omegaconf").OmegaConf.load(CONF / "size" / f"{size}.yaml")
    width, inner, vocabulary = yaml.hidden_dim, yaml.intermediate_dim, yaml.vocabulary_size
    attention, dense, norm = 4 * (width * width + width), 2 * width * inner + width + inner, 2 * width
    encoder, decoder = attention + dense + 2 * norm, 2 * attention + dense + 3 * norm
    total = vocabulary * width + yaml.encoder_layers * encoder + yaml.decoder_layers * decoder
    assert round(total / 1e6, 2) == millions


@pytest.mark.parametrize("name", ["token_dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_works_in_training_alone_and_is_kept_by_the_configuration(name):
    plain, dropped = translator(), translator(**{name: 0.5})
    dropped.set_weights(plain.get_weights())
    inputs = {"source_ids": SOURCE, "target_ids": TARGET}
    assert_equal(dropped(inputs), plain(inputs))
    first, second = (numbers(dropped(inputs, training=True)) for _ in range(2))
    assert np.abs(first - second).max() > 1e-3
    again = EncoderDecoder.from_config(dropped.get_config())
    assert getattr(again.encoder, name) == getattr(again.decoder, name) == 0.5
    with pytest.raises(ValueError, match=f"{name} is a share"):
        translator(**{name: 1.0})


def language_model(**options) -> LanguageModel:
    model = LanguageModel(TransformerDecoder(20, **SIZES, cross_attention=False, **options))
    model.build({"target_ids": (None, None)})
    return model


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
def test_language_model_sees_nothing_that_follows_and_steps_as_it_calls(positions):
    model = language_model(positions=positions)
    logits = numbers(model({"target_ids": TARGET}))
    changed = TARGET.copy()
    changed[:, 2:] = 9
    assert_close(model({"target_ids": changed})[:, :2], logits[:, :2], atol=1e-6)
    context, state = model.start({"target_ids": TARGET[:, :1]}, 4)
    for t in range(4):
        step, state = model.step(TARGET[:, t], t, context, state)
        assert_close(step, logits[:, t], atol=1e-5)


def test_language_model_is_the_same_after_reload(tmp_path):
    model = language_model()
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert_equal(model({"target_ids": TARGET}), again({"target_ids": TARGET}))
