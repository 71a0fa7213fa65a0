"""Attention of a sequence to itself, in training and step by step."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn.layers.attention import MultiHeadAttention
from mmattn.layers.rotary import check_rotary, rotate


@keras.saving.register_keras_serializable(package="mmattn")
class SelfAttention(MultiHeadAttention):
    """A sequence attends to itself: Q = K = V = X.

    Args: as in `MultiHeadAttention`, and
        positions: "rotary" turns queries and keys by their places (`mmattn.layers.rotate`), so that a score depends on
            how far apart two places are; None: a place counts only by what was added to the inputs. Needs an even
            `key_dim`, adds no variable and has no longest sequence.

    Call arguments:
        inputs: `(B, T, D)`.
        padding_mask: `(B, T)` boolean, True = real; nobody looks at a False position.
        mask, inputs_mask: the same, filled in by Keras with the mask that arrives on `inputs` itself.
        attention_mask, use_causal_mask, return_attention_scores, training: as in `MultiHeadAttention`.

    Step by step: `start` makes an empty cache, `step` adds one position to it and gives what `call` with
    `use_causal_mask=True` gives there. With rotary positions the cache holds turned keys.

    Raises:
        ValueError: as `MultiHeadAttention`, and for positions that are not known or do not go with `key_dim`.

    Example:
        >>> import numpy as np
        >>> layer = SelfAttention(num_heads=2, key_dim=4)
        >>> x = np.random.default_rng(0).normal(size=(1, 3, 8)).astype("float32")
        >>> whole = layer(x, use_causal_mask=True)
        >>> cache = layer.start(batch_size=1, max_length=3)
        >>> for t in range(3):
        ...     output, cache = layer.step(x[:, t], t, cache)
        >>> bool(np.allclose(output, whole[:, -1], atol=1e-6))
        True
    """

    def __init__(self, num_heads: int, key_dim: int, *args: Any, positions: str | None = None, **kwargs: Any) -> None:
        super().__init__(num_heads, key_dim, *args, **kwargs)
        check_rotary(positions, key_dim)
        self.positions = positions

    def build(self, inputs_shape: Any) -> None:  # type: ignore[override]
        super().build(inputs_shape, inputs_shape)

    def call(  # type: ignore[override]
        self,
        inputs: Any,
        padding_mask: Any = None,
        attention_mask: Any = None,
        mask: Any = None,
        inputs_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> Any:
        implicit = inputs_mask if mask is None else mask
        return super().call(
            inputs, inputs, key_mask=padding_mask, value_mask=implicit, attention_mask=attention_mask,
            return_attention_scores=return_attention_scores, training=training, use_causal_mask=use_causal_mask,
        )  # fmt: skip

    def project_memory(self, key: Any, value: Any, first: Any = 0) -> tuple[Any, Any]:
        """The keys and values of all heads, `(B, H, S, K)` each; `first` is the place of the first of them."""
        keys, values = super().project_memory(key, value)
        return self._placed(keys, first), values

    def _project_query(self, query: Any, first: Any = 0) -> Any:
        return self._placed(super()._project_query(query), first)

    def _placed(self, heads: Any, first: Any) -> Any:
        if self.positions is None:
            return heads
        places = ops.arange(ops.shape(heads)[2], dtype="int32")
        return rotate(heads, places + ops.cast(first, "int32"))

    def start(self, batch_size: Any, max_length: int) -> dict[str, Any]:
        """An empty cache for `max_length` positions: keys and values `(B, H, L, K)`."""
        shape = (batch_size, self.num_heads, max_length)
        return {
            "keys": ops.zeros((*shape, self.key_dim), dtype=self.compute_dtype),
            "values": ops.zeros((*shape, self.value_dim), dtype=self.compute_dtype),
        }

    def step(self, inputs: Any, index: Any, cache: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Attends from position `index` to the positions 0 .. index.

        Args:
            inputs: `(B, D)`, the position's input.
            index: its place, one number for all rows.
            cache: from `start` or the last step.

        Returns:
            `(B, D)` and the new cache.

        Raises:
            ValueError: for an `index` beyond the cache, where it is a Python number; a tensor's cannot be seen.
        """
        length = cache["keys"].shape[2]
        if isinstance(index, int) and not 0 <= index < length:
            raise ValueError(f"The cache holds positions 0 to {length - 1}. Received index={index}.")
        row = inputs[:, None, :]
        key, value = self.project_memory(row, row, index)
        keys = ops.slice_update(cache["keys"], (0, 0, index, 0), key)
        values = ops.slice_update(cache["values"], (0, 0, index, 0), value)
        seen = ops.less_equal(ops.arange(keys.shape[2], dtype="int32"), index)[None, None, None, :]
        output, _ = self._attend_and_project(self._project_query(row, index), keys, values, seen, training=False)
        return output[:, 0], {"keys": keys, "values": values}

    def compute_output_spec(  # type: ignore[override]
        self,
        inputs: Any,
        padding_mask: Any = None,
        attention_mask: Any = None,
        mask: Any = None,
        inputs_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> Any:
        return super().compute_output_spec(inputs, inputs, return_attention_scores=return_attention_scores)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "positions": self.positions}
