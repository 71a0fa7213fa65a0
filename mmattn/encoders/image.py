"""The vision Transformer: an image becomes a sequence of patch encodings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from mmattn.encoders.pixels import check_pixel_range
from mmattn.layers import GridSinusoids, LearnedPositions, PatchEmbedding, TransformerEncoderBlock
from mmattn.layers.checks import check_dict, check_heads, check_positive, check_shares
from mmattn.layers.quantized import KeepsQuantization
from mmattn.layers.seeds import part_seed


@keras.saving.register_keras_serializable(package="mmattn")
class VisionTransformer(KeepsQuantization, keras.layers.Layer):
    """Patches, learned positions and a stack of encoder blocks, if wanted behind a few convolutions.

    Args:
        image_size: (height, width) in pixels, multiples of `patch_size`.
        patch_size: side of a patch.
        hidden_dim: D.
        num_layers: encoder blocks; 0 leaves the patches as they are embedded.
        num_heads: h; divides D.
        intermediate_dim: width inside the position-wise networks; 4 D when not given.
        stem_dims: widths of 3 x 3 convolutions of stride 2 that come first, so that a patch knows what lies around it
            (Xiao et al. 2021); n of them need a `patch_size` that is a multiple of 2^n. () = pixels cut as they are.
        dropout: share dropped in training.
        norm: "pre" or "post".
        activation: of the position-wise networks.
        seed: of the dropouts; each makes its own from it.

    Call arguments:
        inputs: a dict with "pixels" `(B, height, width, 3)`, 0 to 255.

    Returns:
        memory `(B, P, D)` and its mask `(B, P)`, all True. `grid` says how the P patches lie: (rows, columns).

    Raises:
        ValueError: for an image size that does not divide into patches, a width that does not divide into heads, or
            pixels of another size or that were scaled already.

    Example:
        >>> import numpy as np
        >>> encoder = VisionTransformer((32, 48), patch_size=16, hidden_dim=8, num_layers=1, num_heads=2)
        >>> memory, mask = encoder({"pixels": np.zeros((1, 32, 48, 3), "uint8")})
        >>> tuple(memory.shape), encoder.grid
        ((1, 6, 8), (2, 3))

    Source:
        Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021; Xiao et al., "Early Convolutions Help Transformers
        See Better", 2021, section 3.
    """

    def __init__(
        self,
        image_size: tuple[int, int],
        patch_size: int,
        hidden_dim: int,
        num_layers: int,
        num_heads: int,
        intermediate_dim: int | None = None,
        stem_dims: Sequence[int] = (),
        dropout: float = 0.0,
        norm: str = "pre",
        activation: Any = "gelu",
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        height, width = image_size
        check_positive(height=height, width=width, patch_size=patch_size, hidden_dim=hidden_dim)
        check_heads(num_heads, hidden_dim)
        check_shares(dropout=dropout)
        if height % patch_size or width % patch_size:
            raise ValueError(
                f"image_size (height, width) is a multiple of patch_size. Received {(height, width)} and {patch_size}."
            )
        shrink = 2 ** len(stem_dims)
        if patch_size % shrink:
            raise ValueError(
                f"{len(stem_dims)} convolutions of stride 2 need a patch_size that is a multiple of {shrink}. "
                f"Received patch_size={patch_size}."
            )
        self.image_size = (height, width)
        self.patch_size = patch_size
        self.hidden_dim = hidden_dim
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.intermediate_dim = intermediate_dim
        self.stem_dims = tuple(stem_dims)
        self.dropout = dropout
        self.norm = norm
        self.activation = keras.activations.get(activation)
        self.seed = seed
        self.grid = (height // patch_size, width // patch_size)

        dtype = self.dtype_policy
        self.stem = [
            keras.layers.Conv2D(
                filters, 3, 2, "same", activation="relu", kernel_initializer="he_normal", dtype=dtype, name=f"stem_{i}"
            )
            for i, filters in enumerate(stem_dims)
        ]
        self.patch_embedding = PatchEmbedding(patch_size // shrink, hidden_dim, dtype=dtype, name="patch_embedding")
        self.position_embedding = LearnedPositions(
            self.grid[0] * self.grid[1], GridSinusoids(*self.grid), dtype=dtype, name="positions"
        )
        self.embedding_dropout = keras.layers.Dropout(dropout, seed=part_seed(seed, "encoder"), dtype=dtype)
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
        width = (None, self.grid[0] * self.grid[1], self.hidden_dim)
        shape = (None, *self.image_size, 3)
        for layer in self.stem:
            layer.build(shape)
            shape = layer.compute_output_shape(shape)
        self.patch_embedding.build(shape)
        for layer in (self.position_embedding, *self.blocks, *([self.final_norm] if self.final_norm else [])):
            layer.build(width)

    def call(self, inputs: dict[str, Any], training: bool | None = None) -> tuple[Any, Any]:
        check_dict(self.name, inputs, "pixels")
        pixels = inputs["pixels"]
        if tuple(pixels.shape[1:3]) != self.image_size:
            raise ValueError(
                f"{self.name} takes pixels of (height, width) = {self.image_size}. "
                f"Received the shape {tuple(pixels.shape)}."
            )
        check_pixel_range(pixels)
        x = ops.cast(pixels, self.compute_dtype) / 127.5 - 1.0
        for layer in self.stem:
            x = layer(x)
        x = self.patch_embedding(x)  # (B, P, D)
        x = self.embedding_dropout(self.position_embedding(x), training=training)
        for block in self.blocks:
            x = block(x, training=training)
        x = x if self.final_norm is None else self.final_norm(x)
        return x, ops.ones(ops.shape(x)[:2], dtype="bool")

    def compute_output_spec(self, inputs: dict[str, Any], training: bool | None = None) -> tuple[Any, Any]:
        shape = (inputs["pixels"].shape[0], self.grid[0] * self.grid[1])
        return (
            keras.KerasTensor((*shape, self.hidden_dim), dtype=self.compute_dtype),
            keras.KerasTensor(shape, dtype="bool"),
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "image_size": list(self.image_size),
            "patch_size": self.patch_size,
            "hidden_dim": self.hidden_dim,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "intermediate_dim": self.intermediate_dim,
            "stem_dims": list(self.stem_dims),
            "dropout": self.dropout,
            "norm": self.norm,
            "activation": keras.activations.serialize(self.activation),
            "seed": self.seed,
        }
