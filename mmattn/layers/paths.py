"""Which of the three ways a call of attention takes, and why not a better one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import keras

from mmattn import backend

LONG = 2**20  # scores of a query-key plane, T S, from which on they are not all made at once
LARGE = 2**26  # the same for B H T S
USUAL = 16  # what B is taken for where it is not known


@dataclass(frozen=True)
class Path:
    """A way, "fused", "chunked" or "explicit", and why those that need less memory or time were not taken."""

    name: str
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name + "".join(f"; {reason}" for reason in self.reasons)


def choose_path(
    batch: Any,
    heads: int,
    targets: Any,
    sources: Any,
    dtype: str,
    flash: bool | None = None,
    scores: bool = False,
    dropped: bool = False,
    biased: bool = False,
    capped: bool = False,
    sloped: bool = False,
    masked: str = "no",
    widths: tuple[int, int] = (64, 64),
) -> Path:
    """The way for a call.

    Args:
        batch, targets, sources: B, T, S; not numbers where they are not known before the program runs.
        flash: True: never all weights at once; False: always; None: as it pays.
        scores: the weights are asked for.
        dropped: weights are dropped.
        biased: numbers are added to the scores that only a whole (T, S) array can hold.
        capped, sloped: the scores have a soft cap, or ALiBi's slopes.
        masked: "no": nothing is hidden, or what follows in a square; "keys": some keys, from all queries; "plane":
            what takes a (T, S) array.
        widths: K and V, of a head.

    >>> str(choose_path(1, 8, 10, 10, "float32", flash=False))
    'explicit; flash_attention=False asks for all weights at once'
    """
    if flash is False:
        return Path("explicit", ("flash_attention=False asks for all weights at once",))
    if any(isinstance(size, int) and size == 0 for size in (batch, targets, sources)):
        return Path("explicit", ("an axis of length 0 leaves nothing to compute",))
    known = isinstance(targets, int) and isinstance(sources, int)
    why = backend.why_no_sdpa(dtype, *widths, targets, sources, masked != "no")
    plane = masked == "plane" or (masked == "keys" and backend.name() == "jax")  # cuDNN wants all of it
    for reason, holds in (
        ("the weights are asked for", scores),
        ("it can't hold relative positions' biases", biased),
        ("weights are dropped by a seed", dropped),
        ("it has no soft cap", capped),
        ("it has no slopes by distance", sloped),
        ("its mask would fill a whole (T, S) array", plane and not (known and targets * sources < LONG)),
    ):
        why = why or (reason if holds else "")
    if not why:
        return Path("fused")
    reasons = (f"not fused: {why}",)
    if scores or biased:
        why = "the weights are asked for" if scores else "relative positions' biases fill a whole (T, S) array"
        return Path("explicit", (*reasons, f"not chunked: {why}"))
    if flash:
        return Path("chunked", reasons)
    if not known:
        why = "the lengths are not known before the program runs; flash_attention=True chunks any length"
        return Path("explicit", (*reasons, f"not chunked: {why}"))
    scored = targets * sources
    if scored >= LONG or (batch if isinstance(batch, int) else USUAL) * heads * scored >= LARGE:
        return Path("chunked", reasons)
    return Path("explicit", (*reasons, f"not chunked: {targets} x {sources} scores are few"))


def explain_path(
    layer: Any,
    query: Any,
    value: Any,
    training: bool = False,
    return_attention_scores: bool = False,
    masked: str = "no",
) -> Path:
    """Which way a layer's call would take, without running it.

    Args:
        layer: a built `mmattn.layers.MultiHeadAttention` or one of its kind.
        query, value: arrays, or shapes such as `(None, 128, 512)`, None for what is not known.
        training, return_attention_scores: as the call would have them.
        masked: what is hidden: "no", nothing, or by `use_causal_mask` where T = S; "keys", padding of the memory;
            "plane", anything else.

    Returns:
        A Path: its `name` and `reasons`; printed, one line.

    Raises:
        ValueError: for another layer or one that is not built, shapes that do not fit it, or an unknown `masked`.

    >>> from mmattn.layers import MultiHeadAttention
    >>> layer = MultiHeadAttention(num_heads=8, key_dim=64)
    >>> layer.build((None, None, 512), (None, None, 512))
    >>> explain_path(layer, (1, 4096, 512), (1, 4096, 512), return_attention_scores=True).name
    'explicit'
    """
    if not hasattr(layer, "path_of"):
        raise ValueError(f"explain_path takes an attention layer of mmattn.layers. Received {type(layer).__name__}.")
    if not layer.built:
        raise ValueError(f"{layer.name} is not built: call it once, or build it, before its path is asked for.")
    shapes = [_shape_of(array) for array in (query, value)]
    layer.check_call_shapes(*shapes)
    lengths = [_size([shape[axis] for axis in layer.axes.attended]) for shape in shapes]
    batch = _size([shapes[0][axis] for axis in layer.axes.kept])
    if masked not in ("no", "keys", "plane"):
        raise ValueError(f'masked is "no", "keys" or "plane". Received {masked!r}.')
    masked = masked if layer.sliding_window is None else "plane"
    return layer.path_of(batch, *lengths, training=training, scores=return_attention_scores, masked=masked)


def _shape_of(array: Any) -> tuple[Any, ...]:
    shape = getattr(array, "shape", array)
    if not isinstance(shape, (list, tuple)) and not hasattr(shape, "__iter__"):
        raise ValueError(f"query and value are arrays or shapes such as (None, 128, 512). Received {array!r}.")
    return tuple(shape)


def _size(sizes: list[Any]) -> int | None:
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def flash_setting(flash_attention: bool | None) -> bool | None:
    """The layer's own setting, or else Keras' for all layers."""
    return keras.config.is_flash_attention_enabled() if flash_attention is None else flash_attention
