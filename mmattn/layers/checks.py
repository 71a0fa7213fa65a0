"""The rules that sizes, shares and heads keep, and the words in which a broken one is refused."""

from __future__ import annotations

from typing import Any

import keras


def check_positive(**sizes: Any) -> None:
    """Refuses whatever is not a whole number of 1 or more; None stands for "not given" and passes.

    >>> check_positive(hidden_dim=8, num_layers=0)
    Traceback (most recent call last):
    ValueError: The argument `num_layers` is a positive whole number. Received num_layers=0.
    """
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"The argument `{name}` is a positive whole number. Received {name}={size!r}.")


def check_shares(**shares: Any) -> None:
    """Refuses whatever is not a share that can be dropped.

    >>> check_shares(dropout=1.0)
    Traceback (most recent call last):
    ValueError: dropout is a share in [0, 1). Received dropout=1.0.
    """
    for name, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 <= share < 1.0:
            raise ValueError(f"{name} is a share in [0, 1). Received {name}={share!r}.")


def check_heads(num_heads: int, width: int, name: str = "hidden_dim", hint: str = "") -> None:
    """Refuses heads that do not divide the width, and names those that do.

    >>> check_heads(5, 12)
    Traceback (most recent call last):
    ValueError: num_heads=5 does not divide hidden_dim=12. Heads that fit: 1, 2, 3, 4, 6, 12.
    """
    check_positive(num_heads=num_heads)
    if width % num_heads:
        fits = ", ".join(str(n) for n in range(1, width + 1) if width % n == 0)
        raise ValueError(f"num_heads={num_heads} does not divide {name}={width}. Heads that fit: {fits}.{hint}")


def check_grouped(num_heads: int, num_key_value_heads: int | None) -> None:
    """Refuses heads of keys and values that the query heads can't share out.

    >>> check_grouped(8, 3)
    Traceback (most recent call last):
    ValueError: num_key_value_heads=3 does not divide num_heads=8. Heads that fit: 1, 2, 4, 8.
    """
    if num_key_value_heads is not None and num_heads % num_key_value_heads:
        fits = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise ValueError(
            f"num_key_value_heads={num_key_value_heads} does not divide num_heads={num_heads}. Heads that fit: {fits}."
        )


def check_rows(owner: str, **arrays: Any) -> None:
    """Refuses arrays whose rows do not belong together: some operations would spread one row over all.

    >>> import numpy as np
    >>> check_rows("layer", inputs=np.zeros((2, 3)), memory=np.zeros((1, 5)))
    Traceback (most recent call last):
    ValueError: layer: what belongs together has one batch B. Received inputs (2, 3), memory (1, 5).
    """
    if len({array.shape[0] for array in arrays.values()} - {None}) > 1:
        shapes = ", ".join(f"{name} {tuple(array.shape)}" for name, array in arrays.items())
        raise ValueError(f"{owner}: what belongs together has one batch B. Received {shapes}.")


def check_dict(owner: str, inputs: Any, *names: str) -> None:
    """Refuses what is no dict, or lacks one of its arrays.

    >>> check_dict("model", {"source": 1}, "source_ids", "target_ids")
    Traceback (most recent call last):
    ValueError: model reads a dict with "source_ids", "target_ids". Received one of: source.
    """
    if not hasattr(inputs, "keys") or any(name not in inputs for name in names):
        got = f"one of: {', '.join(sorted(inputs))}" if hasattr(inputs, "keys") else f"a {type(inputs).__name__}"
        wanted = " with " + ", ".join(f'"{name}"' for name in names) if names else ""
        raise ValueError(f"{owner} reads a dict{wanted}. Received {got}.")


def check_ids(owner: str, ids: Any, name: str, ranks: tuple[int, ...] = (2,)) -> None:
    """Refuses token ids that are no whole numbers, or of another rank.

    >>> import numpy as np
    >>> check_ids("decoder", np.zeros((2, 3)), "token_ids")
    Traceback (most recent call last):
    ValueError: decoder takes whole numbers (B, T) as token_ids. Received float64 of shape (2, 3).
    """
    dtype, shape = keras.backend.standardize_dtype(ids.dtype), tuple(ids.shape)
    if "int" not in dtype or len(shape) not in ranks:
        side = "S" if name == "source_ids" else "T"
        wanted = " or ".join({1: "(B,)", 2: f"(B, {side})", 3: "(B, n, T)"}[rank] for rank in ranks)
        raise ValueError(f"{owner} takes whole numbers {wanted} as {name}. Received {dtype} of shape {shape}.")


def checked_source(owner: str, inputs: Any) -> Any:
    """The token ids `(B, S)` that a text encoder reads."""
    check_dict(owner, inputs, "source_ids")
    check_ids(owner, inputs["source_ids"], "source_ids")
    return inputs["source_ids"]


def check_no_state(owner: str, state: Any) -> None:
    """Refuses a state where nothing is remembered across calls: to pass over it would be to forget it.

    >>> check_no_state("decoder", ())
    >>> check_no_state("decoder", {"cells": []})
    Traceback (most recent call last):
    ValueError: decoder remembers nothing from one call to the next: its state is None or (). Received a dict.
    """
    if state is not None and not (isinstance(state, tuple) and not state):
        raise ValueError(
            f"{owner} remembers nothing from one call to the next: its state is None or (). Received a "
            f"{type(state).__name__}."
        )


IN_ATTENTION = ("rotary", "alibi", "t5", "shaw", "transformer_xl")  # positions that the self-attentions see to
POSITIONS = ("sinusoidal", "learned", *IN_ATTENTION)


def check_positions(
    positions: str, max_length: int | None, known: tuple[str, ...] = POSITIONS, options: dict[str, Any] | None = None
) -> None:
    """Refuses a kind of positions that is not among those `known`, learned ones without a longest sequence, and options
    of positions that the self-attentions do not see to (which check them).

    >>> check_positions("learned", None)
    Traceback (most recent call last):
    ValueError: positions="learned" needs max_length, the longest sequence. Received None.
    """
    if positions not in known:
        raise ValueError(f"positions is one of {', '.join(known)}. Received {positions!r}.")
    if positions == "learned" and max_length is None:
        raise ValueError('positions="learned" needs max_length, the longest sequence. Received None.')
    if options is not None and positions not in IN_ATTENTION:
        raise ValueError(
            f"position_options go with positions that attention sees to: {', '.join(IN_ATTENTION)}. Received "
            f"{positions!r} and {options!r}."
        )
