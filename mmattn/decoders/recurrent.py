"""The recurrent decoder: an LSTM or GRU that writes one token after the other and may look back at the memory.

Shapes: B batch, T target length, S memory length, D width of the states, E of the embeddings, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn.layers import AttentiveStack, TokenEmbedding
from mmattn.layers.checks import check_ids, check_positive, check_rows, check_shares
from mmattn.layers.quantized import KeepsQuantization
from mmattn.layers.seeds import part_seed


@keras.saving.register_keras_serializable(package="mmattn")
class RecurrentDecoder(KeepsQuantization, keras.layers.Layer):
    """Embedded tokens, the layers and attention of `mmattn.layers.AttentiveStack`, and scores of the next token.

    It holds what was before the Transformer: `attention=None, input_feeding=False` with an encoder's `summary=True` is
    after Sutskever et al. 2014, `attention=None` with one after Cho et al. 2014, "bahdanau" after the first attention,
    "luong_.." after those that followed; with patches for a memory, after Show, Attend and Tell. `AttentiveStack` says
    where it differs: in what a text starts from, in the readout, in the GRU. Here Sutskever's encoder reads both ways
    and the source as it stands; theirs reads it once, backwards.

    Args:
        vocabulary_size: V.
        hidden_dim: D.
        num_layers: recurrent layers.
        cell: "lstm" or "gru".
        attention: "bahdanau", "luong_dot" (a memory of the width D), "luong_general", "luong_concat", or None, which
            knows the memory's mean alone.
        input_feeding: what is known of the memory enters the layers with each token; "bahdanau" cannot be without.
        embedding_dim: E; D when not given.
        dropout: share dropped in training, of the embedded tokens, of what is fed to the layers, between the layers and
            of the readout.
        token_dropout: share of the input tokens whose embedding is hidden in training (Bowman et al. 2016).
        cross_attention: False gives a language model, whose memory is None; then `attention` is None too.
        tied: the embedding table is the output layer too; a readout of another width goes through a dense layer.
        output_bias: whether the logits have a bias.
        seed: of the dropouts; each makes its own from it.

    Call arguments:
        token_ids: `(B, T)` integers, the start token first.
        memory: `(B, S, D')`, or None for a language model.
        memory_mask: `(B, S)` boolean, True = real; None = all real.
        state: what an earlier call returned, to go on from there; None = from the memory.
        places: int `(M,)`, flat places b * T + t: give the logits there alone, `(M, V)`.
        return_attention_scores: also return the attention `(B, 1, 1, T, S)`.

    Returns:
        logits `(B, T, V)` and the state, and with `return_attention_scores` the weights.

    Raises:
        ValueError: for settings that do not fit.

    Example:
        >>> import numpy as np
        >>> decoder = RecurrentDecoder(vocabulary_size=20, hidden_dim=8, num_layers=2, attention="bahdanau")
        >>> memory, ids = np.zeros((1, 5, 6), "float32"), np.array([[2, 7, 9]])
        >>> logits, _ = decoder(ids, memory)
        >>> context, state = decoder.start(memory, None, max_length=3)
        >>> for t in range(3):
        ...     step_logits, state = decoder.step(ids[:, t], t, context, state)
        >>> bool(np.allclose(step_logits, logits[:, -1], atol=1e-5))
        True

    Source:
        See `mmattn.layers.AttentiveStack`.
    """

    max_length = None  # there is no longest text

    def __init__(
        self,
        vocabulary_size: int,
        hidden_dim: int,
        num_layers: int,
        cell: str = "lstm",
        attention: str | None = "luong_general",
        input_feeding: bool = True,
        embedding_dim: int | None = None,
        dropout: float = 0.0,
        token_dropout: float = 0.0,
        cross_attention: bool = True,
        tied: bool = True,
        output_bias: bool = True,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_positive(vocabulary_size=vocabulary_size, hidden_dim=hidden_dim, embedding_dim=embedding_dim)
        check_shares(token_dropout=token_dropout)
        self.vocabulary_size = vocabulary_size
        self.hidden_dim = hidden_dim
        self.num_layers = num_layers
        self.cell = cell
        self.attention = attention
        self.input_feeding = input_feeding
        self.embedding_dim = embedding_dim
        self.dropout = dropout
        self.token_dropout = token_dropout
        self.has_cross_attention = cross_attention
        self.tied = tied
        self.output_bias = output_bias
        self.seed = seed

        dtype, width = self.dtype_policy, embedding_dim or hidden_dim
        self.stack = AttentiveStack(
            hidden_dim, num_layers, cell, attention, input_feeding, cross_attention, dropout,
            seed=part_seed(seed, "decoder", "stack"), dtype=dtype, name="recurrence",
        )  # fmt: skip
        self.token_embedding = TokenEmbedding(
            vocabulary_size, width, output_bias=output_bias and tied, dtype=dtype, name="token_embedding"
        )
        seeds = {name: part_seed(seed, "decoder", name) for name in ("words", "readout", "hidden_tokens")}
        self.word_dropout = keras.layers.Dropout(dropout, seed=seeds["words"], dtype=dtype)
        self.readout_dropout = keras.layers.Dropout(dropout, seed=seeds["readout"], dtype=dtype)
        self.hidden_tokens = keras.layers.Dropout(
            token_dropout, noise_shape=(None, None, 1), seed=seeds["hidden_tokens"], dtype=dtype
        )
        self.output_embedding, self.projection = self.token_embedding, None
        if not tied:
            self.output_embedding = TokenEmbedding(
                vocabulary_size, hidden_dim, output_bias=output_bias, dtype=dtype, name="output_embedding"
            )
        elif width != hidden_dim:
            self.projection = keras.layers.Dense(width, use_bias=False, dtype=dtype, name="projection")

    def build(self, token_ids_shape: Any, memory_shape: Any = None) -> None:
        for embedding in (self.token_embedding, self.output_embedding):
            if not embedding.built:  # a shared table is built by whoever comes first
                embedding.build((None, None))
        self.stack.build((None, None, self.token_embedding.hidden_dim), memory_shape)
        if self.projection is not None:
            self.projection.build((None, None, self.hidden_dim))

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
        if memory is not None:
            check_rows(self.name, token_ids=token_ids, memory=memory)
        context, first = self.stack.start(memory, memory_mask, ops.shape(token_ids)[0])
        words = self._embed(token_ids, training)  # (B, T, E)
        readouts, state, weights = self.stack(
            words, context=context, state=first if state is None else state, training=training
        )
        if places is not None:
            readouts = ops.take(ops.reshape(readouts, (-1, self.hidden_dim)), places, axis=0)  # (M, D)
        logits = self._logits(readouts, training)
        return (logits, state, weights[:, None, None]) if return_attention_scores else (logits, state)

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
        """Written out, because Keras on torch would call the decoder with arrays of its own."""
        self._check(token_ids, return_attention_scores)
        batch, length = token_ids.shape
        vectors = (batch, length) if places is None else tuple(places.shape)
        dtype = keras.backend.result_type(self.compute_dtype, "float32")
        logits = keras.KerasTensor((*vectors, self.vocabulary_size), dtype=dtype)
        state = self.stack.state_spec(batch)
        if not return_attention_scores:
            return logits, state
        return logits, state, keras.KerasTensor((batch, 1, 1, length, memory.shape[1]), dtype=self.compute_dtype)

    def start(self, memory: Any, memory_mask: Any, max_length: int, batch_size: Any = None) -> tuple[Any, Any]:
        """What generation starts from.

        Args:
            memory: `(B, S, D')`, or None for a language model (then `batch_size` is needed).
            memory_mask: `(B, S)` boolean or None.
            max_length: how many steps are to come; the states are of one size for any number.
            batch_size: B, where there is no memory to tell it.

        Returns:
            context: what the attention keeps of the memory, or its mean, which never change.
            state: what the layers remember, and what is fed to them next, batch first.

        Raises:
            ValueError: for neither a memory nor a `batch_size`.
        """
        if memory is None and batch_size is None:
            raise ValueError("Without a memory, start needs batch_size, the number of rows. Received None.")
        return self.stack.start(memory, memory_mask, ops.shape(memory)[0] if batch_size is None else batch_size)

    def step(self, token_ids: Any, index: Any, context: Any, state: Any) -> tuple[Any, Any]:
        """Scores the token that follows position `index`.

        Args:
            token_ids: `(B,)`, the tokens at position `index`.
            index: the position, which counts for nothing here.
            context, state: from `start` or the last step.

        Returns:
            logits `(B, V)` and the new state.
        """
        readout, state = self.stack.step(self._embed(token_ids), context, state)
        return self._logits(readout), state

    def _embed(self, token_ids: Any, training: bool | None = None) -> Any:
        words = self.token_embedding(token_ids)
        if training and self.token_dropout:  # hidden, not rescaled: at inference every token is there
            words = self.hidden_tokens(words, training=True) * (1.0 - self.token_dropout)
        return self.word_dropout(words, training=training)

    def _logits(self, readout: Any, training: bool | None = None) -> Any:
        readout = self.readout_dropout(readout, training=training)
        return self.output_embedding(readout if self.projection is None else self.projection(readout), reverse=True)

    def _check(self, token_ids: Any, return_attention_scores: bool) -> None:
        check_ids(self.name, token_ids, "token_ids")
        if return_attention_scores and self.attention is None:
            raise ValueError(f"{self.name} has no attention (attention=None), so it has no scores of it.")

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "hidden_dim": self.hidden_dim,
            "num_layers": self.num_layers,
            "cell": self.cell,
            "attention": self.attention,
            "input_feeding": self.input_feeding,
            "embedding_dim": self.embedding_dim,
            "dropout": self.dropout,
            "token_dropout": self.token_dropout,
            "cross_attention": self.has_cross_attention,
            "tied": self.tied,
            "output_bias": self.output_bias,
            "seed": self.seed,
        }
