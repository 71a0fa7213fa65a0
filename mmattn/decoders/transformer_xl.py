"""The Transformer-XL decoder: a Transformer decoder that remembers what it has read before.

Shapes: B batch, T positions of a segment, M positions of the memory, D width, N layers. In the code "memory" alone is
what an encoder has made, as in all decoders; the paper's memory is the `state`, what came before is the past.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn.decoders.transformer import TransformerDecoder
from mmattn.layers.checks import IN_ATTENTION
from mmattn.layers.masks import length_mask


@keras.saving.register_keras_serializable(package="mmattn")
class TransformerXLDecoder(TransformerDecoder):
    """Reads a long text segment by segment: each layer also sees what it was given in the segments before.

        h~ = [SG(memory) ; h]      queries of h;  keys and values of h~;  relative positions

    A layer's memory is the last M of its own inputs, and no gradient goes back into it. So N layers reach N M positions
    back, at the cost of M more keys each. M is an argument of the call: it can be longer at test time.

    Args: those of `TransformerDecoder` but `max_length`, and
        positions: "transformer_xl", the paper's, or another that counts from place to place: "rotary", "alibi", "t5",
            "shaw".
        memory_length: M, how many positions are kept where a call does not say; 0: none.
        sliding_window: a position sees so many, its own included, wherever it lies in its segment (the paper's code
            calls that the same length). With a memory of one less, a text gives the same logits however it is cut.

    Call arguments: those of `TransformerDecoder`, and
        state: what the last call has returned; None: nothing came before. A dict of "hidden", for each layer
            `(B, M, D)`, and "lengths", int32 `(B,)`: the last so many of the M positions are real.
        memory_length: M of the state that is returned.
        reset: boolean `(B,)`, True = the row begins anew and sees nothing of the state.

    Returns:
        logits `(B, T, V)` and the state for the next call; and with `return_attention_scores` the weights.

    Raises:
        ValueError: as `TransformerDecoder`, for positions that a memory does not go with, for a `max_length`, and for a
            state that does not fit.

    Example:
        >>> import numpy as np
        >>> decoder = TransformerXLDecoder(20, 8, num_layers=2, num_heads=2, memory_length=6, cross_attention=False)
        >>> ids = np.array([[2, 7, 9, 4, 5, 6]])
        >>> whole, _ = decoder(ids)
        >>> first, state = decoder(ids[:, :4])
        >>> second, state = decoder(ids[:, 4:], state=state)
        >>> bool(np.allclose(second, whole[:, 4:], atol=1e-5)), np.asarray(state["lengths"]).tolist()
        (True, [6])

    Source:
        Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context", 2019, section 3.
    """

    def __init__(
        self,
        vocabulary_size: int,
        hidden_dim: int,
        num_layers: int,
        num_heads: int,
        intermediate_dim: int | None = None,
        positions: str = "transformer_xl",
        memory_length: int = 64,
        **kwargs: Any,
    ) -> None:
        if positions not in IN_ATTENTION:
            raise ValueError(
                f"What is remembered keeps no place of its own, so positions is one of {', '.join(IN_ATTENTION)}. "
                f"Received {positions!r}."
            )
        if kwargs.get("max_length") is not None:
            raise ValueError(f"There is no longest text here. Received max_length={kwargs['max_length']!r}.")
        sizes = (vocabulary_size, hidden_dim, num_layers, num_heads, intermediate_dim)
        super().__init__(*sizes, positions=positions, **kwargs)
        self.memory_length = _check_length(memory_length)

    def call(
        self,
        token_ids: Any,
        memory: Any = None,
        memory_mask: Any = None,
        state: Any = None,
        places: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        memory_length: int | None = None,
        reset: Any = None,
    ) -> Any:
        self._check(token_ids, return_attention_scores)
        kept = self._length(memory_length)
        hidden, lengths, mask = self._past(state, reset, token_ids)
        x, scores, new = self._embedded(token_ids, training), [], []
        for block, past in zip(self.blocks, hidden, strict=True):
            new.append(_last(past, x, kept))
            before = {} if past is None else {"past": past, "past_mask": mask}
            if return_attention_scores:
                before["return_attention_scores"] = True
            x = block(x, memory, memory_mask=memory_mask, training=training, **before)
            if return_attention_scores:
                x, weights = x
                scores.append(weights)
        lengths = ops.minimum(lengths + ops.shape(token_ids)[1], kept)
        logits, state = self._logits(self._at(places, x)), {"hidden": new, "lengths": lengths}
        return (logits, state, ops.stack(scores, axis=1)) if return_attention_scores else (logits, state)

    def compute_output_spec(
        self,
        token_ids: Any,
        memory: Any = None,
        memory_mask: Any = None,
        state: Any = None,
        places: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        memory_length: int | None = None,
        reset: Any = None,
    ) -> Any:
        logits, _, *scores = super().compute_output_spec(
            token_ids, memory, memory_mask, None, places, return_attention_scores, training
        )
        batch, shape = token_ids.shape[0], (token_ids.shape[0], self._length(memory_length), self.hidden_dim)
        hidden = [keras.KerasTensor(shape, dtype=self.compute_dtype) for _ in self.blocks]
        return (logits, {"hidden": hidden, "lengths": keras.KerasTensor((batch,), dtype="int32")}, *scores)

    def empty_state(self, batch_size: Any, memory_length: int | None = None) -> dict[str, Any]:
        """The state of rows that have read nothing: in a loop, the same shapes from the first call on."""
        shape = (batch_size, self._length(memory_length), self.hidden_dim)
        hidden = [ops.zeros(shape, dtype=self.compute_dtype) for _ in self.blocks]
        return {"hidden": hidden, "lengths": ops.zeros((batch_size,), dtype="int32")}

    def start(
        self, memory: Any, memory_mask: Any, max_length: int, batch_size: Any = None, state: Any = None
    ) -> tuple[Any, Any]:
        """What generation starts from: as `TransformerDecoder.start`, after what a call's `state` remembers.

        The steps remember all that came before them, the M positions of the state and those of the steps: they give
        what one call over `max_length` tokens with that state gives.
        """
        if state is None:
            return super().start(memory, memory_mask, max_length, batch_size)
        hidden, _, mask = self._past(state, batch_size=batch_size, memory=memory)
        rows = ops.shape(state["lengths"])[0]
        pairs = [
            block.start(memory, memory_mask, rows, max_length, past, mask)
            for block, past in zip(self.blocks, hidden, strict=True)
        ]
        return [context for context, _ in pairs], [cache for _, cache in pairs]

    def _past(
        self, state: Any, reset: Any = None, token_ids: Any = None, batch_size: Any = None, memory: Any = None
    ) -> tuple[list[Any], Any, Any]:
        """For each layer what it was given before, how many of that are real `(B,)`, and which `(B, M)`."""
        if state is None:
            return [None] * self.num_layers, ops.zeros(ops.shape(token_ids)[:1], dtype="int32"), None
        if not isinstance(state, dict) or state.keys() != {"hidden", "lengths"}:
            kind = f"a dict of {sorted(state)}" if isinstance(state, dict) else f"a {type(state).__name__}"
            raise ValueError(f'A state of {self.name} is a dict of "hidden" and "lengths". Received {kind}.')
        hidden, lengths = state["hidden"], ops.cast(state["lengths"], "int32")
        shapes = {tuple(array.shape[1:]) for array in hidden}
        if len(hidden) != self.num_layers or len(shapes) != 1 or hidden[0].shape[-1] != self.hidden_dim:
            raise ValueError(
                f'A state of {self.name} holds as "hidden" {self.num_layers} arrays (B, M, {self.hidden_dim}). '
                f"Received {[tuple(array.shape) for array in hidden]}."
            )
        reset = None if reset is None else ops.convert_to_tensor(reset)
        if any(len(array.shape) != 1 for array in (lengths, reset) if array is not None):
            raise ValueError(
                f"{self.name} takes lengths and reset (B,), one of each row. Received lengths {tuple(lengths.shape)}, "
                f"reset {None if reset is None else tuple(reset.shape)}."
            )
        arrays = {"token_ids": token_ids, "lengths": lengths, "reset": reset, "memory": memory}
        arrays |= {f"hidden[{i}]": array for i, array in enumerate(hidden)}
        rows = {name: array.shape[0] for name, array in arrays.items() if array is not None}
        if isinstance(batch_size, int):
            rows["batch_size"] = batch_size
        if len({count for count in rows.values() if count is not None}) > 1:
            counts = ", ".join(f"{name}: {count}" for name, count in rows.items())
            raise ValueError(
                f"{self.name} goes on with all rows of its state. Received other numbers of them: {counts}."
            )
        if reset is not None:
            lengths = ops.where(reset, 0, lengths)
        size = hidden[0].shape[1]
        if size == 0:
            return [None] * self.num_layers, lengths, None
        return list(hidden), lengths, ops.flip(length_mask(lengths, size), axis=1)

    def _length(self, memory_length: int | None) -> int:
        return self.memory_length if memory_length is None else _check_length(memory_length)

    def get_config(self) -> dict[str, Any]:
        config = {**super().get_config(), "memory_length": self.memory_length}
        del config["max_length"]
        return config


def _last(past: Any, x: Any, count: int) -> Any:
    """The last `count` positions of a past `(B, M, D)` and x `(B, T, D)`, with zeros before them where they are few."""
    batch, _, width = ops.shape(x)
    known = 0 if past is None else past.shape[1]
    parts = [] if past is None else [ops.cast(past, x.dtype)]
    if count > known:
        parts.insert(0, ops.zeros((batch, count - known, width), dtype=x.dtype))
    whole = ops.concatenate([*parts, x], axis=1)
    return ops.reshape(whole[:, ops.shape(whole)[1] - count :], (batch, count, width))


def _check_length(memory_length: Any) -> int:
    if not isinstance(memory_length, int) or isinstance(memory_length, bool) or memory_length < 0:
        raise ValueError(f"memory_length is a whole number, 0 or more. Received memory_length={memory_length!r}.")
    return memory_length
