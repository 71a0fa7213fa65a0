"""The one place that asks which Keras backend runs: compile a function, fix the randomness, set the threads.

Everything else in mmattn is written in `keras.ops` and works on TensorFlow, JAX and torch alike.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras


def name() -> str:
    """The running Keras backend: "tensorflow", "jax" or "torch"."""
    return keras.config.backend()


class Compiled:
    """A compiled function, made by `compile`. Call it like the function itself; `traces()` counts its traces so far."""

    def __init__(self, call: Callable[..., Any], count: list[int]) -> None:
        self._call = call
        self._count = count

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def traces(self) -> int:
        """How often the function was traced so far, that is, compiled for new shapes (always 0 on torch)."""
        return self._count[0]


def compile(fn: Callable[..., Any], jit: bool = True, variables_of: Any = None) -> Compiled:
    """Compiles `fn(*args)` for the running backend; the result sees every later update of the model's weights.

    TensorFlow: `tf.function`, by XLA where `jit`. JAX: `jax.jit`; the values of the variables of `variables_of` are
    read at each call and passed in, since JAX would otherwise build the values of the first call into the program.
    torch: `fn` itself. On JAX, variables that `fn` assigns to keep their old value.

    Arguments:
        fn: a function of nests of arrays that returns a nest of arrays. A Python number among the arguments is not
            an array: TensorFlow compiles again for each new value.
        jit: TensorFlow only: compile by XLA (slow to compile, fast to run) or keep the plain graph.
        variables_of: the model, layer or list of them whose variables `fn` uses. Only JAX needs it.

    Raises:
        ValueError: on JAX, if `variables_of` has no variables yet, because it is not built.

    >>> import numpy as np
    >>> twice = compile(lambda x: x * 2)
    >>> np.asarray(twice(np.arange(3, dtype="float32"))).tolist()
    [0.0, 2.0, 4.0]
    >>> twice.traces() in (0, 1)
    True
    """
    count = [0]
    if name() == "tensorflow":
        import tensorflow as tf

        def counted(*args: Any) -> Any:
            count[0] += 1
            return fn(*args)

        return Compiled(tf.function(counted, jit_compile=jit, autograph=False, reduce_retracing=False), count)
    if name() == "jax":
        return Compiled(_jit_with_variables(fn, variables_of, count), count)
    return Compiled(fn, count)


def _jit_with_variables(fn: Callable[..., Any], variables_of: Any, count: list[int]) -> Callable[..., Any]:
    import jax

    def traced(values: list[Any], args: tuple[Any, ...]) -> Any:
        count[0] += 1
        if not values:
            return fn(*args)
        mapping = list(zip(_variables(variables_of), values, strict=True))
        with keras.StatelessScope(state_mapping=mapping, initialize_variables=False):
            return fn(*args)

    jitted = jax.jit(traced)

    def call(*args: Any) -> Any:
        return jitted([variable.value for variable in _variables(variables_of)], args)

    return call


def _variables(owners: Any) -> list[Any]:
    """The variables of one owner or several, each once, in a fixed order."""
    if owners is None:
        return []
    owners = list(owners) if isinstance(owners, Iterable) and not hasattr(owners, "variables") else [owners]
    found = {id(variable): variable for owner in owners for variable in owner.variables}
    if not found and any(not getattr(owner, "built", True) for owner in owners):
        names = ", ".join(getattr(owner, "name", type(owner).__name__) for owner in owners)
        raise ValueError(f"A model must be built before it is compiled; `{names}` has no variables yet. Call it once.")
    return list(found.values())


def batch_stream(batches: Iterator[Any]) -> Any:
    """An endless stream of batches of several shapes in the form that Keras' fit takes.

    Handed a generator, Keras on TensorFlow takes the shapes of all batches from the first two. Here only the number of
    dimensions must stay the same.

    Arguments:
        batches: nests of NumPy arrays.
    """
    if name() != "tensorflow":
        return batches
    import tensorflow as tf

    first = next(batches)
    signature = keras.tree.map_structure(lambda array: tf.TensorSpec([None] * array.ndim, array.dtype), first)
    stream = tf.data.Dataset.from_generator(lambda: itertools.chain([first], batches), output_signature=signature)
    return stream.prefetch(2)


def is_traced(*nests: Any) -> bool:
    """Whether there are placeholders of a program that is being traced among the arrays, rather than numbers."""
    if name() == "tensorflow":
        import tensorflow as tf

        return not tf.executing_eagerly()
    if name() == "jax":
        import jax

        return any(isinstance(leaf, jax.core.Tracer) for leaf in keras.tree.flatten(nests))
    return False


def no_gradient() -> contextlib.AbstractContextManager[Any]:
    """A context in which no gradient is recorded. Only torch records one unasked."""
    if name() == "torch":
        import torch

        return torch.no_grad()
    return contextlib.nullcontext()


def set_determinism(seed: int) -> None:
    """Seeds Python, NumPy and the backend and asks for deterministic kernels: same machine, same seed, same bits."""
    keras.utils.set_random_seed(seed)
    if name() == "tensorflow":
        import tensorflow as tf

        tf.config.experimental.enable_op_determinism()
    elif name() == "torch":
        import torch

        torch.use_deterministic_algorithms(True)


def set_threads(threads: int | None) -> None:
    """Sets how many CPU threads one operation may use; None leaves the backend's own choice (one a core).

    Raises:
        ValueError: if `threads` is below 1, or on JAX, which has no such setting.
        RuntimeError: on TensorFlow, if it has already run something: the threads are set before that.
    """
    if threads is None:
        return
    if threads < 1:
        raise ValueError(f"threads must be at least 1 or None, and is {threads}.")
    if name() == "jax":
        raise ValueError(f"JAX cannot be told a number of threads (threads={threads}); limit the process' CPUs.")
    if name() == "torch":
        import torch

        torch.set_num_threads(threads)
        return
    import tensorflow as tf

    if tf.config.threading.get_intra_op_parallelism_threads() == threads:
        return
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError as error:
        message = f"threads={threads} must be set before TensorFlow runs its first operation, and it has run some."
        raise RuntimeError(message) from error


def cross_entropy(labels: Any, logits: Any, label_smoothing: float, alpha: float = 0.0) -> Any:
    """Cross-entropy of each row, in nats, as `mmattn.training.losses` has it.

    TensorFlow gets the slope written out: by its own derivatives picking the labels' logits costs more than the rest,
    and so does its fused operation (15 M logits, one thread: 230, 200 and 65 ms).

    Arguments:
        labels: int32 (N,).
        logits: float32 (N, V).
        label_smoothing: see `token_losses`.
        alpha: see `RDropCrossEntropy`; N is even if it is above 0.

    Returns:
        float32 (N,).
    """
    if name() == "tensorflow":
        return _tensorflow_cross_entropy(labels, logits, label_smoothing, alpha)
    from keras import ops

    log_total = ops.logsumexp(logits, axis=-1)
    found = log_total - (1.0 - label_smoothing) * ops.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    if label_smoothing:
        found = found - label_smoothing * ops.mean(logits, axis=-1)
    if alpha:
        first, second = ops.split(logits - log_total[:, None], 2)
        divergence = 0.5 * ops.sum((ops.exp(first) - ops.exp(second)) * (first - second), axis=-1)
        found = found + 0.5 * alpha * ops.concatenate([divergence, divergence])
    return found


def _tensorflow_cross_entropy(labels: Any, logits: Any, label_smoothing: float, alpha: float) -> Any:
    import tensorflow as tf

    @tf.custom_gradient
    def losses(logits: Any) -> Any:
        places = tf.stack([tf.range(tf.shape(labels)[0]), labels], axis=-1)
        top = tf.reduce_max(logits, axis=-1, keepdims=True)
        shares = tf.exp(logits - top)
        total = tf.reduce_sum(shares, axis=-1, keepdims=True)
        log_total = tf.math.log(total) + top
        found = log_total[:, 0] - (1.0 - label_smoothing) * tf.gather_nd(logits, places)
        if label_smoothing:
            found -= label_smoothing * tf.reduce_mean(logits, axis=-1)
        if alpha:  # p and q: the two predictions, gap: log p - log q
            p, q = tf.split(shares / total, 2)
            gap = tf.subtract(*tf.split(logits, 2)) - tf.subtract(*tf.split(log_total, 2))
            p_gap, q_gap = tf.reduce_sum(p * gap, -1, keepdims=True), tf.reduce_sum(q * gap, -1, keepdims=True)
            found += tf.tile((0.25 * alpha) * (p_gap - q_gap)[:, 0], [2])

        def gradient(upstream: Any) -> Any:
            if alpha:
                of_p, of_q = tf.split(upstream[:, None], 2)
                each = (0.25 * alpha) * (of_p + of_q)
                apart = each * (p - q)
                first = p * (each * gap + (of_p - each * p_gap)) + apart
                second = q * ((of_q + each * q_gap) - each * gap) - apart
                slopes = tf.concat([first, second], axis=0)
            else:
                slopes = upstream[:, None] / total * shares
            if label_smoothing:
                slopes -= (upstream * (label_smoothing / logits.shape[-1]))[:, None]
            return tf.tensor_scatter_nd_sub(slopes, places, (1.0 - label_smoothing) * upstream)

        return found, gradient

    return losses(logits)
