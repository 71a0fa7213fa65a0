"""Weights as one plain .npz file: packing to float16 or int8, and a reader that believes nothing it has not checked.

The file is the stored (never compressed) zip that `numpy.savez` writes, so any NumPy opens it. The reader compares
the names, shapes and types with a table that the caller trusts, before it allocates anything, and never unpickles.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

DTYPES = ("float16", "float32", "int8")
SCALE = "@scale"  # an int8 array `path` has a float32 companion `path@scale` that broadcasts against it
_PLAIN = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "bool")


class WeightsError(ValueError):
    """A weights file that is damaged, or does not hold what its table says."""


class Packed(NamedTuple):
    """What goes into the file, and what it costs.

    arrays: stored arrays by name, scales of int8 arrays included.
    error: largest relative error of one array, `|w - stored| / |w|` in the Euclidean norm; 0 for float32.
    """

    arrays: dict[str, np.ndarray]
    error: float


def pack(weights: Mapping[str, np.ndarray], dtype: str = "float16") -> Packed:
    """Stores matrices in `dtype`; vectors (biases, norms, statistics) stay float32, integers as they are.

    Args:
        weights: arrays by name.
        dtype: "float32", "float16" or "int8" (symmetric, one scale per channel, along the axis that loses least).

    Raises:
        ValueError: an unknown dtype, or weights that are not finite.

    >>> packed = pack({"kernel": np.eye(4, dtype="float32") / 3}, "float16")
    >>> packed.arrays["kernel"].dtype.name, packed.error < 1e-3
    ('float16', True)
    """
    check_dtype(dtype)
    arrays: dict[str, np.ndarray] = {}
    error = 0.0
    for name, value in weights.items():
        array = np.asarray(value)
        if array.dtype.kind != "f":
            arrays[name] = array
            continue
        array = array.astype("float32")
        if not np.isfinite(array).all():
            raise ValueError(
                f"The weights {name!r} hold NaN or infinity: the training diverged, there is nothing to keep"
            )
        stored: dict[str, np.ndarray] = {name: array}
        if array.ndim > 1 and dtype == "int8" and array.size >= 1024:
            stored = _to_int8(name, array)
        elif array.ndim > 1 and dtype != "float32" and np.abs(array).max(initial=0.0) < 65504.0:
            stored = {name: array.astype("float16")}
        arrays |= stored
        norm = float(np.linalg.norm(array))
        if norm:
            error = max(error, float(np.linalg.norm(array - unpack(stored)[name])) / norm)
    return Packed(arrays, error)


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not a storage type for weights. Types that fit: {', '.join(DTYPES)}")


def _to_int8(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """One scale a channel, along the axis that loses least among those whose scales are small beside the array."""
    best: dict[str, np.ndarray] | None = None
    best_error = math.inf
    reduced = [tuple(a for a in range(array.ndim) if a != keep) for keep in range(array.ndim)] + [(0,)]
    for axes in reduced:
        scale = np.abs(array).max(axis=axes, keepdims=True) / 127.0
        if scale.size * 8 > array.size:
            continue
        scale = np.where(scale > 0, scale, 1.0).astype("float32")
        ints = np.clip(np.rint(array / scale), -127, 127).astype("int8")
        error = float(np.sum((ints * scale - array) ** 2))
        if error < best_error:
            best, best_error = {name: ints, name + SCALE: scale}, error
    return best if best is not None else {name: array.astype("float16")}


def unpack(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights of `pack` again, every real number as float32.

    Raises:
        WeightsError: scales of a shape that would make an array bigger.
    """
    weights: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) in arrays:
            continue
        if name + SCALE in arrays:
            scale = arrays[name + SCALE].shape
            if len(scale) != array.ndim or any(n not in (1, size) for n, size in zip(scale, array.shape, strict=True)):
                raise WeightsError(f"the scales {scale} of {name!r} do not fit its shape {array.shape}")
            weights[name] = array.astype("float32") * arrays[name + SCALE]
        else:
            weights[name] = array.astype("float32") if array.dtype.kind == "f" else array
    return weights


def table(arrays: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Name, shape and type of each array: what `read_npz` compares a file with."""
    return {name: {"shape": list(array.shape), "dtype": array.dtype.name} for name, array in arrays.items()}


def write_npz(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the arrays as `numpy.savez` does; the same arrays always give the same bytes."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(name + ".npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)


def read_npz(data: bytes, expected: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Reads exactly the arrays that `expected` (see `table`) names.

    Raises:
        WeightsError: not a zip, compressed or encrypted members, names missing or unknown, another shape or type than
            the table's, an array of Python objects (pickle), truncated data.
    """
    size = sum(_nbytes(name, entry) for name, entry in expected.items())
    if size > len(data):
        raise WeightsError(f"it has {len(data)} bytes, but the arrays that it should hold need {size}")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = _members(archive, expected)
            return {name: _array(name, archive.read(info), expected[name]) for name, info in members.items()}
    except WeightsError:
        raise
    except Exception as error:  # zipfile, numpy and the tokenizer that reads odd headers raise a dozen kinds
        raise WeightsError(f"it is damaged ({error})") from error


def _nbytes(name: str, entry: Mapping[str, Any]) -> int:
    shape, dtype = entry.get("shape"), entry.get("dtype")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape) or dtype not in _PLAIN:
        raise WeightsError(f"the table entry of {name!r} is not a shape and a plain type: {dict(entry)}")
    return math.prod(shape) * np.dtype(str(dtype)).itemsize


def _members(archive: zipfile.ZipFile, expected: Mapping[str, Any]) -> dict[str, zipfile.ZipInfo]:
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        if name in members or not info.filename.endswith(".npy"):
            raise WeightsError(f"its member {info.filename!r} is not one array of its own")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
            raise WeightsError(
                f"its member {info.filename!r} is compressed or encrypted; plain stored arrays are wanted"
            )
        members[name] = info
    missing, unknown = sorted(expected.keys() - members.keys()), sorted(members.keys() - expected.keys())
    if missing or unknown:
        raise WeightsError(f"arrays missing: {_few(missing)}; arrays unknown: {_few(unknown)}")
    return members


def _array(name: str, raw: bytes, entry: Mapping[str, Any]) -> np.ndarray:
    """One .npy member. The header is compared with the table before the array is made."""
    stream = io.BytesIO(raw)
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise WeightsError(f"the array {name!r} has .npy version {version}; (1, 0) is wanted")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream, max_header_size=10_000)
    wanted: Any = (tuple(entry["shape"]), np.dtype(entry["dtype"]))
    if dtype.hasobject or fortran_order or (shape, dtype) != wanted:
        raise WeightsError(f"the array {name!r} is {dtype} {shape}, not the {wanted[1]} {wanted[0]} of its table")
    offset = stream.tell()
    if len(raw) - offset != math.prod(shape) * dtype.itemsize:
        raise WeightsError(
            f"the array {name!r} has {len(raw) - offset} bytes, not {math.prod(shape) * dtype.itemsize} as its shape"
        )
    return np.frombuffer(raw, dtype=dtype, count=math.prod(shape), offset=offset).reshape(shape)


def _few(names: list[str], most: int = 5) -> str:
    return (", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")) or "none"
