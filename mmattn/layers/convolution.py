"""Weight-normalised convolutions with gated linear units, over whole sequences and step by step.

    w = g v / |v|                   for each output channel: v its direction, g its length
    [A B] = w x + b,  A * sigmoid(B)                       a gated linear unit

Shapes: B batch, T length, C input channels, F filters, k taps of a kernel, D width.
"""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from mmattn.layers.checks import check_positive, check_shares
from mmattn.layers.masks import check_padding

HALF = math.sqrt(0.5)  # the sum of two summands of one variance, times this, has that variance too
EMBEDDING_DEVIATION = 0.1  # so small that the gates start near 1/2, as the initialisation assumes (section 3.5)


@keras.saving.register_keras_serializable(package="mmattn")
class WeightNormConvolution(keras.layers.Layer):
    """A convolution along a sequence, whose kernel is kept as lengths and directions; with one tap a linear map.

    Args:
        filters: F, the output channels.
        kernel_size: k.
        gated: compute 2 F channels, and let the second half gate the first.
        causal: see the input's own place and the k - 1 before it, instead of as many to either side.
        retained: share of the inputs that a dropout before this layer leaves. The kernel starts smaller by its root,
            so that outputs have the variance of what was there before the dropout.

    Call arguments:
        inputs: `(B, T, C)`; with one tap also `(..., C)`.
        mask: `(B, T)` boolean, True = real: whatever stands at other places, even a NaN, counts as zeros. A mask that
            arrives on `inputs` counts where none is given.

    Returns:
        `(B, T, F)`.

    Step by step, if causal: `start(batch_size)` gives the window, the last k - 1 inputs `(B, k - 1, C)`, zeros at
    first; `step(inputs (B, C), window)` gives the outputs `(B, F)` and the new window.

    Raises:
        ValueError: for sizes that are not positive, a share that is none, or steps of what is not causal.

    Example:
        >>> import numpy as np
        >>> layer = WeightNormConvolution(filters=4, kernel_size=3, gated=True, causal=True)
        >>> x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype("float32")
        >>> whole, window = layer(x), layer.start(batch_size=2)
        >>> for t in range(5):
        ...     output, window = layer.step(x[:, t], window)
        >>> bool(np.allclose(output, whole[:, -1], atol=1e-5)), tuple(window.shape)
        (True, (2, 2, 6))

    Source:
        Salimans and Kingma, "Weight Normalization", 2016, section 2; Dauphin et al., "Language Modeling with Gated
        Convolutional Networks", 2017, section 2; Gehring et al. 2017, sections 3.2 and 3.5 (initialisation).
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int = 1,
        gated: bool = False,
        causal: bool = False,
        retained: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_positive(filters=filters, kernel_size=kernel_size)
        if not 0.0 < retained <= 1.0:
            raise ValueError(f"retained is a share in (0, 1]. Received retained={retained!r}.")
        self.supports_masking = True
        self.filters = filters
        self.kernel_size = kernel_size
        self.gated = gated
        self.causal = causal
        self.retained = retained

    def build(self, inputs_shape: Any) -> None:
        self.channels = inputs_shape[-1]
        inputs, outputs = self.kernel_size * self.channels, self.filters * (2 if self.gated else 1)
        length = math.sqrt((4.0 if self.gated else 1.0) * self.retained)  # a gate of about 1/2 leaves a quarter
        self.kernel = self.add_weight(  # v, tap after tap: a matrix, as optimizers of matrices want it
            name="kernel",
            shape=(inputs, outputs),
            initializer=keras.initializers.RandomNormal(stddev=length / math.sqrt(inputs)),
            autocast=False,
        )
        self.gain = self.add_weight(  # g: the length that such a v has on average
            name="gain", shape=(outputs,), initializer=keras.initializers.Constant(length), autocast=False
        )
        self.bias = self.add_weight(name="bias", shape=(outputs,), initializer="zeros")

    def call(self, inputs: Any, mask: Any = None) -> Any:
        inputs = ops.convert_to_tensor(inputs)
        if mask is not None:
            mask = check_padding(mask, tuple(inputs.shape[:2]), "mask")
            inputs = ops.where(mask[..., None], inputs, ops.zeros((), inputs.dtype))
        if self.kernel_size == 1:
            few = len(inputs.shape) == 2
            return self._activated(self._mapped(inputs) if few else ops.matmul(inputs, self._weights()))
        if 0 in inputs.shape[:2]:  # backends refuse or misread it; a product has slopes, which are zeros
            return self._activated(ops.matmul(inputs, self._weights()[: self.channels]))
        before = self.kernel_size - 1 if self.causal else (self.kernel_size - 1) // 2
        inputs = ops.pad(inputs, ((0, 0), (before, self.kernel_size - 1 - before), (0, 0)))
        taps = ops.reshape(self._weights(), (self.kernel_size, self.channels, -1))
        return self._activated(ops.conv(inputs, taps, padding="valid", data_format="channels_last"))

    def start(self, batch_size: Any) -> Any:
        """The window before the first step: zeros `(B, k - 1, C)`."""
        if not self.causal:
            raise ValueError(f"{self.name} looks ahead, so it has no steps: causal=True makes one that has.")
        return ops.zeros((batch_size, self.kernel_size - 1, self.channels), self.compute_dtype)

    def step(self, inputs: Any, window: Any) -> tuple[Any, Any]:
        """One place: the outputs `(B, F)` of the inputs `(B, C)`, and the new window `(B, k - 1, C)`."""
        inputs = ops.cast(inputs, self.compute_dtype)
        seen = ops.concatenate([window, inputs[:, None]], axis=1)  # (B, k, C)
        rows = ops.reshape(seen, (-1, self.kernel_size * self.channels))
        return self._activated(self._mapped(rows)), seen[:, 1:]

    def _weights(self) -> Any:
        """w `(k C, F)` or `(k C, 2 F)`."""
        direction, factor = self._parts()
        return ops.cast(direction * factor, self.compute_dtype)

    def _mapped(self, rows: Any) -> Any:
        """The product with w of few rows `(M, k C)`, of which there are fewer numbers to scale than of the kernel."""
        if self.compute_dtype == "float16":  # the length of v is whatever training has made it, and may not fit
            return ops.matmul(rows, self._weights())
        direction, factor = (ops.cast(part, self.compute_dtype) for part in self._parts())
        return ops.matmul(rows, direction) * factor

    def _parts(self) -> tuple[Any, Any]:
        """v and g / |v|, in float32 at least."""
        wide = keras.backend.result_type(self.variable_dtype, "float32")
        direction, length = (ops.cast(variable, wide) for variable in (self.kernel, self.gain))
        return direction, length / ops.sqrt(ops.sum(ops.square(direction), axis=0))

    def _activated(self, outputs: Any) -> Any:
        outputs = outputs + ops.cast(self.bias, outputs.dtype)
        return ops.glu(outputs, axis=-1) if self.gated else outputs

    def compute_output_shape(self, inputs_shape: Any) -> Any:
        return (*inputs_shape[:-1], self.filters)

    def compute_output_spec(self, inputs: Any, mask: Any = None) -> Any:
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "filters": self.filters,
            "kernel_size": self.kernel_size,
            "gated": self.gated,
            "causal": self.causal,
            "retained": self.retained,
        }


@keras.saving.register_keras_serializable(package="mmattn")
class ConvolutionalBlock(keras.layers.Layer):
    """A gated convolution in a residual branch: `(x + convolution(dropout(x))) sqrt(1/2)`.

    Args:
        kernel_size: k.
        causal: see what came before alone, for a decoder.
        dropout: share of the convolution's input dropped in training.
        seed: of the dropout.

    Call arguments:
        inputs: `(B, T, D)`.
        mask: `(B, T)` boolean, True = real, see `WeightNormConvolution`.

    `start` and `step` as in `WeightNormConvolution`.

    Raises:
        ValueError: for sizes and shares that are none.

    Example:
        >>> import numpy as np
        >>> tuple(ConvolutionalBlock(kernel_size=3)(np.zeros((1, 5, 8), "float32")).shape)
        (1, 5, 8)

    Source:
        Gehring et al. 2017, sections 3.2 and 3.4.
    """

    def __init__(
        self, kernel_size: int = 3, causal: bool = False, dropout: float = 0.0, seed: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        check_positive(kernel_size=kernel_size)
        check_shares(dropout=dropout)
        self.supports_masking = True
        self.kernel_size = kernel_size
        self.causal = causal
        self.dropout = dropout
        self.seed = seed
        self.input_dropout = keras.layers.Dropout(dropout, seed=seed, dtype=self.dtype_policy, name="input_dropout")

    def build(self, inputs_shape: Any) -> None:
        self.convolution = WeightNormConvolution(
            inputs_shape[-1],
            self.kernel_size,
            gated=True,
            causal=self.causal,
            retained=1.0 - self.dropout,
            dtype=self.dtype_policy,
            name="convolution",
        )
        self.convolution.build(inputs_shape)

    def call(self, inputs: Any, mask: Any = None, training: bool | None = None) -> Any:
        return (inputs + self.convolution(self.input_dropout(inputs, training=training), mask=mask)) * HALF

    def start(self, batch_size: Any) -> Any:
        """The window before the first step: zeros `(B, k - 1, D)`."""
        return self.convolution.start(batch_size)

    def step(self, inputs: Any, window: Any) -> tuple[Any, Any]:
        """One place `(B, D)`, and the new window `(B, k - 1, D)`."""
        inputs = ops.cast(inputs, self.compute_dtype)
        outputs, window = self.convolution.step(inputs, window)
        return (inputs + outputs) * HALF, window

    def compute_output_shape(self, inputs_shape: Any) -> Any:
        return inputs_shape

    def compute_output_spec(self, inputs: Any, mask: Any = None, training: bool | None = None) -> Any:
        return keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "kernel_size": self.kernel_size,
            "causal": self.causal,
            "dropout": self.dropout,
            "seed": self.seed,
        }
