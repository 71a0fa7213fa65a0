"""The text encoder: a sentence's token ids become a sequence of vectors."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn.layers import LearnedPositions, SinusoidalPositions, TokenEmbedding, TransformerEncoderBlock
from mmattn.layers.checks import (
    IN_ATTENTION,
    check_heads,
    check_positions,
    check_positive,
    check_shares,
    checked_source,
)
from mmattn.layers.quantized import KeepsQuantization
from mmattn.layers.seeds import part_seed

PAD = 0


@keras.saving.register_keras_serializable(package="mmattn")
class TextEncoder(KeepsQuantization, keras.layers.Layer):
    """Embedded tokens, their positions and a stack of encoder blocks that look at the real tokens alone.

    Args:
        vocabulary_size: V, of the source language.
        hidden_dim: D.
        num_layers: N.
        num_heads: h; divides D.
        intermediate_dim: width inside the position-wise networks; 4 D when not given.
        dropout: share dropped in training, of every residual branch's output and after the embedding.
        token_dropout: share of the tokens whose embedding is hidden in training.
        attention_dropout: share of the attention weights dropped in training.
        activation_dropout: share dropped in training inside the position-wise networks.
        positions: "sinusoidal", "learned" with `max_length`, or what `SelfAttention` has: "rotary", "alibi", "t5",
            "shaw", "transformer_xl".
        position_options: what these take, see `SelfAttention`.
        max_length: the longest source with learned positions.
        norm: "pre" or "post", see `mmattn.layers.TransformerEncoderBlock`.
        activation: of the position-wise networks.
        seed: of the dropouts; each makes its own from it.

    Call arguments:
        inputs: a dict with "source_ids" `(B, S)` integers, 0 where a row is padded.

    Returns:
        memory `(B, S, D)` and its mask `(B, S)`, True = a real token.

    Raises:
        ValueError: for a width that the heads do not divide, or settings that do not fit.

    Example:
        >>> import numpy as np
        >>> encoder = TextEncoder(vocabulary_size=20, hidden_dim=8, num_layers=1, num_heads=2)
        >>> memory, mask = encoder({"source_ids": np.array([[7, 9, 3], [5, 3, 0]])})
        >>> tuple(memory.shape), np.asarray(mask).tolist()
        ((2, 3, 8), [[True, True, True], [True, True, False]])

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
        seed: int | None = None,
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
        self.seed = seed
        self.position_options = position_options

        dtype = self.dtype_policy
        self.token_embedding: Any = None  # a table of its own, made by build, or the one that it is told to share
        self.position_embedding: Any = None
        if positions == "learned" and max_length is not None:
            self.position_embedding = LearnedPositions(
                max_length, initializer=keras.initializers.RandomNormal(stddev=0.02), dtype=dtype, name="positions"
            )
        elif positions == "sinusoidal":
            self.position_embedding = SinusoidalPositions(dtype=dtype, name="positions")
        self.embedding_dropout = keras.layers.Dropout(
            dropout, seed=part_seed(seed, "encoder", "embedding_dropout"), dtype=dtype
        )
        self.hidden_tokens = keras.layers.Dropout(
            token_dropout, noise_shape=(None, None, 1), seed=part_seed(seed, "encoder", "hidden_tokens"), dtype=dtype
        )
        self.blocks = [
            TransformerEncoderBlock(
                num_heads,
                intermediate_dim or 4 * hidden_dim,
                activation=activation,
                dropout=dropout,
                attention_dropout=attention_dropout,
                activation_dropout=activation_dropout,
                norm=norm,
                positions=positions if positions in IN_ATTENTION else None,
                position_options=position_options,
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
        width = (None, None, self.hidden_dim)
        if self.token_embedding is None:
            self.token_embedding = TokenEmbedding(
                self.vocabulary_size,
                self.hidden_dim,
                output_bias=False,
                dtype=self.dtype_policy,
                name="token_embedding",
            )
        if not self.token_embedding.built:
            self.token_embedding.build((None, None))
        if self.position_embedding is not None:
            self.position_embedding.build(width)
        for block in self.blocks:
            block.build(width)
        if self.final_norm is not None:
            self.final_norm.build(width)

    def share_embedding(self, embedding: TokenEmbedding) -> None:
        """Uses another part's table, for one vocabulary of both languages (Press and Wolf 2017). Before build."""
        wanted, found = (self.vocabulary_size, self.hidden_dim), (embedding.vocabulary_size, embedding.hidden_dim)
        if wanted != found:
            raise ValueError(
                f"A shared embedding has one vocabulary_size and hidden_dim. The encoder has {wanted}, "
                f"the decoder {found}."
            )
        if self.built:
            raise ValueError(f"{self.name} has a table of its own already: share the decoder's before it is built.")
        self.token_embedding = embedding

    def call(self, inputs: dict[str, Any], training: bool | None = None) -> tuple[Any, Any]:
        ids = checked_source(self.name, inputs)
        mask = ops.not_equal(ids, PAD)
        x = self.token_embedding(ids)  # (B, S, D)
        if training and self.token_dropout:  # hidden, not rescaled: at inference every token is there
            x = self.hidden_tokens(x, training=True) * (1.0 - self.token_dropout)
        if self.position_embedding is not None:
            x = self.position_embedding(x)
        x = self.embedding_dropout(x, training=training)
        for block in self.blocks:
            x = block(x, padding_mask=mask, training=training)
        return (x if self.final_norm is None else self.final_norm(x)), mask

    def compute_output_spec(self, inputs: dict[str, Any], training: bool | None = None) -> tuple[Any, Any]:
        shape = tuple(checked_source(self.name, inputs).shape)
        return (
            keras.KerasTensor((*shape, self.hidden_dim), dtype=self.compute_dtype),
            keras.KerasTensor(shape, dtype="bool"),
        )

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
            "seed": self.seed,
            "position_options": self.position_options,
        }
