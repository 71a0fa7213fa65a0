"""Greedy search, and the loop over one sequence a row that it shares with sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from keras import ops

from mmattn import backend
from mmattn.decoding.checks import check_lengths
from mmattn.decoding.loop import Generated, Step, cast, flat_step, penalty, run, score_dtype
from mmattn.decoding.rules import Rules, full_prompt


def greedy(
    step: Step,
    context: Any,
    state: Any,
    *,
    ids: Any,
    end_id: int,
    pad_id: int = 0,
    max_length: Any,
    min_length: Any = 0,
    no_repeat_ngram: int = 0,
    length_penalty: Any = 0.6,
    suppress: tuple[int, ...] = (),
    prompt: Any = None,
    size: int | None = None,
) -> Generated:
    """Takes the likeliest token at each position.

    Arguments:
        step: step(ids (B,), index, context, state) -> logits (B, V), state. `index` is one number for all rows; the
            state keeps its shapes and dtypes.
        context: a nest of arrays, batch first, or None; never changes.
        state: a nest of arrays, batch first, or None.
        ids: `(B,)` start tokens.
        end_id: the token that ends a sequence.
        pad_id: fills up what follows; never generated.
        max_length: the most tokens a row may have, prompt and end token included. A row that has not ended by then is
            cut there.
        min_length: the least tokens before the end token, prompt included.
        no_repeat_ngram: no sequence of this many tokens comes twice in a row, prompt included; 0 = off. A row that
            may go on with no token at all ends.
        length_penalty: alpha, for `Generated.scores` only.
        suppress: tokens never to generate, such as the start token and the unknown one.
        prompt: `(B, T0)` tokens that the result begins with; rows of different lengths are filled with padding at
            the right. They go through `step` like generated ones.
        size: L, the length of the arrays, where `max_length` is not a Python number. Default: max_length.

    Returns:
        Generated with N = 1.

    Raises:
        ValueError: for a number that does not fit; the message names those that would.

    >>> import numpy as np
    >>> logits = np.zeros((6, 6), dtype="float32")  # after start 2 comes 5, after 5 comes 4, after 4 the end 3
    >>> logits[2, 5] = logits[5, 4] = logits[4, 3] = 9.0
    >>> step = lambda ids, index, context, state: (ops.take(logits, ids, axis=0), state)
    >>> found = greedy(step, None, None, ids=np.array([2]), end_id=3, max_length=5)
    >>> np.asarray(found.ids).tolist(), np.asarray(found.lengths).tolist()
    ([[[5, 4, 3, 0, 0]]], [[3]])
    """
    size = check_lengths(max_length, min_length, no_repeat_ngram, size)
    traced = backend.is_traced(ids, context, state, prompt)
    prompt = full_prompt(prompt, size, pad_id, traced)
    rules = Rules(end_id, pad_id, tuple(suppress), min_length, no_repeat_ngram, prompt)

    def choose(opened: Any, index: Any) -> tuple[Any, Any]:
        return ops.argmax(opened, axis=-1), ops.max(opened, axis=-1)

    return follow(step, context, state, ids, choose, rules, max_length, size, length_penalty)


def follow(
    step: Step,
    context: Any,
    state: Any,
    ids: Any,
    choose: Callable[[Any, Any], tuple[Any, Any]],
    rules: Rules,
    max_length: Any,
    size: int,
    length_penalty: Any,
) -> Generated:
    """Extends one sequence a row. `choose(open log-probs (B, V), index)` names the next tokens and their log-probs."""
    traced = backend.is_traced(ids, context, state, rules.prompt)
    xp: Any = ops if traced else np
    log_prob_step, state = flat_step(step, state)
    ids = ops.cast(ids, "int32") if traced else np.asarray(ops.convert_to_numpy(ids), dtype="int32")
    history = xp.zeros_like(ids)[:, None] + xp.full((1, size), rules.pad_id, dtype="int32")  # (B, L)
    log_probs = xp.zeros_like(history, dtype=score_dtype())
    places = xp.arange(size, dtype="int32")[None]

    def going(index: Any, ids: Any, done: Any, *_: Any) -> Any:
        return xp.logical_and(index < max_length, xp.logical_not(xp.all(done)))

    def extend(index: Any, ids: Any, done: Any, history: Any, log_probs: Any, state: Any) -> tuple[Any, ...]:
        next_log_probs, state = log_prob_step(ids, index, context, state)
        ids, chosen = choose(rules.open(next_log_probs, history, index), index)
        if not traced:
            ids, chosen = ops.convert_to_numpy(ids), ops.convert_to_numpy(chosen)
        ids = xp.where(done, rules.pad_id, cast(ids, "int32"))
        here = xp.logical_and(places == index, xp.logical_not(done)[:, None])
        history = xp.where(here, ids[:, None], history)
        log_probs = xp.where(here, chosen[:, None], log_probs)
        return index + 1, ids, xp.logical_or(done, ids == rules.end_id), history, log_probs, state

    *_, history, log_probs, _ = run(traced, going, extend, (ids, ids != ids, history, log_probs, state))
    lengths = xp.sum(cast(history != rules.pad_id, "int32"), axis=1)
    total = xp.sum(log_probs, axis=1)
    scores = total / penalty(lengths - rules.prompt_lengths(), length_penalty)
    return Generated(*(array[:, None] for array in (history, cast(lengths, "int32"), total, scores, log_probs)))
