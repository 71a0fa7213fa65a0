"""Which laws of attention hold for mmattn's, Keras' and KerasHub's layers: a Markdown table.

    python benchmarks/attention_laws.py --output laws.md

It ends with an error where a law does not hold for mmattn's layer. Needs no quiet machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

from mmattn.layers import MultiHeadAttention
from mmattn.testing import check_attention


def layers() -> dict[str, Callable[[int], Any]]:
    """What makes each layer, by its public name; ours first."""
    found: dict[str, Callable[[int], Any]] = {
        "mmattn.layers.MultiHeadAttention": lambda width: MultiHeadAttention(2, width // 2),
        "keras.layers.MultiHeadAttention": lambda width: keras.layers.MultiHeadAttention(2, width // 2),
        "keras.layers.GroupQueryAttention": lambda width: keras.layers.GroupQueryAttention(width // 4, 4, 2),
    }
    try:
        import keras_hub
    except ImportError as error:
        say(f"keras_hub.layers.CachedMultiHeadAttention is left out: {error}")
        return found
    hub = keras_hub.layers.CachedMultiHeadAttention
    return {**found, "keras_hub.layers.CachedMultiHeadAttention": lambda width: hub(2, width // 2)}


def versions() -> str:
    """Keras, KerasHub and the backend that runs."""
    packages = {"keras": "Keras", "keras-hub": "KerasHub", keras.config.backend(): f"backend {keras.config.backend()}"}
    found = []
    for package, called in packages.items():
        try:
            found.append(f"{called} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--output", type=Path, help="the file to write; standard output when not given")
    output: Path | None = parser.parse_args(arguments).output
    reports = []
    for name, make in layers().items():
        report = check_attention(make, say=None)
        report.layer = name
        reports.append(report)
        say(f"{name}: {', '.join(report.failed) or 'nothing'} does not hold")
    ours, *others = reports
    text = f"# The laws of attention\n\n{versions()}. A - : the layer cannot be asked.\n\n{ours.markdown(*others)}\n"
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, encoding="utf-8")
    return 1 if ours.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
