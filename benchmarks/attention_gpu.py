"""Attention in bfloat16 on a GPU: whether the laws hold there, and how fast it is beside the backend's own kernel.

    KERAS_BACKEND=torch python benchmarks/attention_gpu.py
    KERAS_BACKEND=jax python benchmarks/attention_gpu.py --lengths 1024 4096 16384 --causal

First the laws of `mmattn.testing.check_attention` are asked in bfloat16, and the three ways of a layer are compared
with float32. Then a whole layer (four projections and attention) takes turns with the same layer written in torch
around `scaled_dot_product_attention`, or in JAX around `jax.nn.dot_product_attention`. TFLOP/s count the products of
the mathematics, 8 B T D D + 4 B T T D forward (half of the second where causal) and three times that with the backward
pass, whatever is computed anew. It runs on a CPU too, with small lengths, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from tables import machine, number, table

import mmattn
from mmattn.layers import MultiHeadAttention, explain_path
from mmattn.testing import check_attention

Call = Callable[[], Any]
APART = 0.02  # of bfloat16 and float32, as a share of the largest output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="*", type=int, default=[512, 2048, 8192], help="T = S")
    parser.add_argument("--tokens", type=int, default=16384, help="B T, at least one row")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=10, help="calls of a round, timed together")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    options = parser.parse_args()
    if keras.config.backend() not in PEERS:
        parser.error(f"KERAS_BACKEND must be one of {', '.join(PEERS)}, and is {keras.config.backend()}")
    wrong = laws()
    rows = [row for length in options.lengths for row in speeds(length, options)]
    about = {**machine(["keras", keras.config.backend()]), "device": device()}
    about["versions"] = {"mmattn": mmattn.__version__, **about["versions"]}
    print(report(rows, options, about))
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


def laws() -> list[str]:
    """What does not hold in bfloat16; also said."""
    found = check_attention(lambda width: MultiHeadAttention(2, width // 2), dtype="bfloat16").failed
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(2, 256, 64)).astype("float32")
    seen = rng.random((2, 256, 256)) < 0.1
    seen[0, 3] = False
    for causal in (False, True):
        for flash in (None, True, False):
            layers = [
                MultiHeadAttention(4, 16, dtype=dtype, flash_attention=flash) for dtype in ("float32", "bfloat16")
            ]
            for layer in layers:
                layer.build(inputs.shape, inputs.shape)
                layer.set_weights(layers[0].get_weights())
            calls = [layer(inputs, inputs, attention_mask=seen, use_causal_mask=causal) for layer in layers]
            outputs = [keras.ops.convert_to_numpy(keras.ops.cast(call, "float32")) for call in calls]
            apart = np.abs(outputs[0] - outputs[1]).max() / np.abs(outputs[0]).max()
            path = str(explain_path(layers[1], inputs, inputs)).split(";")[0]
            name = f"{path}, causal={causal}, flash_attention={flash}"
            print(f"{name}: bfloat16 is {apart:.1e} of the largest output away from float32")
            if not apart < APART or outputs[1][0, 3].any():
                found.append(name)
    return found


def speeds(length: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the table for one length: seconds of each round, in turns."""
    batch = max(1, options.tokens // length)
    shape = (batch, length, options.width)
    inputs = np.random.default_rng(0).normal(size=shape).astype("float32")
    layer = MultiHeadAttention(options.heads, options.width // options.heads, dtype="bfloat16", use_bias=False)
    layer.build(shape, shape)
    passes = PEERS[keras.config.backend()](layer, inputs, options.causal)
    flops = 8 * batch * length * options.width**2 + 4 * batch * length**2 * options.width / (1 + options.causal)
    rows = [
        {"length": length, "what": what, "name": name, "flops": flops * (3 if "backward" in what else 1), "seconds": []}
        for what, name in passes
    ]
    for call in passes.values():
        call()  # compiles
    for _ in range(options.rounds):
        for row, call in zip(rows, passes.values(), strict=True):
            begin = time.perf_counter()
            for _ in range(options.calls):
                last = call()
            wait(last)
            row["seconds"].append((time.perf_counter() - begin) / options.calls)
    return rows


def wait(result: Any) -> None:
    """Until the device has finished."""
    if keras.config.backend() == "jax":
        import jax

        jax.block_until_ready(result)
    else:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def torch_passes(layer: Any, array: np.ndarray, causal: bool) -> dict[tuple[str, str], Call]:
    """Both layers on torch, by what is timed and the name of the layer."""
    import torch
    from torch.nn import functional

    inputs = keras.ops.convert_to_tensor(array, dtype="bfloat16").clone().requires_grad_(True)
    batch, length, width = array.shape
    heads = layer.num_heads
    weights = [
        (0.02 * torch.randn(width, width, dtype=torch.bfloat16, device=inputs.device)).requires_grad_(True)
        for _ in range(4)
    ]

    def peer() -> Any:
        split = [(inputs @ w).view(batch, length, heads, -1).transpose(1, 2) for w in weights[:3]]
        found = functional.scaled_dot_product_attention(*split, is_causal=causal)
        return found.transpose(1, 2).reshape(batch, length, width) @ weights[3]

    def ours() -> Any:
        return layer(inputs, inputs, use_causal_mask=causal)

    def forward(output: Call) -> Call:
        def run() -> Any:
            with torch.no_grad():
                return output()

        return run

    def backward(output: Call) -> Call:
        def run() -> Any:
            for tensor in (inputs, *weights, *(variable.value for variable in layer.trainable_variables)):
                tensor.grad = None
            output().sum().backward()
            return inputs.grad

        return run

    names = {"mmattn": ours, "torch scaled_dot_product_attention": peer}
    made = {("forward", name): forward(output) for name, output in names.items()}
    return made | {("forward and backward", name): backward(output) for name, output in names.items()}


def jax_passes(layer: Any, array: np.ndarray, causal: bool) -> dict[tuple[str, str], Call]:
    """Both layers on JAX, by what is timed and the name of the layer."""
    import jax
    import jax.numpy as jnp

    inputs = jnp.asarray(array, "bfloat16")
    batch, length, width = array.shape
    heads = layer.num_heads
    keys = jax.random.split(jax.random.key(0), 4)
    own = [variable.value for variable in layer.trainable_variables]
    others = [variable.value for variable in layer.non_trainable_variables]
    theirs = [0.02 * jax.random.normal(key, (width, width), "bfloat16") for key in keys]

    def ours(weights: Any, x: Any) -> Any:
        return layer.stateless_call(weights, others, x, x, use_causal_mask=causal)[0]

    def peer(weights: Any, x: Any) -> Any:
        split = [(x @ w).reshape(batch, length, heads, -1) for w in weights[:3]]
        return jax.nn.dot_product_attention(*split, is_causal=causal).reshape(batch, length, width) @ weights[3]

    made: dict[tuple[str, str], Call] = {}
    for name, output, weights in (("mmattn", ours, own), ("jax.nn.dot_product_attention", peer, theirs)):
        forward = jax.jit(output)
        backward = jax.jit(jax.grad(lambda w, x, output=output: output(w, x).astype("float32").sum(), argnums=(0, 1)))
        made["forward", name] = lambda f=forward, w=weights: f(w, inputs)
        made["forward and backward", name] = lambda f=backward, w=weights: f(w, inputs)
    return {key: made[key] for key in sorted(made, key=lambda key: key[0])}


PEERS = {"torch": torch_passes, "jax": jax_passes}


def device() -> str:
    if keras.config.backend() == "jax":
        import jax

        return str(jax.devices()[0].device_kind)
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def report(rows: list[dict[str, Any]], options: argparse.Namespace, about: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    cells = []
    for row in rows:
        peer = next(
            r for r in rows if (r["length"], r["what"]) == (row["length"], row["what"]) and r["name"] != "mmattn"
        )
        seconds = statistics.median(row["seconds"])
        ratio = statistics.median(a / b for a, b in zip(row["seconds"], peer["seconds"], strict=True))
        rate = row["flops"] / seconds / 1e12
        name = f"{row['length']:,}, {row['what']}: {row['name']}"
        cells.append([name, number(seconds * 1000), f"{rate:.3g}", f"{ratio:.2f}"])
    head = (
        f"{about['device']}. {versions}. B T = {options.tokens:,}, D = {options.width}, h = {options.heads}, bfloat16"
        f"{', causal' if options.causal else ''}; medians of {options.rounds} rounds of {options.calls} calls."
    )
    return "\n".join([head, "", *table(["", "ms", "TFLOP/s", "x kernel"], cells)])


if __name__ == "__main__":
    raise SystemExit(main())
