"""Multi-head attention (Vaswani et al. 2017, section 3.2), in training and step by step.

    Z_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)                        (2.1)
    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V                 (2.2)
    MultiHeadAttention(Q, K, V) = Concat(Z_1 .. Z_h) W^O              (2.3)

Shapes: B batch, T target (query) length, S memory (key) length, L cache length, D width (d_model), H heads (h),
K head width (d_k, d_v). Variables have the names and shapes of `keras.layers.MultiHeadAttention`, so that weights
move both ways with `set_weights(other.get_weights())` and in `.weights.h5` files.
"""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from mmattn.layers.checks import check_positive, check_shares
from mmattn.layers.masks import causal_mask, check_mask, check_padding, combine_masks

HIDDEN = -1e30  # a score under a mask, in float32 or wider: its exponential is exactly zero
FLOAT16_MAX = 65504.0


def attend(query: Any, key: Any, value: Any, mask: Any = None, dropout: Any = None) -> tuple[Any, Any]:
    """Scaled dot-product attention, equation (2.2), on heads that are already split.

    The softmax runs in float32 at least. A query that may see nothing gives zeros, and passes no gradient.

    Args:
        query: `(B, H, T, K)`; scaled by 1 / sqrt(K) before the product, so that half precision does not overflow.
        key: `(B, H, S, K)`.
        value: `(B, H, S, K)`.
        mask: boolean, broadcasts to `(B, H, T, S)`; None = everything may be seen.
        dropout: a function applied to the weights before they meet the values.

    Returns:
        `(B, H, T, K)` and the weights `(B, H, T, S)` before dropout.
    """
    scores = ops.matmul(query * (1.0 / math.sqrt(query.shape[-1])), ops.transpose(key, (0, 1, 3, 2)))
    dtype = keras.backend.standardize_dtype(scores.dtype)
    wide = "float64" if dtype == "float64" else "float32"
    scores = ops.cast(scores, wide)
    if (
        dtype == "float16"
    ):  # a product that left float16's range is infinite, and the softmax of infinity is not a number
        scores = ops.clip(scores, -FLOAT16_MAX, FLOAT16_MAX)
    if mask is None:
        weights = _softmax(scores)
    else:
        weights = _softmax(ops.where(mask, scores, ops.cast(HIDDEN, wide)))
        weights = weights * ops.cast(ops.any(mask, axis=-1, keepdims=True), wide)
    weights = ops.cast(weights, value.dtype)
    return ops.matmul(weights if dropout is None else dropout(weights), value), weights


@keras.saving.register_keras_serializable(package="mmattn")
class MultiHeadAttention(keras.layers.Layer):
    """Multi-head attention: equations (2.1) to (2.3) of the module's head.

    It differs from `keras.layers.MultiHeadAttention` in this: a query that may see nothing gives zeros (output,
    weights and gradient), on every path; masks that arrive with the tensors are honoured and left where they are; a
    mask is boolean; the causal mask is aligned to the bottom right.

    Args:
        num_heads: h.
        key_dim: d_k, the width of a head for queries and keys.
        value_dim: d_v, the width of a head for values; `key_dim` when not given.
        dropout: share of the attention weights dropped in training.
        use_bias: whether the four projections have a bias.
        output_shape: width of the output; that of the query when not given. One number, also as `(number,)`.
        kernel_initializer: for the four kernels.
        bias_initializer: for the four biases.
        seed: of the dropout.

    Call arguments:
        query: `(B, T, D)`.
        value: `(B, S, D')`.
        key: `(B, S, D'')`; `value` when not given.
        query_mask: `(B, T)` boolean; a False position asks nothing and gets zeros. Taken from the tensor's own mask
            when not given, like the next two.
        value_mask: `(B, S)` boolean; True = real.
        key_mask: `(B, S)` boolean; True = real.
        attention_mask: boolean `(T, S)`, `(B, T, S)` or `(B, H, T, S)`; True = may look.
        return_attention_scores: also return the weights `(B, H, T, S)`.
        training: whether dropout is on.
        use_causal_mask: let position t see the positions up to t only.

    Returns:
        `(B, T, D)`, or this and the weights.

    Raises:
        ValueError: for sizes that are not positive, or a mask that does not fit.

    Example:
        >>> import numpy as np
        >>> layer = MultiHeadAttention(num_heads=2, key_dim=4)
        >>> words, patches = np.ones((1, 3, 8), "float32"), np.ones((1, 5, 6), "float32")
        >>> output, weights = layer(words, patches, return_attention_scores=True)
        >>> tuple(output.shape), tuple(weights.shape)
        ((1, 3, 8), (1, 2, 3, 5))

        Padding is told by `(B, S)`, True = real:

        >>> _, weights = layer(words, patches, key_mask=np.array([[1, 1, 1, 0, 0]], bool), return_attention_scores=True)
        >>> bool(np.any(np.asarray(weights)[..., 3:]))
        False

        Any other rule by `(B, T, S)` or `(B, H, T, S)`, True = may look. A word that may see nothing gets zeros:

        >>> rule = np.array([[[1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]], bool)
        >>> bool(np.any(np.asarray(layer(words, patches, attention_mask=rule))[0, 2]))
        False

    Source:
        Vaswani et al., "Attention Is All You Need", 2017, section 3.2.
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        dropout: float = 0.0,
        use_bias: bool = True,
        output_shape: int | None = None,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if isinstance(output_shape, (list, tuple)) and len(output_shape) == 1:
            output_shape = output_shape[0]  # as Keras writes it into its configurations
        check_positive(num_heads=num_heads, key_dim=key_dim, value_dim=value_dim, output_shape=output_shape)
        check_shares(dropout=dropout)
        self.supports_masking = True
        self.num_heads = num_heads
        self.key_dim = key_dim
        self.value_dim = value_dim or key_dim
        self.dropout = dropout
        self.use_bias = use_bias
        self._output_shape = output_shape
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.seed = seed

    def build(self, query_shape: Any, value_shape: Any, key_shape: Any = None) -> None:
        key_shape = value_shape if key_shape is None else key_shape
        for name, shape in {"query": query_shape, "value": value_shape, "key": key_shape}.items():
            if len(shape) != 3:
                raise ValueError(f"{name} has the shape (batch, length, width). Received {tuple(shape)}.")
        self._query_dense = self._dense("query", "btd,dhk->bthk", (None, self.num_heads, self.key_dim), "hk")
        self._key_dense = self._dense("key", "btd,dhk->bthk", (None, self.num_heads, self.key_dim), "hk")
        self._value_dense = self._dense("value", "btd,dhk->bthk", (None, self.num_heads, self.value_dim), "hk")
        width = query_shape[-1] if self._output_shape is None else self._output_shape
        self._output_dense = self._dense("attention_output", "bthk,hkd->btd", (None, width), "d")
        self._query_dense.build(query_shape)
        self._key_dense.build(key_shape)
        self._value_dense.build(value_shape)
        self._output_dense.build((None, None, self.num_heads, self.value_dim))
        self._dropout_layer = keras.layers.Dropout(self.dropout, seed=self.seed, dtype=self.dtype_policy)

    def _dense(self, name: str, equation: str, output_shape: tuple[int | None, ...], bias_axes: str) -> Any:
        dense = keras.layers.EinsumDense(
            equation,
            output_shape=output_shape,
            bias_axes=bias_axes if self.use_bias else None,
            kernel_initializer=_copy(self.kernel_initializer),
            bias_initializer=_copy(self.bias_initializer),
            dtype=self.dtype_policy,
            name=name,
        )
        dense.supports_masking = True  # a mask on the inputs is read by `call`; it is no reason for a warning here
        return dense

    def call(
        self,
        query: Any,
        value: Any,
        key: Any = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> Any:
        key = value if key is None else key
        batch, targets, sources = query.shape[0], query.shape[1], key.shape[1]
        if attention_mask is not None:
            attention_mask = check_mask(attention_mask, batch, self.num_heads, targets, sources)
        mask = combine_masks(
            attention_mask,
            None if query_mask is None else check_padding(query_mask, targets, "query_mask")[:, None, :, None],
            None if value_mask is None else check_padding(value_mask, sources, "value_mask")[:, None, None, :],
            None if key_mask is None else check_padding(key_mask, sources, "key_mask")[:, None, None, :],
            causal_mask(ops.shape(query)[1], ops.shape(key)[1])[:, None] if use_causal_mask else None,
        )
        keys, values = self.project_memory(key, value)
        output, weights = self._attend_and_project(self._project_query(query), keys, values, mask, training)
        return (output, weights) if return_attention_scores else output

    # Keras' layer has these four, and its weights files call the projections by them.
    @property
    def query_dense(self) -> Any:
        """W^Q."""
        return self._query_dense

    @property
    def key_dense(self) -> Any:
        """W^K."""
        return self._key_dense

    @property
    def value_dense(self) -> Any:
        """W^V."""
        return self._value_dense

    @property
    def output_dense(self) -> Any:
        """W^O."""
        return self._output_dense

    def project_memory(self, key: Any, value: Any) -> tuple[Any, Any]:
        """The keys and values of all heads, `(B, H, S, K)` each: equation (2.1) but for the query."""
        heads_first = (0, 2, 1, 3)
        return ops.transpose(self._key_dense(key), heads_first), ops.transpose(self._value_dense(value), heads_first)

    def _project_query(self, query: Any) -> Any:
        return ops.transpose(self._query_dense(query), (0, 2, 1, 3))

    def _attend_and_project(self, query: Any, keys: Any, values: Any, mask: Any, training: bool | None) -> Any:
        dropped = self.dropout > 0.0 and training
        heads, weights = attend(
            query, keys, values, mask, (lambda w: self._dropout_layer(w, training=True)) if dropped else None
        )
        output = self._output_dense(ops.transpose(heads, (0, 2, 1, 3)))  # (B, T, D)
        if mask is not None and self.use_bias:  # without it the bias would answer for a query that sees nothing
            sees = ops.any(mask, axis=(1, 3))  # (B | 1, T | 1)
            output = output * ops.cast(sees[:, :, None], output.dtype)
        return output, weights

    def compute_mask(self, query: Any, previous_mask: Any = None) -> Any:
        return previous_mask[0] if isinstance(previous_mask, (list, tuple)) else previous_mask

    def compute_output_spec(
        self,
        query: Any,
        value: Any,
        key: Any = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> Any:
        width = query.shape[-1] if self._output_shape is None else self._output_shape
        output = keras.KerasTensor((*query.shape[:-1], width), dtype=self.compute_dtype)
        if not return_attention_scores:
            return output
        shape = (query.shape[0], self.num_heads, query.shape[1], value.shape[1])
        return output, keras.KerasTensor(shape, dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "dropout": self.dropout,
            "use_bias": self.use_bias,
            "output_shape": self._output_shape,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "seed": self.seed,
        }


def _softmax(scores: Any) -> Any:
    """Over the last axis. Keras warns of an axis of length 1, which here is a sentence of one word."""
    return ops.ones_like(scores) if scores.shape[-1] == 1 else ops.softmax(scores, axis=-1)


def _copy(initializer: Any) -> Any:
    """A fresh initializer of the same kind: one object used twice would give equal kernels."""
    return initializer.__class__.from_config(initializer.get_config())
