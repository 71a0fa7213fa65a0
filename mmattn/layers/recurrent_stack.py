"""Recurrent layers one above the other, over a whole sequence at once or one place at a time.

Shapes: B batch, T length, D the layers' width.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
from keras import ops

from mmattn.layers.checks import check_positive, check_shares
from mmattn.layers.seeds import part_seed

CELLS = {"lstm": keras.layers.LSTM, "gru": keras.layers.GRU}


def check_cell(cell: str) -> None:
    """Refuses an unknown kind of recurrent layer.

    >>> check_cell("rnn")
    Traceback (most recent call last):
    ValueError: cell is one of lstm, gru. Received 'rnn'.
    """
    if cell not in CELLS:
        raise ValueError(f"cell is one of {', '.join(CELLS)}. Received {cell!r}.")


def unread_zeros(shape: Any, dtype: str, unread: Iterable[Any]) -> Any:
    """Zeros in place of what weights and arrays would make of no place at all; their slopes are zeros and not None."""
    zeros = ops.zeros(shape, dtype=dtype)
    for array in unread:
        if array is not None and keras.backend.is_float_dtype(keras.backend.standardize_dtype(array.dtype)):
            nothing = ops.reshape(ops.convert_to_tensor(array), (-1,))[:0]
            zeros = zeros + ops.cast(ops.sum(nothing), dtype)
    return zeros


@keras.saving.register_keras_serializable(package="mmattn")
class RecurrentStack(keras.layers.Layer):
    """Keras' LSTM or GRU layers, each reading the one below.

    Args:
        hidden_dim: D.
        num_layers: N.
        cell: "lstm" or "gru".
        dropout: share dropped in training of what one layer hands to the next, at each place anew; what a layer keeps
            for its next place is never dropped (Zaremba et al. 2015).
        seed: of the dropouts; each makes its own from it.

    Call arguments:
        inputs: `(B, T, D')`.
        states: what the layers remember: for each a list of `(B, D)`, an LSTM's output and its cell, a GRU's output.

    Returns:
        the top layer's outputs `(B, T, D)` and the states after the last place.

    Step by step: `step` reads one place. Where each place's input depends on the place before, that is how to train,
    with `masks` for the dropouts.

    Raises:
        ValueError: for sizes that are not positive, or an unknown cell.

    Example:
        >>> import numpy as np
        >>> stack = RecurrentStack(hidden_dim=4, num_layers=2, cell="gru")
        >>> words = np.ones((1, 3, 6), "float32")
        >>> whole, _ = stack(words, stack.zeros(1))
        >>> states = stack.zeros(1)
        >>> for t in range(3):
        ...     top, states = stack.step(words[:, t], states)
        >>> bool(np.allclose(top, whole[:, -1], atol=1e-6))
        True

    Source:
        Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997. The GRU is after Cho et al., "Learning Phrase
        Representations using RNN Encoder-Decoder", 2014: they reset the state before it is multiplied, Keras the
        product (`reset_after=True`).
    """

    def __init__(
        self,
        hidden_dim: int,
        num_layers: int,
        cell: str = "lstm",
        dropout: float = 0.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_positive(hidden_dim=hidden_dim, num_layers=num_layers)
        check_shares(dropout=dropout)
        check_cell(cell)
        self.hidden_dim = hidden_dim
        self.num_layers = num_layers
        self.cell = cell
        self.dropout = dropout
        self.seed = seed
        dtype = self.dtype_policy
        self.layers = [
            CELLS[cell](hidden_dim, return_sequences=True, return_state=True, dtype=dtype, name=f"layer_{i}")
            for i in range(num_layers)
        ]
        self.dropouts = [
            keras.layers.Dropout(dropout, seed=part_seed(seed, f"above_{i}"), dtype=dtype)
            for i in range(num_layers - 1)
        ]

    @property
    def num_states(self) -> int:
        """How many arrays a layer remembers."""
        return 2 if self.cell == "lstm" else 1

    def build(self, inputs_shape: Any) -> None:
        width = inputs_shape[-1]
        for layer in self.layers:
            layer.build((None, None, width))
            width = self.hidden_dim

    def call(self, inputs: Any, states: Any, training: bool | None = None) -> tuple[Any, Any]:
        if 0 in inputs.shape[:2]:  # no place to begin with: Keras' layers need one
            shape = (*ops.shape(inputs)[:2], self.hidden_dim)
            return unread_zeros(shape, self.compute_dtype, [*self.trainable_weights, inputs]), states
        after = []
        for i, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            if i:
                inputs = self.dropouts[i - 1](inputs, training=training)
            inputs, *state = layer(inputs, initial_state=state, training=training)
            after.append(state)
        return inputs, after

    def step(self, inputs: Any, states: Any, masks: Any = None) -> tuple[Any, Any]:
        """One place.

        Args:
            inputs: `(B, D')`.
            states: from the place before.
            masks: this place's rows of what `masks` gave; None drops nothing.

        Returns:
            the top layer's output `(B, D)` and the states.
        """
        after = []
        for i, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            if i and masks is not None:
                inputs = inputs * masks[i - 1]
            inputs, state = layer.cell(inputs, state)
            after.append(list(state))
        return inputs, after

    def masks(self, like: Any) -> list[Any]:
        """For every layer but the first what its input is multiplied by in training, `(T, B, D)`; `like`: `(T, B, ..)`.

        They are made before the loop over the places, since not every backend can draw numbers inside of one.
        """
        ones = ops.ones((*ops.shape(like)[:2], self.hidden_dim), dtype=self.compute_dtype)
        return [dropout(ones, training=True) for dropout in self.dropouts]

    def zeros(self, batch_size: Any) -> list[list[Any]]:
        """The states of those who have read nothing."""
        zeros = ops.zeros((batch_size, self.hidden_dim), dtype=self.compute_dtype)
        return [[zeros] * self.num_states for _ in self.layers]

    def compute_output_spec(self, inputs: Any, states: Any, training: bool | None = None) -> tuple[Any, Any]:
        outputs = keras.KerasTensor((*inputs.shape[:2], self.hidden_dim), dtype=self.compute_dtype)
        return outputs, self.states_spec(inputs.shape[0])

    def states_spec(self, batch_size: int | None) -> list[list[Any]]:
        """The states' shapes."""
        return [
            [keras.KerasTensor((batch_size, self.hidden_dim), dtype=self.compute_dtype)] * self.num_states
            for _ in self.layers
        ]

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "hidden_dim": self.hidden_dim,
            "num_layers": self.num_layers,
            "cell": self.cell,
            "dropout": self.dropout,
            "seed": self.seed,
        }
