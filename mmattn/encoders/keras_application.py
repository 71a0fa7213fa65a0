"""Any network of keras.applications as a backbone: pixels from 0 to 255 in, a feature grid out, weights from a file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
from keras import ops

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STDDEV = (0.229, 0.224, 0.225)


@keras.saving.register_keras_serializable(package="mmattn")
class KerasApplication(keras.Model):
    """A network of keras.applications as a backbone, with the preprocessing that its family needs in front.

    Args:
        name: the class or function name in keras.applications, such as "MobileNetV2" or "ResNet50V2".
        weights: a local file that `save_weights` of the network without its classifier wrote; None leaves them random.
            Nothing is downloaded.
        layer: the layer whose output is the grid. Default: the last one.
        image_size: side in pixels, or (height, width).
        trainable: False by default: frozen.
        dtype: a Keras dtype policy; the global one when not given.

    Call arguments:
        pixels: `(B, height, width, 3)`, RGB from 0 to 255, any number type.

    Returns:
        The feature grid `(B, rows, columns, C)`.

    Raises:
        ValueError: an unknown name or layer, or a file that does not fit the network.
        FileNotFoundError: no such file.

    Example:
        >>> backbone = KerasApplication("MobileNetV2", image_size=64)
        >>> backbone.output_shape
        (None, 2, 2, 1280)
    """

    def __init__(
        self,
        name: str,
        weights: str | None = None,
        layer: str | None = None,
        image_size: int | tuple[int, int] = 224,
        trainable: bool = False,
        dtype: Any = None,
    ) -> None:
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        policy = keras.dtype_policies.get(keras.config.dtype_policy() if dtype is None else dtype)
        network = _application(name, (height, width), policy)
        if weights is not None:
            _load(network, name, weights)
        layers = [each.name for each in network.layers]
        if layer is not None and layer not in layers:
            raise ValueError(f"{name} has no layer {layer!r}. Its layers: {', '.join(layers)}.")
        output = network.output if layer is None else network.get_layer(layer).output
        pixels = keras.Input((height, width, 3), name="pixels")
        if name.startswith("EfficientNetB"):  # normalised here, see _load
            first = network.get_layer("stem_conv_pad").input
            scaled = (pixels / 255.0 - ops.array(_IMAGENET_MEAN)) / ops.array(_IMAGENET_STDDEV)
        else:
            first = network.input
            scaled = _module(name).preprocess_input(pixels)
        super().__init__(pixels, keras.Model(first, output, name="network")(scaled), name=_module_name(name))
        self.dtype_policy = policy
        self.application = name
        self.layer = layer
        self.image_size = (height, width)
        self.trainable = trainable

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments; `weights` is left out, because what is saved has its own."""
        return {
            "name": self.application,
            "layer": self.layer,
            "image_size": list(self.image_size),
            "trainable": self.trainable,
            "dtype": keras.dtype_policies.serialize(self.dtype_policy),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> KerasApplication:
        """Builds the same network with random weights."""
        return cls(**config)


def _application(name: str, size: tuple[int, int], policy: Any) -> keras.Model:
    build = getattr(keras.applications, name, None) if name[:1].isupper() else None
    if build is None:
        names = ", ".join(each for each in dir(keras.applications) if each[0].isupper())
        raise ValueError(f"keras.applications has no {name!r}. It has {names}.")
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)  # these functions take no dtype
    try:
        return build(include_top=False, weights=None, input_shape=(*size, 3))
    finally:
        keras.config.set_dtype_policy(before)


def _module_name(name: str) -> str:
    return getattr(keras.applications, name).__module__.rpartition(".")[2]


def _module(name: str) -> Any:
    """The family's module, such as keras.applications.resnet_v2."""
    return getattr(keras.applications, _module_name(name))


def _load(network: keras.Model, name: str, weights: str) -> None:
    if weights == "imagenet":
        raise ValueError(
            f'weights="imagenet" would download. Where there is a network, run once: keras.applications.{name}'
            f'(weights="imagenet", include_top=False).save_weights("{name}.weights.h5"), and give that file.'
        )
    if not Path(weights).is_file():
        raise FileNotFoundError(f"weights={weights!r}: there is no such file.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # so Keras reports what it skips
            network.load_weights(weights)
    except (ValueError, KeyError, OSError, UserWarning) as error:
        raise ValueError(
            f"{weights} does not fit {name} without its classifier. A file that fits is written by "
            f"keras.applications.{name}(..., include_top=False).save_weights(path). Keras says: {error}"
        ) from error
    if name.startswith("EfficientNetB"):
        _check_normalization(network, weights)


def _check_normalization(network: keras.Model, weights: str) -> None:
    """EfficientNetB0 to B7: Keras divides by the root of the deviation in a layer whose numbers are in the file, and
    once more in one that it adds only for weights="imagenet" (tensorflow/tensorflow#49930), so that a file alone gives
    half of it. We do both at once, with ImageNet's numbers, and make sure that the file agrees."""
    normalization = next(each for each in network.layers if isinstance(each, keras.layers.Normalization))
    mean, variance = normalization.get_weights()[:2]
    expected = (*_IMAGENET_MEAN, *_IMAGENET_STDDEV)
    if max(abs(a - b) for a, b in zip([*mean, *variance], expected, strict=True)) > 1e-3:
        raise ValueError(
            f"{weights} normalises with mean {mean} and variance {variance}, not with ImageNet's {_IMAGENET_MEAN} and "
            f"{_IMAGENET_STDDEV}. Build the network yourself and pass it to BackboneEncoder as a Keras model."
        )
