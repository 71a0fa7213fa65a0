"""One call of a Generator, read and checked: what shapes the program, and what are only its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from mmattn.decoding.beams import beam
from mmattn.decoding.checks import check_beams, check_lengths, check_sampling
from mmattn.decoding.loop import Generated
from mmattn.decoding.noise import seed_words
from mmattn.decoding.sampling import sample
from mmattn.decoding.search import greedy

SEARCHES: dict[str, Callable[..., Generated]] = {"greedy": greedy, "sample": sample, "beam": beam}
_COMMON: dict[str, Any] = {"min_length": 0, "no_repeat_ngram": 0, "length_penalty": 0.6}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": _COMMON,
    "sample": {**_COMMON, "seed": None, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "rows": None},
    "beam": {**_COMMON, "num_beams": 4, "num_return": 1, "patience": 0.0},
}
_NUMBERS = {"min_length": "int32"} | dict.fromkeys(("length_penalty", "patience", "temperature", "top_p"), "float32")


@dataclass(frozen=True)
class Job:
    """A search over one batch.

    Attributes:
        method: "greedy", "sample" or "beam".
        static: options that shape the program.
        numbers: options that are inputs of the program.
        rows: a dict of nests of NumPy arrays, batch first: "inputs", "ids", and "rows" and "prompt" where given.
        max_length: the most tokens a row may have.
    """

    method: str
    static: dict[str, Any]
    numbers: dict[str, Any]
    rows: dict[str, Any]
    max_length: int

    def key(self, size: int) -> Any:
        """Tells apart the jobs that one compiled program cannot serve, but for their number of rows."""
        forms = [(x.shape[1:], x.dtype.str) for x in keras.tree.flatten(self.rows["inputs"])]
        return self.method, *sorted(self.static.items()), *sorted(self.numbers), *sorted(self.rows), size, *forms

    def batch_size(self) -> int:
        return len(self.rows["ids"])

    def filled(self, count: int, size: int, pad_id: int, without: str = "") -> dict[str, Any]:
        """The arrays with `count` rows, the last one repeated, and the prompt with `size` positions."""
        rows = {name: nest for name, nest in self.rows.items() if name != without}
        if "prompt" in rows:
            rows["prompt"] = np.pad(
                rows["prompt"], ((0, 0), (0, size - rows["prompt"].shape[1])), constant_values=pad_id
            )
        return keras.tree.map_structure(lambda x: np.concatenate([x, np.repeat(x[-1:], count - len(x), axis=0)]), rows)

    def arrays(self) -> dict[str, np.ndarray]:
        """The numbers as arrays, so that another number needs no other program."""
        numbers = {"max_length": np.asarray(self.max_length, "int32")}
        return numbers | {name: np.asarray(value, _NUMBERS.get(name, "int32")) for name, value in self.numbers.items()}


def read_job(inputs: Any, method: str, max_length: int, first: Any, options: dict[str, Any]) -> Job:
    """Checks the options of one call and sorts them. `first`: the token that all rows read first, or one for each.
    Nothing has run yet."""
    if method not in SEARCHES:
        raise ValueError(f"method must be one of {', '.join(SEARCHES)}, and is {method!r}.")
    if unknown := sorted(set(options) - set(OPTIONS[method])):
        raise ValueError(f"{method} has no option {', '.join(unknown)}. Its options: {', '.join(OPTIONS[method])}.")
    options = {**OPTIONS[method], **options}
    check_lengths(max_length, options["min_length"], options["no_repeat_ngram"], None)
    inputs = keras.tree.map_structure(keras.ops.convert_to_numpy, inputs)
    count = _batch_size(inputs)
    if np.shape(first) not in ((), (count,)):
        raise ValueError(f"first must be {count} tokens, one for each row. Its shape is {np.shape(first)}.")
    rows = {"inputs": inputs, "ids": np.array(np.broadcast_to(first, count), dtype="int32")}
    if method == "sample":
        check_sampling(options["temperature"], options["top_k"], options["top_p"])
        if isinstance(options["seed"], bool) or not isinstance(options["seed"], (int, np.integer)):
            raise ValueError(f"sample needs a whole number as its seed, and it is {options['seed']!r}.")
        options["seed"] = seed_words(int(options["seed"]))
        numbers = np.arange(count) if options["rows"] is None else np.asarray(options["rows"])
        if numbers.shape != (count,):
            raise ValueError(f"rows must be {count} numbers, one for each input. Its shape is {numbers.shape}.")
        rows["rows"] = numbers.astype("int32")
        del options["rows"]
    if method == "beam":
        check_beams(options["num_beams"], options["num_return"])
    filters_off = {"top_p"} if options.get("top_p") == 1 else set()  # then the program need not sort the vocabulary
    given = {name: options.pop(name) for name in ("seed", *_NUMBERS) if name in options and name not in filters_off}
    return Job(method, options, given, rows, int(max_length))


def _batch_size(inputs: Any) -> int:
    sizes = [x.shape[0] if x.ndim else 0 for x in keras.tree.flatten(inputs)]
    if len(set(sizes)) != 1 or sizes[0] < 1:
        raise ValueError(f"All inputs must have the same number of rows, at least one. They have {sizes}.")
    return sizes[0]
