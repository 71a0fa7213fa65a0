"""Boolean attention masks: True = may look.

Every mask that reaches an attention layer here is boolean and has one of three shapes: `(T, S)`, `(B, T, S)` or
`(B, H, T, S)`, where a batch, head or query axis of size 1 stands for "the same for all".
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn.backend import is_traced
from mmattn.layers.checks import check_positive

# Shapes: B batch, H heads, T target (query) length, S memory (key) length.


def padding_mask(token_ids: Any, pad_id: int = 0) -> Any:
    """Marks the real positions of right-padded token ids.

    Args:
        token_ids: `(B, S)` integers.
        pad_id: the id that fills the rows up.

    Returns:
        `(B, S)` boolean, True at real tokens.

    Example:
        >>> import numpy as np
        >>> np.asarray(padding_mask(np.array([[5, 6, 0]]))).tolist()
        [[True, True, False]]
    """
    return ops.not_equal(token_ids, pad_id)


def length_mask(lengths: Any, max_length: int) -> Any:
    """The `(B, max_length)` mask of rows that hold `lengths` (B,) real positions each.

    Example:
        >>> import numpy as np
        >>> np.asarray(length_mask(np.array([1, 3]), 3)).tolist()
        [[True, False, False], [True, True, True]]
    """
    return ops.less(ops.arange(max_length, dtype="int32")[None, :], ops.cast(lengths, "int32")[:, None])


def causal_mask(query_length: Any, key_length: Any = None) -> Any:
    """Lets a query see the keys up to its own place, aligned to the bottom right.

    The last query sees every key. With `query_length` < `key_length` the queries are the *last* positions of the
    sequence, so that a call over new tokens and their cache agrees with a call over the whole.

    Args:
        query_length: T.
        key_length: S; equal to T when not given.

    Returns:
        `(1, T, S)` boolean.

    Example:
        >>> import numpy as np
        >>> np.asarray(causal_mask(2, 3))[0].tolist()
        [[True, True, False], [True, True, True]]
    """
    key_length = query_length if key_length is None else key_length
    _check_lengths(query_length=query_length, key_length=key_length)
    rows = ops.arange(query_length, dtype="int32")[:, None] + (key_length - query_length)
    columns = ops.arange(key_length, dtype="int32")[None, :]
    return ops.less_equal(columns, rows)[None, :, :]


def window_mask(query_length: Any, key_length: Any = None, window: int = 1) -> Any:
    """Lets a query see the keys that are less than `window` places away, to either side, aligned to the bottom right.

    Together with `causal_mask` (see `combine_masks`) it is the window of Mistral's models.

    Args:
        query_length: T.
        key_length: S; equal to T when not given.
        window: 1 = a query sees its own place alone.

    Returns:
        `(1, T, S)` boolean.

    Example:
        >>> import numpy as np
        >>> np.asarray(window_mask(3, window=2))[0].tolist()
        [[True, True, False], [True, True, True], [False, True, True]]
    """
    check_positive(window=window)
    key_length = query_length if key_length is None else key_length
    _check_lengths(query_length=query_length, key_length=key_length)
    rows = ops.arange(query_length, dtype="int32")[:, None] + (key_length - query_length)
    columns = ops.arange(key_length, dtype="int32")[None, :]
    return ops.less(ops.abs(rows - columns), window)[None, :, :]


def prefix_mask(prefix_lengths: Any, length: int) -> Any:
    """Causal, but for a prefix that all see whole: for a decoder that reads its prompt like an encoder.

    Args:
        prefix_lengths: `(B,)` positions of each row's prefix.
        length: T.

    Returns:
        `(B, T, T)` boolean.

    Example:
        >>> import numpy as np
        >>> np.asarray(prefix_mask(np.array([2]), 3))[0].tolist()
        [[True, True, False], [True, True, False], [True, True, True]]

    Source:
        Raffel et al. 2020, figure 4.
    """
    return ops.logical_or(causal_mask(length), length_mask(prefix_lengths, length)[:, None, :])


def segment_mask(segment_ids: Any, key_segment_ids: Any = None) -> Any:
    """Keeps sequences apart that are packed into one row: a query sees the keys of its own sequence.

    Args:
        segment_ids: `(B, T)` whole numbers, the sequence of each position; 0 is padding, which sees and shows nothing.
        key_segment_ids: `(B, S)` for the keys; those of the queries when not given.

    Returns:
        `(B, T, S)` boolean.

    Example:
        >>> import numpy as np
        >>> np.asarray(segment_mask(np.array([[1, 1, 2, 0]])))[0].astype(int).tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    """
    segment_ids = ops.convert_to_tensor(segment_ids)
    key_segment_ids = segment_ids if key_segment_ids is None else ops.convert_to_tensor(key_segment_ids)
    shapes = tuple(segment_ids.shape), tuple(key_segment_ids.shape)
    if {len(shape) for shape in shapes} != {2}:
        raise ValueError(f"Segment ids have the shape (B, length). Received {shapes[0]} and {shapes[1]}.")
    same = ops.equal(segment_ids[:, :, None], key_segment_ids[:, None, :])
    return ops.logical_and(same, ops.not_equal(segment_ids, 0)[:, :, None])


def _check_lengths(**lengths: Any) -> None:
    for name, length in lengths.items():
        if isinstance(length, (int, float)) and (length != int(length) or length < 0):
            raise ValueError(f"{name} is a whole number, 0 or more. Received {length!r}.")


def check_mask(mask: Any, batch: int | None, heads: int | None, targets: int | None, sources: int | None) -> Any:
    """Brings an attention mask to `(B | 1, H | 1, T | 1, S)`, or refuses it in words.

    Args:
        mask: boolean, `(T, S)`, `(B, T, S)` or `(B, H, T, S)`; axes of size 1 broadcast, but for S.
        batch, heads, targets, sources: B, H, T, S where known statically, else None.

    Raises:
        ValueError: for a mask that is not boolean, or whose shape does not fit, or fits only by accident
            (a two-dimensional mask when the batch is as large as T, or when its first axis is not known before the
            program runs: it could be a padding mask).
    """
    numbers = f"B={batch}, H={heads}, T={targets}, S={sources}"
    mask = check_boolean(mask, f" ({numbers})")
    received = tuple(mask.shape)
    if len(received) == 2:
        if received[0] is None or (batch is not None and batch == targets and batch != 1):
            raise ValueError(
                f"A mask of shape {received} can be read as (T, S) or as the padding mask (B, S), because {numbers} "
                "(None: not known before the program runs). Pass mask[None] for (1, T, S), or padding through "
                "`key_mask` / `memory_mask`."
            )
        mask = mask[None, None]
    elif len(received) == 3:
        mask = mask[:, None]
    elif len(received) != 4:
        raise ValueError(
            f"An attention mask has the shape (T, S), (B, T, S) or (B, H, T, S). Received {received} ({numbers})."
        )
    limits = (batch, heads, targets, sources)
    for axis, (size, limit) in enumerate(zip(mask.shape, limits, strict=True)):
        may_broadcast = axis < 3 and size == 1
        if size is not None and limit is not None and size != limit and not may_broadcast:
            raise ValueError(
                f"An attention mask has the shape (T, S), (B, T, S) or (B, H, T, S). Received {received}, "
                f"which does not fit {numbers}."
            )
    return mask


def check_boolean(mask: Any, about: str = "", what: str = "An attention mask is boolean, True = may look") -> Any:
    """Brings a mask of truth values or whole numbers (0 hides) to boolean.

    Raises:
        ValueError: for real numbers, or whole numbers below 0 where they can be seen: an additive mask read as truth
            values would show just what it hides.
    """
    mask = ops.convert_to_tensor(mask)
    dtype = keras.backend.standardize_dtype(mask.dtype)
    if keras.backend.is_float_dtype(dtype) or (dtype != "bool" and not is_traced(mask) and bool(ops.any(mask < 0))):
        raise ValueError(
            f"{what}. Received dtype {dtype} of shape {tuple(mask.shape)}{about}. "
            "Compare first: `mask != 0`, or `additive_mask > -1` for an additive one."
        )
    return mask if dtype == "bool" else ops.cast(mask, "bool")


def check_padding(mask: Any, shape: tuple[int | None, ...], name: str) -> Any:
    """Brings a padding mask to boolean `(B | 1, ..)`, or refuses it in words.

    Args:
        mask: boolean, or whole numbers of which 0 means padding.
        shape: of what it speaks of, the batch first; None where a size is not known.
        name: what the message calls it.

    Raises:
        ValueError: for real numbers, or another shape.
    """
    mask = check_boolean(mask, what=f"{name} is boolean, True = real")
    received = tuple(mask.shape)
    fits = len(received) == len(shape) and all(
        None in pair or pair[0] == pair[1] for pair in zip(received[1:], shape[1:], strict=True)
    )
    if not fits or (None not in (received[0], shape[0]) and received[0] not in (1, shape[0])):
        sizes = ", ".join("length" if size is None else str(size) for size in shape[1:])
        batch = "" if shape[0] is None else f" with B={shape[0]}"
        raise ValueError(f"{name} has the shape (B, {sizes}){batch}. Received {received}.")
    return mask


def mean_of_real(memory: Any, mask: Any = None) -> Any:
    """The mean of the real positions of `(B, S, D)`, `(B, D)`; zeros where there are none.

    It is summed in float32 at least: a sum of many positions overflows in float16.

    Args:
        memory: `(B, S, D)`.
        mask: `(B, S)` boolean, True = real; None = all.

    Example:
        >>> import numpy as np
        >>> memory, mask = np.array([[[2.0], [4.0], [9.0]]]), np.array([[True, True, False]])
        >>> float(mean_of_real(memory, mask)[0, 0]), float(mean_of_real(memory)[0, 0])
        (3.0, 5.0)
    """
    memory = ops.convert_to_tensor(memory)
    if mask is None and memory.shape[1]:
        return ops.mean(memory, axis=1)
    if mask is None:
        mask = ops.ones(ops.shape(memory)[:2], "bool")
    real = check_padding(mask, tuple(memory.shape[:2]), "memory_mask")[..., None]
    wide = keras.backend.result_type(memory.dtype, "float32")
    count = ops.maximum(ops.sum(ops.cast(real, wide), axis=1), 1.0)
    total = ops.sum(ops.cast(ops.where(real, memory, ops.zeros((), memory.dtype)), wide), axis=1)
    return ops.cast(total / count, memory.dtype)


def combine_masks(*masks: Any) -> Any:
    """The conjunction of masks that broadcast against each other; None stands for "everything may be seen".

    Raises:
        ValueError: for masks of other numbers of axes: a padding mask (B, S) beside a plane (1, T, S) would be read as
            one of queries and keys.

    Example:
        >>> import numpy as np
        >>> real = padding_mask(np.array([[5, 6, 0]]))  # (B, S)
        >>> np.asarray(combine_masks(causal_mask(3), real[:, None, :]))[0].astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 0]]
    """
    given = [mask for mask in masks if mask is not None]
    shapes = [tuple(mask.shape) for mask in given]
    if len({len(shape) for shape in shapes}) > 1:
        raise ValueError(
            f"Masks to combine have the same number of axes. Received {', '.join(map(str, shapes))}. A padding mask "
            "(B, S) becomes mask[:, None, :], a plane (T, S) becomes mask[None]."
        )
    combined = None
    for mask in given:
        combined = mask if combined is None else ops.logical_and(combined, mask)
    return combined
