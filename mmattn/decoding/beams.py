"""Beam search with the finished hypotheses kept apart from the live ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from mmattn import backend
from mmattn.decoding.checks import check_beams, check_lengths, check_patience
from mmattn.decoding.loop import Generated, Step, cast, flat_step, map_arrays, penalty, run, score_dtype, space
from mmattn.decoding.rules import Rules, full_prompt

NONE = -float("inf")  # the score of an empty place


class Hypotheses(NamedTuple):
    """M hypotheses a row: ids and log-probs `(B, M, L)`, scores `(B, M)` (live ones: the sum of the log-probs)."""

    ids: Any
    log_probs: Any
    scores: Any


def beam(
    step: Step,
    context: Any,
    state: Any,
    *,
    ids: Any,
    end_id: int,
    pad_id: int = 0,
    max_length: Any,
    num_beams: int = 4,
    num_return: int = 1,
    length_penalty: Any = 0.6,
    min_length: Any = 0,
    no_repeat_ngram: int = 0,
    suppress: tuple[int, ...] = (),
    prompt: Any = None,
    size: int | None = None,
    patience: Any = 0.0,
) -> Generated:
    """Keeps the `num_beams` likeliest sequences at each position; returns the best that ended.

    At each position the best `num_beams` continuations of the live beams are kept. Those that end move to the finished
    ones, of which the best `num_return` by score stay, whatever the live ones do. The search of a row is over when no
    live beam can still reach a better score, at the latest at `max_length`, or when `patience` is at its end. What is
    live then is cut off, and returned only in places that no finished hypothesis takes. With one beam this is greedy
    search. What a row gives depends on no other row.

    Arguments:
        num_beams: K, at most the vocabulary.
        num_return: N, at most num_beams.
        length_penalty: alpha; score = log_prob / ((5 + length) / 6) ** alpha, without the prompt. Above 0 it favours
            longer sequences.
        patience: p > 0 ends the search of a row once p * num_beams hypotheses have finished (and num_return at least):
            1 is the usual rule of translation systems. 0 goes on as long as a live beam could win, which with a length
            penalty above 0 and a generous `max_length` takes several times as many positions for few better scores.
        The others: see `greedy`. The context is repeated once for each beam and never gathered; the state is gathered
        at each position.

    Returns:
        Generated with N = num_return: first the finished hypotheses by score, then cut ones.

    Raises:
        ValueError: for a number that does not fit; the message names those that would.

    >>> import numpy as np
    >>> table = np.log([[0.01] * 6] * 2 + [[0.01, 0.01, 0.01, 0.01, 0.52, 0.44]] + [[0.01] * 6]
    ...                + [[0.01, 0.01, 0.01, 0.32, 0.33, 0.32], [0.01, 0.01, 0.01, 0.95, 0.01, 0.01]])
    >>> step = lambda ids, index, context, state: (ops.take(table, ids, axis=0), state)
    >>> search = dict(ids=np.array([2]), end_id=3, max_length=3, length_penalty=0.0)
    >>> np.asarray(beam(step, None, None, num_beams=1, **search).ids)[0, 0].tolist()
    [4, 4, 4]
    >>> np.asarray(beam(step, None, None, num_beams=2, **search).ids)[0, 0].tolist()
    [5, 3, 0]

    Sources: the length penalty and its bound: Wu et al. 2016, section 7. Patience: Kasai et al. 2022, "A Call for
    Clarity in Beam Search: How It Works and When It Stops".
    """
    size = check_lengths(max_length, min_length, no_repeat_ngram, size)
    check_beams(num_beams, num_return)
    check_patience(patience)
    traced = backend.is_traced(ids, context, state, prompt)
    xp: Any = ops if traced else np
    ids = ops.cast(ids, "int32") if traced else np.asarray(ops.convert_to_numpy(ids), dtype="int32")
    prompt = full_prompt(prompt, size, pad_id, traced)
    rules = Rules(end_id, pad_id, tuple(suppress), min_length, no_repeat_ngram, prompt)
    prompt_lengths = 0 if prompt is None else rules.prompt_lengths()[:, None]  # (B, 1)
    context, state = map_arrays(lambda array: ops.repeat(array, num_beams, axis=0), (context, state))
    log_prob_step, state = flat_step(step, state)
    if prompt is not None:
        rules = replace(rules, prompt=xp.repeat(prompt, num_beams, axis=0))
    places = xp.arange(size, dtype="int32")[None, None]
    enough = xp.where(patience > 0, xp.maximum(patience * num_beams, num_return), float("inf"))

    def going(index: Any, ids: Any, live: Hypotheses, finished: Hypotheses, count: Any, state: Any) -> Any:
        best = xp.max(live.scores, axis=1, keepdims=True)  # log-probs only fall, so the bound is at one of the ends
        soon = best / penalty(index + 1 - prompt_lengths, length_penalty)
        late = best / penalty(max_length - prompt_lengths, length_penalty)
        can_win = xp.maximum(soon, late) > finished.scores[:, -1:]
        return xp.logical_and(index < max_length, xp.any(can_win))

    def extend(index: Any, ids: Any, live: Hypotheses, finished: Hypotheses, count: Any, state: Any) -> Any:
        log_probs, state = log_prob_step(ids, index, context, state)
        check_beams(num_beams, num_return, log_probs.shape[-1])
        opened = rules.open(log_probs, xp.reshape(live.ids, (-1, size)), index)
        found = _best_continuations(live.scores, opened)
        parents, tokens, chosen, sums = found if traced else map(ops.convert_to_numpy, found)
        here = places == index
        new_ids = xp.where(here, tokens[..., None], _take(live.ids, parents))
        new_log_probs = xp.where(here, chosen[..., None], _take(live.log_probs, parents))
        ended = tokens == end_id
        scores = xp.where(ended, sums / penalty(index + 1 - prompt_lengths, length_penalty), NONE)
        finished = _best(_joined(finished, Hypotheses(new_ids, new_log_probs, scores)), num_return)
        count = count + xp.sum(cast(scores > NONE, score_dtype()), axis=1, keepdims=True)  # (B, 1)
        live = Hypotheses(new_ids, new_log_probs, xp.where(xp.logical_or(ended, count >= enough), NONE, sums))
        rows = xp.reshape(_rows(parents, num_beams), (-1,))
        state = [ops.take(array, rows, axis=0) for array in state]
        return index + 1, xp.reshape(tokens, (-1,)), live, finished, count, state

    batch = xp.zeros_like(ids)[:, None]  # (B, 1)
    only_first = xp.where(xp.arange(num_beams) == 0, 0.0, NONE)  # all beams are alike at first: one of them is live
    live = _empty(batch, num_beams, size, pad_id)
    live = live._replace(scores=cast(batch, score_dtype()) + cast(only_first, score_dtype())[None])
    finished = _empty(batch, num_return, size, pad_id)
    ids = xp.repeat(ids, num_beams, axis=0)
    none_yet = cast(batch, score_dtype())
    _, _, live, finished, *_ = run(traced, going, extend, (ids, live, finished, none_yet, state))
    cut = live._replace(scores=live.scores / penalty(max_length - prompt_lengths, length_penalty))
    return _ranked(finished, _best(cut, num_return), pad_id)


def _best_continuations(sums: Any, opened: Any) -> tuple[Any, Any, Any, Any]:
    """The best K of all K * V continuations: parents, tokens, log-probs and sums, each `(B, K)`."""
    num_beams, vocabulary_size = sums.shape[1], opened.shape[-1]
    totals = ops.add(space(sums).reshape(sums, (-1, 1)), opened)  # (B * K, V)
    sums, cells = ops.top_k(ops.reshape(totals, (-1, num_beams * vocabulary_size)), num_beams)
    cells = ops.cast(cells, "int32")
    chosen = ops.take(ops.reshape(opened, (-1,)), _rows(cells, num_beams * vocabulary_size))
    return cells // vocabulary_size, cells % vocabulary_size, chosen, sums


def _rows(which: Any, count: int) -> Any:
    """Places `which` `(B, M)` among the `count` of their own row, as places among those of all rows."""
    xp = space(which)
    return which + xp.arange(xp.shape(which)[0], dtype="int32")[:, None] * count


def _take(array: Any, which: Any) -> Any:
    """The hypotheses `which` `(B, M')` of each row of `array` `(B, M, ...)`."""
    xp = space(array)
    return xp.take(xp.reshape(array, (-1, *array.shape[2:])), _rows(which, array.shape[1]), axis=0)


def _best(hypotheses: Hypotheses, count: int) -> Hypotheses:
    """The `count` best of each row; of equal ones the first."""
    if space(hypotheses.scores) is np:
        which = np.argsort(-hypotheses.scores, axis=1, kind="stable")[:, :count].astype("int32")
        scores = np.take_along_axis(hypotheses.scores, which, axis=1)
    else:
        scores, which = ops.top_k(hypotheses.scores, count)
        which = ops.cast(which, "int32")
    return Hypotheses(_take(hypotheses.ids, which), _take(hypotheses.log_probs, which), scores)


def _joined(first: Hypotheses, second: Hypotheses) -> Hypotheses:
    return Hypotheses(*(space(a).concatenate([a, b], axis=1) for a, b in zip(first, second, strict=True)))


def _empty(batch: Any, count: int, size: int, pad_id: int) -> Hypotheses:
    """`count` empty places for each row of `batch` `(B, 1)`, which is all 0."""
    xp = space(batch)
    ids = batch[..., None] + xp.full((1, count, size), pad_id, dtype="int32")
    log_probs = xp.zeros_like(ids, dtype=score_dtype())
    return Hypotheses(ids, log_probs, log_probs[..., 0] + NONE)


def _ranked(finished: Hypotheses, cut: Hypotheses, pad_id: int) -> Generated:
    """The finished hypotheses, then as many of the cut ones as there are places left."""
    xp = space(finished.scores)
    count = finished.scores.shape[1]
    place = xp.arange(count, dtype="int32")[None]
    number = xp.sum(cast(finished.scores > NONE, "int32"), axis=1, keepdims=True)
    which = cast(xp.where(place < number, place, place - number + count), "int32")
    ids, log_probs, scores = (_take(array, which) for array in _joined(finished, cut))
    there = scores > NONE
    ids = xp.where(there[..., None], ids, pad_id)
    log_probs = xp.where(there[..., None], log_probs, 0.0)
    lengths = cast(xp.sum(cast(ids != pad_id, "int32"), axis=-1), "int32")
    return Generated(ids, lengths, xp.where(there, xp.sum(log_probs, axis=-1), NONE), scores, log_probs)
