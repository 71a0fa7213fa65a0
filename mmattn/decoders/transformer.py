"""The Transformer decoder: token ids and a memory in, scores of the next token out."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn.layers import LearnedPositions, SinusoidalPositions, TokenEmbedding, TransformerDecoderBlock
from mmattn.layers.checks import (
    IN_ATTENTION,
    check_heads,
    check_ids,
    check_no_state,
    check_positions,
    check_positive,
    check_shares,
)
from mmattn.layers.quantized import KeepsQuantization
from mmattn.layers.seeds import part_seed


@keras.saving.register_keras_serializable(package="mmattn")
class TransformerDecoder(KeepsQuantization, keras.layers.Layer):
    """A stack of decoder blocks over embedded tokens, with the embedding table as its output layer.

    Args:
        vocabulary_size: V.
        hidden_dim: D.
        num_layers: N.
        num_heads: h; divides D.
        intermediate_dim: width inside the position-wise networks; 4 D when not given.
        dropout: share dropped in training, of every residual branch's output and after the embedding.
        token_dropout: share of the input tokens whose embedding is hidden in training, so that the decoder leans on
            the memory rather than on what it said before (Bowman et al. 2016, section 3.3).
        attention_dropout: share of the attention weights dropped in training.
        activation_dropout: share dropped in training inside the position-wise networks.
        positions: "sinusoidal", "learned" with `max_length`, or what `SelfAttention` has: "rotary", "alibi", "t5",
            "shaw", "transformer_xl".
        position_options: what these take, see `SelfAttention`.
        max_length: the longest sequence with learned positions.
        sliding_window: a position sees itself and those before it that are less than so many places away.
        norm: "pre" or "post", see `mmattn.layers.TransformerEncoderBlock`.
        activation: of the position-wise networks.
        cross_attention: False gives a language model, whose memory is None.
        output_bias: whether the logits have a bias.
        seed: of the dropouts; each makes its own from it.

    Call arguments:
        token_ids: `(B, T)` integers, the start token first.
        memory: `(B, S, D')`, or None for a language model.
        memory_mask: `(B, S)` boolean, True = real; None = all real.
        state: None or (); a decoder that remembers across calls carries its memory in this argument.
        places: int `(M,)`, flat places b * T + t: give the logits there alone, `(M, V)`. In training those of padding
            are not worth their cost.
        return_attention_scores: also return the cross-attention `(B, N, H, T, S)`.

    Returns:
        logits `(B, T, V)` and the state, and with `return_attention_scores` the weights.

    Raises:
        ValueError: for a width that the heads do not divide, or settings that do not fit.

    Example:
        >>> import numpy as np
        >>> decoder = TransformerDecoder(vocabulary_size=20, hidden_dim=8, num_layers=2, num_heads=2)
        >>> memory, ids = np.zeros((1, 5, 8), "float32"), np.array([[2, 7, 9]])
        >>> logits, _ = decoder(ids, memory)
        >>> context, state = decoder.start(memory, None, max_length=3)
        >>> for t in range(3):
        ...     step_logits, state = decoder.step(ids[:, t], t, context, state)
        >>> bool(np.allclose(step_logits, logits[:, -1], atol=1e-5))
        True

    Source:
        Vaswani et al. 2017, section 3.
    """

    def __init__(
        self,
        vocabulary_size: int,
        hidden_dim: int,
        num_layers: int,
        num_heads: int,
        intermediate_dim: int | None = None,
        dropout: float = 0.0,
        token_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        positions: str = "sinusoidal",
        max_length: int | None = None,
        norm: str = "pre",
        activation: Any = "relu",
        cross_attention: bool = True,
        output_bias: bool = True,
        seed: int | None = None,
        sliding_window: int | None = None,
        position_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_positive(vocabulary_size=vocabulary_size, hidden_dim=hidden_dim, num_layers=num_layers)
        check_heads(num_heads, hidden_dim)
        check_shares(dropout=dropout, token_dropout=token_dropout)
        check_positions(positions, max_length, options=position_options)
        self.vocabulary_size = vocabulary_size
        self.hidden_dim = hidden_dim
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.intermediate_dim = intermediate_dim
        self.dropout = dropout
        self.token_dropout = token_dropout
        self.attention_dropout = attention_dropout
        self.activation_dropout = activation_dropout
        self.positions = positions
        self.max_length = max_length
        self.norm = norm
        self.activation = keras.activations.get(activation)
        self.has_cross_attention = cross_attention
        self.output_bias = output_bias
        self.seed = seed
        self.sliding_window = sliding_window
        self.position_options = position_options

        dtype = self.dtype_policy
        self.token_embedding = TokenEmbedding(
            vocabulary_size, hidden_dim, output_bias=output_bias, dtype=dtype, name="token_embedding"
        )
        self.position_embedding: Any = None
        if positions == "learned" and max_length is not None:
            self.position_embedding = LearnedPositions(
                max_length, initializer=keras.initializers.RandomNormal(stddev=0.02), dtype=dtype, name="positions"
            )
        elif positions == "sinusoidal":
            self.position_embedding = SinusoidalPositions(dtype=dtype, name="positions")
        seeds = {name: part_seed(seed, "decoder", name) for name in ("embedding_dropout", "hidden_tokens")}
        self.embedding_dropout = keras.layers.Dropout(dropout, seed=seeds["embedding_dropout"], dtype=dtype)
        self.hidden_tokens = keras.layers.Dropout(
            token_dropout, noise_shape=(None, None, 1), seed=seeds["hidden_tokens"], dtype=dtype
        )
        self.blocks = [
            TransformerDecoderBlock(
                num_heads,
                intermediate_dim or 4 * hidden_dim,
                cross_attention,
                activation=activation,
                dropout=dropout,
                attention_dropout=attention_dropout,
                activation_dropout=activation_dropout,
                norm=norm,
                positions=positions if positions in IN_ATTENTION else None,
                position_options=position_options,
                sliding_window=sliding_window,
                seed=part_seed(seed, "decoder", f"block_{i}"),
                dtype=dtype,
                name=f"block_{i}",
            )
            for i in range(num_layers)
        ]
        self.final_norm = None
        if norm == "pre":
            self.final_norm = keras.layers.LayerNormalization(epsilon=1e-5, dtype=dtype, name="final_norm")

    def build(self, token_ids_shape: Any, memory_shape: Any = None) -> None:
        width = (None, None, self.hidden_dim)
        if not self.token_embedding.built:  # a shared table is built by whoever comes first
            self.token_embedding.build(token_ids_shape)
        if self.position_embedding is not None:
            self.position_embedding.build(width)
        for block in self.blocks:
            block.build(width, memory_shape)
        if self.final_norm is not None:
            self.final_norm.build(width)

    def call(
        self,
        token_ids: Any,
        memory: Any = None,
        memory_mask: Any = None,
        state: Any = None,
        places: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
    ) -> Any:
        self._check(token_ids, return_attention_scores)
        check_no_state(self.name, state)
        x, scores = self._embedded(token_ids, training), []
        for block in self.blocks:
            if return_attention_scores:
                x, weights = block(x, memory, memory_mask=memory_mask, return_attention_scores=True, training=training)
                scores.append(weights)
            else:
                x = block(x, memory, memory_mask=memory_mask, training=training)
        logits = self._logits(self._at(places, x))
        return (logits, (), ops.stack(scores, axis=1)) if return_attention_scores else (logits, ())

    def _embedded(self, token_ids: Any, training: bool | None) -> Any:
        """What the first block gets, `(B, T, D)`."""
        x = self.token_embedding(token_ids)
        if training and self.token_dropout:  # hidden, not rescaled: at inference every token is there
            x = self.hidden_tokens(x, training=True) * (1.0 - self.token_dropout)
        if self.position_embedding is not None:
            x = self.position_embedding(x)
        return self.embedding_dropout(x, training=training)

    def _at(self, places: Any, x: Any) -> Any:
        """The vectors that logits are wanted of: `(M, D)` of M flat places, or all."""
        return x if places is None else ops.take(ops.reshape(x, (-1, self.hidden_dim)), places, axis=0)

    def compute_output_spec(
        self,
        token_ids: Any,
        memory: Any = None,
        memory_mask: Any = None,
        state: Any = None,
        places: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
    ) -> Any:
        """Written out, because Keras on torch would call the decoder with 83 tokens: too many for learned positions."""
        self._check(token_ids, return_attention_scores)
        check_no_state(self.name, state)
        batch, length = token_ids.shape
        vectors = (batch, length) if places is None else tuple(places.shape)
        dtype = keras.backend.result_type(self.compute_dtype, "float32")
        logits = keras.KerasTensor((*vectors, self.vocabulary_size), dtype=dtype)
        if not return_attention_scores:
            return logits, ()
        shape = (batch, self.num_layers, self.num_heads, length, memory.shape[1])
        return logits, (), keras.KerasTensor(shape, dtype=self.compute_dtype)

    def _check(self, token_ids: Any, return_attention_scores: bool) -> None:
        check_ids(self.name, token_ids, "token_ids")
        if return_attention_scores and not self.has_cross_attention:
            raise ValueError(f"{self.name} has no cross-attention (cross_attention=False), so it has no scores of it.")
        if isinstance(self.position_embedding, LearnedPositions):
            self.position_embedding.check_length(token_ids.shape[1])

    def start(self, memory: Any, memory_mask: Any, max_length: int, batch_size: Any = None) -> tuple[Any, Any]:
        """What generation starts from.

        Args:
            memory: `(B, S, D')`, or None for a language model (then `batch_size` is needed).
            memory_mask: `(B, S)` boolean or None.
            max_length: how many steps the caches hold.
            batch_size: B, where there is no memory to tell it.

        Returns:
            context: per layer the keys and values of the memory, which never change.
            state: per layer the cache of the self-attention, batch first.

        Raises:
            ValueError: for more steps than there are learned positions, or neither a memory nor a `batch_size`.
        """
        if isinstance(self.position_embedding, LearnedPositions):
            self.position_embedding.check_length(max_length)
        batch_size = _rows(memory, batch_size)
        pairs = [block.start(memory, memory_mask, batch_size, max_length) for block in self.blocks]
        return [context for context, _ in pairs], [state for _, state in pairs]

    def step(self, token_ids: Any, index: Any, context: Any, state: Any) -> tuple[Any, Any]:
        """Scores the token that follows position `index`.

        Args:
            token_ids: `(B,)`, the tokens at position `index`.
            index: the position, one number for all rows.
            context, state: from `start` or the last step.

        Returns:
            logits `(B, V)` and the new state.
        """
        x = self.token_embedding(token_ids)
        if self.position_embedding is not None:
            x = self.position_embedding.step(x, index)
        caches = []
        for block, block_context, cache in zip(self.blocks, context, state, strict=True):
            x, cache = block.step(x, index, block_context, cache)
            caches.append(cache)
        return self._logits(x), caches

    def _logits(self, x: Any) -> Any:
        return self.token_embedding(x if self.final_norm is None else self.final_norm(x), reverse=True)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "hidden_dim": self.hidden_dim,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "intermediate_dim": self.intermediate_dim,
            "dropout": self.dropout,
            "token_dropout": self.token_dropout,
            "attention_dropout": self.attention_dropout,
            "activation_dropout": self.activation_dropout,
            "positions": self.positions,
            "max_length": self.max_length,
            "norm": self.norm,
            "activation": keras.activations.serialize(self.activation),
            "cross_attention": self.has_cross_attention,
            "output_bias": self.output_bias,
            "seed": self.seed,
            "sliding_window": self.sliding_window,
            "position_options": self.position_options,
        }


def _rows(memory: Any, batch_size: Any) -> Any:
    """B of what starts."""
    if batch_size is None and memory is None:
        raise ValueError("Without a memory, start needs batch_size, the number of rows. Received None.")
    if memory is not None and isinstance(batch_size, int) and memory.shape[0] not in (None, batch_size):
        raise ValueError(f"A memory has batch_size rows. Received {tuple(memory.shape)} and batch_size={batch_size}.")
    return ops.shape(memory)[0] if batch_size is None else batch_size
