"""What the tests of the layers need on every backend: numbers out of its arrays, and which precision it keeps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

TENSORFLOW, JAX, TORCH = (name == keras.config.backend() for name in ("tensorflow", "jax", "torch"))
# keras.ops.tanh on JAX and keras.ops.matmul on torch compute float64 in float32, and JAX has no float64 unless told so.
FLOAT, TOLERANCE = ("float64", 1e-10) if TENSORFLOW else ("float32", 2e-5)
WIDE = pytest.param(
    "float64", 1e-10, marks=pytest.mark.skipif(not TENSORFLOW, reason="Keras on JAX and torch computes in float32")
)
# The ways to run a function. torch has no compiled programs here: `mmattn.backend.compile` gives the function itself.
MODES = {"tensorflow": ("eager", "graph", "xla"), "jax": ("eager", "jit"), "torch": ("eager",)}[keras.config.backend()]


def numbers(array: Any) -> np.ndarray:
    """An array of any backend as NumPy's. `np.asarray` fails on a tensor of torch that a gradient goes through."""
    return np.asarray(ops.convert_to_numpy(array))


def assert_close(found: Any, expected: Any, **tolerances: float) -> None:
    np.testing.assert_allclose(numbers(found), numbers(expected), **tolerances)


def assert_equal(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(numbers(found), numbers(expected))
