"""Sampling: the next token is drawn, not chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import ops

from mmattn import backend
from mmattn.decoding.checks import check_lengths, check_sampling
from mmattn.decoding.loop import Generated, Step, pick, score_dtype
from mmattn.decoding.noise import gumbel, seed_words
from mmattn.decoding.rules import Rules, full_prompt
from mmattn.decoding.search import follow


def sample(
    step: Step,
    context: Any,
    state: Any,
    *,
    ids: Any,
    end_id: int,
    pad_id: int = 0,
    max_length: Any,
    seed: Any,
    temperature: Any = 1.0,
    top_k: int = 0,
    top_p: Any = 1.0,
    rows: Any = None,
    min_length: Any = 0,
    no_repeat_ngram: int = 0,
    length_penalty: Any = 0.6,
    suppress: tuple[int, ...] = (),
    prompt: Any = None,
    size: int | None = None,
) -> Generated:
    """Draws one sequence a row from the model's distribution, sharpened and cut as asked.

    The filters work in this order: forbidden tokens, temperature, top_k, top_p. The noise is a function of (seed, row,
    position, token) alone, so a row draws the same sequence alone and in any batch.

    Arguments:
        seed: an integer of up to 64 bits (or its `noise.seed_words`).
        temperature: above 0; below 1 sharpens the distribution, above 1 flattens it.
        top_k: draw from the k likeliest tokens only (and all that are as likely as the k-th); 0 = off.
        top_p: draw from the smallest set of likeliest tokens that holds this share of the probability; 1 = off.
        rows: `(B,)` integers, the row numbers that the noise depends on; 0 .. B-1 when not given.
        The others: see `greedy`.

    Returns:
        Generated with N = 1.

    Raises:
        ValueError: for a number that does not fit; the message names those that would.

    >>> import numpy as np
    >>> table = np.log(np.full((6, 6), 1 / 6, dtype="float32"))  # any of six tokens may follow any
    >>> step = lambda ids, index, context, state: (ops.take(table, ids, axis=0), state)
    >>> drawn = sample(step, None, None, ids=np.array([2, 2]), end_id=3, max_length=6, seed=1)
    >>> again = sample(step, None, None, ids=np.array([2]), end_id=3, max_length=6, seed=1, rows=np.array([1]))
    >>> bool(np.all(np.asarray(drawn.ids)[1] == np.asarray(again.ids)[0]))
    True

    Source: the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014); top_p: Holtzman et al. 2020, section 3.1.
    """
    size = check_lengths(max_length, min_length, no_repeat_ngram, size)
    check_sampling(temperature, top_k, top_p)
    words = ops.convert_to_tensor(seed_words(int(seed)) if isinstance(seed, (int, np.integer)) else seed, dtype="int32")
    rows = ops.arange(ops.shape(ids)[0], dtype="int32") if rows is None else ops.cast(rows, "int32")
    prompt = full_prompt(prompt, size, pad_id, backend.is_traced(ids, context, state, prompt))
    rules = Rules(end_id, pad_id, tuple(suppress), min_length, no_repeat_ngram, prompt)

    def choose(opened: Any, index: Any) -> tuple[Any, Any]:
        kept = keep_likely(opened / ops.cast(temperature, score_dtype()), top_k, top_p)
        noise = ops.cast(gumbel(words, rows, index, opened.shape[-1]), score_dtype())
        tokens = ops.cast(ops.argmax(kept + noise, axis=-1), "int32")
        return tokens, pick(opened, tokens)

    return follow(step, context, state, ids, choose, rules, max_length, size, length_penalty)


def keep_likely(logits: Any, top_k: int, top_p: Any) -> Any:
    """Puts -inf at all but the `top_k` greatest logits `(B, V)`, then at all outside the `top_p` nucleus of those.

    Tokens as likely as the last one kept are kept too.
    """
    if top_k:
        best = ops.top_k(logits, min(top_k, logits.shape[-1]))[0]
        logits = ops.where(logits < best[:, -1:], -float("inf"), logits)
    if isinstance(top_p, (int, float)) and top_p == 1:
        return logits
    if not top_k:
        best = ops.top_k(logits, logits.shape[-1])[0]
    shares = ops.softmax(best, axis=-1)  # the likeliest first
    before = ops.cumsum(shares, axis=-1) - shares
    least = ops.min(ops.where(before < ops.cast(top_p, score_dtype()), best, float("inf")), axis=-1, keepdims=True)
    return ops.where(logits < least, -float("inf"), logits)
