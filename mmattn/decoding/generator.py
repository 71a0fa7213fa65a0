"""The Generator: runs a search for whole batches, compiled where that pays, and gives NumPy arrays back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from mmattn import backend
from mmattn.decoding.checks import check_special_ids, read_prompt
from mmattn.decoding.job import SEARCHES, Job, read_job
from mmattn.decoding.loop import Generated, Step, map_arrays

COMPILE_PAYS = 250  # positions, see Generator


class Generator:
    """Generates for batches of inputs with a model's `start` and `step`.

    A compiled program serves all batches of its bucket: the batch is filled up to 1, 4, 8, 16, 32, 64 or a multiple of
    64 rows (by copies of the last one), the length to 16, 24, 32, 48, 64, 96, 128 or a multiple of 64 positions, and
    neither shows in the result (without `max_positions`, each length has a program of its own). Other seeds,
    temperatures, penalties or prompts need no new program; other numbers of beams or hypotheses, n-gram sizes, `top_k`
    or shapes of the inputs do, and so does the first prompt.

    Small jobs wait for no compiler. With TensorFlow a job runs in one of three ways, which give the same tokens:

    - compiled=True: `start` as a graph, the whole loop as one XLA program;
    - compiled="step": Python's loop over `step` as a plain graph, which no compiler sees;
    - compiled=False: everything operation by operation, for a debugger.

    Processor seconds for 20 tokens from a Transformer decoder (4 layers, width 256, 4,000 tokens, 49 memory positions,
    one row, a busy CPU core): operation by operation 3.3 at each call; "step" 1.0 once and 0.4 at each call (3 beams:
    0.7); the loop 3.7 once (3 beams: 4.4) and 0.1 at each call. So the loop pays after 3.7 / (0.4 - 0.1) = 12 calls of
    20 tokens: "auto" runs "step" until jobs of one kind have filled 250 positions (or are about to, see `batches`), the
    compiled loop from then on, and any program that is already there. With JAX, which has to compile anyway, it always
    compiles the loop; torch always runs operation by operation.

    Arguments:
        start: start(inputs, max_length) -> context, state.
        step: step(ids (B,), index, context, state) -> logits (B, V), state.
        bos_id, eos_id, pad_id, unk_id: the start, end, padding and unknown token. Start, padding and unknown are never
            generated; unk_id=None lets the model generate it.
        max_positions: the longest sequence that the model can make, `math.inf` for one that has no limit. None: nothing
            is known, and each max_length gets a program of its own length.
        variables_of: the model, for JAX (see `backend.compile`). Default: the object whose method `start` or `step` is.
        jit: False compiles the loop without XLA (TensorFlow only). `start` is never compiled by XLA there: it may hold
            a big convolutional network, which XLA compiles slowly and runs no faster.

    Raises:
        ValueError: for special ids that are missing, negative or equal.

    >>> from keras import ops
    >>> table = np.zeros((6, 6), dtype="float32")  # after start 2 comes 5, after 5 comes 4, after 4 the end 3
    >>> table[2, 5] = table[5, 4] = table[4, 3] = 9.0
    >>> start = lambda inputs, max_length: (inputs["x"], None)
    >>> step = lambda ids, index, context, state: (ops.take(table, ids, axis=0), state)
    >>> generate = Generator(start, step, bos_id=2, eos_id=3)
    >>> generate({"x": np.zeros((2, 1))}, "beam", max_length=4, num_beams=2).ids[:, 0].tolist()
    [[5, 4, 3, 0], [5, 4, 3, 0]]
    """

    def __init__(
        self,
        start: Callable[[Any, int], tuple[Any, Any]],
        step: Step,
        *,
        bos_id: int,
        eos_id: int,
        pad_id: int = 0,
        unk_id: int | None = 1,
        max_positions: float | None = None,
        variables_of: Any = None,
        jit: bool = True,
    ) -> None:
        check_special_ids(bos_id=bos_id, eos_id=eos_id, pad_id=pad_id, unk_id=unk_id)
        self.start = start
        self.step = step
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.pad_id = pad_id
        self.unk_id = unk_id
        self.max_positions = max_positions
        self.jit = jit
        owners = (getattr(start, "__self__", None), getattr(step, "__self__", None))
        self.variables_of = variables_of or [owner for owner in owners if hasattr(owner, "variables")]
        self._programs: dict[Any, backend.Compiled] = {}
        self._buckets: dict[Any, set[int]] = {}  # rows of the batches that each program was compiled for
        self._positions: dict[Any, int] = {}  # run uncompiled so far
        self._vocabulary_size = 0

    def __call__(
        self,
        inputs: Any,
        method: str = "greedy",
        *,
        max_length: int,
        compiled: bool | str = "auto",
        batches: int = 1,
        prompt: Any = None,
        first: Any = None,
        **options: Any,
    ) -> Generated:
        """Generates one batch.

        Arguments:
            inputs: a nest of arrays, batch first, for `start`.
            method: "greedy", "sample" or "beam".
            max_length: the most tokens a row may have, prompt and end token included.
            compiled: True, "step", False or "auto", see the class.
            batches: how many such batches are to come, this one included: a hint for "auto".
            prompt: token ids that the results begin with, `(B, T0)`, or a list of B lists of any lengths.
            first: int `(B,)`, the token that each row reads first, for texts that go on; default: the start token. It
                is no part of the results.
            options: those of the functions `greedy`, `sample` and `beam`.

        Returns:
            Generated, as NumPy arrays of length L = max_length.

        Raises:
            ValueError: for settings, prompts or inputs that do not fit.
            FloatingPointError: where the model's scores are NaN or allow no token.
        """
        if compiled not in (True, False, "step", "auto"):
            raise ValueError(f'compiled must be True, "step", False or "auto", and is {compiled!r}.')
        job = read_job(inputs, method, max_length, self.bos_id if first is None else first, options)
        if self.max_positions is not None and max_length > self.max_positions:
            raise ValueError(f"max_length={max_length} exceeds the model's longest sequence, {self.max_positions}.")
        if prompt is not None:
            job.rows["prompt"] = read_prompt(prompt, job.batch_size(), max_length, self.pad_id, self.eos_id)
        with backend.no_gradient():
            if compiled == "auto":
                compiled = "step" if self._is_small(job, batches) else True
            if backend.name() == "torch" or not compiled:
                found = self._run(job)
            else:
                found = self._run_step(job) if compiled == "step" else self._run_loop(job)
        return self._checked(found, job)

    def traces(self) -> int:
        """How often a program was compiled so far."""
        return sum(program.traces() for program in self._programs.values())

    def _is_small(self, job: Job, batches: int) -> bool:
        """Whether this job and those of its kind so far are too small for a program of their own to pay."""
        key = job.key(self._size(job.max_length))
        done = self._positions.get(key, 0)
        self._positions[key] = done + job.max_length
        return not self._ready(key, job) and backend.name() != "jax" and done + job.max_length * batches < COMPILE_PAYS

    def _ready(self, key: Any, job: Job) -> list[int]:
        """The buckets already compiled that this job fits into without filling up more than 3 rows for each one."""
        return [bucket for bucket in self._buckets.get(key, ()) if job.batch_size() <= bucket <= 4 * _rows(job)]

    def _size(self, max_length: int) -> int:
        """The positions of a compiled program."""
        if self.max_positions is None:
            return max_length
        return int(min(_bucket(max_length, (16, 24, 32, 48, 64, 96)), self.max_positions))

    def _search(self, step: Step, method: str, context: Any, state: Any, **settings: Any) -> Generated:
        suppress = tuple(token for token in (self.bos_id, self.unk_id) if token is not None)

        def watched(*args: Any) -> tuple[Any, Any]:
            logits, state = step(*args)
            self._vocabulary_size = logits.shape[-1]
            return logits, state

        search = SEARCHES[method]
        return search(watched, context, state, end_id=self.eos_id, pad_id=self.pad_id, suppress=suppress, **settings)

    def _run(self, job: Job) -> Generated:
        rows, settings = dict(job.rows), {**job.static, **job.numbers}
        context, state = self.start(rows.pop("inputs"), job.max_length)
        return self._search(self.step, job.method, context, state, max_length=job.max_length, **settings, **rows)

    def _run_step(self, job: Job) -> Generated:
        size = self._size(job.max_length)
        count, bucket, settings = job.batch_size(), _rows(job), {**job.static, **job.numbers}
        rows = job.filled(bucket, size, self.pad_id, without="inputs")
        which = np.minimum(np.arange(bucket), count - 1)
        context, state = map_arrays(
            lambda array: keras.ops.take(array, which, axis=0), self.start(job.rows["inputs"], size)
        )
        program = self._program("step", self.step, jit=False)

        def step(ids: Any, index: Any, context: Any, state: Any) -> tuple[Any, Any]:
            return program(ids, keras.ops.convert_to_tensor(index, dtype="int32"), context, state)

        return self._search(step, job.method, context, state, max_length=job.max_length, size=size, **settings, **rows)

    def _run_loop(self, job: Job) -> Generated:
        size = self._size(job.max_length)
        key = job.key(size)
        bucket = min(self._ready(key, job), default=_rows(job))
        rows = job.filled(bucket, size, self.pad_id)
        method, static = job.method, job.static  # the program outlives the job

        def loop(context: Any, state: Any, rows: Any, numbers: Any) -> Generated:
            return self._search(self.step, method, context, state, size=size, **static, **rows, **numbers)

        start = self._program(size, lambda inputs: self.start(inputs, size), jit=False)
        context, state = start(rows.pop("inputs"))
        found = self._program(key, loop, jit=self.jit)(context, state, rows, job.arrays())
        self._buckets.setdefault(key, set()).add(bucket)
        return found

    def _program(self, key: Any, function: Callable[..., Any], jit: bool) -> backend.Compiled:
        if key not in self._programs:
            self._programs[key] = backend.compile(function, jit=jit, variables_of=self.variables_of)
        return self._programs[key]

    def _checked(self, found: Generated, job: Job) -> Generated:
        """The result as NumPy arrays without the filling."""
        arrays = [keras.ops.convert_to_numpy(array)[: job.batch_size()] for array in found]
        ids, lengths, log_probs, scores, token_log_probs = arrays
        found = Generated(
            ids[..., : job.max_length], lengths, log_probs, scores, token_log_probs[..., : job.max_length]
        )
        if "prompt" in job.rows and (highest := job.rows["prompt"].max()) >= self._vocabulary_size:
            raise ValueError(f"The prompt holds token {highest}, and the model has {self._vocabulary_size} tokens.")
        if bad := np.flatnonzero(~np.isfinite(log_probs[:, 0])).tolist():
            raise FloatingPointError(f"The model's scores for row {bad[0]} are NaN, or allow no token at all.")
        return found


def _rows(job: Job) -> int:
    return _bucket(job.batch_size(), (1, 4, 8, 16, 32, 64))


def _bucket(number: int, sizes: tuple[int, ...]) -> int:
    """The smallest size that holds `number`, or the next multiple of 64."""
    return next((size for size in sizes if size >= number), -(-number // 64) * 64)
