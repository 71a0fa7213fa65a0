"""What every search shares: the shape of a result, the loop, the checked step.

A search is written once for two ways to run. Traced (inside `tf.function`, `jax.jit`), all of it is `keras.ops` and the
loop is `keras.ops.while_loop`. Otherwise the loop is Python's, the model and what is as wide as the vocabulary stay on
the backend, and the bookkeeping of a few numbers a row is NumPy, which costs a tenth of a backend's single operations.
`space(array)` names the module, `keras.ops` or NumPy, whose functions go with an array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

Step = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


class Generated(NamedTuple):
    """Generated sequences: N hypotheses for each of B rows, the best first, in arrays of length L.

    Attributes:
        ids: `(B, N, L)` int32, without the start token; after the end token only padding. A prompt is part of it.
        lengths: `(B, N)` int32, with the end token; 0 = there is no such hypothesis (fewer than N exist).
        log_probs: `(B, N)`, the model's own log-probability of the generated tokens with the end token. Tokens of a
            prompt count 0. Temperature, filters and forbidden tokens do not change it.
        scores: `(B, N)`, log_probs divided by the length penalty.
        token_log_probs: `(B, N, L)`, the summands of `log_probs`.
    """

    ids: Any
    lengths: Any
    log_probs: Any
    scores: Any
    token_log_probs: Any


def space(array: Any) -> Any:
    """The module whose functions go with an array: NumPy or `keras.ops`."""
    return np if isinstance(array, (np.ndarray, np.generic)) else ops


def cast(array: Any, dtype: str) -> Any:
    return array.astype(dtype) if space(array) is np else ops.cast(array, dtype)


def score_dtype() -> str:
    """Log-probabilities are added up in float32, whatever the model computes in (float64 where Keras is set to it)."""
    return "float64" if keras.config.floatx() == "float64" else "float32"


def penalty(length: Any, alpha: Any) -> Any:
    """The length penalty ((5 + length) / 6) ** alpha of Wu et al. 2016, equation 14.

    >>> float(penalty(7, 1.0))
    2.0
    """
    length = np.asarray(length) if isinstance(length, int) else length
    length = cast(space(length).maximum(length, 1), score_dtype())
    return ((length + 5.0) / 6.0) ** alpha


def map_arrays(function: Callable[..., Any], nest: Any) -> Any:
    """Applies `function` to the arrays of a nest and leaves its Nones alone."""
    return keras.tree.map_structure(lambda x: None if x is None else function(x), nest)


def run(traced: bool, condition: Callable[..., Any], body: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    """`while condition(*values): values = body(*values)`. The first value is the number of the round."""
    if traced:
        return ops.while_loop(condition, body, (ops.convert_to_tensor(0, dtype="int32"), *values))
    values = (0, *values)
    while condition(*values):
        values = body(*values)
    return values


def flat_step(step: Step, state: Any) -> tuple[Step, list[Any]]:
    """The step for a state that is a plain list of arrays, as a loop carries it, and the first such list.

    The step gives log-probabilities `(R, V)` in place of logits, and refuses a state that has not kept its form.
    """
    leaves = keras.tree.flatten(state)

    def log_prob_step(ids: Any, index: Any, context: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        given = iter(arrays)
        nest = keras.tree.pack_sequence_as(state, [None if leaf is None else next(given) for leaf in leaves])
        logits, new_state = step(ops.convert_to_tensor(ids), index, context, nest)
        new = keras.tree.flatten(new_state)
        forms = ([_form(leaf) for leaf in keras.tree.flatten(nest)], [_form(leaf) for leaf in new])
        if forms[0] != forms[1]:
            raise ValueError(f"step must return a state of the form it was given: {forms[0]}. It returned {forms[1]}.")
        log_probs = ops.log_softmax(ops.cast(logits, score_dtype()), axis=-1)
        return log_probs, [leaf for leaf in new if leaf is not None]

    return log_prob_step, [ops.convert_to_tensor(leaf) for leaf in leaves if leaf is not None]


def _form(array: Any) -> Any:
    return None if array is None else (keras.backend.standardize_dtype(array.dtype), tuple(array.shape))


def pick(rows: Any, tokens: Any) -> Any:
    """The entry of each row `(R, V)` at its token `(R,)`."""
    count, size = ops.shape(rows)[0], rows.shape[1]
    return ops.take(ops.reshape(rows, (-1,)), ops.arange(count, dtype="int32") * size + tokens)
