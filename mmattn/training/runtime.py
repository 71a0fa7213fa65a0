"""How the machine computes: precision, compiler, determinism, threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import keras

from mmattn import backend

DTYPES = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float64")


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Settings of the machine for one run.

    Args:
        dtype: Keras' dtype policy: "float32", "mixed_bfloat16" or "mixed_float16" (whose loss Keras scales by itself).
        jit_compile: compile the training step by XLA; on JAX it always is.
        deterministic: use only operations whose result does not depend on the order of threads.
        threads: processor threads for an operation; None for all. Part of what makes two runs bit-identical.
    """

    dtype: str = "float32"
    jit_compile: bool = False
    deterministic: bool = True
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is unknown. Known: {', '.join(DTYPES)}.")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads} must be at least 1, or null for all.")

    @contextmanager
    def applied(self, seed: int) -> Iterator[None]:
        """Sets all of it, and the seeds of Python, NumPy and the backend; the dtype policy comes back at the end."""
        before = keras.config.dtype_policy()
        backend.set_threads(self.threads)
        if self.deterministic:
            backend.set_determinism(seed)
        else:
            keras.utils.set_random_seed(seed)
        keras.config.set_dtype_policy(self.dtype)
        try:
            yield
        finally:
            keras.config.set_dtype_policy(before)
