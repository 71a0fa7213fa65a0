"""The Transformer's blocks, composed of attention and a position-wise network.

    encoder block:  self-attention, then FeedForward
    decoder block:  causal self-attention, cross-attention to the memory, then FeedForward

Each part sits in a residual branch: `x + part(norm(x))` (pre-norm), or `norm(x + part(x))` (post-norm, as in 2017).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from mmattn.layers.checks import check_heads, check_positive, check_shares
from mmattn.layers.cross_attention import CrossAttention
from mmattn.layers.quantized import KeepsQuantization
from mmattn.layers.seeds import part_seed
from mmattn.layers.self_attention import SelfAttention, check_places

NORMS = ("pre", "post")


@keras.saving.register_keras_serializable(package="mmattn")
class FeedForward(KeepsQuantization, keras.layers.Layer):
    """Two dense layers at every position: `activation(x W1 + b1) W2 + b2`.

    Args:
        intermediate_dim: width between the two.
        activation: a Keras activation.
        dropout: share dropped between the two in training.
        seed: of the dropout.

    Call arguments:
        inputs: `(..., D)`.

    Raises:
        ValueError: for an `intermediate_dim` that is not positive.

    Example:
        >>> import numpy as np
        >>> tuple(FeedForward(intermediate_dim=16)(np.zeros((1, 3, 8), "float32")).shape)
        (1, 3, 8)

    Source:
        Vaswani et al. 2017, section 3.3.
    """

    def __init__(
        self,
        intermediate_dim: int,
        activation: Any = "relu",
        dropout: float = 0.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_positive(intermediate_dim=intermediate_dim)
        check_shares(dropout=dropout)
        self.supports_masking = True
        self.intermediate_dim = intermediate_dim
        self.activation = keras.activations.get(activation)
        self.dropout = dropout
        self.seed = seed
        self._dropout_layer = keras.layers.Dropout(dropout, seed=seed, dtype=self.dtype_policy)

    def build(self, inputs_shape: Any) -> None:
        self._inner = keras.layers.Dense(
            self.intermediate_dim, activation=self.activation, dtype=self.dtype_policy, name="inner"
        )
        self._outer = keras.layers.Dense(inputs_shape[-1], dtype=self.dtype_policy, name="outer")
        self._inner.build(inputs_shape)
        self._outer.build((*inputs_shape[:-1], self.intermediate_dim))

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return self._outer(self._dropout_layer(self._inner(inputs), training=training))

    def compute_output_shape(self, inputs_shape: Any) -> Any:
        return inputs_shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "intermediate_dim": self.intermediate_dim,
            "activation": keras.activations.serialize(self.activation),
            "dropout": self.dropout,
            "seed": self.seed,
        }


class _Block(KeepsQuantization, keras.layers.Layer):
    """What the two blocks share: sizes, and the residual branch with its norm and dropout."""

    def __init__(
        self,
        num_heads: int,
        intermediate_dim: int,
        key_dim: int | None = None,
        activation: Any = "relu",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        norm: str = "pre",
        norm_epsilon: float = 1e-5,
        seed: int | None = None,
        positions: str | None = None,
        sliding_window: int | None = None,
        position_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if norm not in NORMS:
            raise ValueError(f"norm is one of {NORMS}. Received {norm!r}.")
        check_positive(
            num_heads=num_heads, intermediate_dim=intermediate_dim, key_dim=key_dim, sliding_window=sliding_window
        )
        check_shares(dropout=dropout, attention_dropout=attention_dropout, activation_dropout=activation_dropout)
        check_places(positions, key_dim, position_options)
        self.supports_masking = True
        self.num_heads = num_heads
        self.intermediate_dim = intermediate_dim
        self.key_dim = key_dim
        self.activation = keras.activations.get(activation)
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.activation_dropout = activation_dropout
        self.norm = norm
        self.norm_epsilon = norm_epsilon
        self.seed = seed
        self.positions = positions
        self.sliding_window = sliding_window
        self.position_options = position_options

    def _head_width(self, width: int) -> int:
        if self.key_dim is not None:
            return self.key_dim
        check_heads(self.num_heads, width, "width", " Or give key_dim, the width of a head, yourself.")
        return width // self.num_heads

    def _add_parts(self, width: int, **parts: keras.layers.Layer) -> None:
        """Holds each part with the norm and the dropout of its residual branch, all built for `width`."""
        shape = (None, None, width)
        for name, part in parts.items():
            norm = keras.layers.LayerNormalization(
                epsilon=self.norm_epsilon, dtype=self.dtype_policy, name=f"{name}_norm"
            )
            norm.build(shape)
            setattr(self, name, part)
            setattr(self, f"{name}_norm", norm)
            seed = part_seed(self.seed, f"{name}_dropout")
            setattr(self, f"{name}_dropout", keras.layers.Dropout(self.dropout, seed=seed, dtype=self.dtype_policy))

    def _residual(
        self, x: Any, name: str, part: Callable[[Any], Any], training: bool | None = False
    ) -> tuple[Any, Any]:
        """One residual branch around `part`, which may give (output, more); returns the new x and more."""
        norm, dropout = getattr(self, f"{name}_norm"), getattr(self, f"{name}_dropout")
        output = part(norm(x) if self.norm == "pre" else x)
        output, more = output if isinstance(output, tuple) else (output, None)
        x = x + (dropout(output, training=training) if training else output)
        return (x if self.norm == "pre" else norm(x)), more

    def _self_attention(self, width: int) -> SelfAttention:
        options = self._attention_options("self_attention", width)
        part = SelfAttention(
            positions=self.positions, position_options=self.position_options, sliding_window=self.sliding_window,
            **options,
        )  # fmt: skip
        part.build((None, None, width))
        return part

    def _attention_options(self, name: str, width: int) -> dict[str, Any]:
        return {
            "name": name,
            "num_heads": self.num_heads,
            "key_dim": self._head_width(width),
            "dropout": self.attention_dropout,
            "seed": part_seed(self.seed, name),
            "dtype": self.dtype_policy,
        }

    def _feed_forward(self, width: int) -> FeedForward:
        seed = part_seed(self.seed, "feed_forward")
        part = FeedForward(
            self.intermediate_dim,
            self.activation,
            self.activation_dropout,
            seed,
            dtype=self.dtype_policy,
            name="feed_forward",
        )
        part.build((None, None, width))
        return part

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "intermediate_dim": self.intermediate_dim,
            "key_dim": self.key_dim,
            "activation": keras.activations.serialize(self.activation),
            "dropout": self.dropout,
            "attention_dropout": self.attention_dropout,
            "activation_dropout": self.activation_dropout,
            "norm": self.norm,
            "norm_epsilon": self.norm_epsilon,
            "seed": self.seed,
            "positions": self.positions,
            "sliding_window": self.sliding_window,
            "position_options": self.position_options,
        }

    def compute_output_shape(self, inputs_shape: Any, memory_shape: Any = None) -> Any:
        return inputs_shape


@keras.saving.register_keras_serializable(package="mmattn")
class TransformerEncoderBlock(_Block):
    """Self-attention and a position-wise network, each in a residual branch.

    Args:
        num_heads: h; divides the width unless `key_dim` is given.
        intermediate_dim: width inside the position-wise network.
        key_dim: width of a head; width / num_heads when not given.
        activation: of the position-wise network.
        dropout: share of each branch's output dropped in training.
        attention_dropout: share of the attention weights dropped in training.
        activation_dropout: share dropped in training between the two layers of the position-wise network.
        norm: "pre" (`x + part(norm(x))`; the stack needs a norm at its end) or "post" (`norm(x + part(x))`).
        norm_epsilon: of the layer normalisation.
        seed: of the dropouts; each makes its own from it.
        positions, position_options: of the self-attention, see `SelfAttention`.
        sliding_window: of the self-attention: a position sees those that are less than so many places away.

    Call arguments:
        inputs: `(B, T, D)`.
        padding_mask: `(B, T)` boolean, True = real; a mask that arrives on `inputs` counts too.
        attention_mask: boolean `(T, T)`, `(B, T, T)` or `(B, H, T, T)`.
        return_attention_scores: also return the weights `(B, H, T, T)`.

    Raises:
        ValueError: for heads that do not divide the width, sizes that are not positive, a mask that does not fit.

    Example:
        >>> import numpy as np
        >>> block = TransformerEncoderBlock(num_heads=2, intermediate_dim=16)
        >>> tuple(block(np.zeros((1, 3, 8), "float32")).shape)
        (1, 3, 8)

    Source:
        Vaswani et al. 2017, section 3.1; Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020.
    """

    def build(self, inputs_shape: Any) -> None:
        width = inputs_shape[-1]
        attention = self._self_attention(width)
        self._add_parts(width, self_attention=attention, feed_forward=self._feed_forward(width))

    def call(
        self,
        inputs: Any,
        padding_mask: Any = None,
        attention_mask: Any = None,
        mask: Any = None,
        inputs_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
    ) -> Any:
        def look(x: Any) -> Any:
            return self.self_attention(
                x, padding_mask=padding_mask, attention_mask=attention_mask,
                inputs_mask=inputs_mask if mask is None else mask,
                return_attention_scores=return_attention_scores, training=training,
            )  # fmt: skip

        x, scores = self._residual(inputs, "self_attention", look, training)
        x, _ = self._residual(x, "feed_forward", lambda y: self.feed_forward(y, training=training), training)
        return (x, scores) if return_attention_scores else x

    def compute_output_spec(
        self,
        inputs: Any,
        padding_mask: Any = None,
        attention_mask: Any = None,
        mask: Any = None,
        inputs_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
    ) -> Any:
        output = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
        if not return_attention_scores:
            return output
        batch, length = inputs.shape[:2]
        return output, keras.KerasTensor((batch, self.num_heads, length, length), dtype=self.compute_dtype)


@keras.saving.register_keras_serializable(package="mmattn")
class TransformerDecoderBlock(_Block):
    """Causal self-attention, cross-attention to a memory, and a position-wise network.

    Args: as in `TransformerEncoderBlock`, and
        cross_attention: False leaves out the cross-attention: a language model's block.

    Call arguments:
        inputs: `(B, T, D)`.
        memory: `(B, S, D')`; None when built without cross-attention.
        memory_mask: `(B, S)` boolean, True = real.
        padding_mask: `(B, T)` boolean, True = real. Right-padded rows do not need it: the causal mask hides what
            follows.
        return_attention_scores: also return the cross-attention's weights `(B, H, T, S)`.
        past: `(B, M, D)`, the inputs that this block had before these; the self-attention sees them too, and no
            gradient goes back to them (Dai et al. 2019, section 3.2).
        past_mask: `(B, M)` boolean, True = real.

    Raises:
        ValueError: for a memory that does not go with `cross_attention`.

    `start(memory, memory_mask, batch_size, max_length, past, past_mask)` gives (context, cache); `step(inputs (B, D),
    index, context, cache)` gives the output `(B, D)` at that place, equal to `call`'s, and the new cache.

    Example:
        >>> import numpy as np
        >>> block = TransformerDecoderBlock(num_heads=2, intermediate_dim=16)
        >>> words, patches = np.zeros((1, 3, 8), "float32"), np.zeros((1, 5, 8), "float32")
        >>> tuple(block(words, patches).shape)
        (1, 3, 8)

    Source:
        Vaswani et al. 2017, section 3.1.
    """

    def __init__(self, num_heads: int, intermediate_dim: int, cross_attention: bool = True, **kwargs: Any) -> None:
        super().__init__(num_heads, intermediate_dim, **kwargs)
        self.has_cross_attention = cross_attention

    def build(self, inputs_shape: Any, memory_shape: Any = None) -> None:
        width = inputs_shape[-1]
        parts: dict[str, keras.layers.Layer] = {"self_attention": self._self_attention(width)}
        self._check_memory(memory_shape)
        if self.has_cross_attention:
            cross = CrossAttention(**self._attention_options("cross_attention", width))
            cross.build((None, None, width), (None, None, memory_shape[-1]))
            parts["cross_attention"] = cross
        self._add_parts(width, **parts, feed_forward=self._feed_forward(width))

    def call(
        self,
        inputs: Any,
        memory: Any = None,
        memory_mask: Any = None,
        padding_mask: Any = None,
        mask: Any = None,
        inputs_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        past: Any = None,
        past_mask: Any = None,
    ) -> Any:
        self._check_memory(memory)
        before = self._seen_before(past, past_mask)

        def look_back(x: Any) -> Any:
            return self.self_attention(
                x, padding_mask=padding_mask, inputs_mask=inputs_mask if mask is None else mask,
                use_causal_mask=True, training=training, **before,
            )  # fmt: skip

        def look_across(x: Any) -> Any:
            return self.cross_attention(
                x, memory, memory_mask=memory_mask, return_attention_scores=return_attention_scores, training=training
            )

        x, _ = self._residual(inputs, "self_attention", look_back, training)
        scores = None
        if self.has_cross_attention:
            x, scores = self._residual(x, "cross_attention", look_across, training)
        x, _ = self._residual(x, "feed_forward", lambda y: self.feed_forward(y, training=training), training)
        return (x, scores) if return_attention_scores else x

    def _seen_before(self, past: Any, past_mask: Any) -> dict[str, Any]:
        """What came before, as the self-attention gets its inputs."""
        if past is None:
            return {}
        past = ops.stop_gradient(ops.cast(past, self.compute_dtype))
        if past_mask is not None:  # else the norm would have what is no number in its gradients
            past = ops.where(ops.cast(past_mask, "bool")[..., None], past, ops.zeros((), past.dtype))
        return {"past": self.self_attention_norm(past) if self.norm == "pre" else past, "past_mask": past_mask}

    def _check_memory(self, memory: Any) -> None:
        if self.has_cross_attention and memory is None:
            raise ValueError("This block has cross-attention, so it needs a memory (B, S, D). Received None.")
        if not self.has_cross_attention and memory is not None:
            raise ValueError("This block was made with cross_attention=False and takes no memory.")

    def start(
        self,
        memory: Any,
        memory_mask: Any,
        batch_size: Any,
        max_length: int,
        past: Any = None,
        past_mask: Any = None,
    ) -> tuple[Any, Any]:
        """The context that all steps share, and a cache for `max_length` positions, empty but for a past."""
        self._check_memory(memory)
        context = self.cross_attention.start(memory, memory_mask) if self.has_cross_attention else None
        return context, self.self_attention.start(batch_size, max_length, **self._seen_before(past, past_mask))

    def step(self, inputs: Any, index: Any, context: Any, cache: Any) -> tuple[Any, Any]:
        """The output `(B, D)` of position `index` from its input `(B, D)`, and the new cache."""
        x = ops.cast(inputs, self.compute_dtype)
        x, cache = self._residual(x, "self_attention", lambda y: self.self_attention.step(y, index, cache))
        if self.has_cross_attention:
            x, _ = self._residual(x, "cross_attention", lambda y: self.cross_attention.step(y, context))
        x, _ = self._residual(x, "feed_forward", lambda y: self.feed_forward(y, training=False))
        return x, cache

    def compute_output_spec(
        self,
        inputs: Any,
        memory: Any = None,
        memory_mask: Any = None,
        padding_mask: Any = None,
        mask: Any = None,
        inputs_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        past: Any = None,
        past_mask: Any = None,
    ) -> Any:
        output = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
        if not return_attention_scores:
            return output
        shape = (inputs.shape[0], self.num_heads, inputs.shape[1], memory.shape[1])
        return output, keras.KerasTensor(shape, dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "cross_attention": self.has_cross_attention}
