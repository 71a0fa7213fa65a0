"""Images by a pretrained convolutional network: its feature grid becomes the patches.

A backbone here is any Keras model that takes pixels (B, height, width, 3) from 0 to 255, scales them itself, and
returns a grid (B, rows, columns, C) of known size. `EfficientNetLite` and `KerasApplication` are such. A model of your
own that expects other numbers becomes one with its scaling in front:

    keras.Sequential([keras.Input((224, 224, 3)), keras.layers.Rescaling(1 / 255), model])
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn.encoders.pixels import check_pixel_range
from mmattn.layers import LearnedPositions, TransformerEncoderBlock
from mmattn.layers.checks import check_dict, check_heads, check_positive, check_shares
from mmattn.layers.quantized import KeepsQuantization
from mmattn.layers.seeds import part_seed


@keras.saving.register_keras_serializable(package="mmattn")
class BackboneEncoder(KeepsQuantization, keras.layers.Layer):
    """A backbone, a projection to D, a learned position for each patch, and encoder blocks if wanted.

    Args:
        backbone: takes pixels from 0 to 255 and returns a feature grid (see the top of this file). It always runs in
            inference mode. It learns if its own `trainable` says so; those of this package are frozen by default.
        hidden_dim: D.
        num_layers: Transformer encoder blocks over the patches.
        num_heads: h, of the blocks; divides D.
        intermediate_dim: width inside the blocks' position-wise networks; 4 D when not given.
        dropout: share dropped in training, of the patches and in the blocks.
        positions: add a learned vector for each place of the grid.
        norm: of the blocks, "pre" or "post".
        activation: of the position-wise networks.
        seed: of the dropouts, each of which makes its own from it, and of the learned positions.

    Call arguments:
        inputs: a dict with "pixels" `(B, height, width, 3)`, 0 to 255, or with "features" `(B, S, C)`: the backbone's
            grid, computed beforehand (see `FeatureCache`), S = rows times columns places in row-major order.

    Returns:
        memory `(B, S, D)` and its mask `(B, S)`, all True. `grid` says how the S places lie: (rows, columns).

    Raises:
        ValueError: an input of another shape, pixels that were scaled already, features for a backbone that learns.

    Example:
        >>> import numpy as np
        >>> from mmattn.encoders.efficientnet_lite import EfficientNetLite
        >>> encoder = BackboneEncoder(EfficientNetLite("lite0", image_size=64), hidden_dim=8)
        >>> memory, mask = encoder({"pixels": np.zeros((1, 64, 64, 3), "uint8")})
        >>> tuple(memory.shape), encoder.grid
        ((1, 4, 8), (2, 2))

    Source:
        Xu et al., "Show, Attend and Tell", 2015, section 3.1.1: a convolutional layer's grid as annotation vectors.
    """

    def __init__(
        self,
        backbone: keras.Model,
        hidden_dim: int,
        num_layers: int = 0,
        num_heads: int = 8,
        intermediate_dim: int | None = None,
        dropout: float = 0.0,
        positions: bool = True,
        norm: str = "pre",
        activation: Any = "gelu",
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.grid, self.channels = _grid(backbone)
        check_positive(hidden_dim=hidden_dim)
        check_shares(dropout=dropout)
        if num_layers:
            check_heads(num_heads, hidden_dim)
        self.backbone = backbone
        self.hidden_dim = hidden_dim
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.intermediate_dim = intermediate_dim
        self.dropout = dropout
        self.positions = positions
        self.norm = norm
        self.activation = keras.activations.get(activation)
        self.seed = seed

        dtype = self.dtype_policy
        self.feature_norm = keras.layers.LayerNormalization(epsilon=1e-5, dtype=dtype, name="feature_norm")
        self.projection = keras.layers.Dense(hidden_dim, dtype=dtype, name="projection")
        self.position_embedding = None
        if positions:
            initializer = keras.initializers.RandomNormal(stddev=0.02, seed=seed)
            places = self.grid[0] * self.grid[1]
            self.position_embedding = LearnedPositions(places, initializer, dtype=dtype, name="positions")
        self.patch_dropout = keras.layers.Dropout(dropout, seed=part_seed(seed, "encoder"), dtype=dtype)
        self.blocks = [
            TransformerEncoderBlock(
                num_heads,
                intermediate_dim or 4 * hidden_dim,
                activation=activation,
                dropout=dropout,
                norm=norm,
                seed=part_seed(seed, "encoder", f"block_{i}"),
                dtype=dtype,
                name=f"block_{i}",
            )
            for i in range(num_layers)
        ]
        self.final_norm = None
        if norm == "pre":
            self.final_norm = keras.layers.LayerNormalization(epsilon=1e-5, dtype=dtype, name="final_norm")

    def build(self, inputs_shape: Any = None) -> None:
        places = (None, self.grid[0] * self.grid[1])
        self.feature_norm.build((*places, self.channels))
        self.projection.build((*places, self.channels))
        for layer in (self.position_embedding, *self.blocks, self.final_norm):
            if layer is not None:
                layer.build((*places, self.hidden_dim))

    def call(self, inputs: dict[str, Any], training: bool | None = None) -> tuple[Any, Any]:
        features = self._features(inputs)  # (B, S, C)
        x = self.projection(self.feature_norm(ops.cast(features, self.compute_dtype)))  # (B, S, D)
        if self.position_embedding is not None:
            x = self.position_embedding(x)
        x = self.patch_dropout(x, training=training)
        for block in self.blocks:
            x = block(x, training=training)
        x = x if self.final_norm is None else self.final_norm(x)
        return x, ops.ones(ops.shape(x)[:2], dtype="bool")

    def _features(self, inputs: dict[str, Any]) -> Any:
        check_dict(self.name, inputs)
        given = [name for name in ("pixels", "features") if name in inputs]
        if len(given) != 1:
            raise ValueError(f'inputs holds either "pixels" or "features". Received {sorted(inputs)}.')
        array = inputs[given[0]]
        places = self.grid[0] * self.grid[1]
        expected = self.backbone.input_shape[1:] if given == ["pixels"] else (places, self.channels)
        if tuple(array.shape[1:]) != tuple(expected):
            raise ValueError(f"{given[0]} has the shape (B, {str(tuple(expected))[1:]}. Received {tuple(array.shape)}.")
        if given == ["pixels"]:
            check_pixel_range(array)
            return ops.reshape(self.backbone(array, training=False), (-1, places, self.channels))
        if self.backbone.trainable and self.backbone.trainable_weights:
            raise ValueError(
                f"{self.backbone.name} learns, but its features were computed beforehand. "
                "Set backbone.trainable = False, or feed pixels."
            )
        return array

    def compute_output_spec(self, inputs: dict[str, Any], training: bool | None = None) -> tuple[Any, Any]:
        shape = (next(iter(inputs.values())).shape[0], self.grid[0] * self.grid[1])
        memory = keras.KerasTensor((*shape, self.hidden_dim), dtype=self.compute_dtype)
        return memory, keras.KerasTensor(shape, dtype="bool")

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "backbone": keras.saving.serialize_keras_object(self.backbone),
            "hidden_dim": self.hidden_dim,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "intermediate_dim": self.intermediate_dim,
            "dropout": self.dropout,
            "positions": self.positions,
            "norm": self.norm,
            "activation": keras.activations.serialize(self.activation),
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> BackboneEncoder:
        backbone = keras.saving.deserialize_keras_object(config["backbone"], custom_objects=custom_objects)
        return cls(**{**config, "backbone": backbone})


def _grid(backbone: keras.Model) -> tuple[tuple[int, int], int]:
    shape = getattr(backbone, "output_shape", None)
    if not isinstance(shape, tuple) or len(shape) != 4 or None in shape[1:]:
        raise ValueError(
            f"A backbone returns a grid (B, rows, columns, C) of known size. {getattr(backbone, 'name', backbone)!r} "
            f"returns {shape}. Build it for a fixed image size and without its classifier."
        )
    return (shape[1], shape[2]), shape[3]
