"""Attention of one sequence to another, in training and step by step."""

from __future__ import annotations

from typing import Any

import keras

from mmattn.layers.attention import MultiHeadAttention
from mmattn.layers.checks import check_rows
from mmattn.layers.dot_product import explicit, guarded
from mmattn.layers.masks import check_padding
from mmattn.layers.sight import Sight


@keras.saving.register_keras_serializable(package="mmattn")
class CrossAttention(MultiHeadAttention):
    """One sequence attends to another: Q = Z, K = V = X^(N).

    Arguments as in `MultiHeadAttention`.

    Call arguments:
        inputs: `(B, T, D)`, those who ask.
        memory: `(B, S, D')`, what is looked at.
        memory_mask: `(B, S)` boolean, True = real.
        attention_mask, return_attention_scores, training: as in `MultiHeadAttention`.

    Step by step: `start` projects the memory once, `step` asks for one position.

    Example:
        >>> import numpy as np
        >>> layer = CrossAttention(num_heads=2, key_dim=4)
        >>> words, patches = np.ones((1, 3, 8), "float32"), np.ones((1, 5, 6), "float32")
        >>> whole = layer(words, patches)
        >>> context = layer.start(patches)
        >>> bool(np.allclose(layer.step(words[:, 0], context), whole[:, 0], atol=1e-6))
        True
    """

    def build(self, inputs_shape: Any, memory_shape: Any) -> None:  # type: ignore[override]
        super().build(inputs_shape, memory_shape)

    def call(  # type: ignore[override]
        self,
        inputs: Any,
        memory: Any,
        memory_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
    ) -> Any:
        return super().call(
            inputs, memory, value_mask=memory_mask, attention_mask=attention_mask,
            return_attention_scores=return_attention_scores, training=training,
        )  # fmt: skip

    def start(self, memory: Any, memory_mask: Any = None) -> dict[str, Any]:
        """The keys and values `(B, G, S, K)` of the memory and its mask, which every step shares.

        The mask that Keras has attached to the memory counts where none is given, as in a call.
        """
        if memory_mask is None:
            memory_mask = getattr(memory, "_keras_mask", None)
        if memory_mask is not None:
            memory_mask = check_padding(memory_mask, tuple(memory.shape[:2]), "memory_mask")
        keys, values = self.project_memory(memory, memory)
        if memory_mask is not None:
            keys, values = guarded(keys, values)
        return {"keys": keys, "values": values, "mask": memory_mask}

    def step(self, inputs: Any, context: dict[str, Any]) -> Any:
        """Attends from one position's input `(B, D)` to the whole memory; returns `(B, D)`."""
        check_rows(self.name, inputs=inputs, keys=context["keys"])
        row = inputs[:, None, :]
        sight = Sight(1, context["keys"].shape[2], keys=context["mask"])
        query = self._project_query(row)
        found = explicit(query, context["keys"], context["values"], sight, self.scoring, guard=False)
        return self._project_output(found, row)[:, 0]

    def compute_output_spec(  # type: ignore[override]
        self,
        inputs: Any,
        memory: Any,
        memory_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
    ) -> Any:
        return self._output_spec(inputs, memory, return_attention_scores)
