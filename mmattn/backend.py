"""The one place that asks which Keras backend runs: compiling, own gradients, scans, kernels, randomness, threads.

Everything else in mmattn is written in `keras.ops` and works on TensorFlow, JAX and torch alike.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
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

        logging.getLogger("tensorflow").addFilter(_no_retracing_warning)
        return Compiled(tf.function(counted, jit_compile=jit, autograph=False, reduce_retracing=False), count)
    if name() == "jax":
        return Compiled(_jit_with_variables(fn, variables_of, count), count)
    return Compiled(fn, count)


def _no_retracing_warning(record: logging.LogRecord) -> bool:
    """A filter: `compile` is traced for each shape on purpose, and TensorFlow takes all its functions for one."""
    text = record.getMessage()
    return "retracing" not in text or "compile.<locals>.counted" not in text


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


def with_gradient(forward: Callable[..., Any], backward: Callable[..., Any], *arrays: Any) -> Any:
    """`forward(*arrays)` with a gradient of our own, on every backend.

    `keras.ops.custom_gradient` on torch takes an exception for "no gradient" and gives NaN, and keeps no residuals.

    Arguments:
        forward: arrays -> a tuple of outputs, and a tuple of arrays that `backward` needs. Only those of them that are
            among `arrays` or the outputs count in a gradient of the gradient on torch.
        backward: these arrays, and a tuple of the slopes of the outputs -> the slopes of `arrays`, None where an array
            has none (masks, seeds).
        arrays: tensors, or None. What is traced and not among them must not be used by the two functions.

    Returns:
        The tuple of outputs.

    >>> import numpy as np
    >>> double = with_gradient(lambda x: ((2 * x,), ()), lambda kept, slopes: (2 * slopes[0],), np.ones(2, "float32"))
    >>> np.asarray(double[0]).tolist()
    [2.0, 2.0]
    """
    if name() == "tensorflow":
        return _with_gradient_tensorflow(forward, backward, arrays)
    if name() == "jax":
        return _with_gradient_jax(forward, backward, arrays)
    return _with_gradient_torch(forward, backward, arrays)


def _with_gradient_tensorflow(forward: Any, backward: Any, arrays: Any) -> Any:
    import tensorflow as tf

    places = [place for place, array in enumerate(arrays) if array is not None]

    @tf.custom_gradient
    def function(*given: Any) -> Any:
        full = [None] * len(arrays)
        for place, array in zip(places, given, strict=True):
            full[place] = array
        outputs, kept = forward(*full)

        def gradient(*slopes: Any) -> Any:
            found = backward(kept, slopes)
            return [found[place] for place in places]

        return tuple(outputs), gradient

    return function(*(tf.convert_to_tensor(arrays[place]) for place in places))


def _with_gradient_jax(forward: Any, backward: Any, arrays: Any) -> Any:
    import jax

    @jax.custom_vjp
    def function(*arrays: Any) -> Any:
        return tuple(forward(*arrays)[0])

    def kept_forward(*arrays: Any) -> Any:
        outputs, kept = forward(*arrays)
        return tuple(outputs), kept

    function.defvjp(kept_forward, lambda kept, slopes: tuple(backward(kept, slopes)))
    return function(*(None if a is None else jax.numpy.asarray(a) for a in arrays))


def _with_gradient_torch(forward: Any, backward: Any, arrays: Any) -> Any:
    import torch

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arrays: Any) -> Any:
            outputs, kept = forward(*arrays)
            ctx.save_for_backward(*kept)
            return tuple(outputs)

        @staticmethod
        def backward(ctx: Any, *slopes: Any) -> Any:
            return tuple(backward(ctx.saved_tensors, slopes))

    return Function.apply(*(None if a is None else keras.ops.convert_to_tensor(a) for a in arrays))


def gradients(fn: Callable[..., Any], arrays: Iterable[Any], variables: Iterable[Any] = ()) -> list[Any]:
    """The gradients of the number `fn(*arrays)`, by each array and each Keras variable; zeros where it has no part.

    On JAX, what `fn` assigns to variables is lost.

    >>> import numpy as np
    >>> [np.asarray(g).tolist() for g in gradients(lambda x, y: keras.ops.sum(x * x), [np.ones(2, "float32")] * 2)]
    [[2.0, 2.0], [0.0, 0.0]]
    """
    tensors, variables = [keras.ops.convert_to_tensor(array) for array in arrays], list(variables)
    if name() == "tensorflow":
        import tensorflow as tf

        sources = [*(tf.identity(tensor) for tensor in tensors), *(variable.value for variable in variables)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            total = fn(*sources[: len(tensors)])
        found = tape.gradient(total, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [tf.convert_to_tensor(gradient) for gradient in found]
    if name() == "jax":
        import jax

        def total_of(tensors: Any, values: Any) -> Any:
            mapping = list(zip(variables, values, strict=True))
            with keras.StatelessScope(state_mapping=mapping, initialize_variables=False):
                return fn(*tensors)

        found = jax.grad(total_of, argnums=(0, 1))(tensors, [variable.value for variable in variables])
        return [*found[0], *found[1]]
    import torch

    sources = [*(tensor.detach().clone().requires_grad_() for tensor in tensors), *(v.value for v in variables)]
    found = torch.autograd.grad(fn(*sources[: len(tensors)]), sources, allow_unused=True)
    return [torch.zeros_like(s) if g is None else g for s, g in zip(sources, found, strict=True)]


def scan_blocks(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, count: Any, dtypes: Iterable[str], at_once: int = 1
) -> tuple[Any, Any]:
    """Calls `body(i, carry) -> carry, outputs` for i = 0 .. count - 1 in the memory of `at_once` calls.

    No gradient passes through it: it is for the inside of `with_gradient`. `keras.ops.scan` on TensorFlow wants outputs
    of the carry's shape.

    Arguments:
        body: of a number or scalar array and a tuple of arrays; gives two tuples of arrays.
        carry: a tuple of arrays of fixed shapes.
        count: a number, at least 1; with TensorFlow also a tensor.
        dtypes: of the outputs.
        at_once: how many calls TensorFlow may have begun, as far as one does not need what the other gives.

    Returns:
        The last carry, and the tuple of the outputs, each stacked along a new first axis.
    """
    if name() == "tensorflow":
        return _scan_tensorflow(lambda i, carry, _: body(i, carry), carry, count, dtypes, at_once=at_once)
    if name() == "jax":
        import jax

        carry, outputs = jax.lax.scan(lambda carry, i: body(i, carry), tuple(carry), jax.numpy.arange(count))
        return carry, outputs
    columns = []
    for i in range(count):
        carry, outputs = body(i, carry)
        columns.append(outputs)
    return carry, tuple(keras.ops.stack(column) for column in zip(*columns, strict=True))


def scan(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, inputs: Any, dtypes: Iterable[str]) -> Any:
    """Calls `body(carry, rows) -> carry, outputs` for each place along the inputs' first axis; gradients pass through.

    `keras.ops.scan` on TensorFlow wants outputs of the carry's shape, and `keras.layers.RNN` gives its cell nothing
    that all steps share.

    Arguments:
        body: of a nest of arrays like `carry` and one of the inputs' rows; gives the next carry and a tuple of arrays.
        carry: a nest of arrays, whose shapes and dtypes stay.
        inputs: a nest of arrays `(T, ..)`, T at least 1.
        dtypes: of the outputs.

    Returns:
        The last carry, and the tuple of the outputs, each stacked along a new first axis.

    >>> import numpy as np
    >>> add = lambda total, x: (total + x, (total + x,))
    >>> last, (sums,) = scan(add, keras.ops.zeros(()), np.array([1.0, 2.0, 3.0], "float32"), ["float32"])
    >>> np.asarray(sums).tolist()
    [1.0, 3.0, 6.0]
    """
    inputs = keras.tree.map_structure(keras.ops.convert_to_tensor, inputs)
    if name() == "tensorflow":
        flat = keras.tree.flatten(inputs)
        count = flat[0].shape[0] or keras.ops.shape(flat[0])[0]

        def step(_: Any, carry: Any, rows: Any) -> Any:
            carry, outputs = body(keras.tree.pack_sequence_as(start, carry), keras.tree.pack_sequence_as(inputs, rows))
            return keras.tree.flatten(carry), outputs

        start = carry
        last, outputs = _scan_tensorflow(step, keras.tree.flatten(carry), count, dtypes, flat)
        return keras.tree.pack_sequence_as(start, list(last)), outputs
    if name() == "jax" and is_traced(carry, inputs):  # one by one, it would compile anew at each call
        import jax

        return jax.lax.scan(body, carry, inputs)
    columns = []
    for i in range(len(keras.tree.flatten(inputs)[0])):
        carry, outputs = body(carry, keras.tree.map_structure(lambda array, i=i: array[i], inputs))
        columns.append(outputs)
    return carry, tuple(keras.ops.stack(column) for column in zip(*columns, strict=True))


def _scan_tensorflow(body: Any, carry: Any, count: Any, dtypes: Any, inputs: Any = (), at_once: int = 1) -> Any:
    """`body(i, carry, rows)` has the inputs' rows i. A captured array would get a gradient as large at every step."""
    import tensorflow as tf

    rows = [tf.TensorArray(a.dtype, size=count, element_shape=a.shape[1:]).unstack(a) for a in inputs]
    shapes: list[Any] = []

    def step(i: Any, arrays: Any, carry: Any) -> Any:
        after, outputs = body(i, carry, [array.read(i) for array in rows])
        shapes[:] = [output.shape for output in outputs]
        written = tuple(array.write(i, output) for array, output in zip(arrays, outputs, strict=True))
        return i + 1, written, tuple(after)

    arrays = tuple(tf.TensorArray(dtype, size=count, infer_shape=False) for dtype in dtypes)
    _, arrays, carry = tf.while_loop(
        lambda i, *_: i < count,
        step,
        (0, arrays, tuple(carry)),
        parallel_iterations=at_once,
        maximum_iterations=count,
    )  # XLA wants the most iterations for a gradient
    stacked = tuple(array.stack() for array in arrays)
    for array, shape in zip(stacked, shapes, strict=True):
        array.set_shape([None, *shape])
    return carry, stacked


def matmul(left: Any, right: Any, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    """The matrix product of the last two axes, of the one or the other transposed.

    On TensorFlow a transpose of its own copies the array, which for the keys of a long sequence costs as much as the
    product; the others see views.

    >>> import numpy as np
    >>> float(matmul(np.array([[1.0, 2.0]], "float32"), np.array([[3.0, 4.0]], "float32"), transpose_b=True)[0, 0])
    11.0
    """
    if name() == "tensorflow":
        import tensorflow as tf

        return tf.matmul(left, right, transpose_a=transpose_a, transpose_b=transpose_b)
    left = keras.ops.swapaxes(left, -1, -2) if transpose_a else left
    right = keras.ops.swapaxes(right, -1, -2) if transpose_b else right
    return keras.ops.matmul(left, right)


def sdpa(query: Any, key: Any, value: Any, mask: Any, scale: float, causal: bool) -> Any:
    """The backend's fused kernel: torch's `scaled_dot_product_attention`, or cuDNN's through JAX.

    Arguments:
        query: (B, H, T, K).
        key, value: (B, G, S, K), (B, G, S, V), G a divisor of H.
        mask: boolean, broadcasts to (B, H, T, S), with something visible in each row; or None.
        causal: as well; T = S.
    """
    if name() == "torch":
        import torch

        grouped = key.shape[1] != query.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    import jax

    if mask is not None:  # cuDNN wants it whole
        mask = jax.numpy.broadcast_to(mask, (*mask.shape[:2], query.shape[2], key.shape[2]))
    query, key, value = (jax.numpy.swapaxes(array, 1, 2) for array in (query, key, value))
    found = jax.nn.dot_product_attention(
        query, key, value, mask=mask, scale=scale, is_causal=causal, implementation="cudnn"
    )
    return jax.numpy.swapaxes(found, 1, 2)


def why_no_sdpa(dtype: str, key_dim: int, value_dim: int, targets: Any, sources: Any, masked: bool) -> str:
    """Why there is no fused kernel for such arrays, or none that saves memory; "" where there is one."""
    if name() == "torch":
        return "" if key_dim == value_dim else "torch's kernel wants values as wide as keys"
    if name() == "tensorflow":
        return "TensorFlow has no fused kernel"
    import jax

    if jax.default_backend() != "gpu":
        return "JAX has a fused kernel (cuDNN) on a GPU alone"
    if dtype not in ("float16", "bfloat16"):
        return f"cuDNN's kernel takes float16 and bfloat16, and this is {dtype}"
    if key_dim != value_dim or key_dim % 8 or key_dim > 128:
        return f"cuDNN's kernel wants K = V, a multiple of 8 up to 128, and these are {key_dim} and {value_dim}"
    if masked and any(not isinstance(size, int) or size % 2 for size in (targets, sources)):
        return f"cuDNN's kernel takes masks of even lengths, and these are {targets} and {sources}"
    return ""


def random_uniform(shape: Any, seed: Any, number: Any) -> Any:
    """Float32 numbers in [0, 1) that depend on (seed, number) alone.

    Arguments:
        seed: two whole numbers, from `keras.random.SeedGenerator.next()`.
        number: one more, as a number or scalar array.
    """
    if name() == "tensorflow":
        import tensorflow as tf

        return tf.random.stateless_uniform(shape, tf.random.fold_in(seed, tf.cast(number, "int64")))
    if name() == "jax":
        import jax

        return jax.random.uniform(jax.random.fold_in(jax.numpy.asarray(seed, "uint32"), number), shape)
    import torch

    mixed = int(seed[0]) * 1_000_003 + int(seed[1]) * 8_191 + int(number)
    generator = torch.Generator(device=seed.device).manual_seed(mixed % 2**63)
    return torch.rand(tuple(int(size) for size in shape), generator=generator, device=seed.device)


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
