"""Greedy search and the rules that all searches share."""

from __future__ import annotations

import numpy as np
import pytest
from keras import ops
from toy_steps import BOS, END, PAD, UNK, ToyModel, length_penalty, permitted

from mmattn.decoding import beam, greedy, sample
from mmattn.decoding.rules import repeats

TOY = ToyModel()
COMMON = {"end_id": END, "suppress": (BOS, UNK)}


def search(method, memory, toy=TOY, **options):
    context, state = toy.start({"memory": memory}, options["max_length"])
    found = method(toy.step, context, state, ids=np.full(len(memory), BOS), **COMMON, **options)
    return type(found)(*(np.asarray(ops.convert_to_numpy(array)) for array in found))


def greedy_in_numpy(memory, max_length, prompt=(), **rules):
    tokens, log_probs = (), []
    while len(tokens) < max_length and tokens[-1:] != (END,):
        scores = TOY.log_probs(memory, tokens)
        if len(tokens) < len(prompt):
            tokens, log_probs = (*tokens, prompt[len(tokens)]), [*log_probs, 0.0]
            continue
        open_tokens = [t for t in range(len(scores)) if permitted(tokens, t, **rules) and scores[t] > -np.inf] or [END]
        best = max(open_tokens, key=lambda t: scores[t])
        tokens, log_probs = (*tokens, best), [*log_probs, scores[best]]
    return tokens, log_probs


@pytest.mark.parametrize("rules", [{}, {"min_length": 4}, {"ngram": 1}, {"ngram": 2}, {"min_length": 6, "ngram": 3}])
def test_greedy_equals_a_numpy_loop(rules):
    memory = TOY.memory(6)
    options = {"min_length": rules.get("min_length", 0), "no_repeat_ngram": rules.get("ngram", 0)}
    found = search(greedy, memory, max_length=9, length_penalty=0.7, **options)
    for row in range(6):
        tokens, log_probs = greedy_in_numpy(memory[row], 9, **rules)
        assert found.lengths[row, 0] == len(tokens)
        assert tuple(found.ids[row, 0]) == tokens + (PAD,) * (9 - len(tokens))
        np.testing.assert_allclose(found.token_log_probs[row, 0, : len(tokens)], log_probs, atol=1e-5)
        np.testing.assert_allclose(found.log_probs[row, 0], sum(log_probs), atol=1e-5)
        np.testing.assert_allclose(found.scores[row, 0], sum(log_probs) / length_penalty(len(tokens), 0.7), atol=1e-5)


@pytest.mark.parametrize("method,options", [(greedy, {}), (beam, {"num_beams": 3}), (sample, {"seed": 5})])
def test_a_row_of_a_mixed_batch_equals_the_row_alone(method, options):
    memory = TOY.memory(5, seed=3)
    prompts = [(), (4,), (5, 6, 4), (6, 6), (4, 4, 4, 5)]
    filled = np.array([[*prompt, *[PAD] * (4 - len(prompt))] for prompt in prompts])
    together = search(method, memory, max_length=8, prompt=filled, no_repeat_ngram=3, **options)
    for row, prompt in enumerate(prompts):
        if method is sample:
            options = {**options, "rows": np.array([row])}
        own = np.array([prompt]) if prompt else None
        alone = search(method, memory[row : row + 1], max_length=8, prompt=own, no_repeat_ngram=3, **options)
        np.testing.assert_array_equal(together.ids[row], alone.ids[0])
        np.testing.assert_array_equal(together.lengths[row], alone.lengths[0])
        np.testing.assert_allclose(together.token_log_probs[row], alone.token_log_probs[0], atol=1e-5)
        np.testing.assert_allclose(together.scores[row], alone.scores[0], atol=1e-5)


def test_a_prompt_is_forced_and_counts_nothing():
    memory = TOY.memory(4)
    found = search(greedy, memory, max_length=7, prompt=np.array([[6, 5, 5]] * 4))
    for row in range(4):
        tokens, log_probs = greedy_in_numpy(memory[row], 7, prompt=(6, 5, 5))
        assert tuple(found.ids[row, 0, : len(tokens)]) == tokens
        np.testing.assert_allclose(found.log_probs[row, 0], sum(log_probs), atol=1e-5)
        np.testing.assert_allclose(
            found.scores[row, 0], sum(log_probs) / length_penalty(len(tokens) - 3, 0.6), atol=1e-5
        )


@pytest.mark.parametrize("method,options", [(greedy, {}), (beam, {"num_beams": 3}), (sample, {"seed": 2})])
def test_special_tokens_are_never_generated_even_if_they_are_likeliest(method, options):
    def step(ids, index, context, state):
        return ops.take(np.array([[9.0, 9.0, 9.0, 0.0, 1.0, 1.0]], "float32"), ops.zeros_like(ids), axis=0), state

    found = method(step, None, None, ids=np.full(8, BOS), max_length=12, **COMMON, **options)
    for ids, length in zip(np.asarray(found.ids)[:, 0], np.asarray(found.lengths)[:, 0], strict=True):
        assert not set(ids[:length]) & {PAD, UNK, BOS}
        assert not ids[length:].any()


@pytest.mark.parametrize("method,options", [(greedy, {}), (beam, {"num_beams": 2}), (sample, {"seed": 2})])
def test_a_row_that_may_go_on_with_nothing_ends(method, options):
    def step(ids, index, context, state):  # tokens 4 and 5 only, and no token twice
        return ops.take(np.array([[-np.inf] * 4 + [1.0, 1.0]], "float32"), ops.zeros_like(ids), axis=0), state

    found = method(step, None, None, ids=np.array([BOS]), max_length=6, no_repeat_ngram=1, **COMMON, **options)
    assert np.asarray(found.lengths)[0, 0] == 3
    assert sorted(np.asarray(found.ids)[0, 0].tolist()) == [0, 0, 0, END, 4, 5]


def test_log_probs_are_added_in_float32_when_the_model_computes_in_bfloat16():
    def step(ids, index, context, state):
        logits, state = TOY.step(ids, index, context, state)
        return ops.cast(logits, "bfloat16"), state

    memory = TOY.memory(3)
    context, state = TOY.start({"memory": memory}, 20)
    found = greedy(step, context, state, ids=np.full(3, BOS), max_length=20, min_length=19, **COMMON)
    log_probs = np.asarray(found.token_log_probs)
    assert log_probs.dtype == np.float32
    np.testing.assert_allclose(np.asarray(found.log_probs), log_probs.astype("float64").sum(-1), rtol=1e-6)
    exact = search(greedy, memory, max_length=20, min_length=19).token_log_probs
    assert np.abs(log_probs - exact)[:, :, 0].max() < 0.05  # the first token's: near, although the logits were rounded


@pytest.mark.parametrize("n", [1, 2, 3])
def test_repeated_ngrams_equal_a_loop(n):
    rng = np.random.default_rng(n)
    history = rng.integers(4, 8, size=(6, 9)).astype("int32")
    for filled in range(10):
        expected = np.zeros((6, 8), dtype=bool)
        for row in range(6):
            for token in range(4, 8):
                grown = (*history[row, :filled], token)
                grams = [tuple(grown[i : i + n]) for i in range(len(grown) - n + 1)]
                expected[row, token] = bool(grams) and grams[-1] in grams[:-1]
        in_numpy = repeats(history, filled, n, 8)
        in_ops = repeats(ops.convert_to_tensor(history), ops.convert_to_tensor(filled, dtype="int32"), n, 8)
        np.testing.assert_array_equal(np.broadcast_to(in_numpy, (6, 8)), expected)
        np.testing.assert_array_equal(np.broadcast_to(ops.convert_to_numpy(in_ops), (6, 8)), expected)


@pytest.mark.parametrize(
    "method,options,words",
    [
        (greedy, {"max_length": 0}, "max_length must be at least 1"),
        (greedy, {"max_length": 4.5}, "max_length must be a whole number"),
        (greedy, {"max_length": 5, "min_length": 5}, "min_length can be 0 to 4"),
        (greedy, {"max_length": 5, "min_length": -1}, "at least 0"),
        (greedy, {"max_length": 5, "no_repeat_ngram": -2}, "no_repeat_ngram"),
        (greedy, {"max_length": 2, "prompt": np.array([[4, 4, 4]])}, "at most max_length=2"),
        (greedy, {"max_length": 2, "pad_id": 3}, "end_id=3 must differ from pad_id=3"),
        (greedy, {"max_length": 2, "pad_id": 99}, "pad_id=99 is no token of the model, which has 0 to 31"),
        (beam, {"max_length": 5, "num_beams": 0}, "num_beams must be a whole number from 1"),
        (beam, {"max_length": 5, "num_beams": 33}, "num_beams=33 exceeds the 32 tokens"),
        (beam, {"max_length": 5, "num_beams": 2, "num_return": 3}, "num_return must be from 1 to num_beams=2"),
        (sample, {"max_length": 5, "seed": 1, "temperature": 0}, "temperature must be above 0, and is 0"),
        (sample, {"max_length": 5, "seed": 1, "top_k": -1}, "top_k must be a whole number"),
        (sample, {"max_length": 5, "seed": 1, "top_p": 0.0}, "top_p must be above 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_words(method, options, words):
    with pytest.raises(ValueError, match=words):
        search(method, TOY.memory(1), **options)


def test_a_state_that_changes_its_form_is_refused():
    def step(ids, index, context, state):
        return ops.zeros((1, 8)), ops.concatenate([state, state], axis=1)

    with pytest.raises(ValueError, match="state of the form it was given"):
        greedy(step, None, ops.zeros((1, 2)), ids=np.array([BOS]), max_length=3, **COMMON)
