"""Beam search against every sequence there is, and against beam search in plain Python."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from keras import ops
from toy_steps import BOS, END, PAD, UNK, ToyModel, length_penalty, permitted

from mmattn.decoding import beam, greedy

TOY = ToyModel()
COMMON = {"end_id": END, "suppress": (BOS, UNK)}


def search(memory, method=beam, toy=TOY, **options):
    context, state = toy.start({"memory": memory}, options["max_length"])
    found = method(toy.step, context, state, ids=np.full(len(memory), BOS), **COMMON, **options)
    return type(found)(*(np.asarray(ops.convert_to_numpy(array)) for array in found))


def ranked(finished, cut, count, alpha, prompt_length=0):
    """[(tokens, log_prob)] in the order of a result: finished ones by score, then cut ones."""
    key = lambda pair: -pair[1] / length_penalty(len(pair[0]) - prompt_length, alpha)  # noqa: E731
    return (sorted(finished, key=key)[:count] + sorted(cut, key=key))[:count]


def every_sequence(toy, memory, max_length, **rules):
    finished, cut = [], []
    for length in range(1, max_length + 1):
        for body in itertools.product((4, 5, 6), repeat=length - 1):
            for last in (END, 4, 5, 6) if length == max_length else (END,):
                tokens = (*body, last)
                if all(permitted(tokens[:i], tokens[i], **rules) for i in range(length)):
                    log_prob = sum(toy.log_probs(memory, tokens[:i])[tokens[i]] for i in range(length))
                    (finished if last == END else cut).append((tokens, log_prob))
    return finished, cut


def beams_in_python(toy, memory, num_beams, max_length, prompt=(), enough=math.inf, **rules):
    """Beam search as its definition reads, with no early end but that of `enough` finished ones."""
    live, finished = [((), 0.0)], []
    for position in range(max_length):
        grown = []
        for tokens, log_prob in live:
            scores = toy.log_probs(memory, tokens)
            if position < len(prompt):
                grown.append(((*tokens, prompt[position]), log_prob))
                continue
            follow = [t for t in range(len(scores)) if permitted(tokens, t, **rules) and scores[t] > -np.inf] or [END]
            grown += [((*tokens, t), log_prob + scores[t]) for t in follow]
        kept = sorted(grown, key=lambda pair: -pair[1])[:num_beams]
        finished += [pair for pair in kept if pair[0][-1] == END]
        live = [pair for pair in kept if pair[0][-1] != END]
        if len(finished) >= enough:
            return finished, []
    return finished, live


def assert_same(found, row, expected, alpha, prompt_length=0):
    for n, (tokens, log_prob) in enumerate(expected):
        length = len(tokens)
        assert tuple(found.ids[row, n, :length]) == tokens, (row, n)
        assert not found.ids[row, n, length:].any()
        assert found.lengths[row, n] == length
        np.testing.assert_allclose(found.log_probs[row, n], log_prob, atol=2e-5)
        score = log_prob / length_penalty(length - prompt_length, alpha)
        np.testing.assert_allclose(found.scores[row, n], score, atol=2e-5)
        np.testing.assert_allclose(found.token_log_probs[row, n].sum(), log_prob, atol=2e-5)
    for n in range(len(expected), found.ids.shape[1]):
        assert found.lengths[row, n] == 0
        assert found.scores[row, n] == -np.inf


@pytest.mark.parametrize("alpha", [-0.5, 0.0, 0.6, 1.0, 3.0])
@pytest.mark.parametrize("min_length", [0, 2])
def test_beam_finds_the_best_of_all_sequences(alpha, min_length):
    toy = ToyModel(vocabulary_size=128)  # with tokens 4, 5, 6: at most 27 * 4 sequences at a time
    memory = toy.memory(4)
    options = {"num_beams": 108, "num_return": 60, "length_penalty": alpha, "min_length": min_length}
    found = search(memory, toy=toy, max_length=4, **options)
    for row in range(4):
        finished, cut = every_sequence(toy, memory[row], 4, min_length=min_length)
        assert len(finished) < 60 < len(finished) + len(cut)
        assert_same(found, row, ranked(finished, cut, 60, alpha), alpha)


@pytest.mark.parametrize("num_beams", [1, 2, 3, 5])
@pytest.mark.parametrize("alpha,rules", [(0.0, {}), (0.6, {"ngram": 2}), (1.5, {"min_length": 3}), (-1.0, {})])
def test_beam_equals_beam_search_in_plain_python(num_beams, alpha, rules):
    for seed in range(3):
        toy = ToyModel(content=9, seed=seed)
        memory = toy.memory(4, seed=seed)
        options = {"min_length": rules.get("min_length", 0), "no_repeat_ngram": rules.get("ngram", 0)}
        options |= {"num_beams": num_beams, "num_return": num_beams, "length_penalty": alpha}
        found = search(memory, toy=toy, max_length=7, **options)
        for row in range(4):
            finished, cut = beams_in_python(toy, memory[row], num_beams, 7, **rules)
            assert_same(found, row, ranked(finished, cut, num_beams, alpha), alpha)


def test_beam_continues_prompts_of_mixed_lengths_like_plain_python():
    memory, prompts = TOY.memory(3), [(), (5,), (6, 4, 4)]
    filled = np.array([[*prompt, *[PAD] * (3 - len(prompt))] for prompt in prompts])
    found = search(memory, max_length=7, num_beams=3, num_return=3, length_penalty=0.8, prompt=filled)
    for row, prompt in enumerate(prompts):
        finished, cut = beams_in_python(TOY, memory[row], 3, 7, prompt=prompt)
        assert_same(found, row, ranked(finished, cut, 3, 0.8, len(prompt)), 0.8, len(prompt))


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_one_beam_is_greedy(alpha):
    memory = TOY.memory(8, seed=9)
    one = search(memory, num_beams=1, length_penalty=alpha, max_length=10)
    other = search(memory, method=greedy, length_penalty=alpha, max_length=10)
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_array_equal(one.lengths, other.lengths)
    np.testing.assert_allclose(one.scores, other.scores, atol=1e-6)


def test_search_ends_early_only_when_no_live_beam_can_win():
    calls = []

    def step(ids, index, context, state):
        calls.append(int(index))
        logits = np.full((6, 8), -9.0, dtype="float32")
        logits[:, END] = 0.0 if index == 1 else -8.0
        logits[:, 4] = -1.0 if index == 1 else 5.0
        return ops.take(logits, ops.zeros_like(ids), axis=0), state

    search = {"ids": np.array([BOS]), "max_length": 12, "num_beams": 2, **COMMON}
    found = beam(step, None, None, length_penalty=0.0, **search)
    assert np.asarray(found.lengths)[0, 0] == 2 and max(calls) == 1  # a longer one can only lose
    calls.clear()
    found = beam(step, None, None, length_penalty=9.0, **search)
    assert max(calls) == 11  # under this penalty a longer one may win until the very end
    assert np.asarray(found.lengths)[0, 0] == 12


@pytest.mark.parametrize("patience,num_return", [(1.0, 1), (1.0, 3), (2.0, 2), (0.5, 1), (0.5, 3)])
@pytest.mark.parametrize("alpha", [0.0, 3.0])
def test_patience_ends_the_search_of_each_row_by_itself(patience, num_return, alpha):
    ends = set()
    for seed in range(3):
        toy = ToyModel(content=9, seed=seed)
        memory = toy.memory(4, seed=seed)
        options = {"num_beams": 3, "num_return": num_return, "length_penalty": alpha, "patience": patience}
        found = search(memory, toy=toy, max_length=9, **options)
        for row in range(4):
            finished, cut = beams_in_python(toy, memory[row], 3, 9, enough=max(3 * patience, num_return))
            ends.add(bool(cut))
            assert_same(found, row, ranked(finished, cut, num_return, alpha), alpha)
    assert False in ends  # the rule was at work


def test_patience_saves_positions_under_a_length_penalty():
    calls = []

    def step(ids, index, context, state):
        calls.append(int(index))
        return TOY.step(ids, index, context, state)

    context, state = TOY.start({"memory": TOY.memory(2)}, 60)
    for patience in (0.0, 1.0):
        options = {"max_length": 60, "num_beams": 3, "length_penalty": 2.0, "patience": patience, **COMMON}
        beam(step, context, state, ids=np.full(2, BOS), **options)
    long, short = calls.index(0, 1), len(calls) - calls.index(0, 1)
    assert long == 60 and short < 30
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="patience must be 0"):
            beam(step, context, state, ids=np.full(2, BOS), max_length=6, patience=wrong, **COMMON)


def test_context_is_repeated_once_per_beam_and_never_gathered():
    seen = []

    def step(ids, index, context, state):
        seen.append(context)
        return TOY.step(ids, index, context, state)

    context, state = TOY.start({"memory": TOY.memory(2)}, 6)
    beam(step, context, state, ids=np.full(2, BOS), max_length=6, num_beams=3, **COMMON)
    assert len(seen) > 1 and all(context is seen[0] for context in seen)
    np.testing.assert_array_equal(
        ops.convert_to_numpy(seen[0]["memory"]), np.repeat(ops.convert_to_numpy(context["memory"]), 3, axis=0)
    )


def test_places_without_a_hypothesis_are_empty():
    toy = ToyModel(content=5)  # token 4 and the end: 1 + 1 sequences of up to 1 + end
    found = search(toy.memory(1), toy=toy, max_length=2, num_beams=6, num_return=6)
    finished, cut = beams_in_python(toy, toy.memory(1)[0], 6, 2)
    assert len(finished) + len(cut) == 3
    assert_same(found, 0, ranked(finished, cut, 6, 0.6), 0.6)
