"""Exact resume: the whole state of a training run in one file, written atomically.

Keras' weight files leave out the seed generators (so dropout repeats itself or jumps) and the metrics. These files hold
everything that the next update depends on. A file is an ordinary NumPy .npz without pickles: one array a variable, and
a JSON text with names, dtypes and the run's own state.
"""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np

FORMAT = 1
Arrays = dict[str, np.ndarray]


class CheckpointError(Exception):
    """A checkpoint cannot be used; the message names the file and the reason."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint file is cut short or changed."""


def capture(model: keras.Model, wanted: Callable[[Any], bool] = lambda variable: True) -> Arrays:
    """Copies every variable of a compiled model: weights, seed generators, optimizer (with averages), metrics.

    Args:
        model: compiled and built.
        wanted: of which variables; without it of all.

    Returns:
        name -> array, the name being group, place and path, such as `model/0003:decoder/embedding/embeddings`.
    """
    if hasattr(model, "jax_state_sync"):  # within fit, Keras on JAX keeps the state outside the model
        model.jax_state_sync()
    return {name: value_of(variable) for name, variable in _variables(model) if wanted(variable)}


def value_of(variable: Any) -> np.ndarray:
    """A copy of a Keras variable's value that no later assignment changes."""
    return np.array(variable.numpy())


def restore(model: keras.Model, arrays: Arrays, groups: tuple[str, ...] = ("model", "optimizer", "metrics")) -> None:
    """Puts back what `capture` copied, bit for bit.

    Raises:
        CheckpointError: a variable is missing, left over, or of another shape or dtype; the first few are named.
    """
    variables = {name: v for name, v in _variables(model) if name.partition("/")[0] in groups}
    wanted = {name: a for name, a in arrays.items() if name.partition("/")[0] in groups}
    problems = [f"{name} is missing in the checkpoint" for name in variables.keys() - wanted.keys()]
    problems += [f"{name} is not in the model" for name in wanted.keys() - variables.keys()]
    for name in variables.keys() & wanted.keys():
        variable, array = variables[name], wanted[name]
        shape, dtype = tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype)
        if shape != array.shape or dtype != str(array.dtype):
            problems.append(f"{name} is {dtype} {shape} in the model and {array.dtype} {array.shape} in the checkpoint")
    if problems:
        shown = "; ".join(sorted(problems)[:3])
        raise CheckpointError(
            f"The checkpoint is of another model or optimizer ({len(problems)} differences): {shown}."
        )
    for name, variable in variables.items():
        variable.assign(wanted[name])


def _variables(model: keras.Model) -> Iterator[tuple[str, Any]]:
    optimizer = getattr(model, "optimizer", None)
    groups = {
        "model": model.variables,  # includes the seed generators of every nested layer
        "optimizer": optimizer.variables if optimizer is not None else [],
        "metrics": model.metrics_variables,
    }
    for group, variables in groups.items():
        for index, variable in enumerate(variables):
            plain = re.sub(
                r"_\d+(?=[/_]|$)", "", variable.path
            )  # Keras counts names up (dense_1, dense_2) within a process
            yield f"{group}/{index:04d}:{plain}", variable


def write(path: Path, arrays: Arrays, info: dict[str, Any]) -> None:
    """Writes one checkpoint file. Whenever the process dies, `path` is the old file or the whole new one."""
    stored: Arrays = {}
    entries = []
    for index, (name, array) in enumerate(arrays.items()):
        entries.append({"name": name, "dtype": str(array.dtype), "shape": list(array.shape)})
        native = array.dtype.kind in "biufc"  # bfloat16 and float8 are not, and NumPy would lose their dtype
        stored[f"v{index}"] = array if native else np.frombuffer(array.tobytes(), "uint8")
    text = json.dumps({"format": FORMAT, "variables": entries, "info": info})
    stored["json"] = np.frombuffer(text.encode(), "uint8")
    with atomic_file(path) as file:
        np.savez(file, **stored)  # type: ignore[arg-type]


def read(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Reads one file that `write` made; every array's checksum is compared.

    Raises:
        DamagedCheckpoint: cut short or changed.
        CheckpointError: of a newer format.
    """
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            head = json.loads(stored["json"].tobytes().decode())
            if head["format"] > FORMAT:
                raise CheckpointError(
                    f"{path} has format {head['format']}; this version reads up to {FORMAT}. Update mmattn."
                )
            arrays = {}
            for index, entry in enumerate(head["variables"]):
                array = stored[f"v{index}"]
                if str(array.dtype) != entry["dtype"]:
                    array = np.frombuffer(array.tobytes(), _dtype(entry["dtype"])).reshape(entry["shape"])
                arrays[entry["name"]] = array
            return arrays, head["info"]
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        TypeError,
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
    ) as error:
        raise DamagedCheckpoint(f"{path} is damaged and cannot be read ({type(error).__name__}: {error}).") from error


def read_info(path: Path) -> dict[str, Any]:
    """What `write` was given as `info`, without reading the arrays.

    Raises:
        DamagedCheckpoint: cut short or changed.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            return json.loads(stored["json"].tobytes().decode())["info"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DamagedCheckpoint(f"{path} is damaged and cannot be read ({type(error).__name__}: {error}).") from error


def _dtype(name: str) -> np.dtype:
    import ml_dtypes  # comes with Keras

    return np.dtype(getattr(ml_dtypes, name))


@contextmanager
def atomic_file(path: Path) -> Iterator[Any]:
    """A binary file to write that appears under its name only when it is whole and on the disk."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # a folder cannot be opened there; the rename is durable without it
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


DAMAGED = ".damaged"  # after the name of a checkpoint that could not be read


class CheckpointFolder:
    """The last few checkpoints of a run, `step-00000123.npz`, newest last.

    Args:
        folder: made when it is missing.
        keep: how many to keep, at least 2, so that one damaged file is not the end.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 2:
            raise ValueError(
                f"keep={keep}: at least 2 checkpoints are kept, so that the one before can stand in for a damaged one."
            )
        self.folder = Path(folder)
        self.keep = keep
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in self.folder.glob("*.tmp"):  # of a process killed while writing
            left_over.unlink()

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.npz"))

    def save(self, arrays: Arrays, step: int, info: dict[str, Any]) -> Path:
        """Writes the state after update `step` and removes what is older than the last `keep`."""
        path = self.folder / f"step-{step:08d}.npz"
        write(path, arrays, {**info, "step": step})
        for old in self.files()[: -self.keep]:
            old.unlink()
        return path

    def latest(self, say: Callable[[str], None] = print) -> tuple[Arrays, dict[str, Any]] | None:
        """The newest readable state, or None. Damaged files are named through `say`, renamed and passed over.

        Raises:
            CheckpointError: there are files, damaged ones of before too, and none can be read.
        """
        files = self.files()
        for path in reversed(files):
            try:
                return read(path)
            except DamagedCheckpoint as error:
                say(f"{error}{' Trying the checkpoint before it.' if path != files[0] else ''}")
                path.rename(path.with_name(path.name + DAMAGED))
        if damaged := [path.name for path in sorted(self.folder.glob(f"*{DAMAGED}"))]:
            raise CheckpointError(
                f"No checkpoint in {self.folder} can be read ({', '.join(damaged)}). Start a new run, or delete "
                "these files to begin this one again."
            )
        return None
