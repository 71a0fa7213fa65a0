"""The convolutional decoder: gated convolutions over what was said, each layer of which looks at the source."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn.layers import ConvolutionalBlock, MultiStepAttention, TokenEmbedding, WeightNormConvolution
from mmattn.layers.checks import check_ids, check_no_state, check_positive, check_shares
from mmattn.layers.convolution import EMBEDDING_DEVIATION
from mmattn.layers.multi_step_attention import sources
from mmattn.layers.positions import LearnedPositions, added_positions
from mmattn.layers.quantized import KeepsQuantization
from mmattn.layers.seeds import part_seed


@keras.saving.register_keras_serializable(package="mmattn")
class ConvolutionalDecoder(KeepsQuantization, keras.layers.Layer):
    """Embedded tokens, causal gated convolutions with an attention after each, the embedding table as output layer.

    The paper's output layer is a matrix of its own; here it is the table, as in the other decoders.

    Args:
        vocabulary_size: V.
        hidden_dim: D, the width of the convolutions.
        num_layers: N.
        kernel_size: k; a place sees the N (k - 1) before it.
        embedding_dim: F; D when not given.
        dropout: share dropped in training, of the embeddings, of what goes into each convolution and of what goes
            into the output layer.
        positions: "sinusoidal", "none", or "learned" with `max_length` as in the paper.
        max_length: the longest sequence with learned positions.
        source_embeddings: whether a memory is `mmattn.encoders.ConvolutionalEncoder`'s, outputs and embeddings side by
            side: `(B, S, 2 F)`. False takes that of any other encoder, `(B, S, D')`, and maps it to the width F.
        cross_attention: False gives a language model, whose memory is None.
        output_bias: whether the logits have a bias.
        seed: of the dropouts; each makes its own from it.

    Call arguments:
        token_ids: `(B, T)` integers, the start token first.
        memory: `(B, S, D')`, or None for a language model.
        memory_mask: `(B, S)` boolean, True = real; None = all real.
        state: None or (); a decoder that remembers across calls carries its memory in this argument.
        places: int `(M,)`, flat places b * T + t: give the logits there alone, `(M, V)`.
        return_attention_scores: also return the attention `(B, N, 1, T, S)`.

    Returns:
        logits `(B, T, V)` and the state, and with `return_attention_scores` the weights.

    Raises:
        ValueError: for sizes and shares that are none, a sequence that is longer than the learned positions, a memory
            that does not go with `cross_attention` and `source_embeddings`.

    Example:
        >>> import numpy as np
        >>> decoder = ConvolutionalDecoder(20, hidden_dim=8, num_layers=2)
        >>> memory, ids = np.ones((1, 5, 16), "float32"), np.array([[2, 7, 9]])
        >>> logits, _ = decoder(ids, memory)
        >>> context, state = decoder.start(memory, None, max_length=3)
        >>> for t in range(3):
        ...     step_logits, state = decoder.step(ids[:, t], t, context, state)
        >>> bool(np.allclose(step_logits, logits[:, -1], atol=1e-5))
        True

    Source:
        Gehring et al., "Convolutional Sequence to Sequence Learning", 2017, section 3; the language model: Dauphin et
        al., "Language Modeling with Gated Convolutional Networks", 2017.
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
        source_embeddings: bool = True,
        cross_attention: bool = True,
        output_bias: bool = True,
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
        self.source_embeddings = source_embeddings
        self.has_cross_attention = cross_attention
        self.output_bias = output_bias
        self.seed = seed

        dtype, retained = self.dtype_policy, 1.0 - dropout
        self._width = embedding_dim or hidden_dim  # F
        self.token_embedding = TokenEmbedding(
            vocabulary_size,
            self._width,
            scale=False,
            output_bias=output_bias,
            initializer=keras.initializers.RandomNormal(stddev=EMBEDDING_DEVIATION),
            dtype=dtype,
            name="token_embedding",
        )
        self.position_embedding = added_positions(positions, max_length, EMBEDDING_DEVIATION, dtype)
        seeds = {name: part_seed(seed, "decoder", name) for name in ("embedding_dropout", "output_dropout")}
        self.embedding_dropout = keras.layers.Dropout(dropout, seed=seeds["embedding_dropout"], dtype=dtype)
        self.output_dropout = keras.layers.Dropout(dropout, seed=seeds["output_dropout"], dtype=dtype)
        self.input_map = WeightNormConvolution(hidden_dim, retained=retained, dtype=dtype, name="input_map")
        self.blocks = [
            ConvolutionalBlock(
                kernel_size,
                causal=True,
                dropout=dropout,
                seed=part_seed(seed, "decoder", f"block_{i}"),
                dtype=dtype,
                name=f"block_{i}",
            )
            for i in range(num_layers)
        ]
        self.attentions = [
            MultiStepAttention(dtype=dtype, name=f"attention_{i}") for i in range(num_layers if cross_attention else 0)
        ]
        self.memory_map = None
        if cross_attention and not source_embeddings:
            self.memory_map = WeightNormConvolution(self._width, dtype=dtype, name="memory_map")
        self.output_map = WeightNormConvolution(self._width, dtype=dtype, name="output_map")

    def build(self, token_ids_shape: Any, memory_shape: Any = None) -> None:
        self._check_memory(memory_shape)
        inner, outer = (None, None, self.hidden_dim), (None, None, self._width)
        if not self.token_embedding.built:  # a shared table is built by whoever comes first
            self.token_embedding.build(token_ids_shape)
        if self.position_embedding is not None:
            self.position_embedding.build(outer)
        self.input_map.build(outer)
        for block in self.blocks:
            block.build(inner)
        for attention in self.attentions:
            attention.build(inner, outer, outer, outer)
        if self.memory_map is not None:
            self.memory_map.build(memory_shape)
        self.output_map.build(inner)

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
        self._check(token_ids, memory, return_attention_scores)
        check_no_state(self.name, state)
        embeddings = self.token_embedding(token_ids)  # (B, T, F)
        if self.position_embedding is not None:
            embeddings = self.position_embedding(embeddings)
        embeddings = self.embedding_dropout(embeddings, training=training)
        x = self.input_map(embeddings)  # (B, T, D)
        scores = []
        context = self._context(memory, memory_mask)
        for i, block in enumerate(self.blocks):
            x = block(x, training=training)
            if self.attentions:
                x, weights = self.attentions[i].attend(x, embeddings, context)
                scores.append(weights[:, None])
        if places is not None:
            x = ops.take(ops.reshape(x, (-1, self.hidden_dim)), places, axis=0)  # (M, D)
        logits = self._logits(x, training)
        return (logits, (), ops.stack(scores, axis=1)) if return_attention_scores else (logits, ())

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
        self._check(token_ids, memory, return_attention_scores)
        check_no_state(self.name, state)
        batch, length = token_ids.shape
        vectors = (batch, length) if places is None else tuple(places.shape)
        dtype = keras.backend.result_type(self.compute_dtype, "float32")
        logits = keras.KerasTensor((*vectors, self.vocabulary_size), dtype=dtype)
        if not return_attention_scores:
            return logits, ()
        shape = (batch, self.num_layers, 1, length, memory.shape[1])
        return logits, (), keras.KerasTensor(shape, dtype=self.compute_dtype)

    def start(self, memory: Any, memory_mask: Any, max_length: int, batch_size: Any = None) -> tuple[Any, Any]:
        """What generation starts from.

        Args:
            memory: `(B, S, D')`, or None for a language model (then `batch_size` is needed).
            memory_mask: `(B, S)` boolean or None. The mask that Keras has attached to the memory counts then.
            max_length: how many steps there will be at most.
            batch_size: B, where there is no memory to tell it.

        Returns:
            context: the keys and values of the memory, which all layers share and which never change.
            state: per layer its window, the last k - 1 inputs of its convolution `(B, k - 1, D)`.

        Raises:
            ValueError: for more steps than there are learned positions, or neither a memory nor a `batch_size`.
        """
        self._check_memory(None if memory is None else memory.shape)
        if isinstance(self.position_embedding, LearnedPositions):
            self.position_embedding.check_length(max_length)
        if batch_size is None:
            if memory is None:
                raise ValueError("Without a memory, start needs batch_size, the number of rows. Received None.")
            batch_size = ops.shape(memory)[0]
        return self._context(memory, memory_mask), [block.start(batch_size) for block in self.blocks]

    def step(self, token_ids: Any, index: Any, context: Any, state: Any) -> tuple[Any, Any]:
        """Scores the token that follows position `index`.

        Args:
            token_ids: `(B,)`, the tokens at position `index`.
            index: the position, one number for all rows.
            context, state: from `start` or the last step.

        Returns:
            logits `(B, V)` and the new state.
        """
        embeddings = self.token_embedding(token_ids)  # (B, F)
        if self.position_embedding is not None:
            embeddings = self.position_embedding.step(embeddings, index)
        x = self.input_map(embeddings)
        windows = []
        for i, (block, window) in enumerate(zip(self.blocks, state, strict=True)):
            x, window = block.step(x, window)
            if self.attentions:
                x = self.attentions[i].step(x, embeddings, context)
            windows.append(window)
        return self._logits(x), windows

    def _logits(self, x: Any, training: bool | None = False) -> Any:
        return self.token_embedding(self.output_dropout(self.output_map(x), training=training), reverse=True)

    def _context(self, memory: Any, memory_mask: Any) -> dict[str, Any]:
        """The keys and values `(B, S, F)` of the memory and its mask, for all layers; nothing of a language model."""
        if memory is None:
            return {}
        if memory_mask is None:
            memory_mask = getattr(memory, "_keras_mask", None)
        memory = ops.cast(memory, self.compute_dtype)
        if self.memory_map is not None:
            outputs, embeddings = self.memory_map(memory, mask=memory_mask), None
        else:
            outputs, embeddings = ops.split(memory, 2, axis=-1)
        keys, values = sources(outputs, embeddings, self.num_layers, memory_mask)
        return self.attentions[0].start(keys, values, memory_mask)

    def _check(self, token_ids: Any, memory: Any, return_attention_scores: bool) -> None:
        check_ids(self.name, token_ids, "token_ids")
        self._check_memory(None if memory is None else memory.shape)
        if return_attention_scores and not self.has_cross_attention:
            raise ValueError(f"{self.name} has no cross-attention (cross_attention=False), so it has no scores of it.")
        if isinstance(self.position_embedding, LearnedPositions):
            self.position_embedding.check_length(token_ids.shape[1])

    def _check_memory(self, shape: Any) -> None:
        if (shape is not None) != self.has_cross_attention:
            wanted = "needs a memory (B, S, D')" if self.has_cross_attention else "takes no memory"
            raise ValueError(f"{self.name}, built with cross_attention={self.has_cross_attention}, {wanted}.")
        if shape is not None and self.source_embeddings and shape[-1] != 2 * self._width:
            raise ValueError(
                f"{self.name} takes outputs and embeddings of its own width side by side, {2 * self._width} in all, as "
                f"ConvolutionalEncoder gives them. Received {shape[-1]}. source_embeddings=False takes any memory."
            )

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
            "source_embeddings": self.source_embeddings,
            "cross_attention": self.has_cross_attention,
            "output_bias": self.output_bias,
            "seed": self.seed,
        }
