"""The recurrent text encoder: an LSTM or GRU that reads a sentence, forwards and backwards."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn.encoders.text import PAD
from mmattn.layers import TokenEmbedding
from mmattn.layers.checks import check_positive, check_shares, checked_source
from mmattn.layers.recurrent_stack import CELLS, check_cell, unread_zeros
from mmattn.layers.seeds import part_seed


@keras.saving.register_keras_serializable(package="mmattn")
class RecurrentEncoder(keras.layers.Layer):
    """Embedded tokens and Keras' own recurrent layers, which pass over padding.

    Args:
        vocabulary_size: V, of the source language.
        hidden_dim: D, the memory's width. A layer that reads both ways has D / 2 units for each.
        num_layers: N.
        cell: "lstm" or "gru".
        bidirectional: read forwards and backwards; False reads forwards alone.
        embedding_dim: width of the embeddings; D when not given.
        dropout: share dropped in training of the embedded tokens and of each layer's output.
        token_dropout: share of the tokens whose embedding is hidden in training.
        summary: the memory is one vector, what the top layer ends with (and for both ways, that of each), for a decoder
            without attention.
        seed: of the dropouts; each makes its own from it.

    Call arguments:
        inputs: a dict with "source_ids" `(B, S)` integers, 0 where a row is padded.

    Returns:
        memory `(B, S, D)` and its mask `(B, S)`, True = a real token; with `summary` `(B, 1, D)` and `(B, 1)`, True
        where the row has any.

    Raises:
        ValueError: for sizes that are not positive, an odd width read both ways, or an unknown cell.

    Example:
        >>> import numpy as np
        >>> encoder = RecurrentEncoder(vocabulary_size=20, hidden_dim=8, num_layers=1)
        >>> memory, mask = encoder({"source_ids": np.array([[7, 9, 3], [5, 3, 0]])})
        >>> tuple(memory.shape), np.asarray(mask).tolist()
        ((2, 3, 8), [[True, True, True], [True, True, False]])

    Source:
        Schuster and Paliwal, "Bidirectional Recurrent Neural Networks", 1997; Bahdanau et al. 2015, section 3.2;
        after Sutskever et al. 2014, the summary (theirs is of every layer, and of the reversed source).
    """

    def __init__(
        self,
        vocabulary_size: int,
        hidden_dim: int,
        num_layers: int,
        cell: str = "lstm",
        bidirectional: bool = True,
        embedding_dim: int | None = None,
        dropout: float = 0.0,
        token_dropout: float = 0.0,
        summary: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_positive(
            vocabulary_size=vocabulary_size, hidden_dim=hidden_dim, num_layers=num_layers, embedding_dim=embedding_dim
        )
        check_shares(dropout=dropout, token_dropout=token_dropout)
        check_cell(cell)
        if bidirectional and hidden_dim % 2:
            raise ValueError(
                f"A layer that reads both ways has hidden_dim / 2 units for each. Received hidden_dim={hidden_dim}."
            )
        self.vocabulary_size = vocabulary_size
        self.hidden_dim = hidden_dim
        self.num_layers = num_layers
        self.cell = cell
        self.bidirectional = bidirectional
        self.embedding_dim = embedding_dim
        self.dropout = dropout
        self.token_dropout = token_dropout
        self.summary = summary
        self.seed = seed

        self.token_embedding: Any = None  # a table of its own, made by build, or the one that it is told to share
        self.layers = [self._make_layer(i) for i in range(num_layers)]
        self.dropouts = [
            keras.layers.Dropout(dropout, seed=part_seed(seed, "encoder", f"dropout_{i}"), dtype=self.dtype_policy)
            for i in range(num_layers + 1)
        ]
        self.hidden_tokens = keras.layers.Dropout(
            token_dropout, noise_shape=(None, None, 1), seed=part_seed(seed, "encoder", "hidden_tokens"),
            dtype=self.dtype_policy,
        )  # fmt: skip

    def _make_layer(self, index: int) -> Any:
        sequences = not (self.summary and index == self.num_layers - 1)
        units, dtype = self.hidden_dim // (1 + self.bidirectional), self.dtype_policy
        layer = CELLS[self.cell](units, return_sequences=sequences, dtype=dtype, name=f"layer_{index}")
        return keras.layers.Bidirectional(layer, dtype=dtype, name=f"layer_{index}") if self.bidirectional else layer

    def build(self, inputs_shape: Any = None) -> None:
        if self.token_embedding is None:
            self.token_embedding = TokenEmbedding(
                self.vocabulary_size, self.embedding_dim or self.hidden_dim, output_bias=False,
                dtype=self.dtype_policy, name="token_embedding",
            )  # fmt: skip
        if not self.token_embedding.built:
            self.token_embedding.build((None, None))
        width = self.token_embedding.hidden_dim
        for layer in self.layers:
            layer.build((None, None, width))
            width = self.hidden_dim

    def share_embedding(self, embedding: TokenEmbedding) -> None:
        """Uses another part's table, for one vocabulary of both languages (Press and Wolf 2017). Before build."""
        wanted = (self.vocabulary_size, self.embedding_dim or self.hidden_dim)
        found = (embedding.vocabulary_size, embedding.hidden_dim)
        if wanted != found:
            raise ValueError(
                f"A shared embedding has one vocabulary_size and one width. The encoder has {wanted}, "
                f"the decoder {found}."
            )
        if self.built:
            raise ValueError(f"{self.name} has a table of its own already: share the decoder's before it is built.")
        self.token_embedding = embedding

    def call(self, inputs: dict[str, Any], training: bool | None = None) -> tuple[Any, Any]:
        ids = checked_source(self.name, inputs)
        mask = ops.not_equal(ids, PAD)
        x = self.token_embedding(ids)  # (B, S, E)
        x = ops.where(mask[..., None], x, ops.zeros((), x.dtype))  # what the layers pass over still has a gradient
        if training and self.token_dropout:  # hidden, not rescaled: at inference every token is there
            x = self.hidden_tokens(x, training=True) * (1.0 - self.token_dropout)
        x = self.dropouts[0](x, training=training)
        for layer, dropout in zip(self.layers, self.dropouts[1:], strict=True):
            x = dropout(self._read(layer, x, mask, training), training=training)
        return (x[:, None], ops.any(mask, axis=1, keepdims=True)) if self.summary else (x, mask)

    def _read(self, layer: Any, x: Any, mask: Any, training: bool | None) -> Any:
        """What a layer makes of x; zeros where there is nothing to read, since Keras' layers need a first place."""
        if 0 not in x.shape[:2]:
            return layer(x, mask=mask, training=training)
        batch, length = ops.shape(x)[:2]
        places = (length,) if layer.return_sequences else ()
        return unread_zeros((batch, *places, self.hidden_dim), self.compute_dtype, [*layer.trainable_weights, x])

    def compute_output_spec(self, inputs: dict[str, Any], training: bool | None = None) -> tuple[Any, Any]:
        batch, length = checked_source(self.name, inputs).shape
        shape = (batch, 1 if self.summary else length)
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
            "cell": self.cell,
            "bidirectional": self.bidirectional,
            "embedding_dim": self.embedding_dim,
            "dropout": self.dropout,
            "token_dropout": self.token_dropout,
            "summary": self.summary,
            "seed": self.seed,
        }
