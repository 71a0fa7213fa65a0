"""Where a decoder looked, token by token, and the pictures of it.

Shapes: N layers, H heads, T tokens, S memory positions.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from mmattn.preprocess.text import Tokenizer


def cross_attention(
    model: Any, inputs: Mapping[str, Any], ids: Sequence[int], layer: int | None, head: int | None
) -> np.ndarray:
    """The weights float32 (T, S) with which each token was predicted, from one full pass over a text.

    Args:
        model: has `attention(inputs) -> (1, N, H, T, S)`.
        inputs: a batch of one, what the encoder reads.
        ids: the text's T tokens, without start and end. For no token there is one row all the same.
        layer, head: from 0; -1 the last, None the mean of all.

    Raises:
        ValueError: no such layer or head.
    """
    shown = [Tokenizer.bos_id, *ids]  # position t, which has seen t tokens, predicts token t
    inputs = {**inputs, "target_ids": np.array([shown[: max(1, len(ids))]], "int32")}
    scores = keras.ops.convert_to_numpy(keras.ops.cast(model.attention(inputs), "float32"))[0]  # (N, H, T, S)
    return _select(_select(scores, layer, "layer"), head, "head")


def save_picture(picture: Any, path: str | os.PathLike[str]) -> None:
    """Writes a picture as a PNG, whole or not at all.

    Raises:
        OSError: it can't be written.
    """
    path = Path(path)
    part = path.with_name(f".{secrets.token_hex(8)}.part")  # no longer than the name itself may be
    try:
        with open(part, "wb") as file:
            picture.save(file, "PNG")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _select(scores: np.ndarray, index: int | None, what: str) -> np.ndarray:
    """Entry `index` of the first axis, or the mean of all."""
    if index is None:
        return scores.mean(axis=0)
    if not -len(scores) <= index < len(scores):
        raise ValueError(
            f"{what}={index} doesn't exist: there are {len(scores)}, 0 to {len(scores) - 1} or None for the mean"
        )
    return scores[index]
