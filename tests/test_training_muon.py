"""Laws of Muon with attention's kernels: each update is the orthogonalised momentum of the paper's matrices."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from mmattn.layers import SelfAttention
from mmattn.training.muon import Muon

RATE, SCALE = 0.1, 0.2


def orthogonalised(matrix: np.ndarray) -> np.ndarray:
    """Five Newton-Schulz steps in float64, written down from the source's polynomial."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


@pytest.mark.parametrize("in_a_graph", [False, True])
def test_three_dimensional_kernels_are_updated_as_the_matrices_of_the_paper(in_a_graph):
    layer = SelfAttention(num_heads=2, key_dim=3)
    layer.build((None, None, 8))
    matrices = {"query": (8, 6), "key": (8, 6), "value": (8, 6), "attention_output": (6, 8)}
    kernels = [v for v in layer.trainable_variables if v.path.endswith("kernel")]
    assert len(kernels) == 4
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=v.shape).astype("float32") for v in kernels]
    before = [v.numpy() for v in kernels]
    optimizer = Muon(RATE, weight_decay=None, adam_weight_decay=None)
    optimizer.build(kernels)

    def update():
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in gradients])

    if in_a_graph:
        if keras.backend.backend() != "tensorflow":
            pytest.skip("a graph of TensorFlow's")
        import tensorflow as tf

        tf.function(update)()
    else:
        update()
    for variable, old, gradient in zip(kernels, before, gradients, strict=True):
        rows, columns = matrices[variable.path.split("/")[-2]]
        momentum = gradient.astype("float64") * (1 + 0.95)  # the first step with Nesterov's look ahead
        step = orthogonalised(momentum.reshape(rows, columns)) * np.sqrt(max(rows, columns)) * SCALE * RATE
        np.testing.assert_allclose(variable.numpy(), old - step.reshape(old.shape), atol=2e-6)


def test_embeddings_and_norms_are_left_to_adam():
    table, gamma = (
        keras.Variable(np.ones(shape, "float32"), name=name)
        for name, shape in (("embeddings", (5, 4)), ("gamma", (4,)))
    )
    table.__dict__["_path"] = "token_embedding/embeddings"
    optimizer = Muon(RATE, weight_decay=None, adam_weight_decay=None)
    assert optimizer._should_use_adamw(table) and optimizer._should_use_adamw(gamma)
    optimizer.build([table, gamma])
    optimizer.apply([keras.ops.ones((5, 4)), keras.ops.ones((4,))])
    for variable in (table, gamma):  # Adam's first step is the sign of the gradient times the rate
        np.testing.assert_allclose(variable.numpy(), 1.0 - RATE, atol=1e-5)


def test_of_an_attention_s_variables_those_with_two_axes_count_as_matrices_too():
    layer = SelfAttention(2, 4, positions="transformer_xl")
    layer.build((None, None, 8))
    left = {v.path.split("/", 1)[1] for v in layer.trainable_variables if Muon(RATE)._should_use_adamw(v)}
    assert left == {"attention_output/bias", "positions/content_bias", "positions/place_bias"}


def test_gates_and_recurrent_kernels_are_matrices_and_their_biases_are_not():
    attention, cell = SelfAttention(2, 4, use_gate=True), keras.layers.GRUCell(3)
    attention.build((None, None, 8))
    cell.build((None, 4))
    variables = [*attention._gate_dense.trainable_variables, *cell.trainable_variables]
    left = {v.path.split("/", 1)[1] for v in variables if Muon(RATE)._should_use_adamw(v)}
    assert left == {"bias"}, left


def test_optimizer_is_the_same_after_its_configuration():
    optimizer = Muon(0.02, momentum=0.9, adam_beta_2=0.98)
    again = Muon.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    assert keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer)).momentum == 0.9
