"""What a trained model costs at one length of the sequences.

    python -m mmattn.comparison.costs RUN/bundle --length 64

prints a JSON object. The tokens are random, as many of the source as of the target. Each length has a process of its
own, so that one that has too little memory costs no other its numbers.

Shapes: B rows, L tokens a side.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
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
from mmattn.generation import longest, longest_source
from mmattn.training.losses import MaskedCrossEntropy

KINDS = ("translator", "language_model")  # of bundles that can be measured


def measure(bundle: Bundle, length: int, rows: int = 8, repeats: int = 5) -> dict[str, Any]:
    """The costs of a bundle's model at a length; its weights stay as they are.

    Returns:
        "train_seconds": of a step of B rows (Adam, cross-entropy; the same for all families), median.
        "train_mebibytes": the most main memory during such a step above that between two; None but on Linux with
            glibc, where it can be told.
        "encode_seconds": of B sources; None for a language model.
        "generate_seconds": of L tokens for B rows, greedily.

    Raises:
        ValueError: the model does not take that length.
    """
    model = bundle.model
    limits = {"encoder": longest_source(model), "decoder": longest(model) or math.inf}
    if short := [f"its {part} has {most:g} positions" for part, most in limits.items() if length > most]:
        raise ValueError(f"It does not take {length} tokens: {' and '.join(short)}.")
    model.compile(
        optimizer=keras.optimizers.Adam(1e-4),
        loss=MaskedCrossEntropy(label_smoothing=0.1),
        jit_compile=backend.name() == "jax",
    )
    inputs, labels = random_batch(bundle, length, rows)
    generate = Generator(
        model.start, model.step, bos_id=bundle.tokenizer.bos_id, eos_id=bundle.tokenizer.eos_id, max_positions=None,
        variables_of=model,
    )  # fmt: skip

    def write() -> Any:  # as many tokens in each row
        return generate(inputs, max_length=length, min_length=length - 1, compiled=True)

    generating = _median(write, repeats)
    encoding = None
    if "source_ids" in inputs:
        encode = backend.compile(lambda arrays: model.encode(arrays), jit=False, variables_of=model)
        sources = {"source_ids": ops.convert_to_tensor(inputs["source_ids"])}
        with backend.no_gradient():
            encoding = _median(lambda: ops.convert_to_numpy(encode(sources)[0]), repeats)
    training, memory = _training(model, inputs, labels, repeats)
    return {
        "train_seconds": training,
        "train_mebibytes": memory,
        "encode_seconds": encoding,
        "generate_seconds": generating,
    }


def random_batch(bundle: Bundle, length: int, rows: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inputs and labels of random tokens, int32 (B, L), each of its own side's vocabulary."""
    random = np.random.default_rng(0)

    def draw(tokenizer: Any) -> np.ndarray:
        return random.integers(4, tokenizer.vocabulary_size, (rows, length), "int32")

    inputs = {"target_ids": draw(bundle.tokenizer)}
    if bundle.kind == "translator":
        inputs["source_ids"] = draw(bundle.source_tokenizer or bundle.tokenizer)
    return inputs, draw(bundle.tokenizer)


def _training(
    model: Any, inputs: dict[str, np.ndarray], labels: np.ndarray, repeats: int
) -> tuple[float, float | None]:
    """Seconds of a step, and the MiB that it needs."""
    kept = [variable.numpy().copy() for variable in model.weights]

    def step() -> Any:
        return model.train_on_batch(inputs, labels, sample_weight=np.ones(labels.shape, "float32"))

    step()  # traced, and the optimizer's variables made
    before = _memory()
    seconds = _median(step, repeats)
    after = _memory()
    for variable, array in zip(model.weights, kept, strict=True):
        variable.assign(array)
    return seconds, None if before is None or after is None else max(0.0, after[1] - before[0])


def _reason(error: Exception) -> str:
    """The sentence that says why, without what Keras puts around it and the colours of a terminal.

    >>> _reason(ValueError("Exception encountered when calling X.call().\\n\\n\\x1b[1mToo long.\\x1b[0m"))
    'Too long.'
    """
    lines = [line for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith("Exception encountered")]
    return (kept or lines or [type(error).__name__])[0]


def _median(call: Callable[[], Any], repeats: int) -> float:
    call()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _memory() -> tuple[float, float] | None:
    """Resident MiB now, and the most since the last call; None but on Linux with glibc.

    What is free goes back to the system first: kept by the allocator, it would hide what the next step needs.
    """
    try:
        most = _status("VmHWM")
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS"), most
    except (OSError, KeyError, AttributeError, TypeError):  # TypeError: Windows has no CDLL(None)
        return None


def _status(name: str) -> float:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return float(lines[name].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what a trained model costs.")
    parser.add_argument("bundle", help="the folder of a translator or a language model")
    parser.add_argument("--length", type=int, required=True, help="tokens of the source and of the target")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    try:
        backend.set_threads(arguments.threads)
        bundle = load_bundle(arguments.bundle)
        if bundle.kind not in KINDS:
            parser.error(f"costs are those of a translator or a language model; this is a {bundle.kind}")
        found = measure(bundle, arguments.length, arguments.rows, arguments.repeats)
    except Exception as error:  # each backend has its own for a lack of memory; the report says which it was
        found = {"problem": _reason(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
