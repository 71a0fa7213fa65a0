"""Laws of mmattn.training.losses, against NumPy loops."""

from __future__ import annotations

import math

import keras
import ml_dtypes
import numpy as np
import pytest

from mmattn.training.losses import MaskedCrossEntropy, Perplexity, RDropCrossEntropy, TokenAccuracy, token_losses


def loop_loss(labels, logits, weights, smoothing):
    """The definition, one token and one word at a time, in float64."""
    total = count = 0.0
    size = logits.shape[-1]
    for b, t in np.ndindex(labels.shape):
        row = logits[b, t].astype("float64")
        log_probs = row - row.max() - math.log(sum(math.exp(v - row.max()) for v in row))
        target = [smoothing / size] * size
        target[labels[b, t]] += 1 - smoothing
        total += weights[b, t] * -sum(p * q for p, q in zip(target, log_probs, strict=True))
        count += weights[b, t]
    return total / count


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    lengths = np.array([4, 2, 1])
    weights = (np.arange(4)[None] < lengths[:, None]).astype("float32")
    return rng.integers(0, 7, (3, 4)).astype("int32"), rng.normal(0, 3, (3, 4, 7)).astype("float32"), weights


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_loss_equals_its_definition_word_by_word(batch, smoothing):
    labels, logits, weights = batch
    loss = MaskedCrossEntropy(smoothing)(labels, logits, sample_weight=weights)
    assert float(loss) == pytest.approx(loop_loss(labels, logits, weights, smoothing), rel=1e-5)


def test_loss_does_not_change_when_the_batch_is_padded_further(batch):
    labels, logits, weights = batch
    loss = MaskedCrossEntropy(0.1)
    longer = [np.pad(a, ((0, 2), (0, 5)) + ((0, 0),) * (a.ndim - 2), constant_values=1) for a in (labels, logits)]
    padded = loss(*longer, sample_weight=np.pad(weights, ((0, 2), (0, 5))))
    assert float(padded) == pytest.approx(float(loss(labels, logits, sample_weight=weights)), rel=1e-6)


def test_gradient_at_padding_is_exactly_zero(batch):
    tf = pytest.importorskip("tensorflow")
    labels, logits, weights = batch
    logits = tf.constant(logits)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        loss = MaskedCrossEntropy(0.1)(labels, logits, sample_weight=weights)
    gradient = tape.gradient(loss, logits).numpy()
    assert not gradient[weights == 0].any()
    assert gradient[weights == 1].any(axis=-1).all()


def loop_r_drop(labels, logits, weights, smoothing, alpha):
    """Equation 4 of Liang et al., halved (the mean of the two passes), one token at a time in float64."""
    total = loop_loss(labels[:, None], logits[:, None], weights[:, None], smoothing)
    half, count = len(labels) // 2, weights.sum()
    for m in range(half):
        p, q = (np.exp(logits[i].astype("float64")) for i in (m, m + half))
        p, q = p / p.sum(), q / q.sum()
        both = (p * np.log(p / q)).sum() + (q * np.log(q / p)).sum()
        total += weights[m] * 2 * (alpha / 2) * (both / 2) / count
    return total


@pytest.fixture
def twins():
    rng = np.random.default_rng(4)
    labels, weights = rng.integers(0, 7, 5).astype("int32"), np.array([1, 1, 0, 1, 1], "float32")
    return np.tile(labels, 2), rng.normal(0, 2, (10, 7)).astype("float32"), np.tile(weights, 2)


@pytest.mark.parametrize(("smoothing", "alpha"), [(0.0, 0.0), (0.1, 1.0), (0.0, 5.0)])
def test_r_drop_loss_equals_its_definition(twins, smoothing, alpha):
    labels, logits, weights = twins
    loss = RDropCrossEntropy(smoothing, alpha)(labels, logits, sample_weight=weights)
    assert float(loss) == pytest.approx(loop_r_drop(labels, logits, weights, smoothing, alpha), rel=1e-5)


@pytest.mark.parametrize("way", ["eager", "graph", "xla"])
@pytest.mark.parametrize(("smoothing", "alpha"), [(0.0, None), (0.1, None), (0.1, 5.0)])
def test_slopes_are_those_of_the_definition(twins, smoothing, alpha, way):
    tf = pytest.importorskip("tensorflow")
    labels, logits, weights = twins
    loss = MaskedCrossEntropy(smoothing) if alpha is None else RDropCrossEntropy(smoothing, alpha)

    def slopes(logits):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            value = loss(labels, logits, sample_weight=weights)
        return tape.gradient(value, logits)

    if way != "eager":
        slopes = tf.function(slopes, jit_compile=way == "xla")
    found = slopes(tf.constant(logits)).numpy()
    exact, step = np.zeros(logits.shape), 1e-5
    for place in np.ndindex(logits.shape):
        moved = [logits.astype("float64") for _ in range(2)]
        moved[0][place] += step
        moved[1][place] -= step
        up, down = (loop_r_drop(labels, one, weights, smoothing, alpha or 0.0) for one in moved)
        exact[place] = (up - down) / (2 * step)
    np.testing.assert_allclose(found, exact, atol=2e-6)
    assert not found[weights == 0].any()


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_loss_of_half_precision_logits_is_computed_in_float32(dtype):
    logits = np.array([[[30000.0, -30000.0, 0.0] + [0.0] * 5000]]).astype(dtype)  # exp and the sum overflow a half
    loss = token_losses(np.array([[1]]), logits, 0.1)
    assert keras.backend.standardize_dtype(loss.dtype) == "float32"
    exact = loop_loss(np.array([[1]]), logits.astype("float32"), np.ones((1, 1)), 0.1)
    assert float(loss[0, 0]) == pytest.approx(exact, rel=1e-5)


def test_smoothed_loss_is_least_at_the_smoothed_distribution():
    smoothing, size = 0.2, 5
    target = np.full(size, smoothing / size)
    target[3] += 1 - smoothing
    best = float(token_losses(np.array([[3]]), np.log(target)[None, None], smoothing)[0, 0])
    rng = np.random.default_rng(1)
    for _ in range(20):
        other = np.log(target) + rng.normal(0, 0.1, size)
        assert float(token_losses(np.array([[3]]), other[None, None], smoothing)[0, 0]) > best - 1e-6
    assert best == pytest.approx(-(target * np.log(target)).sum(), rel=1e-5)


def test_metrics_count_each_real_token_once_over_batches_of_different_lengths():
    rng = np.random.default_rng(2)
    accuracy, perplexity = TokenAccuracy(), Perplexity()
    hits, losses = [], []
    for width, real in ((3, 2), (6, 5)):
        labels, logits = rng.integers(0, 4, (1, width)), rng.normal(size=(1, width, 4))
        weights = (np.arange(width) < real).astype("float32")[None]
        accuracy.update_state(labels, logits, weights)
        perplexity.update_state(labels, logits, weights)
        for t in range(real):
            hits.append(logits[0, t].argmax() == labels[0, t])
            losses.append(loop_loss(labels[:, t : t + 1], logits[:, t : t + 1], np.ones((1, 1)), 0))
    assert float(accuracy.result()) == pytest.approx(np.mean(hits))
    assert float(perplexity.result()) == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)


def test_loss_survives_serialization(batch):
    labels, logits, weights = batch
    loss = MaskedCrossEntropy(0.3)
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert type(again) is MaskedCrossEntropy
    assert float(again(labels, logits, weights)) == float(loss(labels, logits, weights))


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, 2.0])
def test_impossible_smoothing_is_refused(smoothing):
    with pytest.raises(ValueError, match=r"label_smoothing=.* is not in \[0, 1\)"):
        MaskedCrossEntropy(smoothing)


def test_gradients_accumulated_over_two_batches_are_those_of_both_in_one():
    """With as many real tokens in each; the optimizer averages over batches."""
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(4, 3, 5)).astype("float32"), rng.integers(0, 6, (4, 3))
    weights = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], "float32")  # 3 real ones in each half
    results = []
    for steps, parts in ((2, 2), (None, 1)):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3, 5)), keras.layers.Dense(6)])
        model.compile(keras.optimizers.Adam(0.1, gradient_accumulation_steps=steps), loss=MaskedCrossEntropy(0.1))
        for part in np.split(np.arange(4), parts):
            model.train_on_batch(inputs[part], labels[part], sample_weight=weights[part])
        results.append([v.numpy() for v in model.trainable_variables])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
