"""The encoder-decoder and the Transformer decoder: step equals call, saving, several targets a source."""

from __future__ import annotations

import itertools
import re

import keras
import numpy as np
import pytest
from arrays import WIDE, assert_close, assert_equal, numbers
from keras import ops

from mmattn.decoders import ConvolutionalDecoder, RecurrentDecoder, TransformerDecoder, TransformerXLDecoder
from mmattn.encoders import ConvolutionalEncoder, RecurrentEncoder, TextEncoder
from mmattn.encoders.image import VisionTransformer
from mmattn.heads import EncoderClassifier, MaskedLanguageModel
from mmattn.layers import TransformerEncoderBlock
from mmattn.model import EncoderDecoder, LanguageModel

IDS = np.array([[2, 5, 6, 7, 3], [2, 9, 8, 3, 0], [2, 4, 4, 4, 4]])
PIXELS = np.random.default_rng(0).integers(0, 256, (3, 16, 24, 3)).astype("uint8")


def make(dtype="float32", **options):
    encoder = VisionTransformer((16, 24), patch_size=8, hidden_dim=8, num_layers=1, num_heads=2, dtype=dtype)
    decoder = TransformerDecoder(20, 8, num_layers=2, num_heads=2, dtype=dtype, **options)
    model = EncoderDecoder(encoder, decoder, dtype=dtype)
    model.build({"pixels": (None, 16, 24, 3), "target_ids": (None, None)})
    rng = np.random.default_rng(1)
    model.set_weights([rng.normal(size=w.shape, scale=0.3) for w in model.get_weights()])
    return model


DECODERS = {
    "pre": {},
    "post": {"norm": "post", "activation": "gelu"},
    "learned": {"positions": "learned", "max_length": 9},
}


@pytest.mark.parametrize("options", DECODERS.values(), ids=DECODERS)
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), WIDE])
def test_step_equals_call(options, dtype, tolerance):
    model = make(dtype, **options)
    whole = numbers(model({"pixels": PIXELS, "target_ids": IDS}))
    context, state = model.start({"pixels": PIXELS}, max_length=8)
    for t in range(IDS.shape[1]):
        logits, state = model.step(ops.convert_to_tensor(IDS[:, t]), t, context, state)
        assert_close(logits, whole[:, t], atol=tolerance)


def test_the_future_never_reaches_the_past():
    model = make()
    changed = IDS.copy()
    changed[:, 3:] = 11
    one, two = (numbers(model({"pixels": PIXELS, "target_ids": ids})) for ids in (IDS, changed))
    assert_equal(one[:, :3], two[:, :3])
    assert np.abs(one[:, 3:] - two[:, 3:]).max() > 1e-3


def test_the_picture_matters():
    model = make()
    one, two = (numbers(model({"pixels": p, "target_ids": IDS})) for p in (PIXELS, 255 - PIXELS))
    assert np.abs(one - two).max() > 1e-3


def test_several_targets_of_a_source_equal_each_alone():
    model = make()
    several = np.stack([IDS, IDS[::-1]], axis=1)  # (3, 2, 5)
    logits = numbers(model({"pixels": PIXELS, "target_ids": several}))
    for n in range(2):
        alone = numbers(model({"pixels": PIXELS, "target_ids": several[:, n]}))
        assert_close(logits[:, n], alone, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"positions": "learned", "max_length": 9}])
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_a_symbolic_call_gives_the_shapes_and_types_of_a_real_one(options, dtype):
    model = make(dtype, **options)
    for ids in (IDS, np.stack([IDS, IDS], axis=1)):
        for axes in (ids.shape[1:], (None,) * (ids.ndim - 1)):
            inputs = {"pixels": keras.Input((16, 24, 3)), "target_ids": keras.Input(axes, dtype="int32")}
            symbolic, real = model(inputs), model({"pixels": PIXELS, "target_ids": ids})
            assert symbolic.shape == (None, *axes, 20) and tuple(real.shape) == (*ids.shape, 20)
            assert symbolic.dtype == keras.backend.standardize_dtype(real.dtype)
    with pytest.raises(ValueError, match="goes with one target"):
        model({"pixels": PIXELS, "target_ids": ids, "label_places": np.array([0])})


def test_attention_is_that_of_the_decoder_and_sums_to_one():
    scores = numbers(make().attention({"pixels": PIXELS, "target_ids": IDS}))
    assert scores.shape == (3, 2, 2, 5, 6)
    assert_close(scores.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("options", DECODERS.values(), ids=DECODERS)
def test_saved_and_loaded_it_gives_the_same(options, tmp_path):
    model = make(**options, dropout=0.1, token_dropout=0.1)
    inputs = {"pixels": PIXELS, "target_ids": IDS}
    before = numbers(model(inputs))
    model.save(tmp_path / "m.keras")
    assert_equal(before, keras.models.load_model(tmp_path / "m.keras")(inputs))
    twin = EncoderDecoder.from_config(model.get_config())
    twin.build({"pixels": (None, 16, 24, 3), "target_ids": (None, None)})
    twin.set_weights(model.get_weights())
    assert_equal(before, twin(inputs))
    for each in (model, twin):
        assert len({v.path for v in each.weights}) == len(each.weights)


def test_the_configuration_keeps_the_precision_and_what_is_frozen():
    model = make("mixed_bfloat16")
    model.trainable = False
    twin = EncoderDecoder.from_config(model.get_config())
    assert twin.dtype_policy.name == "mixed_bfloat16" and not twin.trainable and not twin.trainable_weights


def test_no_two_dropouts_drop_the_same_places():
    """One seed for the whole model: every dropout draws its own noise from it, and the same in each twin."""

    def dropouts():
        options = {"hidden_dim": 8, "num_layers": 2, "num_heads": 2, "dropout": 0.5, "seed": 1}
        encoder = VisionTransformer((16, 24), patch_size=8, **options)
        decoder = TransformerDecoder(20, token_dropout=0.5, **options)
        model = EncoderDecoder(encoder, decoder)
        model.build({"pixels": (None, 16, 24, 3), "target_ids": (None, None)})
        blocks = [*encoder.blocks, *decoder.blocks]
        attention = [TransformerEncoderBlock(2, 8, attention_dropout=0.5, seed=seed) for seed in (1, 2)]
        for block in attention:
            block.build((None, None, 8))
        found = [each for layer in (model, *attention) for each in layer._flatten_layers()]
        return [each for each in found if isinstance(each, keras.layers.Dropout) and each.rate], len(blocks)

    (layers, blocks), (twins, _) = dropouts(), dropouts()
    assert len(layers) == 2 + 2 * 2 + 2 * 3 + 1 + 2 and blocks == 4
    noise = [numbers(layer(np.ones((4, 6, 8), "float32"), training=True)) for layer in layers]
    for a, b in itertools.combinations(noise, 2):
        assert np.any(a != b)
    for layer, twin in zip(layers, twins, strict=True):
        assert layer.seed == twin.seed


def test_it_learns_eight_pairs_by_heart():
    model = make()
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(5)
    pixels, words = rng.integers(0, 256, (8, 16, 24, 3)), rng.integers(4, 20, (8, 4))
    ids = np.concatenate([np.full((8, 1), 2), words[:, :-1]], axis=1)
    model.fit({"pixels": pixels.astype("uint8"), "target_ids": ids}, words, epochs=120, batch_size=8, verbose=0)
    predicted = numbers(model({"pixels": pixels.astype("uint8"), "target_ids": ids})).argmax(-1)
    assert_equal(predicted, words)


def test_a_language_model_has_no_memory():
    decoder = TransformerDecoder(20, 8, num_layers=2, num_heads=2, cross_attention=False)
    whole, _ = decoder(IDS)
    context, state = decoder.start(None, None, 5, batch_size=3)
    for t in range(5):
        logits, state = decoder.step(ops.convert_to_tensor(IDS[:, t]), t, context, state)
        assert_close(logits, numbers(whole)[:, t], atol=1e-5)
    with pytest.raises(ValueError, match="no cross-attention"):
        decoder(IDS, return_attention_scores=True)


def test_generation_that_cannot_start_is_refused_in_words():
    decoder = TransformerDecoder(20, 8, num_layers=1, num_heads=2, positions="learned", max_length=4)
    memory = np.ones((1, 3, 8), "float32")
    decoder(IDS[:1, :2], memory)
    with pytest.raises(ValueError, match="knows 4 positions; the sequence has 5"):
        decoder.start(memory, None, 5)
    language_model = TransformerDecoder(20, 8, num_layers=1, num_heads=2, cross_attention=False)
    with pytest.raises(ValueError, match="batch_size"):
        language_model.start(None, None, 5)


def test_token_dropout_hides_tokens_in_training_only():
    decoder = TransformerDecoder(20, 8, num_layers=1, num_heads=2, token_dropout=0.9, seed=1)
    memory = np.ones((3, 4, 8), "float32")
    quiet = numbers(decoder(IDS, memory)[0])
    assert_equal(quiet, numbers(decoder(IDS, memory)[0]))
    assert np.abs(quiet - numbers(decoder(IDS, memory, training=True)[0])).max() > 1e-3


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_heads": 3}, r"num_heads=3 does not divide hidden_dim=8\. Heads that fit: 1, 2, 4, 8"),
        ({"positions": "none"}, "positions"),
        ({"positions": "learned"}, "max_length"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"vocabulary_size": 0}, "vocabulary_size=0"),
        ({"dropout": -0.1}, "-0.1"),
    ],
)
def test_impossible_decoders_are_refused_in_words(options, words):
    with pytest.raises(ValueError, match=words):
        TransformerDecoder(**{"vocabulary_size": 20, "hidden_dim": 8, "num_layers": 1, "num_heads": 2, **options})


def test_images_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"\(16, 24\).*\(1, 8, 8, 3\)"):
        make()({"pixels": np.zeros((1, 8, 8, 3), "uint8"), "target_ids": IDS[:1]})
    with pytest.raises(ValueError, match="target_ids"):
        make()({"pixels": PIXELS})
    with pytest.raises(ValueError, match=r"one batch B\. Received target_ids \(1, 5\), memory \(3, "):
        make()({"pixels": PIXELS, "target_ids": IDS[:1]})


def test_pixels_that_were_scaled_already_are_refused():
    model = make()
    whole = numbers(model({"pixels": PIXELS, "target_ids": IDS}))
    assert_close(model({"pixels": PIXELS.astype("float32"), "target_ids": IDS}), whole, atol=1e-5)
    for scaled in (PIXELS / 255, PIXELS / 127.5 - 1):
        with pytest.raises(ValueError, match="scaled already"):
            model({"pixels": scaled.astype("float32"), "target_ids": IDS})


@pytest.mark.parametrize(
    "options", [{"num_heads": 0}, {"num_heads": 3}, {"patch_size": 0}, {"patch_size": 5}, {"stem_dims": (4,) * 4}]
)
def test_impossible_vision_transformers_are_refused_in_words(options):
    with pytest.raises(ValueError, match=r"Received|Heads that fit"):
        VisionTransformer((16, 24), **{"patch_size": 8, "hidden_dim": 8, "num_layers": 1, "num_heads": 2, **options})


def test_an_encoder_without_a_mask_is_refused_in_words():
    model = EncoderDecoder(keras.layers.Identity(), TransformerDecoder(11, hidden_dim=8, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match=r"An encoder gives two arrays, .* gave dict"):
        model.encode({"x": np.ones((1, 3, 8), "float32")})


def text_models():
    sizes = {"hidden_dim": 8, "num_layers": 1}
    yield RecurrentEncoder(12, **sizes), RecurrentDecoder(12, **sizes)
    yield ConvolutionalEncoder(12, **sizes), ConvolutionalDecoder(12, **sizes)
    yield TextEncoder(12, num_heads=2, **sizes), TransformerDecoder(12, num_heads=2, **sizes)
    yield TextEncoder(12, num_heads=2, **sizes), TransformerXLDecoder(12, num_heads=2, **sizes)


@pytest.mark.parametrize("parts", [*text_models()], ids=lambda parts: type(parts[1]).__name__)
def test_ids_of_another_kind_or_rank_are_refused_in_words(parts):
    model = EncoderDecoder(*parts)
    source, target = np.array([[3, 4, 5]]), np.array([[2, 5]])
    model({"source_ids": source.astype("uint8"), "target_ids": target.astype("int16")})
    for ids, said in [
        (source.astype("float32"), "Received float32 of shape (1, 3)"),
        (source > 3, "Received bool of shape (1, 3)"),
        (source[0], "of shape (3,)"),
        (source[None], "of shape (1, 1, 3)"),
    ]:
        with pytest.raises(ValueError, match=r"takes whole numbers \(B, S\) as source_ids.*" + re.escape(said)):
            model({"source_ids": ids, "target_ids": target})
    for ids in (target[0], target + 0.5, target[None, None]):
        with pytest.raises(ValueError, match=r"takes whole numbers \(B, T\) or \(B, n, T\) as target_ids"):
            model({"source_ids": source, "target_ids": ids})
        with pytest.raises(ValueError, match=r"takes whole numbers \(B, T\) as token_ids"):
            parts[1](ids, model.encode({"source_ids": source})[0])
    with pytest.raises(ValueError, match=r'reads a dict with "source_ids"\. Received one of: source'):
        model({"source": source, "target_ids": target})
    with pytest.raises(ValueError, match=r"takes token ids, whole numbers.*float32"):
        parts[1].token_embedding(keras.Input((None,)))


@pytest.mark.parametrize("state", ["x", {}, [np.zeros((1, 8))], {"hidden": []}], ids=str)
def test_a_state_is_refused_where_nothing_or_something_else_is_remembered(state):
    sizes = {"hidden_dim": 8, "num_layers": 1, "cross_attention": False}
    ids = np.array([[2, 5]])
    for decoder in (TransformerDecoder(12, num_heads=2, **sizes), ConvolutionalDecoder(12, **sizes)):
        with pytest.raises(ValueError, match=r"its state is None or \(\)"):
            decoder(ids, state=state)
        assert decoder(ids, state=())[1] == ()
    with pytest.raises(ValueError, match='is a dict of "hidden" and "lengths"'):
        TransformerXLDecoder(12, num_heads=2, **sizes)(ids, state=state)


def test_rows_of_another_number_are_refused_in_steps_and_by_decoders_alone():
    memory, ids = np.ones((1, 5, 8), "float32"), np.array([[2], [3], [4]])
    sizes = {"hidden_dim": 8, "num_layers": 1}
    for decoder in (
        TransformerDecoder(12, num_heads=2, **sizes),
        TransformerXLDecoder(12, num_heads=2, **sizes),
        ConvolutionalDecoder(12, source_embeddings=False, **sizes),
        RecurrentDecoder(12, **sizes),
        RecurrentDecoder(12, attention=None, **sizes),
        RecurrentDecoder(12, attention=None, input_feeding=False, **sizes),
    ):
        decoder(ids[:1], memory)
        with pytest.raises(ValueError, match="one batch B"):
            decoder(ids, memory)
        context, state = decoder.start(memory, None, 4)
        if context:  # it is the memory that has other rows; without one, the state
            state = keras.tree.map_structure(lambda a: ops.repeat(a, 3, axis=0), state)
        with pytest.raises(ValueError, match=r"one batch B|for the same rows"):
            decoder.step(ids[:, 0], 0, context, state)
    transformer = TransformerDecoder(12, num_heads=2, **sizes)
    transformer(ids[:1], memory)
    with pytest.raises(ValueError, match=r"has batch_size rows\. Received \(1, 5, 8\) and batch_size=3"):
        transformer.start(memory, None, 4, batch_size=3)
    remembering = TransformerXLDecoder(12, num_heads=2, memory_length=2, **sizes)
    _, state = remembering(ids, np.repeat(memory, 3, axis=0))
    with pytest.raises(ValueError, match=r"all rows of its state.* memory: 1"):
        remembering.start(memory, None, 4, state=state)
    for wrong in (True, np.ones((3, 1), bool)):
        with pytest.raises(ValueError, match=r"takes lengths and reset \(B,\)"):
            remembering(ids, np.repeat(memory, 3, axis=0), state=state, reset=wrong)


@pytest.mark.parametrize("parts", [*text_models()], ids=lambda parts: type(parts[1]).__name__)
def test_what_is_no_dict_is_refused_before_and_after_a_model_is_built(parts):
    ids = np.array([[2, 5]])
    classes = EncoderClassifier(VisionTransformer((16, 24), 8, 8, 1, 2), 3)
    words = MaskedLanguageModel(TextEncoder(12, 8, 1, 2))
    language = LanguageModel(TransformerDecoder(12, 8, 1, 2, cross_attention=False))
    models = {EncoderDecoder(*parts): "target_ids", language: "target_ids", classes: None, words: "source_ids"}
    for model, name in models.items():
        wanted = "reads a dict" if name is None else f'reads a dict with "{name}"'
        for inputs in (ids, [ids, ids]):
            with pytest.raises(ValueError, match=wanted):
                model(inputs)
    model = EncoderDecoder(*parts)
    model({"source_ids": ids, "target_ids": ids})
    with pytest.raises(ValueError, match='reads a dict with "target_ids"'):
        model([ids, ids])


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="only TensorFlow tells a missing slope from zeros")
@pytest.mark.parametrize("parts", [*text_models()], ids=lambda parts: type(parts[1]).__name__)
def test_slopes_of_texts_without_tokens_are_zeros(parts):
    import tensorflow as tf

    model, ids = EncoderDecoder(*parts), np.array([[2, 5]])
    model({"source_ids": ids, "target_ids": ids})
    for source, target in ((ids, ids[:, :0]), (ids[:, :0], ids), (ids[:0], ids[:0])):
        with tf.GradientTape() as tape:
            total = ops.sum(model({"source_ids": source, "target_ids": target}))
        slopes = tape.gradient(total, model.trainable_variables)
        missing = [w.path for w, slope in zip(model.trainable_variables, slopes, strict=True) if slope is None]
        assert not missing
        assert all(np.isfinite(tf.convert_to_tensor(slope)).all() for slope in slopes)
