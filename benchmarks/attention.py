"""Time and memory of one self-attention layer over long sequences: mmattn and Keras, and torch's own kernel.

    python benchmarks/attention.py
    python benchmarks/attention.py --lengths 512 4096 16384 --causal

Each measurement has a process of its own, since a process does not give its peak memory back, and they take turns.
Memory is the most that the process holds during the calls above what it held before the first (Linux alone). A
contender that does not end within `--memory` GiB is named and left out from then on.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from processes import Failed, Worker
from tables import machine, number, table

PASSES = {"forward": "forward", "backward": "forward and backward"}
ENTRIES = {
    "mmattn": ("mmattn on TensorFlow", "tensorflow", ("mmattn", "keras", "tensorflow")),
    "keras": ("keras.layers.MultiHeadAttention on TensorFlow", "tensorflow", ("keras", "tensorflow")),
    "mmattn-torch": ("mmattn on torch", "torch", ("mmattn", "keras", "torch")),
    "keras-torch": ("keras.layers.MultiHeadAttention on torch", "torch", ("keras", "torch")),
}


@dataclass(frozen=True)
class Job:
    """What is measured: B = 1, self-attention of `length` positions, float32."""

    length: int
    width: int
    heads: int
    causal: bool
    threads: int
    memory_gib: float


@dataclass
class Row:
    name: str
    length: int
    what: str
    seconds: list[float] = field(default_factory=list)
    mebibytes: list[float] = field(default_factory=list)


class Layer:
    """A layer, its compiled passes, and how much memory they take."""

    def __init__(self, name: str, job: Job) -> None:
        library, _, backend = name.partition("-")
        os.environ["KERAS_BACKEND"] = backend or "tensorflow"
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import keras

        if backend == "torch":
            import torch

            torch.set_num_threads(job.threads)
        else:
            import tensorflow as tf

            tf.config.threading.set_intra_op_parallelism_threads(job.threads)
            tf.config.threading.set_inter_op_parallelism_threads(job.threads)
        keras.utils.set_random_seed(0)
        if library == "mmattn":
            from mmattn.layers import MultiHeadAttention as Attention
        else:
            Attention = keras.layers.MultiHeadAttention
        self.layer = Attention(job.heads, job.width // job.heads)
        shape = (1, job.length, job.width)
        self.layer.build(shape, shape)
        self.causal = job.causal
        inputs = np.random.default_rng(0).normal(size=shape).astype("float32")
        self.inputs = keras.ops.convert_to_tensor(inputs)
        self.passes = _torch_passes(self) if backend == "torch" else _tensorflow_passes(self)
        _limit_memory(job.memory_gib)

    def measure(self, what: str, calls: int) -> tuple[float, float]:
        """Median seconds of `calls` calls after a first one, and the most MiB above the start, in all of them."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator has kept would hide what the calls need
        before = _resident()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
        seconds = []
        for _ in range(calls + 1):
            begin = time.perf_counter()
            self.passes[what]()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds[1:]), (_resident("VmHWM") - before) / 1024


def _tensorflow_passes(own: Layer) -> dict[str, Any]:
    import tensorflow as tf

    def output(inputs: Any) -> Any:
        return own.layer(inputs, inputs, use_causal_mask=own.causal)

    def backward(inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            loss = tf.reduce_sum(tf.square(output(inputs)))
        return [tf.reduce_sum(g) for g in tape.gradient(loss, [inputs, *own.layer.trainable_variables])]

    made = {"forward": tf.function(lambda inputs: tf.reduce_sum(output(inputs))), "backward": tf.function(backward)}
    for function in made.values():
        function.get_concrete_function(own.inputs)
    return {name: lambda function=function: function(own.inputs) for name, function in made.items()}


def _torch_passes(own: Layer) -> dict[str, Any]:
    import torch

    inputs = own.inputs.clone().requires_grad_(True)

    def output() -> Any:
        return own.layer(inputs, inputs, use_causal_mask=own.causal)

    def forward() -> Any:
        with torch.no_grad():
            return output().sum()

    def backward() -> None:
        output().square().sum().backward()
        inputs.grad = None

    return {"forward": forward, "backward": backward}


def _resident(which: str = "VmRSS") -> int:
    """KiB that the process holds, or with "VmHWM" the most it has held. A thread that looks would cost time."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which))


def _limit_memory(gib: float) -> None:
    import resource

    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    most = used + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="*", choices=ENTRIES, default=list(ENTRIES), help="default: all")
    parser.add_argument("--lengths", nargs="*", type=int, default=[512, 4096], help="T = S")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=3, help="timed calls of a round")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--memory", type=float, default=8.0, help="GiB that a contender may take")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    options = parser.parse_args()
    rows: list[Row] = []
    names = [name for name in options.contenders if _is_there(name)]
    for length in options.lengths:
        job = Job(length, options.width, options.heads, options.causal, options.threads, options.memory)
        own = [Row(name, length, what) for what in PASSES for name in names]
        for _ in range(options.rounds):
            for row in list(own):
                try:
                    _measure(row, job, options.calls)
                except Failed as error:
                    print(f"{ENTRIES[row.name][0]}, {length}, {row.what} left out: {str(error).splitlines()[-1]}")
                    own.remove(row)
        rows += own
    about = machine(dict.fromkeys(package for name in names for package in ENTRIES[name][2]))
    print(_report(rows, options, about))
    if options.json:
        record = {"machine": about, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _is_there(name: str) -> bool:
    missing = [package for package in ENTRIES[name][2] if importlib.util.find_spec(package) is None]
    if missing:
        print(f"{ENTRIES[name][0]} left out: {', '.join(missing)} not installed.")
    return not missing


def _measure(row: Row, job: Job, calls: int) -> None:
    worker = Worker("attention", "Layer", (row.name, job), job.threads)
    try:
        seconds, mebibytes = worker.run("measure", row.what, calls)[1]
    finally:
        worker.stop()
    row.seconds.append(seconds)
    row.mebibytes.append(mebibytes)


def _report(rows: list[Row], options: argparse.Namespace, about: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [
        f"{about['processor']}, {options.threads} threads. {versions}. B = 1, D = {options.width}, "
        f"h = {options.heads}, float32{', causal' if options.causal else ''}; medians of {options.rounds} rounds.",
        "",
    ]
    cells = []
    for row in rows:
        keras = next((r for r in rows if r.name == "keras" and (r.length, r.what) == (row.length, row.what)), None)
        seconds, mebibytes = statistics.median(row.seconds), statistics.median(row.mebibytes)
        ratios = ["", ""]
        if keras is not None:
            ratios = [
                f"{statistics.median(a / b for a, b in zip(row.seconds, keras.seconds, strict=True)):.2f}",
                f"{mebibytes / statistics.median(keras.mebibytes):.2f}",
            ]
        name = f"{row.length:,}, {PASSES[row.what]}: {ENTRIES[row.name][0]}"
        cells.append([name, number(seconds * 1000), ratios[0], number(mebibytes), ratios[1]])
    return "\n".join(lines + table(["", "ms", "x Keras", "MiB", "x Keras"], cells))


if __name__ == "__main__":
    main()
