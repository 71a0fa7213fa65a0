"""Which tokens may follow: special tokens, minimum length, repeated n-grams, prompts."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops

from mmattn.decoding.checks import check_tokens
from mmattn.decoding.loop import cast, space

LOWEST = -1e9  # stands for log(0) where a sequence has to end although the model rules it out


@dataclass(frozen=True)
class Rules:
    """Which tokens may follow: never padding or `suppress`, no end before `min_length`, no n-gram a second time.

    Attributes:
        end_id, pad_id, suppress: token ids.
        min_length: the end token may not stand at a position below it (positions count from 0).
        no_repeat_ngram: n; 0 = off.
        prompt: `(R, L)` int32, forced where it is not padding; None = no prompt.
    """

    end_id: int
    pad_id: int
    suppress: tuple[int, ...]
    min_length: Any
    no_repeat_ngram: int
    prompt: Any = None

    def open(self, log_probs: Any, history: Any, index: Any) -> Any:
        """Log-probabilities `(R, V)` with -inf for what may not follow `history` `(R, L)`, filled up to `index`.

        Where nothing may follow, the sequence ends. Where the prompt goes on, its token has 0 and all others -inf.
        """
        size = log_probs.shape[-1]
        shut, is_end = _masks(self.end_id, self.pad_id, self.suppress, size)
        early = index < self.min_length
        forbidden: Any = np.where(early, shut | is_end, shut) if isinstance(early, (bool, np.bool_)) else None
        if forbidden is None:
            forbidden = ops.logical_or(shut, ops.logical_and(is_end, early))
        if self.no_repeat_ngram:
            repeated = repeats(history, index, self.no_repeat_ngram, size)
            forbidden = space(repeated).logical_or(forbidden, repeated)
        opened = ops.where(forbidden, -float("inf"), log_probs)
        nothing = ops.max(opened, axis=-1, keepdims=True) == -float("inf")  # (R, 1)
        if space(history) is ops or ops.convert_to_numpy(nothing).any():
            opened = ops.where(ops.logical_and(nothing, is_end), ops.maximum(log_probs, LOWEST), opened)
        if self.prompt is None:
            return opened
        forced = space(self.prompt).take(self.prompt, index, axis=1)[:, None]  # (R, 1)
        only = ops.where(ops.arange(size, dtype="int32")[None] == forced, 0.0, -float("inf"))
        return ops.where(forced == self.pad_id, opened, ops.cast(only, opened.dtype))

    def prompt_lengths(self) -> Any:
        """`(R,)` tokens of each row's prompt, or 0 without a prompt."""
        return 0 if self.prompt is None else space(self.prompt).sum(cast(self.prompt != self.pad_id, "int32"), axis=1)


@functools.lru_cache(maxsize=64)
def _masks(end_id: int, pad_id: int, suppress: tuple[int, ...], size: int) -> tuple[np.ndarray, np.ndarray]:
    check_tokens(end_id, pad_id, suppress, size)
    tokens = np.arange(size)[None]
    return np.isin(tokens, [pad_id, *suppress]), tokens == end_id


def repeats(history: Any, index: Any, n: int, vocabulary_size: int) -> Any:
    """`(R, V)` boolean: the tokens that would repeat an n-gram of `history` `(R, L)`, which is filled up to `index`."""
    xp = space(history)
    windows = history.shape[1] - n + 1
    if windows < 1:
        return np.zeros((1, vocabulary_size), dtype="bool")
    ends = history[:, n - 1 :]  # (R, W)
    same = xp.logical_and((xp.arange(windows, dtype="int32") + (n - 1) < index)[None], ends == ends)  # filled so far
    for i in range(n - 1):
        last = xp.take(history, xp.maximum(index - (n - 1) + i, 0), axis=1)  # (R,)
        same = xp.logical_and(same, history[:, i : i + windows] == last[:, None])
    rows = xp.shape(history)[0]
    cells = xp.reshape(xp.arange(rows, dtype="int32")[:, None] * vocabulary_size + ends, (-1,))
    if xp is np:
        counts = np.bincount(cells[same.ravel()], minlength=rows * vocabulary_size)
    else:
        counts = ops.segment_sum(
            ops.cast(ops.reshape(same, (-1,)), "int32"), cells, num_segments=rows * vocabulary_size
        )
    return xp.reshape(counts, (-1, vocabulary_size)) > 0


def full_prompt(prompt: Any, size: int, pad_id: int, traced: bool) -> Any:
    """The prompt `(B, T0)` filled up to `(B, size)` with padding."""
    if prompt is None:
        return None
    prompt = ops.cast(prompt, "int32") if traced else np.asarray(ops.convert_to_numpy(prompt), dtype="int32")
    if len(prompt.shape) != 2 or prompt.shape[1] > size:
        raise ValueError(
            f"prompt must be (batch, tokens) with at most max_length={size} tokens. Its shape is {tuple(prompt.shape)}."
        )
    return space(prompt).pad(prompt, ((0, 0), (0, size - prompt.shape[1])), constant_values=pad_id)
