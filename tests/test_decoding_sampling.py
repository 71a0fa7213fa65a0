"""Sampling: the noise is good and a function of its place alone; the filters and the draws follow the definitions."""

from __future__ import annotations

import numpy as np
import pytest
from keras import ops
from toy_steps import BOS, END, UNK, ToyModel

from mmattn.decoding import noise, sample
from mmattn.decoding.sampling import keep_likely

TOY = ToyModel()
COMMON = {"end_id": END, "suppress": (BOS, UNK)}


def hashed(seed, rows, position, size):
    return ops.convert_to_numpy(noise.hashed(noise.seed_words(seed), np.asarray(rows), position, size))


def uniform(seed, rows, position, size):
    return ops.convert_to_numpy(noise.uniform(noise.seed_words(seed), np.asarray(rows), position, size))


def assert_even(counts):
    """Chi-square against equal counts, five standard deviations wide."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    assert expected >= 5
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom), chi_square


def axes():
    """Noise along each thing it depends on: neighbours along the first axis differ in that thing."""
    yield "row", uniform(7, np.arange(1000), 3, 256)
    yield "position", np.concatenate([uniform(7, [5], position, 4000) for position in range(50)])
    yield "seed", np.concatenate([uniform(seed, [5], 3, 4000) for seed in range(50)])
    yield "high seed", np.concatenate([uniform(seed << 32, [5], 3, 4000) for seed in range(50)])
    yield "token", uniform(7, np.arange(256), 3, 1000).T


def test_noise_is_uniform_and_independent_along_every_axis():
    for name, u in axes():
        assert u.dtype == np.float32 and u.min() > 0 and u.max() < 1, name
        assert_even(np.histogram(u, bins=1024, range=(0, 1))[0])
        for lag in (1, 2, 16):  # pairs of neighbours fill the unit square evenly
            pairs = np.histogram2d(u[lag:].ravel(), u[:-lag].ravel(), bins=64, range=((0, 1), (0, 1)))[0]
            assert_even(pairs)
        triples = (u[2:] * 8).astype(int) * 64 + (u[1:-1] * 8).astype(int) * 8 + (u[:-2] * 8).astype(int)
        assert_even(np.bincount(triples.ravel(), minlength=512))
        tails = np.sort(u.ravel())[[100, -101]] * [1, 1] - [0, 1]
        assert np.all(np.abs(np.abs(tails) * u.size - 101) < 5 * np.sqrt(101)), name


def test_every_bit_of_the_noise_is_fair_and_no_two_agree():
    bits = np.unpackbits(hashed(3, np.arange(400), 0, 250).view(np.uint32).reshape(-1, 1).view(np.uint8), axis=1)
    signs = 2.0 * bits - 1  # (100000, 32)
    assert np.abs(signs.mean(0)).max() < 5 / np.sqrt(len(signs))
    agreement = signs.T @ signs / len(signs) - np.eye(32)
    assert np.abs(agreement).max() < 5 / np.sqrt(len(signs))


@pytest.mark.parametrize("what", ["seed", "row", "position"])
def test_one_bit_of_seed_row_or_position_flips_half_of_the_noise(what):
    for bit in range(0, 64 if what == "seed" else 16, 3):
        place = {"seed": 12345, "row": 77, "position": 13}
        other = {**place, what: place[what] ^ (1 << bit)}
        a, b = (hashed(p["seed"], [p["row"]], p["position"], 2000).view(np.uint32) for p in (place, other))
        flipped = np.unpackbits((a ^ b).view(np.uint8)).mean()
        assert abs(flipped - 0.5) < 5 * 0.5 / np.sqrt(64000), (bit, flipped)


def test_integer_hash_equals_unsigned_arithmetic_in_numpy():
    def mix(x):
        x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
        return x ^ (x >> 16)

    values = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678, 0xDEADBEEF]
    found = ops.convert_to_numpy(noise.mix(ops.convert_to_tensor(np.array(values, "uint32").view("int32"))))
    assert found.view("uint32").tolist() == [mix(value) for value in values]


def test_noise_of_a_row_does_not_depend_on_its_batch():
    together = hashed(11, [4, 9, 2**31 - 1, 0], 6, 50)
    for place, row in enumerate([4, 9, 2**31 - 1, 0]):
        np.testing.assert_array_equal(hashed(11, [row], 6, 50)[0], together[place])
    np.testing.assert_array_equal(hashed(11, [4], 6, 20)[0], together[0, :20])


def filtered_in_numpy(logits, top_k, top_p):
    kept = np.full_like(logits, -np.inf)
    for row, values in enumerate(logits):
        order = sorted(range(len(values)), key=lambda token: -values[token])[: top_k or len(values)]
        shares = np.exp([values[token] - values[order[0]] for token in order])
        total = 0.0
        for token, share in zip(order, shares / shares.sum(), strict=True):
            if total >= top_p:
                break
            kept[row, token] = values[token]
            total += share
    return kept


@pytest.mark.parametrize(
    "top_k,top_p", [(0, 1.0), (1, 1.0), (5, 1.0), (99, 1.0), (0, 0.5), (0, 0.9), (7, 0.6), (0, 1e-6)]
)
def test_filters_equal_a_numpy_loop(top_k, top_p):
    logits = np.random.default_rng(1).normal(scale=2.0, size=(50, 40)).astype("float32")
    logits[:, 3:6] = -np.inf
    found = ops.convert_to_numpy(keep_likely(ops.convert_to_tensor(logits), top_k, top_p))
    np.testing.assert_array_equal(found, filtered_in_numpy(logits, top_k, top_p))


def test_filters_keep_tokens_as_likely_as_the_last_one_kept():
    logits = ops.convert_to_tensor(np.log([[0.4, 0.2, 0.2, 0.2]]).astype("float32"))
    assert np.isfinite(ops.convert_to_numpy(keep_likely(logits, 2, 1.0))).all()
    assert np.isfinite(ops.convert_to_numpy(keep_likely(logits, 0, 0.5))).all()


@pytest.mark.parametrize("temperature,top_k,top_p", [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.7, 3, 1.0), (1.0, 0, 0.7)])
def test_tokens_are_drawn_as_often_as_their_probability_says(temperature, top_k, top_p):
    logits = np.array([0.0, 0, 0, 0.5, 1.0, 0.2, -0.5, 0.9], dtype="float32")

    def step(ids, index, context, state):
        return ops.take(logits[None], ops.zeros_like(ids), axis=0), state

    draws, options = 20000, {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    found = sample(step, None, None, ids=np.full(draws, BOS), max_length=1, seed=4, **COMMON, **options)
    counts = np.bincount(np.asarray(found.ids)[:, 0, 0], minlength=8)
    opened = np.where(np.arange(8) < 3, -np.inf, logits)[None] / temperature
    shares = np.exp(filtered_in_numpy(opened, top_k, top_p))[0]
    expected = draws * shares / shares.sum()
    there = expected > 0
    assert counts[~there].sum() == 0
    chi_square = ((counts - expected)[there] ** 2 / expected[there]).sum()
    assert chi_square < there.sum() - 1 + 5 * np.sqrt(2 * there.sum())
    log_probs = logits - np.log(np.exp(logits).sum())  # the model's own, whatever the temperature
    np.testing.assert_allclose(np.asarray(found.log_probs)[:, 0], log_probs[np.asarray(found.ids)[:, 0, 0]], atol=1e-5)


def test_same_seed_same_draws_other_seed_other_draws():
    memory = TOY.memory(16)

    def draw(seed):
        context, state = TOY.start({"memory": memory}, 8)
        options = {"max_length": 8, "seed": seed, **COMMON}
        return np.asarray(sample(TOY.step, context, state, ids=np.full(16, BOS), **options).ids)

    np.testing.assert_array_equal(draw(1), draw(1))
    np.testing.assert_array_equal(draw(np.int64(1)), draw(1))
    for other in (2, -1, 1 << 32, 10**18):
        assert (draw(1) != draw(other)).any()
