"""Where in a sequence a vector stands: added to it, for a whole sequence or for one step."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from mmattn.layers.checks import check_positions, check_positive


@keras.saving.register_keras_serializable(package="mmattn")
class SinusoidalPositions(keras.layers.Layer):
    """Adds sines and cosines of geometrically spaced wavelengths; no variables, no longest length.

    Even channels hold sin(t / 10000^(2i/D)), odd ones the cosine of the same angle.

    Args:
        amplitude: of the waves, for embeddings that are small; a wave's deviation is 0.7 of it.

    Call arguments:
        inputs: `(B, T, D)`.

    Example:
        >>> import numpy as np
        >>> layer = SinusoidalPositions()
        >>> x = np.zeros((1, 3, 4), "float32")
        >>> bool(np.allclose(layer(x)[:, 2], layer.step(x[:, 2], 2)))
        True

    Source:
        Vaswani et al. 2017, section 3.5.
    """

    def __init__(self, amplitude: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.amplitude = amplitude

    def call(self, inputs: Any) -> Any:
        return inputs + self._table(ops.arange(ops.shape(inputs)[1], dtype="int32"), inputs.shape[-1])

    def step(self, inputs: Any, index: Any) -> Any:
        """Adds the place `index` to every row of `(B, D)`."""
        inputs = ops.convert_to_tensor(inputs)
        table = self._table(ops.reshape(ops.cast(index, "int32"), (1,)), inputs.shape[-1])
        return ops.add(inputs, ops.cast(table, keras.backend.standardize_dtype(inputs.dtype)))

    def _table(self, positions: Any, width: int) -> Any:
        wide = keras.backend.result_type(self.compute_dtype, "float32")
        channels = ops.arange(width, dtype="int32")
        pair = ops.cast(channels - channels % 2, wide)
        angles = ops.cast(positions[:, None], wide) * ops.exp(pair * (-math.log(10000.0) / width))[None, :]
        table = ops.where(channels % 2 == 0, ops.sin(angles), ops.cos(angles))
        return ops.cast(table * self.amplitude, self.compute_dtype)  # (T, D)

    def compute_output_shape(self, inputs_shape: Any) -> Any:
        return inputs_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "amplitude": self.amplitude}


@keras.saving.register_keras_serializable(package="mmattn")
class LearnedPositions(keras.layers.Layer):
    """Adds one learned vector a place, up to `max_length` places.

    Args:
        max_length: the longest sequence; a longer one is refused.
        initializer: for the vectors.

    Call arguments:
        inputs: `(B, T, D)`, T at most `max_length`.

    Raises:
        ValueError: for a longer sequence.

    Example:
        >>> import numpy as np
        >>> layer = LearnedPositions(max_length=8)
        >>> tuple(layer(np.zeros((2, 5, 4), "float32")).shape)
        (2, 5, 4)

    Source:
        Gehring et al., "Convolutional Sequence to Sequence Learning", 2017, section 3.1.
    """

    def __init__(self, max_length: int, initializer: Any = "glorot_uniform", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_positive(max_length=max_length)
        self.supports_masking = True
        self.max_length = max_length
        self.initializer = keras.initializers.get(initializer)

    def build(self, inputs_shape: Any) -> None:
        self.embeddings = self.add_weight(
            name="embeddings", shape=(self.max_length, inputs_shape[-1]), initializer=self.initializer
        )

    def call(self, inputs: Any) -> Any:
        self.check_length(inputs.shape[1])
        table = ops.convert_to_tensor(self.embeddings)
        places = ops.arange(ops.shape(inputs)[1], dtype="int32")  # a slice would need a length that is known
        return inputs + ops.cast(ops.take(table, places, axis=0), inputs.dtype)

    def check_length(self, length: Any) -> None:
        """Refuses a sequence that is longer than the places known; a length that is not known yet passes."""
        if isinstance(length, int) and length > self.max_length:
            raise ValueError(
                f"{self.name} knows {self.max_length} positions; the sequence has {length}. "
                f"Cut it, or build the layer with max_length={length} or more and train it."
            )

    def step(self, inputs: Any, index: Any) -> Any:
        """Adds the place `index` to every row of `(B, D)`."""
        inputs = ops.convert_to_tensor(inputs)
        return ops.add(
            inputs, ops.cast(ops.take(self.embeddings, index, axis=0), keras.backend.standardize_dtype(inputs.dtype))
        )

    def compute_output_shape(self, inputs_shape: Any) -> Any:
        return inputs_shape

    def get_config(self) -> dict[str, Any]:
        initializer = keras.initializers.serialize(self.initializer)
        return {**super().get_config(), "max_length": self.max_length, "initializer": initializer}


ADDED = ("none", "sinusoidal", "learned")  # positions that are added to embeddings


def added_positions(positions: str, max_length: int | None, deviation: float, dtype: Any) -> Any:
    """The layer that adds places to embeddings, as small as they are; None for positions="none".

    Args:
        positions: one of `ADDED`.
        max_length: the longest sequence with learned positions.
        deviation: of the embeddings; learned places start with it, waves have it.
        dtype: of the layer.

    Raises:
        ValueError: for another kind, and for learned positions without `max_length`.
    """
    check_positions(positions, max_length, ADDED)
    if positions == "learned" and max_length is not None:
        start = keras.initializers.RandomNormal(stddev=deviation)
        return LearnedPositions(max_length, initializer=start, dtype=dtype, name="positions")
    if positions == "sinusoidal":
        return SinusoidalPositions(amplitude=deviation * math.sqrt(2.0), dtype=dtype, name="positions")
    return None


@keras.saving.register_keras_serializable(package="mmattn")
class GridSinusoids(keras.initializers.Initializer):
    """Starting values for the places of a grid: sines and cosines of the row in one half of the channels, of the column
    in the other, so that a model can tell near from far and left from right before it has learned any place.

    Args:
        rows, columns: the grid; places are numbered row by row.

    Raises:
        ValueError: for a table that is not (rows * columns, D) with D a multiple of 4.

    Example:
        >>> tuple(GridSinusoids(2, 3)((6, 8)).shape)
        (6, 8)

    Source:
        Vaswani et al. 2017, section 3.5, once for each axis; Beyer et al., "Better plain ViT baselines for
        ImageNet-1k", 2022, use it for patches. The wavelengths here end at the size of the grid.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self.rows = rows
        self.columns = columns

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        if len(shape) != 2 or shape[0] != self.rows * self.columns or shape[1] % 4:
            raise ValueError(
                f"A grid of {self.rows} x {self.columns} places has a table of the shape "
                f"({self.rows * self.columns}, D), D a multiple of 4. Received {tuple(shape)}."
            )
        count = shape[1] // 4
        lowest = 2 * max(self.rows, self.columns)
        rates = np.power(float(lowest), -np.arange(count) / max(count - 1, 1))
        angles = [np.arange(size)[:, None] * rates for size in (self.rows, self.columns)]
        down, across = (np.concatenate([np.sin(a), np.cos(a)], axis=1) for a in angles)
        table = np.concatenate([np.repeat(down, self.columns, axis=0), np.tile(across, (self.rows, 1))], axis=1)
        return ops.convert_to_tensor(table, dtype=dtype or keras.config.floatx())

    def get_config(self) -> dict[str, Any]:
        return {"rows": self.rows, "columns": self.columns}
