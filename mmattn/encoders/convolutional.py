"""The convolutional encoder: of each token, what it says in its context and, beside it, what it says alone."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn.layers import ConvolutionalBlock, TokenEmbedding, WeightNormConvolution
from mmattn.layers.checks import check_positive, check_shares, checked_source
from mmattn.layers.convolution import EMBEDDING_DEVIATION
from mmattn.layers.positions import LearnedPositions, added_positions
from mmattn.layers.seeds import part_seed

PAD = 0


@keras.saving.register_keras_serializable(package="mmattn")
class ConvolutionalEncoder(keras.layers.Layer):
    """Embedded tokens and their places, and a stack of gated convolutions over the real tokens alone.

    The paper's decoder compares with what the convolutions have made of a place, z, and takes z and the place's
    embedding e. Both travel in one memory, side by side, [z e]: it stays one array `(B, S, 2 F)` under one mask, as
    every decoder expects, one of another family (a Transformer's cross-attention) reads it as it would any other, and
    the decoder can slow the gradient of z alone, as the paper asks.

    Args:
        vocabulary_size: V, of the source language.
        hidden_dim: D, the width of the convolutions.
        num_layers: N.
        kernel_size: k; with N layers a place sees N (k - 1) / 2 places to either side.
        embedding_dim: F; D when not given.
        dropout: share dropped in training, of the embeddings and of what goes into each convolution.
        positions: "sinusoidal", "none", or "learned" with `max_length` as in the paper.
        max_length: the longest source with learned positions.
        seed: of the dropouts; each makes its own from it.

    Call arguments:
        inputs: a dict with "source_ids" `(B, S)` integers, 0 where a row is padded.

    Returns:
        memory `(B, S, 2 F)` and its mask `(B, S)`, True = a real token.

    Raises:
        ValueError: for sizes and shares that are none, or a source that is longer than the learned positions.

    Example:
        >>> import numpy as np
        >>> encoder = ConvolutionalEncoder(vocabulary_size=20, hidden_dim=8, num_layers=2)
        >>> memory, mask = encoder({"source_ids": np.array([[7, 9, 3], [5, 3, 0]])})
        >>> tuple(memory.shape), np.asarray(mask).tolist()
        ((2, 3, 16), [[True, True, True], [True, True, False]])

    Source:
        Gehring et al., "Convolutional Sequence to Sequence Learning", 2017, section 3.
    """

    def __init__(
        self,
        vocabulary_size: int,
        hidden_dim: int,
        num_layers: int,
        kernel_size: int = 3,
        embedding_dim: int | None = None,
        dropout: float = 0.0,
        positions: str = "sinusoidal",
        max_length: int | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_positive(vocabulary_size=vocabulary_size, hidden_dim=hidden_dim, num_layers=num_layers)
        check_positive(embedding_dim=embedding_dim)
        check_shares(dropout=dropout)
        self.vocabulary_size = vocabulary_size
        self.hidden_dim = hidden_dim
        self.num_layers = num_layers
        self.kernel_size = kernel_size
        self.embedding_dim = embedding_dim
        self.dropout = dropout
        self.positions = positions
        self.max_length = max_length
        self.seed = seed

        dtype = self.dtype_policy
        self._width = embedding_dim or hidden_dim  # F
        self.token_embedding: Any = None  # a table of its own, made by build, or the one that it is told to share
        self.position_embedding = added_positions(positions, max_length, EMBEDDING_DEVIATION, dtype)
        self.embedding_dropout = keras.layers.Dropout(
            dropout, seed=part_seed(seed, "encoder", "embedding_dropout"), dtype=dtype
        )
        self.input_map = WeightNormConvolution(hidden_dim, retained=1.0 - dropout, dtype=dtype, name="input_map")
        self.blocks = [
            ConvolutionalBlock(
                kernel_size,
                dropout=dropout,
                seed=part_seed(seed, "encoder", f"block_{i}"),
                dtype=dtype,
                name=f"block_{i}",
            )
            for i in range(num_layers)
        ]
        self.output_map = WeightNormConvolution(self._width, dtype=dtype, name="output_map")

    def build(self, inputs_shape: Any = None) -> None:
        if self.token_embedding is None:
            self.token_embedding = TokenEmbedding(
                self.vocabulary_size,
                self._width,
                scale=False,
                output_bias=False,
                initializer=keras.initializers.RandomNormal(stddev=EMBEDDING_DEVIATION),
                dtype=self.dtype_policy,
                name="token_embedding",
            )
        if not self.token_embedding.built:
            self.token_embedding.build((None, None))
        if self.position_embedding is not None:
            self.position_embedding.build((None, None, self._width))
        self.input_map.build((None, None, self._width))
        for block in self.blocks:
            block.build((None, None, self.hidden_dim))
        self.output_map.build((None, None, self.hidden_dim))

    def share_embedding(self, embedding: TokenEmbedding) -> None:
        """Uses another part's table, for one vocabulary of both languages. Before build."""
        wanted, found = (self.vocabulary_size, self._width), (embedding.vocabulary_size, embedding.hidden_dim)
        if wanted != found:
            raise ValueError(
                f"A shared embedding has one vocabulary_size and width. The encoder has {wanted}, the decoder {found}."
            )
        if self.built:
            raise ValueError(f"{self.name} has a table of its own already: share the decoder's before it is built.")
        self.token_embedding = embedding

    def call(self, inputs: dict[str, Any], training: bool | None = None) -> tuple[Any, Any]:
        ids = self._ids(inputs)
        mask = ops.not_equal(ids, PAD)
        embeddings = self.token_embedding(ids)  # (B, S, F)
        if self.position_embedding is not None:
            embeddings = self.position_embedding(embeddings)
        embeddings = self.embedding_dropout(embeddings, training=training)
        x = self.input_map(embeddings, mask=mask)
        for block in self.blocks:
            x = block(x, mask=mask, training=training)
        return ops.concatenate([self.output_map(x, mask=mask), embeddings], axis=-1), mask

    def compute_output_spec(self, inputs: dict[str, Any], training: bool | None = None) -> tuple[Any, Any]:
        shape = tuple(self._ids(inputs).shape)
        return (
            keras.KerasTensor((*shape, 2 * self._width), dtype=self.compute_dtype),
            keras.KerasTensor(shape, dtype="bool"),
        )

    def _ids(self, inputs: dict[str, Any]) -> Any:
        ids = checked_source(self.name, inputs)
        if isinstance(self.position_embedding, LearnedPositions):
            self.position_embedding.check_length(ids.shape[1])
        return ids

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "hidden_dim": self.hidden_dim,
            "num_layers": self.num_layers,
            "kernel_size": self.kernel_size,
            "embedding_dim": self.embedding_dim,
            "dropout": self.dropout,
            "positions": self.positions,
            "max_length": self.max_length,
            "seed": self.seed,
        }
