"""The paths of attention are one function: against a loop in NumPy, and against each other.

Shapes: B batch, H query heads, G key and value heads, T target (query) length, S memory (key) length.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from keras import ops

from mmattn import backend
from mmattn.layers import MultiHeadAttention, SelfAttention, attention, explain_path
from mmattn.layers.checks import IN_ATTENTION
from mmattn.layers.chunked import BLOCK, block_sizes, chunked
from mmattn.layers.dot_product import Scoring, explicit, fused
from mmattn.layers.paths import choose_path
from mmattn.layers.sight import Sight

BACKEND = keras.backend.backend()
TENSORFLOW, JAX, TORCH = (name == BACKEND for name in ("tensorflow", "jax", "torch"))
COUNTS = {  # the ways to run a function, the cheapest first, and how many cases by chance each of them gets
    "tensorflow": {"eager": 10, "graph": 1, "xla": 1},
    "jax": {"jit": 3},
    "torch": {"eager": 20},
}[BACKEND]
FAST, *DEAR = COUNTS
DEAR_TOO = [FAST, *(pytest.param(mode, marks=pytest.mark.slow) for mode in DEAR)]
# Keras computes in float32 on JAX and torch, whatever the type
FLOAT, TOLERANCE = ("float64", 1e-9) if TENSORFLOW else ("float32", 2e-5)
SCALE, KEY, VALUE = 0.4, 3, 2
PATHS = ("explicit", "chunked", "fused") if TORCH else ("explicit", "chunked")
FLASH = (None, False, True) if TORCH else (False, True)  # the layer's settings that take these paths


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of attention; its numbers come from the seed.

    Attributes:
        dense: which axes of (B, H, T) a dense mask has; None: there is none.
        rows: of a block of the chunked path; None: its own choice.
        together: key heads of a block, where rows is given.
    """

    batch: int = 1
    heads: int = 2
    groups: int = 2
    targets: int = 5
    sources: int = 5
    causal: bool = False
    window: int | None = None
    keys: bool = False
    queries: bool = False
    dense: tuple[bool, bool, bool] | None = None
    soft_cap: float | None = None
    sloped: bool = False
    rows: int | None = 2
    together: int = 1
    seed: int = 0

    @property
    def sizes(self) -> tuple[int, int] | None:
        return None if self.rows is None else (self.together, self.rows)

    @property
    def scoring(self) -> Scoring:
        return Scoring(SCALE, self.soft_cap, tuple(0.3 * (h + 1) for h in range(self.heads)) if self.sloped else None)

    def arrays(self) -> list[np.ndarray]:
        """Query, key, value, and the slopes of the output."""
        rng = np.random.default_rng(self.seed)
        asking, asked = (self.batch, self.heads, self.targets), (self.batch, self.groups, self.sources)
        return [
            rng.normal(size=s).astype(FLOAT) for s in ((*asking, KEY), (*asked, KEY), (*asked, VALUE), (*asking, VALUE))
        ]

    def masks(self) -> tuple[Any, Any, Any]:
        """The arrays of a `Sight`: mask, keys, queries."""
        rng = np.random.default_rng(self.seed + 1)
        mask = None
        if self.dense is not None:
            sizes = zip(self.dense, (self.batch, self.heads, self.targets), strict=True)
            mask = rng.random((*(size if full else 1 for full, size in sizes), self.sources)) < 0.6
        return (
            mask,
            rng.random((self.batch, self.sources)) < 0.7 if self.keys else None,
            rng.random((self.batch, self.targets)) < 0.7 if self.queries else None,
        )

    def sees(self) -> np.ndarray:
        """Who sees what, one pair at a time: (B, H, T, S)."""
        mask, keys, queries = self.masks()
        found = np.ones((self.batch, self.heads, self.targets, self.sources), bool)
        for b, h, t, s in np.ndindex(found.shape):
            place = t + self.sources - self.targets
            found[b, h, t, s] = (
                (not self.causal or s <= place)
                and (self.window is None or abs(place - s) < self.window)
                and (mask is None or np.broadcast_to(mask, found.shape)[b, h, t, s])
                and (keys is None or keys[b, s])
                and (queries is None or queries[b, t])
            )
        return found

    def sight(self, mask: Any = None, keys: Any = None, queries: Any = None) -> Sight:
        return Sight(self.targets, self.sources, mask, keys, queries, self.causal, self.window)

    def paths(self) -> list[str]:
        return [path for path in PATHS if path != "fused" or not (self.sloped or self.soft_cap)]

    def attend(self, path: str, whole: bool = False) -> Callable[..., Any]:
        """A path as a function of query, key, value, mask, keys and queries."""

        def run(query: Any, key: Any, value: Any, *masks: Any) -> Any:
            given = query, key, value, self.sight(*masks), self.scoring
            if path == "chunked":
                found = chunked(*given, sizes=self.sizes)
            else:
                found = (explicit if path == "explicit" else fused)(*given)
            return found if whole else found.heads

        return run


@st.composite
def cases(draw: Any) -> Case:
    heads = draw(st.sampled_from([1, 2, 4]))
    maybe = st.booleans()
    return Case(
        batch=draw(st.integers(1, 2)),
        heads=heads,
        groups=draw(st.sampled_from([g for g in (1, 2, 4) if heads % g == 0])),
        targets=draw(st.integers(1, 6)),
        sources=draw(st.integers(1, 6)),
        causal=draw(maybe),
        window=draw(st.sampled_from([None, 1, 2, 4])),
        keys=draw(maybe),
        queries=draw(maybe),
        dense=draw(st.one_of(st.none(), st.tuples(maybe, maybe, maybe))),
        soft_cap=draw(st.sampled_from([None, None, 1.5])),
        sloped=draw(st.sampled_from([False, False, True])),
        rows=draw(st.sampled_from([2, 3, 16])),
        together=draw(st.sampled_from([1, 1, 2, 3])),
        seed=draw(st.integers(0, 999)),
    )


CORNERS = {
    "open": Case(groups=1, batch=2),
    "causal": Case(causal=True, heads=4),
    "causal, more queries than keys": Case(causal=True, targets=6, sources=3, keys=True, batch=2),
    "causal window, fewer queries than keys": Case(causal=True, window=2, targets=3, sources=6, rows=3),
    "window, more queries than keys": Case(window=2, targets=6, sources=2),
    "one query": Case(targets=1, keys=True, causal=True, dense=(True, True, False)),
    "one key": Case(sources=1, targets=4, dense=(True, False, True)),
    "masks of queries": Case(queries=True, batch=2, rows=16, together=3),
    "a mask of each head": Case(heads=4, dense=(False, True, True), rows=3),
    "a mask of each head, heads together": Case(batch=2, heads=4, groups=2, dense=(True, True, True), together=3),
    "slopes, heads together": Case(batch=2, heads=4, groups=4, sloped=True, keys=True, queries=True, together=3),
    "one mask for all": Case(batch=2, dense=(False, False, False), soft_cap=1.5),
    "all at once": Case(2, 4, 2, 6, 5, True, 4, True, True, (True, True, True), 1.5, True),
}  # fmt: skip


def everywhere(mode: str, law: Callable[[Case], None], times: int = 1) -> None:
    """Calls the law with the corners (one of them where calls are dear), then with cases by chance.

    These are the same for each law, so that no program is made twice.
    """
    for case in CORNERS.values() if mode == FAST else [CORNERS["all at once"]]:
        law(case)
    options = settings(max_examples=COUNTS[mode] * times, database=None, deadline=None)
    seed(0)(options(given(cases())(lambda case: law(case))))()


Numbers = list[np.ndarray]


@functools.cache
def program(case: Case, path: str, mode: str = FAST, dtype: str = FLOAT) -> Callable[[Numbers, Any], Numbers]:
    return compiled(case.attend(path), mode, dtype)


@functools.cache
def of_case(case: Case, path: str, mode: str) -> Numbers:
    """The output of a path and its slopes by query, key and value."""
    return program(case, path, mode)(case.arrays(), case.masks())


def compiled(attend: Callable[..., Any], mode: str = FAST, dtype: str = FLOAT) -> Callable[..., Numbers]:
    """A function of arrays and masks, all of them arguments of the program.

    It gives what `attend` makes of them, and the slopes by each array; the last array holds the slopes of the output.
    """
    run = {"tensorflow": _compiled_tensorflow, "jax": _compiled_jax, "torch": _compiled_torch}[BACKEND](attend, mode)

    def call(arrays: Any, masks: Any = ()) -> Numbers:
        *arrays, upstream = (ops.cast(ops.convert_to_tensor(array), dtype) for array in arrays)
        masks = tuple(None if mask is None else ops.convert_to_tensor(mask) for mask in masks)
        return [numbers(array) for array in run(tuple(arrays), masks, upstream)]

    return call


def numbers(array: Any) -> np.ndarray:
    return ops.convert_to_numpy(ops.cast(array, FLOAT))


def _compiled_tensorflow(attend: Any, mode: str) -> Any:
    import tensorflow as tf

    def both(arrays: Any, masks: Any, upstream: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            output = attend(*arrays, *masks)
            total = tf.reduce_sum(output * upstream)
        return (output, *tape.gradient(total, arrays, unconnected_gradients=tf.UnconnectedGradients.ZERO))

    return both if mode == "eager" else tf.function(both, jit_compile=mode == "xla", autograph=False)


def _compiled_jax(attend: Any, mode: str) -> Any:
    import jax

    def total(arrays: Any, masks: Any, upstream: Any) -> Any:
        output = attend(*arrays, *masks)
        return (output * upstream).sum(), output

    def both(arrays: Any, masks: Any, upstream: Any) -> Any:
        (_, output), found = jax.value_and_grad(total, has_aux=True)(arrays, masks, upstream)
        return output, *found

    return jax.jit(both) if mode == "jit" else both


def _compiled_torch(attend: Any, mode: str) -> Any:
    import torch

    def both(arrays: Any, masks: Any, upstream: Any) -> Any:
        arrays = tuple(array.detach().requires_grad_() for array in arrays)
        output = attend(*arrays, *masks)
        return output.detach(), *torch.autograd.grad((output * upstream).sum(), arrays, materialize_grads=True)

    return both


def loop(case: Case, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Attention by its definition, one query of one head at a time, in float64."""
    sees, shared = case.sees(), case.heads // case.groups
    output = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, h, t in np.ndindex(query.shape[:3]):
        scores = {}
        for s in np.flatnonzero(sees[b, h, t]):
            score = math.fsum(query[b, h, t] * key[b, h // shared, s]) * SCALE
            if case.soft_cap:
                score = case.soft_cap * math.tanh(score / case.soft_cap)
            if case.sloped:
                score -= case.scoring.slopes[h] * abs(t + case.sources - case.targets - s)
            scores[s] = math.exp(score)
        for s, score in scores.items():
            output[b, h, t] += score / math.fsum(scores.values()) * value[b, h // shared, s]
    return output


def of_groups(case: Case, seen: np.ndarray) -> np.ndarray:
    """What some query head of a group does, (B, H, ..) -> (B, G, ..)."""
    return seen.reshape(case.batch, case.groups, -1, *seen.shape[2:]).any(2)


# One function


def is_the_loop_with_one_gradient(case: Case, mode: str) -> None:
    expected = loop(case, *case.arrays()[:3])
    for path in case.paths():
        output, *gradients = of_case(case, path, mode)
        np.testing.assert_allclose(output, expected, atol=TOLERANCE, err_msg=path)
        for gradient, same in zip(gradients, of_case(case, "explicit", mode)[1:], strict=True):
            np.testing.assert_allclose(gradient, same, atol=TOLERANCE, err_msg=path)


def has_the_slopes_of_the_loop(case: Case, mode: str) -> None:
    *arrays, upstream = case.arrays()
    step, rng = 1e-6, np.random.default_rng(case.seed)
    for number, gradient in enumerate(of_case(case, "explicit", mode)[1:]):
        for place in map(tuple, rng.integers(0, gradient.shape, (3, 4))):
            sides = []
            for move in (step, -step):
                moved = [array.astype("float64") for array in arrays]
                moved[number][place] += move
                sides.append((loop(case, *moved) * upstream).sum())
            expected = (sides[0] - sides[1]) / (2 * step)
            assert gradient[place] == pytest.approx(expected, abs=1e-7 if TENSORFLOW else 1e-4)


def hides_whatever_stands_where_nobody_may_look(case: Case, mode: str) -> None:
    sees, rng = case.sees(), np.random.default_rng(case.seed)
    unseen, blind = ~of_groups(case, sees.any(2)), ~sees.any(3)
    bad = case.arrays()
    for array, places in zip(bad, (blind, unseen, unseen), strict=False):
        array[places] = rng.choice([np.nan, np.inf, -np.inf], (places.sum(), array.shape[-1]))
    for path in case.paths():
        found = program(case, path, mode)(bad, case.masks())
        for one, other in zip(found, of_case(case, path, mode), strict=True):
            np.testing.assert_allclose(one, other, atol=TOLERANCE, err_msg=path)


def harms_just_those_who_see_what_is_not_a_number(case: Case, mode: str) -> None:
    sees, rng = case.sees(), np.random.default_rng(case.seed)
    what, row = rng.integers(3), rng.integers(case.batch)  # query, key or value
    bad = case.arrays()
    place = rng.integers(bad[what].shape[2])
    bad[what][row, :, place] = np.nan
    harmed = np.zeros(sees.shape[:3], bool)
    harmed[row] = sees[row, :, :, place] if what else sees[row].any(-1) & (np.arange(case.targets) == place)
    fine, apart = ~harmed, ~of_groups(case, harmed).any(-1)
    for path in case.paths():
        found = program(case, path, mode)(bad, case.masks())
        assert np.isnan(found[0][harmed]).all(), path
        for one, other, safe in zip(found, of_case(case, path, mode), (fine, fine, apart, apart), strict=True):
            np.testing.assert_allclose(one[safe], other[safe], atol=TOLERANCE, err_msg=path)


def gives_zeros_to_the_blind_and_the_unseen(case: Case, mode: str) -> None:
    sees = case.sees()
    blind, unseen = ~sees.any(-1), ~of_groups(case, sees.any(2))
    for path in case.paths():
        for array, places in zip(of_case(case, path, mode), (blind, blind, unseen, unseen), strict=True):
            assert not array[places].any(), path


LAWS = [
    is_the_loop_with_one_gradient,
    has_the_slopes_of_the_loop,
    hides_whatever_stands_where_nobody_may_look,
    harms_just_those_who_see_what_is_not_a_number,
    gives_zeros_to_the_blind_and_the_unseen,
]


@pytest.mark.parametrize("mode", COUNTS)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_every_path(law, mode):
    everywhere(mode, lambda case: law(case, mode))


@pytest.mark.slow
@pytest.mark.parametrize("mode", COUNTS)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_every_path_in_many_cases(law, mode):
    everywhere(mode, lambda case: law(case, mode), times=8)


@pytest.mark.slow
def test_a_long_sequence_in_chunks_is_the_same():
    case = Case(targets=2048, sources=2048, causal=True, keys=True, groups=1, rows=300)
    rng = np.random.default_rng(0)
    shapes = (1, 2, 2048, 64), (1, 1, 2048, 64), (1, 1, 2048, 64), (1, 2, 2048, 64)
    arrays = [rng.normal(size=shape).astype("float32") for shape in shapes]
    masks = None, np.arange(2048)[None] >= 100, None
    for given_ in (case, dataclasses.replace(case, rows=None)):
        found, expected = (
            compiled(given_.attend(path), dtype="float32")(arrays, masks) for path in ("chunked", "explicit")
        )
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
        assert not found[0][:, :, :100].any()


# Queries that may see nothing


@pytest.mark.parametrize("path", PATHS)
def test_a_path_tells_which_queries_see_something(path):
    for name in ("open", "causal, more queries than keys", "one key", "masks of queries", "all at once", "rows alone"):
        case = CORNERS.get(name, Case(targets=3, dense=(True, False, True), queries=True, rows=1))
        if path in case.paths():
            given_ = [
                None if array is None else ops.convert_to_tensor(array) for array in (*case.arrays()[:3], *case.masks())
            ]
            sees, found = case.sees().any((1, 3)), case.attend(path, whole=True)(*given_).sees
            assert (
                sees.all()
                if found is None
                else (np.broadcast_to(ops.convert_to_numpy(found), sees.shape) == sees).all()
            )


def layer_of(flash: Any, dtype: str = "float32", kind: Any = MultiHeadAttention, **options: Any) -> Any:
    """A layer with four heads and the same weights each time, none of them zero."""
    layer = kind(num_heads=4, key_dim=4, flash_attention=flash, dtype=dtype, **options)
    layer.build(*[(None, None, 8)] * (1 if kind is SelfAttention else 2))
    rng = np.random.default_rng(3)
    layer.set_weights([rng.normal(size=w.shape, scale=0.4).astype("float32") for w in layer.weights])
    return layer


@pytest.mark.parametrize("options", [{}, {"num_key_value_heads": 2, "use_gate": True, "qk_norm": True}])
@pytest.mark.parametrize("flash", FLASH)
def test_a_blind_query_gives_zeros_though_the_layer_has_biases(flash, options):
    layer, rng = layer_of(flash, **options), np.random.default_rng(0)
    sees = rng.random((2, 4, 6, 5)) < 0.4
    sees[0, :, 2] = sees[1, :, 4] = False  # blind
    sees[1, 1:, 0], sees[1, 0, 0, 0] = False, True  # one head sees one key
    blind = ~sees.any((1, 3))
    arrays = [rng.normal(size=shape).astype("float32") for shape in ((2, 6, 8), (2, 5, 8), (2, 6, 8))]
    run = compiled(lambda query, value, mask: layer(query, value, attention_mask=mask), dtype="float32")
    output, of_query, of_value = run(arrays, [sees])
    for array in (output, of_query):
        assert not array[blind].any() and np.isfinite(array).all()
    assert output[~blind].all() and of_query[~blind].any() and np.isfinite(of_value).all()
    padding = np.arange(5)[None] < [[0], [3]]
    run = compiled(lambda query, value, real: layer(query, value, key_mask=real), dtype="float32")
    output, of_query, of_value = run(arrays, [padding])
    assert not output[0].any() and not of_query[0].any() and not of_value[~padding].any()
    assert output[1].all() and of_value[1, :3].any(-1).all()


@pytest.mark.parametrize("flash", FLASH)
def test_a_layer_with_dropout_trains_on_rows_without_a_word(flash):
    inputs, real = keras.Input((None, 8)), keras.Input((None,), dtype="bool")
    layer = layer_of(flash, kind=SelfAttention, dropout=0.3)
    model = keras.Model([inputs, real], layer(inputs, padding_mask=real, use_causal_mask=True))
    model.compile(keras.optimizers.SGD(0.1), loss="mse", jit_compile=JAX)
    x = np.random.default_rng(0).normal(size=(3, 6, 8)).astype("float32")
    padding = np.arange(6)[None] < [[0], [3], [6]]
    loss = model.fit([x, padding], x, epochs=3, verbose=0).history["loss"]
    assert np.isfinite(loss).all() and loss[-1] < loss[0]
    assert not model.predict([x, padding], verbose=0)[0].any()


# Half precision

HALF = {"float16": 4e-3, "bfloat16": 4e-2}  # of the largest number


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("path", PATHS)
def test_half_precision_is_near_float32(path, dtype):
    for name in ("open", "causal window, fewer queries than keys", "masks of queries", "all at once"):
        case = CORNERS[name]
        if path in case.paths():
            arrays = [numbers(ops.cast(ops.convert_to_tensor(array), dtype)) for array in case.arrays()]
            found = program(case, path, dtype=dtype)(arrays, case.masks())
            expected = program(case, "explicit")(arrays, case.masks())
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, atol=HALF[dtype] * max(1, np.abs(other).max()))


def test_small_slopes_of_float16_lose_no_more_in_blocks_than_all_at_once():
    rng = np.random.default_rng(0)
    shapes = (1, 2, 64, 64), (1, 1, 512, 64), (1, 1, 512, 64), (1, 2, 64, 64)
    arrays = [rng.normal(size=shape).astype("float16") for shape in shapes]
    arrays[3] *= 1e-3  # slopes of the output, as they come from a loss that is a mean
    sight, scoring = Sight(64, 512), Scoring(1 / math.sqrt(64))

    def slopes(path, dtype):
        *inputs, above = (ops.cast(ops.convert_to_tensor(array), dtype) for array in arrays)
        return [
            numbers(ops.cast(slope, "float32"))
            for slope in backend.gradients(lambda *x: ops.sum(path(*x, sight, scoring).heads * above), inputs)
        ]

    exact = slopes(explicit, "float32")
    errors = [
        [
            np.abs(one - other).mean() / np.abs(other).mean()
            for one, other in zip(slopes(path, "float16"), exact, strict=True)
        ]
        for path in (explicit, lambda *given: chunked(*given, sizes=(1, 16)))
    ]
    assert all(error < 2 * least for least, error in zip(*errors, strict=True))


@pytest.mark.parametrize(
    "case", [Case(causal=True), Case(keys=True, dense=(True, True, True))], ids=["causal", "masks"]
)
@pytest.mark.parametrize("path", PATHS)
def test_scores_at_the_end_of_float16_stay_finite(path, case):
    arrays = case.arrays()
    arrays[0][..., :] = 400.0, 0.0, 0.0
    for scores in ([60000, 65000, -65000, 100, 50000], [-70000, 60000, 200000, 65600, 70000], [-2e5] * 5, [2e5] * 5):
        arrays[1][..., 0] = np.array(scores) / (400 * SCALE)
        found = program(case, path, dtype="float16")(arrays, case.masks())
        assert all(np.isfinite(array).all() for array in found)
        if max(scores) < 65504:  # beyond it they count as equal
            expected = program(case, "explicit")(arrays, case.masks())
            np.testing.assert_allclose(found[0], expected[0], atol=4e-3)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("flash", FLASH)
def test_a_layer_in_mixed_precision_is_near_float32(flash, policy):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype("float32") for shape in ((2, 6, 8), (2, 5, 8), (2, 6, 8))]
    sees = rng.random((2, 1, 6, 5)) < 0.6
    for size in (1.0, 200.0):
        found, expected = (
            compiled(
                lambda query, value, mask, layer=layer: ops.cast(layer(query, value, attention_mask=mask), "float32"),
                dtype="float32",
            )([size * arrays[0], size * arrays[1], arrays[2]], [sees])
            for layer in (layer_of(flash, policy), layer_of(False))
        )
        assert all(np.isfinite(array).all() for array in found)
        if size == 1.0:  # a softmax of large scores magnifies any rounding
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, atol=4 * HALF[policy[6:]] * max(1, np.abs(other).max()))


# Dropout in chunks

RATE = 0.4
DROPPED = {
    "padding": Case(keys=True, batch=2, heads=4, groups=1, rows=3),
    "causal": Case(causal=True, targets=5, sources=6, heads=4, batch=2, together=3),
    "window": Case(window=2, targets=6, sources=6, soft_cap=1.5, sloped=True),
}


def a_seed(number: int) -> np.ndarray:
    return ops.convert_to_numpy(keras.random.SeedGenerator(number).next())


def dropping(case: Case) -> Callable[..., Any]:
    """The chunked path as a function of query, key, value, masks and the seed."""

    def run(query: Any, key: Any, value: Any, *masks: Any) -> Any:
        *masks, seed = masks
        return chunked(query, key, value, case.sight(*masks), case.scoring, RATE, seed, case.sizes).heads

    return run


def dropping_explicitly(case: Case) -> Callable[..., Any]:
    """The same by all weights at once, of which those go that each block draws for the keys in its reach."""
    pairs = case.batch * case.groups

    def run(query: Any, key: Any, value: Any, *masks: Any) -> Any:
        *masks, seed = masks
        sight = case.sight(*masks)

        def drop(weights: Any) -> Any:
            pieces, count = (
                -(-n // of) for n, of in zip((pairs, case.targets), (case.together, case.rows), strict=True)
            )
            drawn = []
            for piece in range(pieces):
                rows = []
                for number in range(count):
                    first, last = number * case.rows, min(case.targets, (number + 1) * case.rows)
                    low, high = sight.reach(first, last) if sight.is_placed else (0, case.sources)
                    sizes = case.together, case.heads // case.groups, case.rows, high - low
                    block = backend.random_uniform(sizes, seed, piece * count + number)
                    rows.append(ops.pad(block[:, :, : last - first], [(0, 0)] * 3 + [(low, case.sources - high)]))
                drawn.append(ops.concatenate(rows, axis=2))
            all_drawn = ops.reshape(ops.concatenate(drawn)[:pairs], ops.shape(weights))
            return ops.where(all_drawn < RATE, ops.zeros_like(weights), weights / (1 - RATE))

        return explicit(query, key, value, sight, case.scoring, dropout=drop).heads

    return run


@pytest.mark.parametrize("mode", DEAR_TOO)
@pytest.mark.parametrize("name", DROPPED)
def test_dropout_in_chunks_is_a_function_of_its_seed_and_has_its_slopes(name, mode):
    case = DROPPED[name]
    run, same = compiled(dropping(case), mode), compiled(dropping_explicitly(case), mode)
    first, again, other = (run(case.arrays(), (*case.masks(), a_seed(number))) for number in (1, 1, 2))
    expected = same(case.arrays(), (*case.masks(), a_seed(1)))
    for one, two, three in zip(first, again, expected, strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, three, atol=TOLERANCE)
    assert np.abs(first[0] - other[0]).max() > 0.1


def test_dropout_in_chunks_is_right_on_average():
    case = Case(batch=256, keys=True, together=128)
    *arrays, upstream = case.arrays()
    arrays = [np.repeat(array[:1], case.batch, axis=0) for array in arrays]
    masks = None, np.array([[1, 1, 0, 1, 1]], bool), None
    run = compiled(dropping(case))
    outputs = np.concatenate([run((*arrays, upstream), (*masks, a_seed(number)))[0] for number in range(8)])
    expected = compiled(case.attend("explicit"))((*arrays, upstream), masks)[0][0]
    error = outputs.std(0) / math.sqrt(len(outputs))
    assert (error > 0).all() and (np.abs(outputs.mean(0) - expected) < 5 * error).all()
    assert len(np.unique(outputs.round(6), axis=0)) > 500  # each row of a batch has its own drops


def test_each_block_of_each_seed_has_its_own_numbers():
    seeds = itertools.product(range(3), range(3))
    drawn = {
        (seed, number): numbers(backend.random_uniform((5,), ops.convert_to_tensor(np.array(seed)), number))
        for seed in seeds
        for number in range(3)
    }
    assert all(((array >= 0) & (array < 1)).all() for array in drawn.values())
    assert len({tuple(array) for array in drawn.values()}) == len(drawn)


# Lengths that are not known, and the choice


@pytest.mark.skipif(not TENSORFLOW, reason="only TensorFlow's programs have axes of unknown length")
@pytest.mark.parametrize("jit", [False, True])
def test_one_trace_of_the_chunked_path_serves_every_length(jit, monkeypatch):
    import tensorflow as tf

    monkeypatch.setattr("mmattn.layers.chunked.BLOCK", 2**8)  # so that there are several blocks
    monkeypatch.setattr("mmattn.layers.chunked.ROWS", 16)
    layer, same, traces = layer_of(True), layer_of(False), []

    def both(layer, query, value, real, mask):
        with tf.GradientTape() as tape:
            tape.watch([query, value])
            output = layer(query, value, key_mask=real, attention_mask=mask, use_causal_mask=True)
            total = tf.reduce_sum(tf.sin(output))
        return output, *tape.gradient(total, [query, value])

    signature = [tf.TensorSpec((None, None, 8))] * 2 + [tf.TensorSpec((None,) * n, "bool") for n in (2, 4)]

    @tf.function(input_signature=signature, jit_compile=jit, autograph=False)
    def run(*arrays):
        traces.append(True)
        assert explain_path(layer, arrays[0], arrays[1]).name == "chunked"
        return both(layer, *arrays)

    rng = np.random.default_rng(0)
    sizes = ((2, 5, 7, 5), (0, 5, 7, 5), (1, 40, 37, 1), (3, 17, 17, 17), (2, 0, 7, 0), (2, 5, 0, 5), (0, 5, 0, 5))
    for batch, targets, sources, rows in sizes[: 2 if jit else None]:
        query, value = (rng.normal(size=(batch, n, 8)).astype("float32") for n in (targets, sources))
        real, mask = rng.random((batch, sources)) < 0.8, rng.random((batch, 1, rows, sources)) < 0.8
        arrays = [tf.constant(array) for array in (query, value, real, mask)]
        for one, other in zip(run(*arrays), both(same, *arrays), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
    assert len(traces) == 1


@pytest.mark.parametrize("flash", [None, False, True])
@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 5, 0), (0, 1100, 1100)], ids=str)
def test_an_empty_axis_is_no_error(shape, flash):
    batch, targets, sources = shape
    layer = layer_of(flash)
    query, value = (np.ones((batch, size, 8), "float32") for size in (targets, sources))
    for rules in ({}, {"use_causal_mask": True}, {"key_mask": np.ones((batch, sources), bool)}):
        output = ops.convert_to_numpy(layer(query, value, **rules))
        assert output.shape == query.shape
        assert np.all(np.isfinite(output))
    assert explain_path(layer, query, value).name == "explicit"


@pytest.mark.parametrize("positions", [None, *IN_ATTENTION])
@pytest.mark.parametrize("causal", [False, True])
def test_an_empty_sequence_is_no_error_with_any_positions(positions, causal):
    layer = SelfAttention(2, 4, positions=positions)
    for shape in ((2, 0, 8), (0, 3, 8)):
        assert tuple(layer(np.zeros(shape, "float32"), use_causal_mask=causal).shape) == shape


@pytest.mark.parametrize("flash", FLASH)
def test_one_key_has_slopes_of_zero_and_not_none(flash):
    layer, rng = layer_of(flash), np.random.default_rng(0)
    query, value = (ops.convert_to_tensor(rng.normal(size=(2, n, 8)).astype("float32")) for n in (3, 1))
    for weight, slope in zip(layer.trainable_weights, slopes_of_weights(layer, query, value), strict=True):
        assert slope is not None and np.all(np.isfinite(slope))
        asks = weight.path.split("/")[-2] in ("query", "key")  # whatever they are, the one key gets all
        assert (np.abs(np.asarray(slope)).max() < 1e-4) == asks, weight.path
    expected = MultiHeadAttention.to_keras(layer)(query, value)
    np.testing.assert_allclose(ops.convert_to_numpy(layer(query, value)), ops.convert_to_numpy(expected), atol=1e-5)


def slopes_of_weights(layer: Any, *inputs: Any) -> list[Any]:
    """Of the sum of sines of its output, those of its trainable weights, or None."""
    if TENSORFLOW:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            total = ops.sum(ops.sin(layer(*inputs)))
        return tape.gradient(total, layer.trainable_weights)
    if TORCH:
        import torch

        total = ops.sum(ops.sin(layer(*inputs)))
        values = [variable.value for variable in layer.trainable_weights]
        return [None if g is None else g.numpy() for g in torch.autograd.grad(total, values, allow_unused=True)]
    import jax

    def total(values):
        return ops.sum(ops.sin(layer.stateless_call(values, [], *inputs)[0]))

    return jax.grad(total)([variable.value for variable in layer.trainable_weights])


def test_blocks_fill_the_room_they_have():
    assert block_sizes(0, 1, 5, 7) == block_sizes(1, 1, 5, 7) and block_sizes(3, 1, 0, 0)[1] == 1
    lengths = (1, 5, 1000, 65536, 10**5), (1, 7, 16384, 65536, 10**6)  # some of whose products are 0 in int32
    for heads, shared, targets, sources in itertools.product((1, 4, 512), (1, 8, 16), *lengths):
        together, rows = block_sizes(heads, shared, targets, sources)
        of_query, room = shared * sources, BLOCK
        least = max(16, 64 // shared // 16 * 16)
        assert 1 <= rows <= targets and (rows <= least or together * rows * of_query <= room)
        assert 1 <= together <= heads and (together == 1 or rows == targets)
        count, fitting = -(-targets // rows), max(least, room // of_query // 16 * 16)
        assert count == -(-targets // fitting) and count * rows - targets < 16 * count  # no more blocks than have to be
        fitting = min(heads, max(1, room // (of_query * targets)))
        pieces = -(-heads // together)
        assert pieces == -(-heads // fitting) and pieces * together - heads < pieces  # nor more heads than fill them
        sizes = block_sizes(ops.convert_to_tensor(heads), shared, ops.convert_to_tensor(targets), sources)
        assert tuple(map(int, sizes)) == (together, rows)


KERNEL, WITHOUT = "", "there is no kernel"
SHORT, LONGER, UNKNOWN = (2, 8, 64, 64, "float32"), (1, 8, 1024, 1024, "float32"), (None, 8, None, 64, "float32")


@pytest.mark.parametrize(
    "kernel, sizes, options, text",
    [
        (KERNEL, SHORT, {}, "fused"),
        (KERNEL, UNKNOWN, {"flash": True}, "fused"),
        (KERNEL, LONGER, {"flash": False}, "explicit; flash_attention=False asks for all weights at once"),
        (WITHOUT, SHORT, {}, "explicit; not fused: there is no kernel; not chunked: 64 x 64 scores are few"),
        (WITHOUT, SHORT, {"flash": True}, "chunked; not fused: there is no kernel"),
        (WITHOUT, LONGER, {}, "chunked; not fused: there is no kernel"),
        (WITHOUT, (128, 8, 256, 256, "float32"), {}, "chunked; not fused: there is no kernel"),
        (WITHOUT, (127, 8, 256, 256, "float32"), {}, "explicit; .* not chunked: 256 x 256 scores are few"),
        (WITHOUT, (None, 8, 256, 256, "float32"), {}, "explicit; .* not chunked: 256 x 256 scores are few"),
        (
            WITHOUT,
            UNKNOWN,
            {},
            "explicit; .* not chunked: the lengths are not known before.*flash_attention=True chunks any length",
        ),
        (WITHOUT, UNKNOWN, {"flash": True}, "chunked; not fused: there is no kernel"),
        (
            KERNEL,
            LONGER,
            {"scores": True},
            "explicit; not fused: the weights are asked for; not chunked: the weights are.*",
        ),
        (KERNEL, LONGER, {"scores": True, "flash": True}, "explicit; .* not chunked: the weights are asked for"),
        (KERNEL, LONGER, {"biased": True}, "explicit; not fused: it can't hold.*; not chunked: .* a whole .* array"),
        (KERNEL, LONGER, {"dropped": True}, "chunked; not fused: weights are dropped by a seed"),
        (KERNEL, LONGER, {"capped": True}, "chunked; not fused: it has no soft cap"),
        (KERNEL, LONGER, {"sloped": True}, "chunked; not fused: it has no slopes by distance"),
        (KERNEL, SHORT, {"masked": "plane"}, "fused"),
        (KERNEL, LONGER, {"masked": "plane"}, r"chunked; not fused: its mask would fill a whole \(T, S\) array"),
        (WITHOUT, (None, 64, 256, 256, "float32"), {}, "chunked; not fused: there is no kernel"),
        (KERNEL, (0, 8, 64, 64, "float32"), {"flash": True}, "explicit; an axis of length 0 leaves nothing to compute"),
    ],
)
def test_the_choice_and_its_reasons(kernel, sizes, options, text, monkeypatch):
    monkeypatch.setattr(backend, "why_no_sdpa", lambda *_: kernel)
    assert re.fullmatch(text, str(choose_path(*sizes, **options)))


def test_this_backend_says_whether_it_has_a_kernel():
    reason = backend.why_no_sdpa("float32", 8, 8, 16, 16, False)
    assert {"tensorflow": "TensorFlow has no", "jax": "cuDNN", "torch": ""}[BACKEND] in reason
    assert (reason == "") is TORCH


@pytest.mark.parametrize("kernel", [KERNEL, WITHOUT] if TORCH else [WITHOUT])
@pytest.mark.parametrize("flash", FLASH)
def test_a_layer_goes_the_way_that_is_explained_for_it(kernel, flash, monkeypatch):
    taken = []
    for path in ("explicit", "chunked", "fused"):
        function = getattr(attention, path)

        def watched(*given, path=path, function=function):
            taken.append(path)
            return function(*given)

        monkeypatch.setattr(attention, path, watched)
    monkeypatch.setattr(backend, "why_no_sdpa", lambda *_: kernel)
    monkeypatch.setattr("mmattn.layers.paths.LONG", 36)
    ways = set()
    for options in ({}, {"soft_cap": 2.0}, {"positions": "t5"}):
        layer = layer_of(flash, kind=SelfAttention, **options)
        for length, scores in ((3, False), (6, False), (6, True)):
            x = np.ones((1, length, 8), "float32")
            path = explain_path(layer, x, x, return_attention_scores=scores)
            assert path == explain_path(layer, x.shape, x.shape, return_attention_scores=scores)
            layer(x, return_attention_scores=scores)
            assert taken.pop() == path.name and not taken
            ways.add(path.name)
    assert ways == {
        None: {"explicit", "chunked"} | ({"fused"} if kernel == KERNEL else set()),
        True: {"explicit", "chunked"} | ({"fused"} if kernel == KERNEL else set()),
        False: {"explicit"},
    }[flash]  # fmt: skip


def test_flash_attention_disabled_in_keras_counts_where_the_layer_has_no_setting(monkeypatch):
    monkeypatch.setattr(backend, "why_no_sdpa", lambda *_: WITHOUT)
    shape = (1, 1024, 8)
    try:
        keras.config.disable_flash_attention()
        assert explain_path(layer_of(None), shape, shape).name == "explicit"
        assert explain_path(layer_of(True), shape, shape).name == "chunked"
    finally:
        keras.config.enable_flash_attention()
    assert explain_path(layer_of(None), shape, shape).name == "chunked"
    assert explain_path(layer_of(False), shape, shape).name == "explicit"


# A gradient of our own


def products(x: Any, nothing: Any, y: Any, places: Any) -> Any:
    """x y and x + y, with slopes that are not theirs, so that it shows whose they are."""

    def forward(x: Any, nothing: Any, y: Any, places: Any) -> Any:
        assert nothing is None
        return (x * y, x + y), (x, y, places)

    def backward(kept: Any, slopes: Any) -> Any:
        x, y, places = kept
        share = ops.cast(places, x.dtype)
        return 2 * slopes[0] * y + slopes[1], None, share * slopes[0] * x + slopes[1], None

    return backend.with_gradient(forward, backward, x, nothing, y, places)


@pytest.mark.parametrize("mode", COUNTS)
def test_slopes_are_the_given_ones_where_some_arrays_are_none(mode):
    x, y, upstream = np.array([1.0, 2.0]), np.array([3.0, 5.0]), np.array([1.0, 10.0])
    first = compiled(lambda x, y, places: products(x, None, y, places)[0], mode)
    for one, other in zip(first([x, y, upstream], [np.array([3, 4])]), ([3, 10], [6, 100], [3, 80]), strict=True):
        np.testing.assert_allclose(one, other)
    second = compiled(lambda x, y, places: ops.multiply(*products(x, None, y, places)), mode)  # x y (x + y)
    for one, other in zip(second([x, y, upstream], [np.array([1, 1])]), ([12, 70], [27, 800], [7, 240]), strict=True):
        np.testing.assert_allclose(one, other)


class Broken(Exception):
    pass


@pytest.mark.parametrize("mode", COUNTS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_comes_out_as_it_is(where, mode):
    def refuse(*_):
        raise Broken("as it is")

    def forward(x):
        return (2 * x,), ()

    def run(x):
        return backend.with_gradient(*((refuse, None) if where == "forward" else (forward, refuse)), x)[0]

    with pytest.raises(Broken) as error:
        compiled(run, mode)([np.ones(2), np.ones(2)])
    assert error.value.args == ("as it is",)


def slopes_of_slopes(attend: Callable[..., Any], arrays: Any, mode: str) -> Numbers:
    """The slopes, by each array, of the squared slopes of the sum of sin(output)."""
    arrays = tuple(ops.convert_to_tensor(array) for array in arrays)
    if TENSORFLOW:
        import tensorflow as tf

        def run(arrays):
            with tf.GradientTape() as second:
                second.watch(arrays)
                with tf.GradientTape() as first:
                    first.watch(arrays)
                    total = tf.reduce_sum(tf.sin(attend(*arrays)))
                squares = sum(tf.reduce_sum(slope**2) for slope in first.gradient(total, arrays))
            return second.gradient(squares, arrays)

        found = (run if mode == "eager" else tf.function(run, jit_compile=mode == "xla", autograph=False))(arrays)
    elif JAX:
        import jax

        def squares(arrays):
            slopes = jax.grad(lambda arrays: jax.numpy.sin(attend(*arrays)).sum())(arrays)
            return sum((slope**2).sum() for slope in slopes)

        found = (jax.jit(jax.grad(squares)) if mode == "jit" else jax.grad(squares))(arrays)
    else:
        import torch

        arrays = tuple(array.requires_grad_() for array in arrays)
        slopes = torch.autograd.grad(torch.sin(attend(*arrays)).sum(), arrays, create_graph=True)
        found = torch.autograd.grad(sum((slope**2).sum() for slope in slopes), arrays)
    return [numbers(array) for array in found]


@pytest.mark.parametrize("mode", COUNTS)
def test_slopes_of_slopes_pass_through_a_gradient_of_our_own(mode):
    def cube(x):
        return backend.with_gradient(lambda x: ((x**3,), (x,)), lambda kept, s: (3 * kept[0] ** 2 * s[0],), x)[0]

    x = np.array([0.5, 1.5], FLOAT)
    expected = slopes_of_slopes(lambda x: x * x * x, [x], mode)
    np.testing.assert_allclose(slopes_of_slopes(cube, [x], mode)[0], expected[0], rtol=1e-5)


@pytest.mark.parametrize("mode", DEAR_TOO)
@pytest.mark.parametrize("name", ["causal, more queries than keys", "all at once"])
def test_slopes_of_slopes_are_the_same_on_both_paths(name, mode):
    case = CORNERS[name]
    masks = [None if mask is None else ops.convert_to_tensor(mask) for mask in case.masks()]
    sees = ops.convert_to_tensor(case.sees())

    def plain(query, key, value):
        """As a textbook has it: the backend's own slopes, twice."""
        key, value = (ops.repeat(array, case.heads // case.groups, axis=1) for array in (key, value))
        scores = ops.matmul(query, ops.transpose(key, (0, 1, 3, 2))) * SCALE
        if case.soft_cap:
            scores = case.soft_cap * ops.tanh(scores / case.soft_cap)
        if case.sloped:
            away = np.abs(np.arange(case.targets)[:, None] + case.sources - case.targets - np.arange(case.sources))
            scores = scores - ops.convert_to_tensor((np.array(case.scoring.slopes)[:, None, None] * away).astype(FLOAT))
        weights = ops.exp(scores) * ops.cast(sees, scores.dtype)
        total = ops.sum(weights, axis=-1, keepdims=True)
        return ops.matmul(weights / ops.where(total > 0, total, ops.ones_like(total)), value)

    expected = slopes_of_slopes(plain, case.arrays()[:3], mode)
    # TensorFlow's XLA has no slopes of a loop in a loop
    for path in ("explicit",) if mode == "xla" else ("explicit", "chunked"):
        run = case.attend(path)
        found = slopes_of_slopes(lambda *arrays, run=run: run(*arrays, *masks), case.arrays()[:3], mode)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=20 * TOLERANCE, err_msg=path)


# Blocks


def digits(count: Any) -> Any:
    """The number 012.. of so many digits, and what each block made of it."""

    def body(number: Any, carry: Any) -> Any:
        (value, rows) = carry
        value = 10 * value + ops.cast(number, "int32")
        rows = rows + ops.cast(number, "float32")
        return (value, rows), (value, rows[:, None], value % 2 == 0)

    start = ops.zeros((), "int32"), ops.zeros((2,), "float32")
    return backend.scan_blocks(body, start, count, ("int32", "float32", "bool"))


@pytest.mark.parametrize("mode", COUNTS)
@pytest.mark.parametrize("count", [1, 4])
def test_blocks_go_in_order_and_hand_on_what_they_carry(count, mode):
    run = functools.partial(digits, count)
    if mode != "eager":
        run = backend.compile(run, jit=mode == "xla")
    (value, rows), (values, columns, even) = run()
    expected = [0, 1, 12, 123][:count]
    assert int(value) == expected[-1] and ops.convert_to_numpy(values).tolist() == expected
    assert ops.convert_to_numpy(rows).tolist() == [sum(range(count))] * 2
    assert ops.convert_to_numpy(columns)[:, 1, 0].tolist() == np.cumsum(range(count)).tolist()
    assert tuple(columns.shape) == (count, 2, 1)
    assert ops.convert_to_numpy(even).tolist() == [n % 2 == 0 for n in expected]


@pytest.mark.skipif(not TENSORFLOW, reason="only TensorFlow's programs may not know the count")
@pytest.mark.parametrize("jit", [False, True])
def test_blocks_may_be_counted_when_the_program_runs(jit):
    import tensorflow as tf

    shapes = []

    @tf.function(input_signature=[tf.TensorSpec((None,))], jit_compile=jit, autograph=False)
    def run(array):
        (value, _), (values, columns, _) = digits(tf.shape(array)[0])
        shapes.append(columns.shape.as_list())
        return value, values

    for count, expected in ((1, [0]), (4, [0, 1, 12, 123])):
        value, values = run(tf.zeros(count))
        assert int(value) == expected[-1] and values.numpy().tolist() == expected
    assert shapes == [[None, 2, 1]]
