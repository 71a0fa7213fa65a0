"""Read a state dict that `torch.save` wrote before PyTorch 1.6, with NumPy alone: PyTorch is not needed nor imported.

The old format is a row of pickles followed by raw numbers: a magic number, a protocol version, a note about the
machine, the state dict itself (each tensor a view into a storage that is named, not contained), the list of storage
names, then each storage as a little-endian count and its bytes. A pickle may name any function, so the reader admits
five names, all bound to code in this file or to OrderedDict, and refuses everything else before it is looked up.
"""

from __future__ import annotations

import collections
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_STORAGE_DTYPES: dict[str, np.dtype[Any]] = {
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "LongStorage": np.dtype("<i8"),
}


class StateDictError(ValueError):
    """The file is not a plain state dict of the old format."""


@dataclass
class _Storage:
    """A flat array that several tensors may look into; its numbers follow after all pickles."""

    dtype: np.dtype[Any]
    count: int
    numbers: np.ndarray = field(default_factory=lambda: np.zeros(0))


@dataclass
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def to_numpy(self) -> np.ndarray:
        """A copy of the view, its bounds checked: strides come from the file and are not trusted."""
        numbers = self.storage.numbers
        values = (self.offset, *self.shape, *self.strides)
        if len(self.shape) != len(self.strides) or any(not isinstance(v, int) or v < 0 for v in values):
            raise StateDictError(f"a tensor of shape {self.shape} and strides {self.strides} is not possible")
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        if 0 not in self.shape and last >= len(numbers):
            raise StateDictError(f"a tensor of shape {self.shape} reaches past its storage of {len(numbers)} numbers")
        steps = [s * numbers.itemsize for s in self.strides]
        return np.array(np.lib.stride_tricks.as_strided(numbers[self.offset :], self.shape, steps, writeable=False))


def _rebuild_tensor(storage: object, offset: int, shape: tuple, strides: tuple, *_unused: object) -> _Tensor:
    if not isinstance(storage, _Storage):
        raise StateDictError("a tensor without a storage")
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, storages: dict[str, _Storage]) -> None:
        super().__init__(file)
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if module == "torch" and name in _STORAGE_DTYPES:
            return name
        raise StateDictError(f"it asks for {module}.{name}, which a plain state dict does not need; nothing was run")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype_name, key, _device, count = pid[:5]
        dtype = _STORAGE_DTYPES.get(dtype_name)
        if kind != "storage" or dtype is None:
            raise StateDictError(f"unknown storage {pid[:2]}")
        return self._storages.setdefault(key, _Storage(dtype, count))


def _read_numbers(file: BinaryIO, storage: _Storage) -> np.ndarray:
    count = int(np.frombuffer(file.read(8), "<i8")[0])
    if count != storage.count:
        raise StateDictError(f"a storage of {count} numbers where the header says {storage.count}")
    size = count * storage.dtype.itemsize
    raw = file.read(size)
    if len(raw) != size:
        raise StateDictError(f"the file ends in the middle of a storage ({len(raw)} of {size} bytes)")
    return np.frombuffer(raw, storage.dtype)


def read_state_dict(path: str | Path) -> dict[str, np.ndarray]:
    """Name -> array, in the file's order.

    Raises `StateDictError` with the file's name when it is damaged, of another format, or names anything but tensors.
    """
    storages: dict[str, _Storage] = {}
    try:
        with open(path, "rb") as file:
            for expected in (_MAGIC, _PROTOCOL):
                if _Unpickler(file, {}).load() != expected:
                    raise StateDictError("not a state dict of the format that torch.save wrote before PyTorch 1.6")
            _Unpickler(file, {}).load()  # byte order and sizes of the machine that wrote it: always little-endian
            tensors = _Unpickler(file, storages).load()
            for key in _Unpickler(file, {}).load():
                storages[key].numbers = _read_numbers(file, storages[key])
        return {name: tensor.to_numpy() for name, tensor in tensors.items()}
    except StateDictError as error:
        raise StateDictError(f"{path}: {error}") from None
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise StateDictError(f"{path}: damaged or not a state dict ({type(error).__name__}: {error})") from error
