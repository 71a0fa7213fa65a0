"""Attention by one head, as recurrent and convolutional decoders ask: additive and multiplicative scores.

Shapes: B batch, T target (query) length, S memory (key) length, D query width, K key width, V value width.

Whatever stands under the memory's mask, even a NaN, reaches neither a result nor a gradient. Who may see nothing gets
zeros. The softmax is in float32 at least.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn.layers.checks import check_positive, check_rows
from mmattn.layers.dot_product import HIDDEN, Scoring, softmax, wide_of
from mmattn.layers.masks import check_padding
from mmattn.layers.quantized import KeepsQuantization

SCORES = ("dot", "general")


class SingleHeadAttention(KeepsQuantization, keras.layers.Layer):
    """What the layers below share: all but how a query and a key become a score.

    A subclass has `keys(memory (B, S, D'))`, which is computed once for all queries, and
    `scores(inputs (B, T, D), keys) -> (B, T, S)`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True

    def keys(self, memory: Any) -> Any:
        raise NotImplementedError

    def scores(self, inputs: Any, keys: Any) -> Any:
        raise NotImplementedError

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(inputs, (list, tuple)):
            raise ValueError(
                f"{self.name} takes queries and memory one by one and not as a list: layer(inputs, memory). Received a "
                f"{type(inputs).__name__} of {len(inputs)}."
            )
        return super().__call__(inputs, *args, **kwargs)

    def call(
        self,
        inputs: Any,
        memory: Any,
        memory_mask: Any = None,
        value: Any = None,
        return_attention_scores: bool = False,
    ) -> Any:
        self._check_inputs(inputs, memory, memory if value is None else value)
        found, weights = self.attend(inputs, self.start(memory, memory_mask, value))
        return (found, weights[:, None]) if return_attention_scores else found

    def _check_inputs(self, inputs: Any, memory: Any, value: Any) -> None:
        """Refuses what the backend would say in its own words."""
        shapes = [tuple(array.shape) for array in (inputs, memory, value)]
        if any(len(shape) != 3 for shape in shapes) or any(
            None not in pair and pair[0] != pair[1] for pair in zip(shapes[1][:2], shapes[2][:2], strict=True)
        ):
            raise ValueError(
                f"{self.name} takes inputs (B, T, D), memory (B, S, D') and value (B, S, V), B and S the same in the "
                f"last two. Received inputs {shapes[0]}, memory {shapes[1]}, value {shapes[2]}."
            )

    def start(self, memory: Any, memory_mask: Any = None, value: Any = None) -> dict[str, Any]:
        """The keys `(B, S, K)` and values `(B, S, V)` of the memory and its mask, which every step shares.

        The mask that Keras has attached to the memory counts where none is given, as in a call.
        """
        if memory_mask is None:
            memory_mask = getattr(memory, "_keras_mask", None)
        memory, value = (None if a is None else self._array(a) for a in (memory, value))
        if memory_mask is not None:
            memory_mask = check_padding(memory_mask, tuple(memory.shape[:2]), "memory_mask")
            real = memory_mask[..., None]
            memory, value = (None if a is None else ops.where(real, a, ops.zeros((), a.dtype)) for a in (memory, value))
        return {"keys": self.keys(memory), "values": memory if value is None else value, "mask": memory_mask}

    def step(self, inputs: Any, context: dict[str, Any], return_attention_scores: bool = False) -> Any:
        """Attends from one position's input `(B, D)`; returns `(B, V)`, or this and the weights `(B, S)`."""
        found, weights = self.attend(self._array(inputs)[:, None], context)
        return (found[:, 0], weights[:, 0]) if return_attention_scores else found[:, 0]

    def attend(self, inputs: Any, context: dict[str, Any]) -> tuple[Any, Any]:
        """What the queries `(B, T, D)` find in what `start` gave: `(B, T, V)`, and the weights `(B, T, S)`."""
        values, mask = context["values"], context["mask"]
        check_rows(self.name, inputs=inputs, keys=context["keys"], values=values)
        scores = self.scores(inputs, context["keys"])
        scores = ops.cast(scores, wide_of(scores.dtype))
        if mask is None:
            weights = softmax(scores)
        else:
            mask = mask[:, None]  # (B, 1, S)
            weights = softmax(ops.where(mask, scores, ops.cast(HIDDEN, scores.dtype)))
            weights = weights * ops.cast(ops.any(mask, axis=-1, keepdims=True), weights.dtype)
        weights = ops.cast(weights, values.dtype)
        return ops.matmul(weights, values), weights

    def _array(self, array: Any) -> Any:
        return ops.cast(ops.convert_to_tensor(array), self.compute_dtype)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        return previous_mask[0] if isinstance(previous_mask, (list, tuple)) else previous_mask

    def compute_output_spec(
        self,
        inputs: Any,
        memory: Any,
        memory_mask: Any = None,
        value: Any = None,
        return_attention_scores: bool = False,
    ) -> Any:
        width = (memory if value is None else value).shape[-1]
        output = keras.KerasTensor((*inputs.shape[:2], width), dtype=self.compute_dtype)
        if not return_attention_scores:
            return output
        shape = (inputs.shape[0], 1, inputs.shape[1], memory.shape[1])
        return output, keras.KerasTensor(shape, dtype=self.compute_dtype)


@keras.saving.register_keras_serializable(package="mmattn")
class AdditiveAttention(SingleHeadAttention):
    """Scores by a small network: v^T tanh(W q + U k).

    It is Bahdanau's alignment model, and Luong's "concat", v^T tanh(W [q; k]), whose matrix is W and U side by side.

    Args:
        units: K, the network's width.

    Call arguments:
        inputs: `(B, T, D)`, those who ask. A call makes `(B, T, S, K)` numbers, a step `(B, S, K)`.
        memory: `(B, S, D')`, what is looked at.
        memory_mask: `(B, S)` boolean, True = real. Taken from the tensor's own mask when not given.
        value: `(B, S, V)`, what is taken where a key fits; the memory when not given.
        return_attention_scores: also return the weights `(B, 1, T, S)`.

    Returns:
        `(B, T, V)`, or this and the weights.

    Raises:
        ValueError: for a width that is not positive or a mask that does not fit.

    Example:
        >>> import numpy as np
        >>> layer = AdditiveAttention(units=4)
        >>> states, memory = np.ones((1, 3, 8), "float32"), np.ones((1, 5, 6), "float32")
        >>> found, weights = layer(states, memory, return_attention_scores=True)
        >>> tuple(found.shape), tuple(weights.shape)
        ((1, 3, 6), (1, 1, 3, 5))
        >>> context = layer.start(memory)
        >>> bool(np.allclose(layer.step(states[:, 0], context), found[:, 0], atol=1e-6))
        True

    Source:
        Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate", 2015, section A.1.2;
        Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", 2015, section 3.1.
    """

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_positive(units=units)
        self.units = units
        dtype = self.dtype_policy
        self.query_projection = keras.layers.Dense(units, use_bias=False, dtype=dtype, name="query")
        self.key_projection = keras.layers.Dense(units, use_bias=False, dtype=dtype, name="key")

    def build(self, inputs_shape: Any, memory_shape: Any) -> None:
        self.query_projection.build(inputs_shape)
        self.key_projection.build(memory_shape)
        self.direction = self.add_weight(name="direction", shape=(self.units,), initializer="glorot_uniform")

    def keys(self, memory: Any) -> Any:
        return self.key_projection(memory)

    def scores(self, inputs: Any, keys: Any) -> Any:
        bent = ops.tanh(self.query_projection(inputs)[:, :, None] + keys[:, None])  # (B, T, S, K)
        return ops.matmul(bent, ops.cast(self.direction, bent.dtype)[:, None])[..., 0]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable(package="mmattn")
class MultiplicativeAttention(SingleHeadAttention):
    """Scores by a product: q^T k ("dot") or q^T W k ("general"). Luong's third, "concat", is `AdditiveAttention`.

    There is no scale: that of "general" is learned, and the papers that use "dot" have none.

    Args:
        score: "dot", for queries as wide as the memory, or "general".

    Call arguments:
        inputs: `(B, T, D)`, those who ask.
        memory: `(B, S, D')`, what is looked at; D' = D with "dot".
        memory_mask: `(B, S)` boolean, True = real. Taken from the tensor's own mask when not given.
        value: `(B, S, V)`, what is taken where a key fits; the memory when not given.
        return_attention_scores: also return the weights `(B, 1, T, S)`.

    Returns:
        `(B, T, V)`, or this and the weights.

    Raises:
        ValueError: for an unknown score, widths that "dot" cannot multiply, or a mask that does not fit.

    Example:
        >>> import numpy as np
        >>> layer = MultiplicativeAttention("dot")
        >>> states, memory = np.ones((1, 3, 6), "float32"), np.ones((1, 5, 6), "float32")
        >>> found, weights = layer(states, memory, return_attention_scores=True)
        >>> tuple(found.shape), bool(np.allclose(weights, 0.2))
        ((1, 3, 6), True)

    Source:
        Luong et al. 2015, section 3.1; "dot" with other values: Gehring et al., "Convolutional Sequence to Sequence
        Learning", 2017, section 3.3.
    """

    def __init__(self, score: str = "general", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if score not in SCORES:
            raise ValueError(
                f'score is one of {", ".join(SCORES)}. Received {score!r}. ("concat" is AdditiveAttention.)'
            )
        self.score = score

    def build(self, inputs_shape: Any, memory_shape: Any) -> None:
        width, memory_width = inputs_shape[-1], memory_shape[-1]
        self.query_projection = None
        if self.score == "general":
            self.query_projection = keras.layers.Dense(
                memory_width, use_bias=False, dtype=self.dtype_policy, name="query"
            )
            self.query_projection.build(inputs_shape)
        elif width != memory_width:
            raise ValueError(
                f'score="dot" multiplies queries and a memory of one width. Received {width} and {memory_width}: '
                'score="general" takes any.'
            )

    def keys(self, memory: Any) -> Any:
        return memory

    def scores(self, inputs: Any, keys: Any) -> Any:
        query = inputs if self.query_projection is None else self.query_projection(inputs)
        return Scoring(scale=1.0).products(query[:, None], keys[:, None])[:, 0]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "score": self.score}
