"""The recurrent decoder: an LSTM or GRU that writes one token after the other and may look back at the memory.

Shapes: B batch, T target length, S memory length, D width of the states, E of the embeddings, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn import backend
from mmattn.layers import AdditiveAttention, MultiplicativeAttention, RecurrentStack, TokenEmbedding
from mmattn.layers.checks import check_positive, check_shares
from mmattn.layers.masks import check_padding
from mmattn.layers.seeds import part_seed

ATTENTIONS = ("bahdanau", "luong_dot", "luong_general", "luong_concat")


@keras.saving.register_keras_serializable(package="mmattn")
class RecurrentDecoder(keras.layers.Layer):
    """Recurrent layers over embedded tokens; what they and the attention know becomes scores of the next token.

    What each layer starts from is a dense layer of the memory's mean: every encoder has one, so that words and patches
    start a text in the same way (Xu et al. 2015; Bahdanau's own, the first state of the backward encoder, is a
    recurrent encoder's alone). Then, with the attention

    "bahdanau"  the state before a token asks; what it finds enters the layers with the token; state, find and token
                make the readout tanh(W [s; c; y]);
    "luong_.."  the layers read the token, and the new state asks; the readout is tanh(W [c; s]), and with
                `input_feeding` it enters the layers with the next token;
    None        the memory's mean is all there is: an encoder with `summary=True` makes it of one vector. With
                `input_feeding` it enters with each token and the readout is that of "bahdanau" (Cho et al. 2014),
                without it is the state itself (Sutskever et al. 2014).

    Where nothing that is found enters the layers, a call reads all tokens at once and asks for all of them at once.

    Args:
        vocabulary_size: V.
        hidden_dim: D.
        num_layers: recurrent layers.
        cell: "lstm" or "gru".
        attention: "bahdanau", "luong_dot" (a memory of the width D), "luong_general", "luong_concat", or None.
        input_feeding: see above; "bahdanau" cannot be without.
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
        Bahdanau et al. 2015, section A.2; Luong et al. 2015, sections 3.1 and 3.3; Sutskever et al. 2014; Cho et al.
        2014; Xu et al., "Show, Attend and Tell", 2015, section 3.1.2.
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
        check_positive(vocabulary_size=vocabulary_size, embedding_dim=embedding_dim)
        check_shares(token_dropout=token_dropout)
        _check_attention(attention, input_feeding, cross_attention)
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
        self.token_embedding = TokenEmbedding(
            vocabulary_size, width, output_bias=output_bias and tied, dtype=dtype, name="token_embedding"
        )
        seeds = {name: part_seed(seed, "decoder", name) for name in ("words", "hidden_tokens", "fed", "readout")}
        self.hidden_tokens = keras.layers.Dropout(
            token_dropout, noise_shape=(None, None, 1), seed=seeds["hidden_tokens"], dtype=dtype
        )
        self.dropouts = {
            name: keras.layers.Dropout(dropout, seed=seeds[name], dtype=dtype, name=f"{name}_dropout")
            for name in ("words", "fed", "readout")
        }
        self.stack = RecurrentStack(
            hidden_dim, num_layers, cell, dropout, seed=part_seed(seed, "decoder", "stack"), dtype=dtype, name="stack"
        )
        self.asking = self._make_attention()
        self.initial: Any = None
        self.readout: Any = None
        self.projection: Any = None
        if cross_attention:
            units = num_layers * self.stack.num_states * hidden_dim
            self.initial = keras.layers.Dense(units, activation="tanh", dtype=dtype, name="initial_state")
            if attention is not None or input_feeding:
                self.readout = keras.layers.Dense(hidden_dim, activation="tanh", dtype=dtype, name="readout")
        self.output_embedding = self.token_embedding
        if not tied:
            self.output_embedding = TokenEmbedding(
                vocabulary_size, hidden_dim, output_bias=output_bias, dtype=dtype, name="output_embedding"
            )
        elif width != hidden_dim:
            self.projection = keras.layers.Dense(width, use_bias=False, dtype=dtype, name="projection")

    def _make_attention(self) -> Any:
        named = {"dtype": self.dtype_policy, "name": "attention"}
        if self.attention in ("bahdanau", "luong_concat"):
            return AdditiveAttention(self.hidden_dim, **named)
        if self.attention is not None:
            return MultiplicativeAttention(self.attention.removeprefix("luong_"), **named)
        return None

    @property
    def is_luong(self) -> bool:
        """Whether the new state asks, rather than that before the token."""
        return self.attention is not None and self.attention != "bahdanau"

    @property
    def is_fed(self) -> bool:
        """Whether the layers read anything but the token."""
        return self.has_cross_attention and self.input_feeding

    def build(self, token_ids_shape: Any, memory_shape: Any = None) -> None:
        self._check_memory(memory_shape)
        width = self.token_embedding.hidden_dim
        for embedding in (self.token_embedding, self.output_embedding):
            if not embedding.built:  # a shared table is built by whoever comes first
                embedding.build((None, None))
        memory_width = memory_shape[-1] if self.has_cross_attention else 0
        fed = self.hidden_dim if self.is_luong else memory_width
        self.stack.build((None, None, width + fed * self.is_fed))
        if self.initial is not None:
            self.initial.build((None, memory_width))
        if self.asking is not None:
            self.asking.build((None, None, self.hidden_dim), memory_shape)
        if self.readout is not None:
            self.readout.build((None, None, self.hidden_dim + memory_width + width * (not self.is_luong)))
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
        self._check_scores(return_attention_scores)
        context, first = self._start(memory, memory_mask, ops.shape(token_ids)[0])
        words = self._embed(token_ids, bool(training))  # (B, T, E)
        run = self._run_at_once if self.attention is None or not self.is_fed else self._run_by_places
        read, state, weights = run(words, context, first if state is None else state, bool(training))
        if places is not None:
            read = ops.take(ops.reshape(read, (-1, read.shape[-1])), places, axis=0)  # (M, ..)
        logits = self._logits(read, bool(training))
        return (logits, state, weights[:, None, None]) if return_attention_scores else (logits, state)

    def _run_at_once(self, words: Any, context: Any, state: Any, training: bool) -> tuple[Any, Any, Any]:
        """All places: what the logits are made of `(B, T, ..)`, the last state, and the weights `(B, T, S)`."""
        inputs, fed, weights = words, None, None
        if self.is_fed:  # the same for all places
            fed = ops.repeat(context["mean"][:, None], ops.shape(words)[1], axis=1)
            inputs = ops.concatenate([words, self.dropouts["fed"](fed, training=training)], axis=-1)
        read, cells = self.stack(inputs, state["cells"], training=training)
        if self.is_luong:
            found, weights = self.asking.attend(read, context["attention"])
            read = self.readout(ops.concatenate([found, read], axis=-1))
        elif fed is not None:
            read = ops.concatenate([read, words, fed], axis=-1)
        return read, {"cells": cells}, weights

    def _run_by_places(self, words: Any, context: Any, state: Any, training: bool) -> tuple[Any, Any, Any]:
        """The same one place after the other."""
        rows = {"words": ops.swapaxes(words, 0, 1)}  # (T, B, E)
        if training and self.dropout:
            fed = state["fed"] if self.is_luong else context["attention"]["values"][:, 0]
            ones = ops.ones((ops.shape(words)[1], *ops.shape(fed)), dtype=self.compute_dtype)
            rows["fed"], rows["layers"] = self.dropouts["fed"](ones, training=True), self.stack.masks(rows["words"])

        def body(state: Any, rows: Any) -> tuple[Any, Any]:
            read, state, weights = self._advance(rows["words"], context, state, rows.get("fed"), rows.get("layers"))
            return state, (read, weights)

        state, outputs = backend.scan(body, state, rows, [self.compute_dtype] * 2)
        read, weights = (ops.swapaxes(output, 0, 1) for output in outputs)
        return read, state, weights

    def _advance(
        self, word: Any, context: Any, state: Any, fed_mask: Any = None, masks: Any = None
    ) -> tuple[Any, Any, Any]:
        """One place: what the logits are made of `(B, ..)`, the state, and the weights `(B, S)`."""
        fed = weights = None
        if self.attention == "bahdanau":
            fed, weights = self.asking.step(state["cells"][-1][0], context["attention"], return_attention_scores=True)
        elif self.is_fed:
            fed = state["fed"] if self.is_luong else context["mean"]
        inputs = word
        if fed is not None:
            inputs = ops.concatenate([word, fed if fed_mask is None else fed * fed_mask], axis=-1)
        read, cells = self.stack.step(inputs, state["cells"], masks)
        state = {"cells": cells}
        if self.is_luong:
            found, weights = self.asking.step(read, context["attention"], return_attention_scores=True)
            read = self.readout(ops.concatenate([found, read], axis=-1))
            if self.is_fed:
                state["fed"] = read
        elif fed is not None:
            read = ops.concatenate([read, word, fed], axis=-1)
        return read, state, weights

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
        return self._start(memory, memory_mask, ops.shape(memory)[0] if batch_size is None else batch_size)

    def step(self, token_ids: Any, index: Any, context: Any, state: Any) -> tuple[Any, Any]:
        """Scores the token that follows position `index`.

        Args:
            token_ids: `(B,)`, the tokens at position `index`.
            index: the position, which counts for nothing here.
            context, state: from `start` or the last step.

        Returns:
            logits `(B, V)` and the new state.
        """
        read, state, _ = self._advance(self._embed(token_ids, False), context, state)
        return self._logits(read, False), state

    def _start(self, memory: Any, memory_mask: Any, batch_size: Any) -> tuple[Any, Any]:
        self._check_memory(None if memory is None else memory.shape)
        if self.initial is None:
            return {}, {"cells": self.stack.zeros(batch_size)}
        if memory_mask is None:
            memory_mask = getattr(memory, "_keras_mask", None)
        context: dict[str, Any] = {}
        mean = _mean(ops.cast(ops.convert_to_tensor(memory), self.compute_dtype), memory_mask)
        if self.asking is not None:
            context["attention"] = self.asking.start(memory, memory_mask)
        elif self.is_fed:
            context["mean"] = mean
        arrays, count = (
            ops.split(self.initial(mean), self.num_layers * self.stack.num_states, -1),
            self.stack.num_states,
        )
        state: dict[str, Any] = {"cells": [arrays[i : i + count] for i in range(0, len(arrays), count)]}
        if self.is_luong and self.is_fed:
            state["fed"] = ops.zeros_like(arrays[0])
        return context, state

    def _embed(self, token_ids: Any, training: bool) -> Any:
        words = self.token_embedding(token_ids)
        if training and self.token_dropout:  # hidden, not rescaled: at inference every token is there
            words = self.hidden_tokens(words, training=True) * (1.0 - self.token_dropout)
        return self.dropouts["words"](words, training=training)

    def _logits(self, read: Any, training: bool) -> Any:
        if self.readout is not None and not self.is_luong:  # Luong's is made already, to be fed
            read = self.readout(read)
        read = self.dropouts["readout"](read, training=training)
        return self.output_embedding(read if self.projection is None else self.projection(read), reverse=True)

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
        self._check_scores(return_attention_scores)
        self._check_memory(None if memory is None else memory.shape)
        batch, length = token_ids.shape
        vectors = (batch, length) if places is None else tuple(places.shape)
        dtype = keras.backend.result_type(self.compute_dtype, "float32")
        logits = keras.KerasTensor((*vectors, self.vocabulary_size), dtype=dtype)
        state = {"cells": self.stack.states_spec(batch)}
        if self.is_luong and self.is_fed:
            state["fed"] = keras.KerasTensor((batch, self.hidden_dim), dtype=self.compute_dtype)
        if not return_attention_scores:
            return logits, state
        return logits, state, keras.KerasTensor((batch, 1, 1, length, memory.shape[1]), dtype=self.compute_dtype)

    def _check_scores(self, wanted: bool) -> None:
        if wanted and self.attention is None:
            raise ValueError(f"{self.name} has no attention (attention=None), so it has no scores of it.")

    def _check_memory(self, shape: Any) -> None:
        if self.has_cross_attention == (shape is None):
            said = "looks at a memory (B, S, D)" if self.has_cross_attention else "is a language model: memory=None"
            raise ValueError(f"{self.name} {said}. Received memory of shape {shape and tuple(shape)}.")

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


def _mean(memory: Any, mask: Any) -> Any:
    """The mean of the real positions `(B, D')`; zeros where there are none."""
    if mask is None:
        return ops.mean(memory, axis=1)
    real = check_padding(mask, memory.shape[1], "memory_mask")[..., None]
    count = ops.maximum(ops.sum(ops.cast(real, "int32"), axis=1), 1)
    return ops.sum(ops.where(real, memory, ops.zeros((), memory.dtype)), axis=1) / ops.cast(count, memory.dtype)


def _check_attention(attention: str | None, input_feeding: bool, cross_attention: bool) -> None:
    if attention is not None and attention not in ATTENTIONS:
        raise ValueError(f"attention is one of {', '.join(ATTENTIONS)} or None. Received {attention!r}.")
    if attention == "bahdanau" and not input_feeding:
        raise ValueError('attention="bahdanau" feeds what it finds to the layers. Received input_feeding=False.')
    if attention is not None and not cross_attention:
        raise ValueError(f"cross_attention=False has no memory to look at: attention=None. Received {attention!r}.")
