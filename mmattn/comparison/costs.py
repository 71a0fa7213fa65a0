"""What a trained model costs, and how that grows with the length of the sequences.

    python -m mmattn.comparison.costs RUN/bundle costs.json

Every length is measured with random tokens, source and target alike, in one process that does nothing else: seconds of
a training step (Adam, cross-entropy; the same for all families), its memory, and seconds for encoding and for greedy
generation. A length that a model cannot take is left out and the reason kept.

Shapes: B rows, L tokens a side.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from mmattn import backend
from mmattn.bundle import Bundle, load_bundle
from mmattn.decoding import Generator
from mmattn.training.folder import write_json
from mmattn.training.losses import MaskedCrossEntropy

LENGTHS = (16, 32, 64, 128, 256)


def measure(bundle: Bundle, lengths: tuple[int, ...] = LENGTHS, rows: int = 8, repeats: int = 5) -> dict[str, Any]:
    """The costs of a bundle's model at each length.

    Returns:
        {"parameters": n, "rows": B, "lengths": [entry, ..]}, an entry for each length with "length" and, where it can
        be measured, "train_seconds" (a step of B rows, median), "train_mebibytes" (its peak above the idle process;
        None where the system does not tell), "encode_seconds" (of B sources; None for a language model),
        "generate_seconds" (of L tokens for B rows); else "problem".
    """
    model = bundle.model
    parameters = int(sum(np.prod(variable.shape) for variable in model.weights))
    model.compile(
        optimizer=keras.optimizers.Adam(1e-4),
        loss=MaskedCrossEntropy(label_smoothing=0.1),
        jit_compile=backend.name() == "jax",
    )
    entries: list[dict[str, Any]] = []
    for length in sorted(lengths):
        try:
            entries.append({"length": length, **_one_length(bundle, length, rows, repeats)})
        except (ValueError, MemoryError) as error:
            entries.append({"length": length, "problem": _reason(error)})
    return {"parameters": parameters, "rows": rows, "lengths": entries}


def _one_length(bundle: Bundle, length: int, rows: int, repeats: int) -> dict[str, Any]:
    model, random = bundle.model, np.random.default_rng(0)

    def draw() -> np.ndarray:
        return random.integers(4, bundle.tokenizer.vocabulary_size, (rows, length), "int32")

    inputs = {"target_ids": draw()} | ({"source_ids": draw()} if bundle.kind == "translator" else {})
    labels, weights = draw(), np.ones((rows, length), "float32")
    generate = _generator(bundle, length)

    def write() -> Any:  # as many tokens in each row
        return generate(inputs, max_length=length, min_length=length - 1, compiled=True)

    generating = _median(write, repeats)  # first, because here a model may refuse the length
    encoding = None
    if bundle.kind == "translator":
        encode = backend.compile(lambda arrays: model.encode(arrays), jit=False, variables_of=model)
        sources = {"source_ids": ops.convert_to_tensor(inputs["source_ids"])}
        with backend.no_gradient():
            encoding = _median(lambda: ops.convert_to_numpy(encode(sources)[0]), repeats)
    kept = [variable.numpy().copy() for variable in model.weights]

    def step() -> Any:
        return model.train_on_batch(inputs, labels, sample_weight=weights)

    step()  # traced, and the optimizer's variables made
    gc.collect()
    before = _memory(reset=True)
    training = _median(step, repeats)
    peak = _memory()
    for variable, array in zip(model.weights, kept, strict=True):
        variable.assign(array)
    memory = None if before is None or peak is None else max(0.0, peak[1] - before[0])
    return {
        "train_seconds": training,
        "train_mebibytes": memory,
        "encode_seconds": encoding,
        "generate_seconds": generating,
    }


def _reason(error: Exception) -> str:
    """The sentence that says why, without what Keras puts around it and the colours of a terminal.

    >>> _reason(ValueError("Exception encountered when calling X.call().\\n\\n\\x1b[1mToo long.\\x1b[0m"))
    'Too long.'
    """
    lines = [line for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith("Exception encountered")]
    return (kept or lines or [type(error).__name__])[0]


def _generator(bundle: Bundle, length: int) -> Generator:
    tokenizer, model = bundle.tokenizer, bundle.model
    return Generator(
        model.start, model.step, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id, max_positions=None,
        variables_of=model,
    )  # fmt: skip


def _median(call: Callable[[], Any], repeats: int) -> float:
    call()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _memory(reset: bool = False) -> tuple[float, float] | None:
    """Resident MiB now and the most since the last reset, on Linux; None elsewhere."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        now, most = (float(lines[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    except (OSError, KeyError):
        return None
    return now, most


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what a trained model costs.")
    parser.add_argument("bundle", help="the folder of a translator or a language model")
    parser.add_argument("output", help="a JSON file")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    backend.set_threads(arguments.threads)
    bundle = load_bundle(arguments.bundle)
    if bundle.kind not in ("translator", "language_model"):
        parser.error(f"costs are those of a translator or a language model; this is a {bundle.kind}")
    found = measure(bundle, tuple(arguments.lengths), arguments.rows, arguments.repeats)
    write_json(Path(arguments.output), found)


if __name__ == "__main__":
    main()
