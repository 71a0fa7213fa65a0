"""The weights of several validations, kept on the disk so that their mean can be tried at the end."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import keras
import numpy as np

from mmattn.training.checkpoint import Arrays, DamagedCheckpoint, capture, read, read_info, write


class Snapshots:
    """Keeps the weights of the last `count` validations and of the `count` best ones, `step-00000123.npz` each.

    Args:
        folder: made when there is something to keep.
        count: n; 0 keeps nothing.

    Source: the mean of a run's last weights: Vaswani et al. 2017, section 6.1.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.count = count

    def add(self, step: int, score: float, model: keras.Model) -> None:
        """Writes the weights that are in the model, and removes those that are neither among the last nor the best."""
        if not self.count:
            return
        self.folder.mkdir(exist_ok=True)
        weights = {
            id(v) for v in model.weights if keras.backend.is_float_dtype(keras.backend.standardize_dtype(v.dtype))
        }
        arrays = capture(model, lambda variable: id(variable) in weights)
        write(self.folder / f"step-{step:08d}.npz", arrays, {"step": step, "score": score})
        files = self._files()
        kept = {*self._last(files), *self._best(files)}
        for path in files:
            if path not in kept:
                path.unlink()

    def forget_after(self, step: int) -> None:
        """Removes what a run that goes on after `step` is going to make again."""
        for path in self._files():
            if int(re.findall(r"\d+", path.stem)[-1]) > step:
                path.unlink()

    def means(self, say: Callable[[str], None] = print) -> Iterator[tuple[str, Arrays]]:
        """(name, mean weights) of the last `count` and of the best `count`, where there are several.

        Damaged files are named through `say`, renamed and passed over.
        """
        files = []
        for path in self._files():
            try:
                read(path)
                files.append(path)
            except DamagedCheckpoint as error:
                say(f"{error} It is left out of the means.")
                path.rename(path.with_name(path.name + ".damaged"))
        last, best = self._last(files), self._best(files)
        for name, chosen in (("last", last), ("best", best if set(best) != set(last) else [])):
            if len(chosen) > 1:
                yield f"mean of the weights of the {name} {len(chosen)} validations", mean_of(chosen)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.npz"))

    def _last(self, files: Sequence[Path]) -> list[Path]:
        return list(files[-self.count :])

    def _best(self, files: Sequence[Path]) -> list[Path]:
        def score(path: Path) -> float:
            try:
                return float(read_info(path)["score"])
            except DamagedCheckpoint:  # the first to be removed
                return -math.inf

        return sorted(files, key=score, reverse=True)[: self.count]


def mean_of(files: Sequence[Path]) -> Arrays:
    """The mean of each array over several files, added up in float64."""
    total: Arrays = {}
    kinds: dict[str, np.dtype] = {}
    for path in files:
        arrays, _ = read(path)
        for name, array in arrays.items():
            kinds[name] = array.dtype
            total[name] = total.get(name, 0.0) + array.astype("float64")
    return {name: (array / len(files)).astype(kinds[name]) for name, array in total.items()}
