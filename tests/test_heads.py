"""Models of an encoder alone: pooled classes and masked tokens, against NumPy; padding, saving, precision, programs."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
from arrays import MODES, WIDE, assert_close, assert_equal, numbers
from keras import ops

from mmattn import backend
from mmattn.encoders.image import VisionTransformer
from mmattn.encoders.text import TextEncoder
from mmattn.heads import EncoderClassifier, MaskedLanguageModel
from mmattn.layers.masks import mean_of_real

IDS = np.array([[5, 19, 7, 3, 0], [9, 3, 0, 0, 0], [4, 8, 19, 19, 3]], "int32")
PLACES = np.array([1, 12, 13, 0], "int32")
SIZES = {"hidden_dim": 8, "num_layers": 2, "num_heads": 2}


@keras.saving.register_keras_serializable(package="tests")
class Given(keras.layers.Layer):
    """An encoder that gives what it is given: memory and mask."""

    def call(self, inputs, training=None):
        return inputs["memory"], inputs["mask"]

    def compute_output_spec(self, inputs, training=None):
        return inputs["memory"], inputs["mask"]


def filled(model, seed=1):
    rng = np.random.default_rng(seed)
    model.set_weights([rng.normal(size=w.shape, scale=0.4) for w in model.get_weights()])
    return model


def text_classifier(dtype="float32", **options):
    encoder = TextEncoder(20, **SIZES, dtype=dtype)
    model = EncoderClassifier(encoder, 3, dtype=dtype, **options)
    model.build({"source_ids": (None, None)})
    return filled(model)


def masked_model(dtype="float32", **options):
    model = MaskedLanguageModel(TextEncoder(20, **SIZES, dtype=dtype), dtype=dtype, **options)
    model.build({"source_ids": (None, None)})
    return filled(model)


def pooled(memory, mask, pooling):
    """One row after the other, by loops."""
    found = np.zeros((len(memory), memory.shape[-1]))
    for row, real in enumerate(mask):
        kept = [memory[row, place] for place in range(len(real)) if real[place]]
        if pooling == "first":
            found[row] = memory[row, 0] if real[0] else 0.0
        elif kept:
            found[row] = np.mean(kept, axis=0) if pooling == "mean" else np.max(kept, axis=0)
    return found


@pytest.mark.parametrize("pooling", ["mean", "max", "first"])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), WIDE])
def test_the_classes_are_scores_of_the_pooled_memory(pooling, dtype, tolerance):
    rng = np.random.default_rng(0)
    memory = rng.normal(size=(4, 5, 6)).astype(dtype)
    mask = np.arange(5) < np.array([5, 2, 1, 0])[:, None]
    model = EncoderClassifier(Given(dtype=dtype), 3, pooling=pooling, dtype=dtype)
    model.build({"memory": (None, 5, 6), "mask": (None, 5)})
    kernel, bias = model.get_weights()
    expected = pooled(memory, mask, pooling) @ kernel + bias
    assert_close(model({"memory": memory, "mask": mask}), expected, atol=tolerance)
    memory[~mask] = np.nan
    assert_close(model({"memory": memory, "mask": mask}), expected, atol=tolerance)


def test_a_mean_of_many_positions_does_not_overflow_in_half_precision():
    memory, mask = np.full((1, 600, 2), 200, "float16"), np.arange(600)[None] < 500
    memory[:, 500:] = np.nan
    assert_equal(mean_of_real(memory, mask), [[200, 200]])
    assert_equal(mean_of_real(memory[:, :500]), [[200, 200]])
    assert_equal(mean_of_real(memory[:, :0]), [[0, 0]])


def test_what_is_nan_at_padding_reaches_no_gradient():
    memory, mask = np.ones((2, 3, 4), "float32"), np.array([[True, True, False], [False] * 3])
    memory[~mask] = np.nan
    model = EncoderClassifier(Given(), 3)
    model.build({"memory": (None, 3, 4), "mask": (None, 3)})
    found = backend.gradients(
        lambda array: ops.sum(model({"memory": array, "mask": mask}) ** 2), [memory], model.trainable_variables
    )
    assert all(np.isfinite(numbers(gradient)).all() for gradient in found)
    assert_equal(found[0][1], np.zeros((3, 4)))


@pytest.mark.parametrize("pooling", ["mean", "max", "first"])
def test_more_padding_changes_no_class(pooling):
    model = text_classifier(pooling=pooling)
    wider = np.pad(IDS, ((0, 0), (0, 3)))
    assert_close(model({"source_ids": wider}), numbers(model({"source_ids": IDS})), atol=1e-5)


def gelu(x):
    return 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2)))


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-4), WIDE])
def test_masked_tokens_are_compared_with_the_encoders_own_table(dtype, tolerance):
    model = masked_model(dtype)
    memory = numbers(model.encoder({"source_ids": IDS})[0]).astype("float64")
    weights = {v.path.split("/", 1)[1]: v.numpy().astype("float64") for v in model.weights}
    table = next(value for name, value in weights.items() if name.endswith("embeddings"))
    flat = memory.reshape(-1, 8)
    expected = []
    for place in range(len(flat)):
        x = gelu(flat[place] @ weights["transform/kernel"] + weights["transform/bias"])
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-5) * weights["norm/gamma"] + weights["norm/beta"]
        expected.append([x @ row for row in table] + weights["output_bias"])
    expected = np.array(expected)
    assert_close(model({"source_ids": IDS}), expected.reshape(3, 5, 20), atol=tolerance)
    assert_close(model({"source_ids": IDS, "label_places": PLACES}), expected[PLACES], atol=tolerance)


def test_there_is_one_table_and_both_ends_train_it():
    model = masked_model()
    tables = [v for v in model.trainable_variables if tuple(v.shape) == (20, 8)]
    assert len(tables) == 1
    inputs = {"source_ids": IDS[:1, :2], "label_places": PLACES[:1]}
    (gradient,) = backend.gradients(lambda: ops.sum(model(inputs) ** 2), [], tables)
    assert (np.abs(numbers(gradient)).sum(axis=1) > 0).all()  # every token is an output


@pytest.mark.parametrize("mode", MODES)
def test_all_programs_agree(mode):
    inputs = {"source_ids": IDS, "label_places": PLACES}
    for model, arrays in ((masked_model(), inputs), (text_classifier(), {"source_ids": IDS})):
        expected = numbers(model(arrays))
        found = model
        if mode != "eager":
            found = backend.compile(lambda a, m=model: m(a, training=False), jit=mode != "graph", variables_of=model)
        assert_close(found({name: ops.convert_to_tensor(array) for name, array in arrays.items()}), expected, atol=1e-5)


@pytest.mark.parametrize("policy, tolerance", [("mixed_bfloat16", 0.15), ("mixed_float16", 0.02)])
def test_half_precision_is_near_and_logits_are_float32(policy, tolerance):
    for make in (masked_model, text_classifier):
        exact, half = numbers(make()({"source_ids": IDS})), make(policy)({"source_ids": IDS})
        assert keras.backend.standardize_dtype(half.dtype) == "float32"
        assert np.abs(numbers(half) - exact).max() < tolerance * np.abs(exact).max()


def test_saved_models_give_the_same(tmp_path):
    for number, model in enumerate(
        (masked_model(activation="relu"), text_classifier(pooling="max", dropout=0.2, seed=4))
    ):
        model.save(tmp_path / f"{number}.keras")
        again = keras.saving.load_model(tmp_path / f"{number}.keras")
        assert_equal(again({"source_ids": IDS}), numbers(model({"source_ids": IDS})))
        own = {name: value for name, value in model.get_config().items() if name != "encoder"}
        assert own.items() <= again.get_config().items()


def test_what_is_announced_is_what_comes():
    for model, arrays in (
        (masked_model(), {"source_ids": IDS}),
        (masked_model(), {"source_ids": IDS, "label_places": PLACES}),
        (text_classifier(), {"source_ids": IDS}),
    ):
        symbols = {name: keras.KerasTensor(array.shape, "int32") for name, array in arrays.items()}
        spec, found = model.compute_output_spec(symbols), model(arrays)
        assert tuple(spec.shape) == tuple(found.shape)
        assert spec.dtype == keras.backend.standardize_dtype(found.dtype)


def test_a_seed_repeats_the_dropout_and_there_is_none_in_use():
    inputs = {"source_ids": IDS}
    one, two = (numbers(text_classifier(dropout=0.5, seed=3)(inputs, training=True)) for _ in range(2))
    assert_equal(one, two)
    model = text_classifier(dropout=0.5, seed=4)
    assert np.abs(one - numbers(model(inputs, training=True))).max() > 1e-3
    assert_equal(model(inputs), numbers(text_classifier()(inputs)))


def test_a_picture_is_classified_by_what_it_shows():
    encoder = VisionTransformer((16, 24), patch_size=8, hidden_dim=8, num_layers=1, num_heads=2)
    model = EncoderClassifier(encoder, 4)
    model.build({"pixels": (None, 16, 24, 3)})
    pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 24, 3)).astype("uint8")
    logits = numbers(filled(model)({"pixels": pixels}))
    assert logits.shape == (2, 4) and np.abs(logits[0] - logits[1]).max() > 1e-3


def test_what_does_not_fit_is_refused():
    encoder = TextEncoder(20, **SIZES)
    with pytest.raises(ValueError, match=r"pooling is one of mean, max, first\. Received 'cls'"):
        EncoderClassifier(encoder, 3, pooling="cls")
    with pytest.raises(ValueError, match="num_classes=0"):
        EncoderClassifier(encoder, 0)
    with pytest.raises(ValueError, match=r"dropout is a share in \[0, 1\)"):
        EncoderClassifier(encoder, 2, dropout=1.0)
    with pytest.raises(ValueError, match="needs an encoder of tokens; vision_transformer"):
        MaskedLanguageModel(VisionTransformer((16, 16), 8, 8, 1, 2, name="vision_transformer"))
