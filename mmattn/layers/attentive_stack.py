"""Recurrent layers that look at a memory: what they know after each word.

Shapes: B batch, T target length, S memory length, D width of the states, D' of the memory, E of the words.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn import backend
from mmattn.layers.checks import check_rows
from mmattn.layers.masks import mean_of_real
from mmattn.layers.quantized import KeepsQuantization
from mmattn.layers.recurrent_stack import RecurrentStack, unread_zeros
from mmattn.layers.seeds import part_seed
from mmattn.layers.single_head import AdditiveAttention, MultiplicativeAttention

ATTENTIONS = ("bahdanau", "luong_dot", "luong_general", "luong_concat")


@keras.saving.register_keras_serializable(package="mmattn")
class AttentiveStack(KeepsQuantization, keras.layers.Layer):
    """Recurrent layers over embedded words, an attention, and the readout: one vector of all that is known at a place.

    What each layer starts from is a dense layer of the memory's mean: every encoder has one, so that words and patches
    start a text in the same way (Xu et al. 2015; Bahdanau's own, the first state of the backward encoder, is a
    recurrent encoder's alone). Then, with the attention

    "bahdanau"  the state before a word asks; what it finds enters the layers with the word; state, word and find make
                the readout tanh(W [s; y; c]) (the paper's is a maxout layer over the state before the word, y and c);
    "luong_.."  the layers read the word, and the new state asks; the readout is tanh(W [c; s]), and with
                `input_feeding` it enters the layers with the next word;
    None        the memory's mean is all there is. With `input_feeding` it enters with each word, and the readout is
                that of "bahdanau" (after Cho et al. 2014, with a maxout layer there), without it is the state itself
                (after Sutskever et al. 2014, whose layers each start from the encoder's layer of the same height).

    Where nothing that is found enters the layers, a call reads all words at once and asks for all of them at once.

    Args:
        hidden_dim: D.
        num_layers: recurrent layers.
        cell: "lstm" or "gru".
        attention: "bahdanau", "luong_dot" (a memory of the width D), "luong_general", "luong_concat", or None.
        input_feeding: see above; "bahdanau" cannot be without.
        cross_attention: False reads words alone; then `attention` is None too.
        dropout: share dropped in training of what is fed to the layers beside the word, and between the layers.
        seed: of the dropouts; each makes its own from it.

    Call arguments:
        words: `(B, T, E)`.
        context, state: from `start`, or the state after an earlier call.

    Returns:
        the readouts `(B, T, D)`, the state, and the weights `(B, T, S)`, None without attention.

    Raises:
        ValueError: for settings that do not fit.

    Example:
        >>> import numpy as np
        >>> layer = AttentiveStack(hidden_dim=8, num_layers=1)
        >>> layer.build((None, None, 4), (None, None, 6))
        >>> words, memory = np.ones((1, 3, 4), "float32"), np.ones((1, 5, 6), "float32")
        >>> readouts, _, weights = layer(words, *layer.start(memory))
        >>> tuple(readouts.shape), tuple(weights.shape)
        ((1, 3, 8), (1, 3, 5))

    Source:
        After Bahdanau et al. 2015, section A.2; Luong et al. 2015, sections 3.1 and 3.3; Sutskever et al. 2014; Cho et
        al. 2014; Xu et al., "Show, Attend and Tell", 2015, section 3.1.2.
    """

    def __init__(
        self,
        hidden_dim: int,
        num_layers: int,
        cell: str = "lstm",
        attention: str | None = "luong_general",
        input_feeding: bool = True,
        cross_attention: bool = True,
        dropout: float = 0.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        _check_attention(attention, input_feeding, cross_attention)
        self.hidden_dim = hidden_dim
        self.num_layers = num_layers
        self.cell = cell
        self.attention = attention
        self.input_feeding = input_feeding
        self.cross_attention = cross_attention
        self.dropout = dropout
        self.seed = seed
        self.is_luong = attention is not None and attention != "bahdanau"
        self.is_fed = cross_attention and input_feeding  # the layers read more than the word

        dtype = self.dtype_policy
        self.stack = RecurrentStack(
            hidden_dim, num_layers, cell, dropout, seed=part_seed(seed, "stack"), dtype=dtype, name="stack"
        )
        self.fed_dropout = keras.layers.Dropout(dropout, seed=part_seed(seed, "fed"), dtype=dtype, name="fed_dropout")
        self.asking: Any = None
        if attention in ("bahdanau", "luong_concat"):
            self.asking = AdditiveAttention(hidden_dim, dtype=dtype, name="attention")
        elif attention is not None:
            self.asking = MultiplicativeAttention(attention.removeprefix("luong_"), dtype=dtype, name="attention")
        self.initial: Any = None
        if cross_attention:
            units = num_layers * self.stack.num_states * hidden_dim
            self.initial = keras.layers.Dense(units, activation="tanh", dtype=dtype, name="initial_state")
        self.readout: Any = None
        if self.asking is not None or self.is_fed:
            self.readout = keras.layers.Dense(hidden_dim, activation="tanh", dtype=dtype, name="readout")

    def build(self, words_shape: Any, memory_shape: Any = None) -> None:
        self._check_memory(memory_shape)
        width, memory_width = words_shape[-1], memory_shape[-1] if self.cross_attention else 0
        self.stack.build((None, None, width + self.is_fed * (self.hidden_dim if self.is_luong else memory_width)))
        if self.initial is not None:
            self.initial.build((None, memory_width))
        if self.asking is not None:
            self.asking.build((None, None, self.hidden_dim), memory_shape)
        if self.readout is not None:
            self.readout.build((None, None, self.hidden_dim + memory_width + width * (not self.is_luong)))

    def start(self, memory: Any = None, memory_mask: Any = None, batch_size: Any = None) -> tuple[Any, Any]:
        """What the layers look at, which never changes, and what they remember and are fed before the first word.

        Args:
            memory: `(B, S, D')`, or None where there is none (then `batch_size` is needed).
            memory_mask: `(B, S)` boolean or None. The mask that Keras has attached to the memory counts then.
            batch_size: B.
        """
        self._check_memory(None if memory is None else memory.shape)
        if self.initial is None:
            return {}, {"cells": self.stack.zeros(batch_size)}
        if memory_mask is None:
            memory_mask = getattr(memory, "_keras_mask", None)
        context: dict[str, Any] = {}
        mean = mean_of_real(ops.cast(ops.convert_to_tensor(memory), self.compute_dtype), memory_mask)
        if self.asking is not None:
            context["attention"] = self.asking.start(memory, memory_mask)
        elif self.is_fed:
            context["mean"] = mean
        count = self.stack.num_states
        arrays = ops.split(self.initial(mean), self.num_layers * count, axis=-1)
        state: dict[str, Any] = {"cells": [arrays[i : i + count] for i in range(0, len(arrays), count)]}
        if self.is_luong and self.is_fed:
            state["fed"] = ops.zeros_like(arrays[0])
        return context, state

    def call(self, words: Any, context: Any, state: Any, training: bool | None = None) -> tuple[Any, Any, Any]:
        self._check_state(state, words.shape[0])
        if 0 in words.shape[:2]:  # no place to begin with
            batch, length = ops.shape(words)[:2]
            unread = [*self.trainable_weights, words, *keras.tree.flatten(context)]
            weights = None
            if self.asking is not None:
                sources = ops.shape(context["attention"]["keys"])[1]
                weights = ops.zeros((batch, length, sources), dtype=self.compute_dtype)
            return unread_zeros((batch, length, self.hidden_dim), self.compute_dtype, unread), state, weights
        if self.asking is not None and self.is_fed:
            return self._by_places(words, context, state, bool(training))
        inputs, fed, weights = words, None, None
        if self.is_fed:  # the same at all places
            fed = ops.repeat(context["mean"][:, None], ops.shape(words)[1], axis=1)
            inputs = ops.concatenate([words, self.fed_dropout(fed, training=training)], axis=-1)
        top, cells = self.stack(inputs, state["cells"], training=training)
        if self.is_luong:
            found, weights = self.asking.attend(top, context["attention"])
            top = self.readout(ops.concatenate([found, top], axis=-1))
        elif fed is not None:
            top = self.readout(ops.concatenate([top, words, fed], axis=-1))
        return top, {"cells": cells}, weights

    def step(self, word: Any, context: Any, state: Any) -> tuple[Any, Any]:
        """One place: `(B, E)` in, the readout `(B, D)` and the state out."""
        self._check_state(state, word.shape[0])
        if "mean" in context:
            check_rows(self.name, word=word, memory=context["mean"])
        read, state, _ = self._advance(word, context, state)
        return self._read(read), state

    def _by_places(self, words: Any, context: Any, state: Any, training: bool) -> tuple[Any, Any, Any]:
        """One place after the other."""
        rows = {"words": ops.swapaxes(words, 0, 1)}  # (T, B, E)
        if training and self.dropout:
            fed = state["fed"] if self.is_luong else context["attention"]["values"][:, 0]
            ones = ops.ones((ops.shape(words)[1], *ops.shape(fed)), dtype=self.compute_dtype)
            rows["fed"], rows["layers"] = self.fed_dropout(ones, training=True), self.stack.masks(rows["words"])

        def body(state: Any, rows: Any) -> tuple[Any, Any]:
            read, state, weights = self._advance(rows["words"], context, state, rows.get("fed"), rows.get("layers"))
            return state, (read, weights)

        state, outputs = backend.scan(body, state, rows, [self.compute_dtype] * 2)
        read, weights = (ops.swapaxes(output, 0, 1) for output in outputs)
        return self._read(read), state, weights

    def _advance(
        self, word: Any, context: Any, state: Any, fed_mask: Any = None, masks: Any = None
    ) -> tuple[Any, Any, Any]:
        """One place: what `_read` takes `(B, ..)`, the state, and the weights `(B, S)`."""
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

    def _read(self, read: Any) -> Any:
        """The readout, of one place or all at once. Luong's is made already, to be fed."""
        return read if self.readout is None or self.is_luong else self.readout(read)

    def state_spec(self, batch_size: int | None) -> dict[str, Any]:
        """The state's shapes."""
        cells = self.stack.states_spec(batch_size)
        return {"cells": cells, "fed": cells[0][0]} if self.is_luong and self.is_fed else {"cells": cells}

    def compute_output_spec(
        self, words: Any, context: Any, state: Any, training: bool | None = None
    ) -> tuple[Any, Any, Any]:
        batch, length = words.shape[:2]
        readouts, weights = keras.KerasTensor((batch, length, self.hidden_dim), dtype=self.compute_dtype), None
        if self.asking is not None:
            sources = context["attention"]["keys"].shape[1]
            weights = keras.KerasTensor((batch, length, sources), dtype=self.compute_dtype)
        return readouts, self.state_spec(batch), weights

    def _check_memory(self, shape: Any) -> None:
        if self.cross_attention == (shape is None):
            said = "looks at a memory (B, S, D)" if self.cross_attention else "is a language model's: memory=None"
            raise ValueError(f"{self.name} {said}. Received memory of shape {shape and tuple(shape)}.")

    def _check_state(self, state: Any, rows: int | None) -> None:
        """Refuses what no call or `start` has returned for these rows."""
        wanted = self.state_spec(rows)
        arrays, specs = keras.tree.flatten(state), keras.tree.flatten(wanted)
        shapes = [tuple(getattr(array, "shape", ("?", "?"))) for array in arrays]
        places = zip(arrays, specs, strict=False)
        if (
            not isinstance(state, dict)
            or state.keys() != wanted.keys()
            or len(arrays) != len(specs)
            or any(shape[1:] != (self.hidden_dim,) for shape in shapes)
            or any(None not in (a.shape[0], spec.shape[0]) and a.shape[0] != spec.shape[0] for a, spec in places)
        ):
            kind = f"a dict of {sorted(state)}" if isinstance(state, dict) else f"a {type(state).__name__}"
            raise ValueError(
                f"{self.name} goes on with the state of an earlier call or of `start`, for the same rows: a dict of "
                f"{sorted(wanted)}, {len(specs)} arrays of the shape ({'B' if rows is None else rows}, "
                f"{self.hidden_dim}). Received {kind}, arrays of the shapes {shapes}."
            )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "hidden_dim": self.hidden_dim,
            "num_layers": self.num_layers,
            "cell": self.cell,
            "attention": self.attention,
            "input_feeding": self.input_feeding,
            "cross_attention": self.cross_attention,
            "dropout": self.dropout,
            "seed": self.seed,
        }


def _check_attention(attention: str | None, input_feeding: bool, cross_attention: bool) -> None:
    if attention is not None and attention not in ATTENTIONS:
        raise ValueError(f"attention is one of {', '.join(ATTENTIONS)} or None. Received {attention!r}.")
    if attention == "bahdanau" and not input_feeding:
        raise ValueError('attention="bahdanau" feeds what it finds to the layers. Received input_feeding=False.')
    if attention is not None and not cross_attention:
        raise ValueError(f"cross_attention=False has no memory to look at: attention=None. Received {attention!r}.")
