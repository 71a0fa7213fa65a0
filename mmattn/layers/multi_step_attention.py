"""The attention of a convolutional decoder's layers: each looks at the source anew.

    d = (W_d h + b_d + g) sqrt(1/2)                       the query: the layer's output and the token's embedding
    a = softmax(d . z),  c = sqrt(S) sum_j a_j (z_j + e_j) sqrt(1/2)
    h' = (h + W_c c + b_c) sqrt(1/2)

Shapes: B batch, T target length, S source length, D width of the decoder's layers, F width of the embeddings.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn import backend
from mmattn.layers.convolution import HALF, WeightNormConvolution
from mmattn.layers.masks import check_padding
from mmattn.layers.quantized import KeepsQuantization
from mmattn.layers.single_head import MultiplicativeAttention


@keras.saving.register_keras_serializable(package="mmattn")
class MultiStepAttention(KeepsQuantization, keras.layers.Layer):
    """Adds to each place what it finds in the source: one layer's step of several.

    Call arguments:
        inputs: `(B, T, D)`, a decoder layer's output h.
        embeddings: `(B, T, F)`, those of the target's tokens, g.
        keys: `(B, S, F)`, z.
        values: `(B, S, F)`. `sources` makes keys and values, once for all layers.
        memory_mask: `(B, S)` boolean, True = real.
        return_attention_scores: also return the weights `(B, 1, T, S)`.

    Returns:
        `(B, T, D)`, or this and the weights.

    Step by step: `start(keys, values, memory_mask)` gives a context, which layers of one source share; `step(inputs
    (B, D), embeddings (B, F), context)` gives `(B, D)`, `attend` the same of all places, with the weights.

    Example:
        >>> import numpy as np
        >>> layer, rng = MultiStepAttention(), np.random.default_rng(0)
        >>> x, g, z, e = (rng.normal(size=(1, n, 8)).astype("float32") for n in (3, 3, 5, 5))
        >>> keys, values = sources(z, e, num_layers=2)
        >>> found, weights = layer(x, g, keys, values, return_attention_scores=True)
        >>> tuple(found.shape), tuple(weights.shape)
        ((1, 3, 8), (1, 1, 3, 5))
        >>> step = layer.step(x[:, 0], g[:, 0], layer.start(keys, values))
        >>> bool(np.allclose(step, found[:, 0], atol=1e-5))
        True

    Source:
        Gehring et al. 2017, section 3.3; the scales: section 3.4.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.attention = MultiplicativeAttention("dot", dtype=self.dtype_policy, name="attention")

    def build(self, inputs_shape: Any, embeddings_shape: Any, keys_shape: Any, values_shape: Any) -> None:
        width, source_width = embeddings_shape[-1], values_shape[-1]
        dtype = self.dtype_policy
        self.query = WeightNormConvolution(width, dtype=dtype, name="query")
        self.query.build(inputs_shape)
        self.attention.build((None, None, width), keys_shape)
        self.output_map = WeightNormConvolution(inputs_shape[-1], dtype=dtype, name="output_map")
        self.output_map.build((None, None, source_width))

    def call(
        self,
        inputs: Any,
        embeddings: Any,
        keys: Any,
        values: Any,
        memory_mask: Any = None,
        return_attention_scores: bool = False,
    ) -> Any:
        output, weights = self.attend(inputs, embeddings, self.start(keys, values, memory_mask))
        return (output, weights[:, None]) if return_attention_scores else output

    def start(self, keys: Any, values: Any, memory_mask: Any = None) -> dict[str, Any]:
        """What every step shares: the source, whatever stands at places that are not real set to zeros."""
        return self.attention.start(keys, memory_mask, values)

    def attend(self, inputs: Any, embeddings: Any, context: dict[str, Any]) -> tuple[Any, Any]:
        """All places, `(B, T, D)`, with what they find in the source that `start` gave; and the weights `(B, T, S)`."""
        found, weights = self.attention.attend(self._query(inputs, embeddings), context)
        return self._joined(inputs, found), weights

    def step(self, inputs: Any, embeddings: Any, context: dict[str, Any]) -> Any:
        """One place: `(B, D)`, with what it finds in the source."""
        inputs, embeddings = (ops.cast(array, self.compute_dtype) for array in (inputs, embeddings))
        return self._joined(inputs, self.attention.step(self._query(inputs, embeddings), context))

    def _query(self, inputs: Any, embeddings: Any) -> Any:
        places = [tuple(array.shape[:-1]) for array in (inputs, embeddings)]
        if any(None not in pair and pair[0] != pair[1] for pair in zip(*places, strict=False)):
            raise ValueError(
                f"{self.name}: inputs and embeddings are of the same places. Received {tuple(inputs.shape)} and "
                f"{tuple(embeddings.shape)}."
            )
        return (self.query(inputs) + embeddings) * HALF

    def _joined(self, inputs: Any, found: Any) -> Any:
        return (inputs + self.output_map(found)) * HALF

    def compute_output_spec(
        self,
        inputs: Any,
        embeddings: Any,
        keys: Any,
        values: Any,
        memory_mask: Any = None,
        return_attention_scores: bool = False,
    ) -> Any:
        output = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
        if not return_attention_scores:
            return output
        shape = (inputs.shape[0], 1, inputs.shape[1], keys.shape[1])
        return output, keras.KerasTensor(shape, dtype=self.compute_dtype)


def sources(outputs: Any, embeddings: Any, num_layers: int, memory_mask: Any = None) -> tuple[Any, Any]:
    """The keys and values that all layers of a decoder share.

    Args:
        outputs: `(B, S, F)`, what the encoder has made of each place: z. The gradient that goes back there is divided
            by 2 N; that of the embeddings is not.
        embeddings: `(B, S, F)`, what stood there before: e, or None where only z is known.
        num_layers: N, how many layers of the decoder look.
        memory_mask: `(B, S)` boolean, True = real.

    Returns:
        keys z, and values (z + e) sqrt(1/2), times the root of the number of real places: a mean of S vectors has an
        S-th of their variance. Where places are not real, both are zeros.
    """
    if memory_mask is not None:
        memory_mask = check_padding(memory_mask, tuple(outputs.shape[:2]), "memory_mask")
        outputs, embeddings = (
            None if a is None else ops.where(memory_mask[..., None], a, ops.zeros((), a.dtype))
            for a in (outputs, embeddings)
        )
    keys = _slower(outputs, 0.5 / num_layers)
    values = keys if embeddings is None else (keys + embeddings) * HALF
    wide = keras.backend.result_type(values.dtype, "float32")
    if memory_mask is None:
        count = ops.cast(ops.shape(values)[1], wide)
    else:
        count = ops.sum(ops.cast(memory_mask, wide), axis=1)[:, None, None]
    return keys, values * ops.cast(ops.sqrt(count), values.dtype)


def _slower(array: Any, factor: float) -> Any:
    """The array itself, whose gradient is multiplied by `factor`."""
    (same,) = backend.with_gradient(lambda x: ((x,), ()), lambda kept, slopes: (slopes[0] * factor,), array)
    return same
