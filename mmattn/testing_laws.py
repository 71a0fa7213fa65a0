"""The laws of attention as questions to a layer: what `mmattn.testing.check_attention` asks.

A law is a function of a `Subject` that gives whether it holds and what was measured; its docstring is the law.

Shapes: B batch, T target (query) length, S memory (key) length, D width.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from mmattn import backend

# Of two ways of one computation; outputs are about 1, and a broken law shows in differences of 1e-1 and more.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}
PLAIN = {"dropout": 0.0, "sliding_window": None}  # settings of the copies that are asked, beside dtype
BLIND = (1, 2)  # the row and the query that may see nothing


class CannotAsk(Exception):
    """Why a layer cannot be asked for a law."""


class Subject:
    """The layer that is asked, and what it is asked with."""

    def __init__(self, layer: Any, width: int, length: int, seed: int, dtype: str) -> None:
        self.given = layer if isinstance(layer, keras.Layer) else layer(width)
        self.name = f"{type(self.given).__module__.split('.')[0]}.{type(self.given).__name__}"
        self.width, self.length, self.seed = width, length, seed
        self.plain, self.tolerance = {"dtype": dtype, **PLAIN}, TOLERANCES[dtype]
        parameters = list(inspect.signature(self.given.call).parameters.values())
        self.arguments = {parameter.name for parameter in parameters}
        self.takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self.has_memory = len(parameters) > 1 and parameters[1].default is inspect.Parameter.empty
        self.was_built = self.given.built
        self.in_a_list = not self.has_memory and self._takes_a_list()
        self.has_memory |= self.in_a_list
        rng = np.random.default_rng(seed)
        self.lengths = [length + 2, length, length + 1]  # of the rows, without padding
        self.memory = rng.normal(size=(3, length + 2, width)).astype("float32")  # (B, S, D)
        self.query = rng.normal(size=(3, length, width)).astype("float32") if self.has_memory else self.memory
        self.real = np.arange(length + 2) < np.array(self.lengths)[:, None]  # (B, S)
        self.table = keras.layers.Embedding(20, width, mask_zero=True)
        self.table.build(None)
        self.table.set_weights([rng.normal(size=(20, width))])
        self.words = rng.integers(1, 20, size=(3, length + 2))
        shape = (3, self.query.shape[1], length + 2)
        self.free = rng.random(shape) < 0.6  # (B, T, S)
        self.free[..., 0] = True
        self.free[BLIND] = False
        self.layer = self.given
        with contextlib.suppress(Exception):  # the laws will meet it
            self.layer = self.copy()
        self.is_copy = self.layer is not self.given
        if not self.is_copy:
            with contextlib.suppress(Exception):
                self.call(self.query, self.memory)  # builds it
        self.problem = self._unrelated() if self.is_copy else None  # a layer's own weights may hide its attention

    def _takes_a_list(self) -> bool:
        """Whether query and memory come in one argument, as `keras.layers.Attention` takes them."""
        zeros = np.zeros((1, self.length, self.width), "float32")
        for arguments in (zeros, [zeros, zeros]):
            probe = self.given
            with contextlib.suppress(Exception):
                probe = type(self.given).from_config(self.given.get_config())
            with contextlib.suppress(Exception):
                probe(arguments)
                return isinstance(arguments, list)
        return False

    def _unrelated(self) -> str | None:
        """Why no law can be asked: the layer relates no places to each other."""
        place = self.length // 2
        other = self.memory.copy()
        other[:, place] *= -2  # a norm would hide a sum or a positive factor
        try:
            found = [self.output(*self.with_memory(memory)) for memory in (self.memory, other)]
            if not self.has_memory:
                found = [np.delete(output, place, axis=1) for output in found]
            same = bool(np.all(found[0] == found[1]))
        except Exception:
            return None  # the laws will meet it
        return "it is no attention: what stands at one place changes nothing at any other" if same else None

    def copy(self, **changes: Any) -> Any:
        """A layer of the same config but for `changes`, and with weights that are always the same."""
        try:
            config = self.given.get_config()
            plain = {name: value for name, value in self.plain.items() if name in config}
            missing = [name for name in changes if name not in config]
            copy = None if missing else type(self.given).from_config({**config, **plain, **changes})
        except Exception as error:
            raise CannotAsk(f"it cannot be made from its config: {words_of(error)}") from error
        if copy is None:
            raise CannotAsk(f"its config has no {', '.join(missing)}")
        axes = (1,) * len(changes.get("attention_axes") or ())  # one more where attention runs over the second
        zeros = np.zeros((1, *axes, self.length, self.width), "float32")
        copy(*self._inputs(zeros, zeros))
        rng = np.random.default_rng(self.seed)
        for variable in copy.trainable_variables:
            begins = 1.0 if np.all(ops.convert_to_numpy(variable.value) == 1.0) else 0.0  # the scale of a norm
            variable.assign(rng.normal(begins, np.prod(variable.shape) ** -0.25, variable.shape).astype("float32"))
        return copy

    def below(
        self, number: float, limit: float | None = None, what: str = "largest difference", where: str = ""
    ) -> tuple[bool, str]:
        """Whether a difference is small enough, and it in words."""
        return bool(number <= (self.tolerance if limit is None else limit)), f"{what} {number:.1e}{where}"

    def worst(self, changes: dict[str, float]) -> tuple[bool, str]:
        """The same for the largest of several."""
        name = max(changes, key=lambda call: np.nan_to_num(changes[call], nan=np.inf))
        return self.below(changes[name], where=name)

    def takes(self, name: str) -> bool:
        """Whether a call may have an argument of this name."""
        return self.takes_any or name in self.arguments

    def call(self, query: Any, memory: Any, layer: Any = None, **options: Any) -> Any:
        """Calls the layer; options that are None or False are left out."""
        options = {name: value for name, value in options.items() if value is not None and value is not False}
        if missing := [name for name in options if not self.takes(name)]:
            raise CannotAsk(f"its call has no {', '.join(missing)}")
        return (self.layer if layer is None else layer)(*self._inputs(query, memory), **options)

    def _inputs(self, query: Any, memory: Any) -> tuple[Any, ...]:
        """What the layer is called with."""
        if self.in_a_list:
            return ([query, memory],)
        return (query, memory) if self.has_memory else (memory,)

    def output(self, query: Any, memory: Any, layer: Any = None, **options: Any) -> np.ndarray:
        """The output of a call, without the scores."""
        tensors = [
            ops.convert_to_tensor(array) if isinstance(array, np.ndarray) else array for array in (query, memory)
        ]
        query, memory = (tensors[1], tensors[1]) if query is memory else tensors
        found = self.call(query, memory, layer, **options)
        return _numpy(found[0] if options.get("return_attention_scores") else found)

    def with_memory(self, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The query, which is the memory itself where the layer attends to its own input, and this memory."""
        return (self.query if self.has_memory else memory), memory

    def row(self, number: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """One row alone, its memory without padding."""
        memory = self.memory[number : number + 1, :length]
        return (self.query[number : number + 1] if self.has_memory else memory), memory

    def embedded(self, rows: Any = slice(None), length: int | None = None, words: Any = None) -> tuple[Any, Any]:
        """Query and memory with implicit masks on them."""
        words = np.where(self.real, self.words, 0) if words is None else words
        memory = self.table(words[rows, :length])
        return (self.table(self.words[rows, : self.length]) if self.has_memory else memory), memory

    def mask(self, real: np.ndarray) -> np.ndarray:
        """(B, S) as (B, T, S)."""
        return np.repeat(real[:, None], self.query.shape[1], axis=1)

    def alone(self, found: np.ndarray, run: Callable[[int, int], np.ndarray]) -> float:
        """The largest difference between rows of a padded batch and the same rows alone, without padding."""
        singles = [run(number, length)[0] for number, length in enumerate(self.lengths)]
        return _largest(_apart(row[: len(single)], single) for row, single in zip(found, singles, strict=True))

    def gradients(self, pick: Callable[[Any], Any], memory: Any, **options: Any) -> tuple[list[Any], list[Any]]:
        """Of the sum of what is picked from the output: by the inputs, and by the weights."""
        arrays = self.with_memory(memory) if self.has_memory else (memory,)

        def total(*tensors: Any) -> Any:
            return ops.sum(pick(self.call(tensors[0], tensors[-1], **options)))

        found = [_numpy(slope) for slope in backend.gradients(total, arrays, self.layer.trainable_variables)]
        return found[: len(arrays)], found[len(arrays) :]


def _numpy(array: Any) -> np.ndarray:
    return ops.convert_to_numpy(ops.cast(array, "float32"))


def _apart(first: np.ndarray, second: np.ndarray) -> float:
    """The largest difference; NaN beside NaN is none."""
    if first.shape != second.shape:
        raise ValueError(f"outputs that should be equal have the shapes {first.shape} and {second.shape}")
    with np.errstate(invalid="ignore"):
        return _largest(np.where((first == second) | (np.isnan(first) & np.isnan(second)), 0, first - second))


def _largest(numbers: Any) -> float:
    numbers = np.abs(np.asarray(numbers if isinstance(numbers, np.ndarray) else list(numbers)))
    return float(np.max(numbers, initial=0.0))


def words_of(error: Exception) -> str:
    """What a layer's error says, in a line: without Keras' frame around it."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()]
    lines = [line for line in lines if line and not line.startswith("Exception encountered when calling")]
    said = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return said if len(said) <= 160 else said[:157] + "..."


Law = Callable[[Subject], tuple[bool, str]]
LAWS: dict[str, Law] = {}


def _law(function: Law) -> Law:
    LAWS[function.__name__.strip("_").replace("_", " ")] = function
    return function


@_law
def _padding(it: Subject) -> tuple[bool, str]:
    """padding hidden by attention_mask changes nothing"""
    inputs = it.with_memory(np.where(it.real[..., None], it.memory, 100.0).astype("float32"))
    found = it.output(*inputs, attention_mask=it.mask(it.real))
    return it.below(it.alone(found, lambda number, length: it.output(*it.row(number, length))))


@_law
def _implicit_mask(it: Subject) -> tuple[bool, str]:
    """padding that Embedding(mask_zero=True) tells changes nothing"""
    return it.below(it.alone(it.output(*it.embedded()), lambda n, length: it.output(*it.embedded([n], length))))


@_law
def _mask_stays(it: Subject) -> tuple[bool, str]:
    """the implicit masks are still on the caller's tensors after the call"""
    words = np.where(it.real, it.words, 0)
    query, memory = it.table(words[:, : it.length]), it.table(words)
    mean = keras.layers.GlobalAveragePooling1D()  # reads the mask
    before = [_numpy(mean(tensor)) for tensor in (query, memory)]
    it.call(query, memory)
    after = [_numpy(mean(tensor)) for tensor in (query, memory)]
    return it.below(_largest(map(_apart, before, after)), what="their means by the mask differ by")


@_law
def _stack(it: Subject) -> tuple[bool, str]:
    """three times over one memory with an implicit mask, padding changes nothing"""

    def stack(query: Any, memory: Any) -> np.ndarray:
        for _ in range(3):
            width, query = query.shape[-1], it.call(query, memory)
            if query.shape[-1] != width:
                raise CannotAsk("its output is not as wide as its query")
            memory = memory if it.has_memory else query
        return _numpy(query)

    return it.below(it.alone(stack(*it.embedded()), lambda n, length: stack(*it.embedded([n], length))))


def _future(it: Subject, x: np.ndarray, layer: Callable[[], Any], trainings: Iterable[bool]) -> tuple[bool, str]:
    """How much outputs change where only what comes later does, in the worst call."""
    half = it.length // 2
    other = np.concatenate([x[..., :half, :], x[..., half:, :] + 5], axis=-2)
    changes = {}
    scored = [False, True] if it.takes("return_attention_scores") else [False]
    for training, scores in itertools.product(trainings, scored):
        options = {"use_causal_mask": True, "training": training, "return_attention_scores": scores}
        first, second = (it.output(each, each, layer(), **options)[..., :half, :] for each in (x, other))
        changes[f" (training={training}, return_attention_scores={scores})"] = _apart(first, second)
    return it.worst(changes)


@_law
def _causal(it: Subject) -> tuple[bool, str]:
    """use_causal_mask: what comes later changes nothing, in training and not, with scores and without"""
    trainings = [False, True] if it.is_copy and it.takes("training") else [False]
    return _future(it, it.memory[:, : it.length], lambda: it.layer, trainings)


@_law
def _causal_with_dropout(it: Subject) -> tuple[bool, str]:
    """use_causal_mask with dropout in the layer: what comes later changes nothing"""
    seeded = {"seed": 1} if "seed" in it.copy(dropout=0.5).get_config() else {}
    trainings = [False, True] if seeded and it.takes("training") else [False]
    return _future(it, it.memory[:, : it.length], lambda: it.copy(dropout=0.5, **seeded), trainings)


@_law
def _causal_of_rank_4(it: Subject) -> tuple[bool, str]:
    """use_causal_mask for (B, N, T, D) with attention over T: what comes later changes nothing"""
    x = np.stack([it.memory[:, : it.length], it.memory[:, -it.length :]], axis=1)
    layer = it.copy(attention_axes=(2,))
    return _future(it, x, lambda: layer, [False])


@_law
def _causal_alignment(it: Subject) -> tuple[bool, str]:
    """use_causal_mask with fewer queries than keys: the last query sees all keys, as with a cache"""
    if not it.has_memory:
        raise CannotAsk("it attends to its own input")
    causal, plain = (it.output(it.query, it.memory, use_causal_mask=causal) for causal in (True, False))
    return it.below(_apart(causal[:, -1], plain[:, -1]))


@_law
def _blind_query(it: Subject) -> tuple[bool, str]:
    """a query that may see nothing gives zeros"""
    found = it.output(it.query, it.memory, attention_mask=it.free)
    return it.below(_apart(found[BLIND], np.zeros_like(found[BLIND])), 0.0, "largest output")


@_law
def _blind_query_with_scores(it: Subject) -> tuple[bool, str]:
    """a query that may see nothing gives the same whether scores are asked for or not"""
    found = [
        it.output(it.query, it.memory, attention_mask=it.free, return_attention_scores=scores)[BLIND]
        for scores in (False, True)
    ]
    return it.below(_apart(*found))


@_law
def _blind_query_gradient(it: Subject) -> tuple[bool, str]:
    """a query that may see nothing passes no gradient, to inputs or weights"""
    inputs, weights = it.gradients(lambda output: output[BLIND], it.memory, attention_mask=it.free)
    return it.below(_largest(map(_largest, inputs + weights)), 0.0, "largest gradient")


@_law
def _blind_query_finite(it: Subject) -> tuple[bool, str]:
    """a query that may see nothing makes no output and no gradient NaN"""
    output = it.output(it.query, it.memory, attention_mask=it.free)
    inputs, weights = it.gradients(lambda output: output, it.memory, attention_mask=it.free)
    return _all_finite({"outputs": output, **_named(inputs, weights)})


def _named(inputs: list[Any], weights: list[Any]) -> dict[str, np.ndarray]:
    """Gradients under the names that `_all_finite` says."""
    return {
        "gradients of inputs": np.concatenate([array.ravel() for array in inputs]),
        "gradients of weights": np.concatenate([np.zeros(0), *(array.ravel() for array in weights)]),
    }


def _all_finite(arrays: dict[str, np.ndarray]) -> tuple[bool, str]:
    broken = {name: np.size(array) - np.isfinite(array).sum() for name, array in arrays.items()}
    said = ", ".join(f"{count} of {arrays[name].size} {name}" for name, count in broken.items())
    return not any(broken.values()), f"not finite: {said}"


def _broken_memory(it: Subject) -> np.ndarray:
    """NaN and infinity where there is padding."""
    broken = it.memory.copy()
    broken[~it.real] = np.inf
    broken[1, -1] = np.nan
    return broken


def _hiding(it: Subject) -> np.ndarray:
    """A mask (B, T, S) of the padding; where queries are padding too, they may see nothing."""
    return it.mask(it.real) if it.has_memory else it.mask(it.real) & it.real[..., None]


@_law
def _hidden_nan(it: Subject) -> tuple[bool, str]:
    """NaN and infinity under attention_mask reach no output"""
    outputs = [
        it.output(*it.with_memory(memory), attention_mask=_hiding(it)) for memory in (it.memory, _broken_memory(it))
    ]
    plain, broken = outputs if it.has_memory else [output[it.real] for output in outputs]
    return _all_finite({"outputs": broken}) if np.isnan(broken).any() else it.below(_apart(plain, broken))


@_law
def _hidden_nan_gradient(it: Subject) -> tuple[bool, str]:
    """NaN and infinity under attention_mask reach no gradient, of inputs or weights"""

    def pick(output: Any) -> Any:
        return output if it.has_memory else ops.where(it.real[..., None], output, ops.zeros_like(output))

    return _all_finite(_named(*it.gradients(pick, _broken_memory(it), attention_mask=_hiding(it))))


def _refused_or_right(it: Subject, rows: Any, given: np.ndarray, right: np.ndarray) -> tuple[bool, str]:
    """Whether a mask that is easily misread is refused, or read as it is meant."""
    memory = it.memory[rows]
    query = it.query[rows] if it.has_memory else memory
    meant = it.output(query, memory, attention_mask=right)
    try:
        found = it.output(query, memory, attention_mask=given)
    except Exception as error:
        return True, f"refused: {words_of(error)}"
    return it.below(_apart(found, meant), where=" from what is meant")


@_law
def _float_mask(it: Subject) -> tuple[bool, str]:
    """an additive mask (0 and -1e9) is refused, or read as what it is"""
    mask = it.mask(it.real)
    return _refused_or_right(it, slice(None), np.where(mask, 0.0, -1e9).astype("float32"), mask)


@_law
def _ambiguous_mask(it: Subject) -> tuple[bool, str]:
    """a padding mask (B, S) as attention_mask, with B = T, is refused, or read as what it is"""
    rows = np.arange(it.query.shape[1]) % 3
    return _refused_or_right(it, rows, it.real[rows], it.mask(it.real)[rows])


@_law
def _same_with_scores(it: Subject) -> tuple[bool, str]:
    """the output is the same with scores and without"""
    changes = {}
    for name, value in {"": None, "attention_mask": it.mask(it.real), "use_causal_mask": True}.items():
        if not name or it.takes(name):
            options = {name: value} if name else {}
            plain, scored = (
                it.output(it.query, it.memory, return_attention_scores=scores, **options) for scores in (False, True)
            )
            changes[f" (with {name or 'no mask'})"] = _apart(plain, scored)
    return it.worst(changes)


@_law
def _scores(it: Subject) -> tuple[bool, str]:
    """scores sum to 1, and are 0 under a mask"""
    mask = it.mask(it.real)
    tensors = [ops.convert_to_tensor(array) for array in (it.query, it.memory)]
    scores = it.call(*tensors, attention_mask=mask, return_attention_scores=True)[1]
    if scores is None:
        return False, "None instead of scores"
    scores = _numpy(scores)  # (B, H, T, S)
    hidden = _largest(np.where(mask[:, None], 0, scores))
    sums = scores.sum(-1)
    return hidden == 0 and _apart(sums, np.ones_like(sums)) <= it.tolerance, (
        f"largest under the mask {hidden:.1e}, sums from {sums.min():.4f} to {sums.max():.4f}"
    )


@_law
def _compiled(it: Subject) -> tuple[bool, str]:
    """eager, compiled and XLA calls agree, with implicit, explicit and causal masks"""
    if backend.name() == "torch":
        raise CannotAsk("on torch nothing is compiled")

    def run(words: Any, query: Any, memory: Any, mask: Any) -> list[Any]:
        found = [it.call(it.table(words[:, : it.length]), it.table(words))]
        if it.takes("attention_mask"):
            found.append(it.call(query, memory, attention_mask=mask))
        return [*found, it.call(query, memory, use_causal_mask=True)] if it.takes("use_causal_mask") else found

    arrays = np.where(it.real, it.words, 0), it.query, it.memory, it.mask(it.real)
    tensors = [ops.convert_to_tensor(array) for array in arrays]
    eager = run(*tensors)
    changes = {}
    for name, jit in {" (graph)": False, " (XLA)": True}.items():
        found = backend.compile(run, jit, variables_of=[it.layer, it.table])(*tensors)
        changes[name] = _largest(_apart(_numpy(a), _numpy(b)) for a, b in zip(eager, found, strict=True))
    return it.worst(changes)


@_law
def _float16(it: Subject) -> tuple[bool, str]:
    """mixed_float16 stays finite where logits leave its range, with a mask and without"""
    layer, inputs = it.copy(dtype="mixed_float16"), it.with_memory(it.memory * 400)
    inputs = (it.query * 400 if it.has_memory else inputs[1], inputs[1])
    found = {"outputs without a mask": it.output(*inputs, layer)}
    if it.takes("attention_mask"):
        found["with one"] = it.output(*inputs, layer, attention_mask=it.mask(it.real))
    return _all_finite(found)


@_law
def _bfloat16(it: Subject) -> tuple[bool, str]:
    """mixed_bfloat16 is near float32"""
    low, exact = (it.output(it.query, it.memory, it.copy(dtype=dtype)) for dtype in ("mixed_bfloat16", "float32"))
    return it.below(_apart(low, exact) / _largest(exact), 0.05, "difference over largest output")


def _itself(it: Subject) -> Any:
    """The layer that was handed over: what its config forgets shows in it alone."""
    try:
        it.output(it.query, it.memory, it.given)
    except Exception as error:
        if it.was_built:
            raise CannotAsk(f"it is built for other inputs: {words_of(error)}") from error
        raise
    return it.given


@_law
def _config(it: Subject) -> tuple[bool, str]:
    """made anew from its config, with the same weights, it gives the same"""
    layer = _itself(it)
    copy = type(layer).from_config(layer.get_config())
    it.output(it.query, it.memory, copy)  # builds it
    copy.set_weights(layer.get_weights())
    return it.below(_apart(*(it.output(it.query, it.memory, each) for each in (layer, copy))))


def _reloaded(it: Subject, layer: Any, change: Callable[[Any], None]) -> tuple[bool, str]:
    """How much a model of the layer differs once it is changed, saved and loaded."""
    arrays = [it.query, it.memory] if it.has_memory else [it.memory]
    inputs = [keras.Input(array.shape[1:]) for array in arrays]
    model = keras.Model(inputs, it.call(inputs[0], inputs[-1], layer))
    change(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        loaded = keras.models.load_model(path, custom_objects={type(layer).__name__: type(layer)})
    return it.below(_apart(_numpy(model(arrays)), _numpy(loaded(arrays))))


@_law
def _saved(it: Subject) -> tuple[bool, str]:
    """a model with it, saved as .keras and loaded, gives the same"""
    return _reloaded(it, _itself(it), lambda model: None)


@_law
def _quantized(it: Subject) -> tuple[bool, str]:
    """a model with it, after model.quantize("int8") saved and loaded, gives the same"""

    def quantize(model: Any) -> None:
        model.quantize("int8")
        if not any(getattr(part, "quantization_mode", None) for part in model._flatten_layers()):
            raise CannotAsk("nothing in it can be quantized")

    return _reloaded(it, it.copy(dtype="float32"), quantize)  # Keras refuses float16
