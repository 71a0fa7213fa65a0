"""Attention of a sequence to itself, in training and step by step."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import keras
import numpy as np
from keras import ops

from mmattn.layers.attention import MultiHeadAttention
from mmattn.layers.checks import IN_ATTENTION, check_positive
from mmattn.layers.dot_product import explicit, finite, guarded
from mmattn.layers.masks import check_boolean, check_padding, combine_masks
from mmattn.layers.relative import BucketedBias, ClippedDistances, ProjectedDistances, alibi_slopes
from mmattn.layers.rotary import check_rotary, rotate
from mmattn.layers.sight import Sight

LEARNED = {  # positions with variables, and what they take
    "t5": ("num_buckets", "max_distance", "bidirectional"),
    "shaw": ("max_distance",),
    "transformer_xl": ("max_distance",),
}


@keras.saving.register_keras_serializable(package="mmattn")
class SelfAttention(MultiHeadAttention):
    """A sequence attends to itself: Q = K = V = X.

    Args: as in `MultiHeadAttention`, and
        positions: how places count in the scores; None: only by what was added to the inputs. "rotary" turns queries
            and keys by their places (`mmattn.layers.rotate`; needs an even `key_dim`), "alibi" lowers a score by the
            distance (`alibi_slopes`): these add no variable, have no longest sequence and take every path. "t5"
            (`BucketedBias`), "shaw" (`ClippedDistances`) and "transformer_xl" (`ProjectedDistances`) are learned, and
            make all scores at once.
        position_options: a dict of what the learned ones take, such as {"max_distance": 64}; "t5" also num_buckets
            and bidirectional.

    Call arguments:
        inputs: `(B, T, D)`.
        padding_mask: `(B, T)` boolean, True = real; nobody looks at a False position.
        mask, inputs_mask: the same, filled in by Keras with the mask that arrives on `inputs` itself.
        attention_mask, use_causal_mask, return_attention_scores, training: as in `MultiHeadAttention`.
        past: `(B, M, D)`, what came before the inputs. The inputs ask, and see it and themselves (S = M + T): it has
            the places before theirs for all positions, masks and windows. A mask then speaks of M + T positions.
        past_mask: `(B, M)` boolean, True = real.

    Step by step: `start` makes an empty cache, or one that holds a past, `step` adds one position to it and gives what
    `call` with `use_causal_mask=True` gives there, with all positions and with a `sliding_window` too. With rotary
    positions the cache holds turned keys.

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
        past: Any = None,
        past_mask: Any = None,
    ) -> Any:
        masks, whole = (padding_mask, inputs_mask if mask is None else mask), inputs
        if past is not None:
            masks = (self._real_of_both(inputs, past, combine_masks(*map(_as_mask, masks)), past_mask), None)
            whole = ops.concatenate([ops.cast(past, inputs.dtype), inputs], axis=1)
        return super().call(
            inputs, whole, key_mask=masks[0], value_mask=masks[1], attention_mask=attention_mask,
            return_attention_scores=return_attention_scores, training=training, use_causal_mask=use_causal_mask,
        )  # fmt: skip

    def _real_of_both(self, inputs: Any, past: Any, mask: Any, past_mask: Any) -> Any:
        """The mask `(B, M + T)` of what came before and what is there, or None where all is real."""
        if not self.axes.is_plain:
            raise ValueError(
                f"A past goes with inputs (batch, length, width) whose length attention runs over. Received inputs "
                f"{tuple(inputs.shape)} and attention_axes={self.axes.attended}."
            )
        if mask is None and past_mask is None:
            return None
        parts = []
        for of, real, name in ((past, past_mask, "past_mask"), (inputs, mask, "padding_mask")):
            shape = ops.shape(of)[:2]
            real = ops.ones(shape, dtype="bool") if real is None else check_padding(real, tuple(of.shape[:2]), name)
            parts.append(ops.broadcast_to(real, shape))
        return ops.concatenate(parts, axis=1)

    def _unasked(self, query: Any, key: Any, value: Any, sight: Sight) -> Any:
        return None if sight.keys is None else sight.keys[:, sight.sources - sight.targets :]

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

    def start(self, batch_size: Any, max_length: int, past: Any = None, past_mask: Any = None) -> dict[str, Any]:
        """An empty cache for `max_length` positions: keys and values `(B, G, L, K)`.

        With a `past` and `past_mask`, as in a call, its M positions come before them (L = M + `max_length`), and "real"
        `(B, M)` says which of those there are.
        """
        shape = (batch_size, self.num_key_value_heads, max_length)
        keys = ops.zeros((*shape, self.key_dim), dtype=self.compute_dtype)
        values = ops.zeros((*shape, self.value_dim), dtype=self.compute_dtype)
        if past is None:
            return {"keys": keys, "values": values}
        past = ops.cast(past, self.compute_dtype)
        real = ops.ones((1, past.shape[1]), dtype="bool")
        if past_mask is not None:
            real = check_padding(past_mask, tuple(past.shape[:2]), "past_mask")
        before = guarded(*self.project_memory(past, past))
        return {
            "keys": ops.concatenate([before[0], keys], axis=2),
            "values": ops.concatenate([before[1], values], axis=2),
            "real": ops.broadcast_to(real, (batch_size, past.shape[1])),
        }

    def step(self, inputs: Any, index: Any, cache: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Attends from position `index` to the positions 0 .. index.

        Args:
            inputs: `(B, D)`, the position's input.
            index: its place, one number for all rows; 0 is the first after the past.
            cache: from `start` or the last step.

        Returns:
            `(B, D)` and the new cache.

        Raises:
            ValueError: for an `index` beyond the cache, where it is a number; a tensor's cannot be seen.
        """
        before = cache["real"].shape[1] if "real" in cache else 0
        length = cache["keys"].shape[2] - before
        if isinstance(index, (int, np.integer, np.ndarray)):
            index = operator.index(index)
            if not 0 <= index < length:
                raise ValueError(f"The cache holds positions 0 to {length - 1}. Received index={index}.")
        else:
            index = ops.cast(index, "int32")
        row, place, real = inputs[:, None, :], index + before, None
        key, value = guarded(*self.project_memory(row, row, place))
        keys = ops.slice_update(cache["keys"], (0, 0, place, 0), key)
        values = ops.slice_update(cache["values"], (0, 0, place, 0), value)
        query = self._project_query(row, place)
        if before:
            added = ops.ones((ops.shape(row)[0], length), dtype="bool")
            real = ops.concatenate([cache["real"], added], axis=1)
        sight = Sight(1, before + length, keys=real, causal=True, window=self.sliding_window, place=place)
        found = explicit(self._asked(query), keys, values, sight, self.scoring, self._bias(query, sight), guard=False)
        output = self._project_output(found, row)
        return output[:, 0], {**cache, "keys": keys, "values": values}

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
        past: Any = None,
        past_mask: Any = None,
    ) -> Any:
        before, length = 0 if past is None else past.shape[1], inputs.shape[1]
        seen = None if None in (before, length) else before + length
        whole = inputs if past is None else keras.KerasTensor((inputs.shape[0], seen, inputs.shape[-1]))
        return self._output_spec(inputs, whole, return_attention_scores)

    def get_config(self) -> dict[str, Any]:
        config = {**super().get_config(), "positions": self.positions}
        return {**config, "position_options": self.position_options} if self.position_options else config


def _as_mask(mask: Any) -> Any:
    return None if mask is None else check_boolean(mask, what="padding_mask is boolean, True = real")


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
    known = LEARNED.get(positions or "", ())
    if options is not None and not (isinstance(options, dict) and set(options) <= set(known)):
        takes = ", ".join(f'"{name}" ({", ".join(takes)})' for name, takes in LEARNED.items())
        raise ValueError(
            f"position_options is a dict of what these positions take: {takes}. Received {positions!r} and {options!r}."
        )
    check_positive(**{name: value for name, value in (options or {}).items() if name != "bidirectional"})
    if positions == "rotary" and key_dim is not None:
        check_rotary(key_dim)
