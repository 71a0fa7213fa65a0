"""From token ids and pixels to vectors, and from vectors back to token scores."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from mmattn.layers.checks import check_positive
from mmattn.layers.quantized import KeepsQuantization


@keras.saving.register_keras_serializable(package="mmattn")
class TokenEmbedding(keras.layers.Layer):
    """Token ids to vectors, and with `reverse=True` vectors to logits over the same table.

    Args:
        vocabulary_size: V.
        hidden_dim: D.
        scale: multiply the vectors by sqrt(D), as the paper does for a table shared with the output.
        output_bias: whether the logits have a bias.
        initializer: for the table; a normal of deviation 1/sqrt(D) when not given.

    Call arguments:
        inputs: `(..., )` integer ids, or with `reverse=True` vectors `(..., D)`.
        reverse: give logits `(..., V)` instead. Under mixed precision the product runs in half precision and the
            logits come as float32, so that the softmax and the loss after them do not.

    Raises:
        ValueError: for sizes that are not positive, and for ids that are no whole numbers.

    Example:
        >>> import numpy as np
        >>> layer = TokenEmbedding(vocabulary_size=10, hidden_dim=4)
        >>> vectors = layer(np.array([[1, 2]]))
        >>> tuple(vectors.shape), tuple(layer(vectors, reverse=True).shape)
        ((1, 2, 4), (1, 2, 10))

    Source:
        Vaswani et al. 2017, section 3.4; Press and Wolf, "Using the Output Embedding to Improve Language Models", 2017.
    """

    def __init__(
        self,
        vocabulary_size: int,
        hidden_dim: int,
        scale: bool = True,
        output_bias: bool = True,
        initializer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_positive(vocabulary_size=vocabulary_size, hidden_dim=hidden_dim)
        self.vocabulary_size = vocabulary_size
        self.hidden_dim = hidden_dim
        self.scale = scale
        self.output_bias = output_bias
        self.initializer = keras.initializers.get(
            initializer or keras.initializers.RandomNormal(stddev=1.0 / math.sqrt(hidden_dim))
        )

    def build(self, inputs_shape: Any = None) -> None:
        self.embeddings = self.add_weight(
            name="embeddings", shape=(self.vocabulary_size, self.hidden_dim), initializer=self.initializer
        )
        self.bias = None
        if self.output_bias:
            self.bias = self.add_weight(name="output_bias", shape=(self.vocabulary_size,), initializer="zeros")

    def call(self, inputs: Any, reverse: bool = False) -> Any:
        if not reverse:
            if self._dtype_of(inputs) not in ("int32", "int64"):  # not every backend takes the others as places
                inputs = ops.cast(inputs, "int32")
            vectors = ops.cast(ops.take(self.embeddings, inputs, axis=0), self.compute_dtype)
            return vectors * math.sqrt(self.hidden_dim) if self.scale else vectors
        table = ops.cast(self.embeddings, self.compute_dtype)
        logits = ops.matmul(ops.cast(inputs, self.compute_dtype), ops.transpose(table))
        logits = ops.cast(logits, keras.backend.result_type(logits.dtype, "float32"))
        return logits if self.bias is None else logits + ops.cast(self.bias, logits.dtype)

    def compute_output_spec(self, inputs: Any, reverse: bool = False) -> Any:
        if reverse:
            dtype = keras.backend.result_type(self.compute_dtype, "float32")
            return keras.KerasTensor((*inputs.shape[:-1], self.vocabulary_size), dtype=dtype)
        self._dtype_of(inputs)
        return keras.KerasTensor((*inputs.shape, self.hidden_dim), dtype=self.compute_dtype)

    def _dtype_of(self, ids: Any) -> str:
        """The dtype of token ids; refuses what are none."""
        dtype = keras.backend.standardize_dtype(ids.dtype)
        if "int" not in dtype:
            raise ValueError(f'{self.name} takes token ids, whole numbers (dtype="int32"). Received {dtype}.')
        return dtype

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "hidden_dim": self.hidden_dim,
            "scale": self.scale,
            "output_bias": self.output_bias,
            "initializer": keras.initializers.serialize(self.initializer),
        }


@keras.saving.register_keras_serializable(package="mmattn")
class PatchEmbedding(KeepsQuantization, keras.layers.Layer):
    """Cuts an image into square patches and projects each to one vector, row by row.

    Args:
        patch_size: side of a patch in pixels.
        hidden_dim: D.

    Call arguments:
        images: `(B, height, width, channels)`, height and width multiples of `patch_size`.

    Returns:
        `(B, P, D)`, P = height * width / patch_size^2, in row-major order.

    Raises:
        ValueError: for an image that does not divide into patches.

    Example:
        >>> import numpy as np
        >>> tuple(PatchEmbedding(patch_size=8, hidden_dim=16)(np.zeros((1, 32, 64, 3), "float32")).shape)
        (1, 32, 16)

    Source:
        Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021, section 3.1.
    """

    def __init__(self, patch_size: int, hidden_dim: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_positive(patch_size=patch_size, hidden_dim=hidden_dim)
        self.patch_size = patch_size
        self.hidden_dim = hidden_dim
        self.projection = keras.layers.Dense(hidden_dim, name="projection", dtype=self.dtype_policy)

    def build(self, images_shape: Any) -> None:
        size, (height, width, channels) = self.patch_size, images_shape[1:]
        if None in (height, width, channels) or height % size or width % size:
            raise ValueError(
                f"An image divides into patches of {size} x {size} pixels when its height and width are multiples "
                f"of {size}. Received (batch, height, width, channels) = {tuple(images_shape)}."
            )
        self.projection.build((None, None, size * size * channels))

    def call(self, images: Any) -> Any:
        size = self.patch_size
        height, width, channels = images.shape[1:]
        rows, columns = height // size, width // size
        patches = ops.reshape(images, (-1, rows, size, columns, size, channels))
        patches = ops.transpose(patches, (0, 1, 3, 2, 4, 5))  # (B, rows, columns, size, size, channels)
        return self.projection(ops.reshape(patches, (-1, rows * columns, size * size * channels)))

    def compute_output_shape(self, images_shape: Any) -> Any:
        patches = (images_shape[1] // self.patch_size) * (images_shape[2] // self.patch_size)
        return (images_shape[0], patches, self.hidden_dim)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "patch_size": self.patch_size, "hidden_dim": self.hidden_dim}
