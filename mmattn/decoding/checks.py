"""Refuses settings of a search that cannot work, in words, before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_lengths(max_length: Any, min_length: Any, no_repeat_ngram: int, size: int | None) -> int:
    """Returns the length of the result's arrays. Lengths that are arrays are not looked at."""
    if size is None:
        if not _whole(max_length):
            raise ValueError(
                f"max_length must be a whole number, and is {max_length!r}; an array needs `size` beside it."
            )
        size = int(max_length)
    if _whole(max_length) and not 1 <= max_length <= size:
        raise ValueError(
            f"max_length must be at least 1 and at most the size of the arrays ({size}), and is {max_length}."
        )
    if _whole(min_length) and min_length < 0:
        raise ValueError(f"min_length must be at least 0, and is {min_length}.")
    if _whole(min_length) and _whole(max_length) and min_length >= max_length:
        raise ValueError(
            f"min_length={min_length} tokens and the end token do not fit into max_length={max_length}. "
            f"min_length can be 0 to {max_length - 1}."
        )
    if not _whole(no_repeat_ngram) or no_repeat_ngram < 0:
        raise ValueError(f"no_repeat_ngram must be a whole number, 0 for off, and is {no_repeat_ngram!r}.")
    return size


def check_sampling(temperature: Any, top_k: Any, top_p: Any) -> None:
    if _real(temperature) and not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be above 0, and is {temperature}. For the likeliest token: greedy.")
    if not _whole(top_k) or top_k < 0:
        raise ValueError(f"top_k must be a whole number, 0 for off, and is {top_k!r}.")
    if _real(top_p) and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1 (off), and is {top_p}.")


def check_beams(num_beams: Any, num_return: Any, vocabulary_size: int | None = None) -> None:
    if not _whole(num_beams) or num_beams < 1:
        raise ValueError(f"num_beams must be a whole number from 1, and is {num_beams!r}.")
    if not _whole(num_return) or not 1 <= num_return <= num_beams:
        raise ValueError(f"num_return must be from 1 to num_beams={num_beams}, and is {num_return!r}.")
    if vocabulary_size is not None and num_beams > vocabulary_size:
        raise ValueError(f"num_beams={num_beams} exceeds the {vocabulary_size} tokens of the vocabulary.")


def check_patience(patience: Any) -> None:
    if _real(patience) and not 0 <= patience < float("inf"):
        raise ValueError(f"patience must be 0 (off) or more, in numbers of beams, and is {patience}.")


def check_tokens(end_id: int, pad_id: int, suppress: tuple[int, ...], vocabulary_size: int) -> None:
    for what, token in [("end_id", end_id), ("pad_id", pad_id), *(("suppress", token) for token in suppress)]:
        if not 0 <= token < vocabulary_size:
            raise ValueError(f"{what}={token} is no token of the model, which has 0 to {vocabulary_size - 1}.")
    if end_id == pad_id or end_id in suppress:
        raise ValueError(f"end_id={end_id} must differ from pad_id={pad_id} and from suppress={suppress}.")


def _whole(number: Any) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def _real(number: Any) -> bool:
    return isinstance(number, (int, float, np.number))


def check_special_ids(**ids: int | None) -> None:
    """Special tokens must be there, except an unknown one, and differ."""
    for name, token in ids.items():
        if token is None and name == "unk_id":
            continue
        if token is None or not _whole(token) or token < 0:
            raise ValueError(f"{name} must be a token id, a whole number from 0, and is {token!r}.")
    given = [token for token in ids.values() if token is not None]
    if len(set(given)) < len(given):
        raise ValueError(f"The special tokens must differ, and are {', '.join(f'{k}={v}' for k, v in ids.items())}.")


def read_prompt(prompt: Any, rows: int, max_length: int, pad_id: int, end_id: int) -> np.ndarray:
    """The prompt as int32 `(rows, T0)`, padded at the right, from an array or from a list of lists of any lengths."""
    lists = [[int(token) for token in np.asarray(row).reshape(-1)] for row in prompt]
    if len(lists) != rows:
        raise ValueError(f"prompt has {len(lists)} rows and the inputs have {rows}: one prompt for each input.")
    for number, row in enumerate(lists):
        while row and row[-1] == pad_id:
            row.pop()
        if len(row) >= max_length:
            raise ValueError(
                f"The prompt of row {number} has {len(row)} tokens, and max_length={max_length} must exceed that."
            )
        if bad := [token for token in row if token in (pad_id, end_id) or token < 0]:
            raise ValueError(
                f"The prompt of row {number} holds {bad[0]}. Padding, the end token and negative ids do not fit."
            )
    prompt = np.full((rows, max(1, *(len(row) for row in lists))), pad_id, dtype="int32")
    for filled, row in zip(prompt, lists, strict=True):
        filled[: len(row)] = row
    return prompt
