"""Attention of a sequence to itself, in training and step by step."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import keras
import numpy as np
from keras import ops

from mmattn.layers.attention import MultiHeadAttention
from mmattn.layers.checks import IN_ATTENTION
from mmattn.layers.dot_product import explicit, finite, guarded
from mmattn.layers.relative import BucketedBias, ClippedDistances, ProjectedDistances, alibi_slopes
from mmattn.layers.rotary import check_rotary, rotate
from mmattn.layers.sight import Sight

LEARNED = ("t5", "shaw", "transformer_xl")


@keras.saving.register_keras_serializable(package="mmattn")
class SelfAttention(MultiHeadAttention):
    """A sequence attends to itself: Q = K = V = X.

    Args: as in `MultiHeadAttention`, and
        positions: how places count in the scores; None: only by what was added to the inputs. "rotary" turns queries
            and keys by their places (`mmattn.layers.rotate`; needs an even `key_dim`), "alibi" lowers a score by the
            distance (`alibi_slopes`): these add no variable, have no longest sequence and take every path. "t5"
            (`BucketedBias`), "shaw" (`ClippedDistances`) and "transformer_xl" (`ProjectedDistances`) are learned, and
            make all scores at once.
        position_options: a dict of what `BucketedBias` or `ClippedDistances` takes, such as {"max_distance": 64}.

    Call arguments:
        inputs: `(B, T, D)`.
        padding_mask: `(B, T)` boolean, True = real; nobody looks at a False position.
        mask, inputs_mask: the same, filled in by Keras with the mask that arrives on `inputs` itself.
        attention_mask, use_causal_mask, return_attention_scores, training: as in `MultiHeadAttention`.

    Step by step: `start` makes an empty cache, `step` adds one position to it and gives what `call` with
    `use_causal_mask=True` gives there, with all positions and with a `sliding_window` too. With rotary positions the
    cache holds turned keys.

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

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        *args: Any,
        positions: str | None = None,
        position_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_heads, key_dim, *args, **kwargs)
        check_places(positions, key_dim, position_options)
        self.positions = positions
        self.position_options = position_options
        self._relative: Any = None
        if positions == "alibi":
            self.scoring = dataclasses.replace(self.scoring, slopes=alibi_slopes(num_heads))

    def build(self, inputs_shape: Any) -> None:  # type: ignore[override]
        super().build(inputs_shape, inputs_shape)
        if self.positions is not None and not self.axes.has_order:
            raise ValueError(
                f"positions={self.positions!r} needs one axis that attention runs over. Received attention_axes="
                f"{self.axes.attended}."
            )
        if self._is_biased:
            options = {"name": "positions", "dtype": self.dtype_policy, **(self.position_options or {})}
            if self.positions == "t5":
                self._relative = BucketedBias(self.num_heads, **options)
            elif self.positions == "shaw":
                self._relative = ClippedDistances(self.scoring.scale, **options)
            else:
                self._relative = ProjectedDistances(self.scoring.scale, inputs_shape[-1], **options)
            self._relative.build((None, self.num_heads, None, self.key_dim))

    @property
    def _is_biased(self) -> bool:  # type: ignore[override]
        return self.positions in LEARNED

    def _bias(self, query: Any, sight: Sight) -> Any:
        if self._relative is None:
            return None
        return self._relative(finite(query), sight=sight)  # what is not, the product with the keys keeps

    def _asked(self, query: Any) -> Any:
        return self._relative.content(query) if self.positions == "transformer_xl" else query

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
        """The keys and values of their heads, `(B, G, S, K)` each; `first` is the place of the first of them."""
        keys, values = super().project_memory(key, value)
        return self._placed(keys, first), values

    def _project_query(self, query: Any, first: Any = 0) -> Any:
        return self._placed(super()._project_query(query), first)

    def _placed(self, heads: Any, first: Any) -> Any:
        if self.positions != "rotary":
            return heads
        places = ops.arange(ops.shape(heads)[2], dtype="int32")
        return rotate(heads, places + ops.cast(first, "int32"))

    def start(self, batch_size: Any, max_length: int) -> dict[str, Any]:
        """An empty cache for `max_length` positions: keys and values `(B, G, L, K)`."""
        shape = (batch_size, self.num_key_value_heads, max_length)
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
            ValueError: for an `index` beyond the cache, where it is a number; a tensor's cannot be seen.
        """
        length = cache["keys"].shape[2]
        if isinstance(index, (int, np.integer, np.ndarray)):
            index = operator.index(index)
            if not 0 <= index < length:
                raise ValueError(f"The cache holds positions 0 to {length - 1}. Received index={index}.")
        else:
            index = ops.cast(index, "int32")
        row = inputs[:, None, :]
        key, value = guarded(*self.project_memory(row, row, index))
        keys = ops.slice_update(cache["keys"], (0, 0, index, 0), key)
        values = ops.slice_update(cache["values"], (0, 0, index, 0), value)
        query = self._project_query(row, index)
        sight = Sight(1, length, causal=True, window=self.sliding_window, place=index)
        found = explicit(self._asked(query), keys, values, sight, self.scoring, self._bias(query, sight), guard=False)
        output = self._project_output(found, row)
        return output[:, 0], {"keys": keys, "values": values}

    def compute_output_shape(self, inputs_shape: Any) -> tuple[Any, ...]:  # type: ignore[override]
        return super().compute_output_shape(inputs_shape, inputs_shape)

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
        return self._output_spec(inputs, inputs, return_attention_scores)

    def get_config(self) -> dict[str, Any]:
        config = {**super().get_config(), "positions": self.positions}
        return {**config, "position_options": self.position_options} if self.position_options else config


def check_places(positions: str | None, key_dim: int | None = None, options: dict[str, Any] | None = None) -> None:
    """Refuses an unknown kind of positions, options that it does not have, and a head whose channels do not pair up.

    >>> check_places("rotary", 5)
    Traceback (most recent call last):
    ValueError: Rotary positions turn pairs of channels, so key_dim, the width of a head, is even. Received 5.
    """
    if positions is not None and positions not in IN_ATTENTION:
        raise ValueError(
            f"Positions inside attention are None or one of {', '.join(IN_ATTENTION)}. Received {positions!r}."
        )
    if options and positions not in ("t5", "shaw"):
        raise ValueError(f'position_options go with positions "t5" and "shaw". Received {positions!r} and {options}.')
    if positions == "rotary" and key_dim is not None:
        check_rotary(key_dim)
