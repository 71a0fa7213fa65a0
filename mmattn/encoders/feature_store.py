"""Rows of float16 on disk, one for each different image, found by its SHA-256 or, while it is unchanged, by its path.

    features.npy   float16 (rows, ...), which any NumPy opens
    index.json     SHA-256 of an image file -> row; path -> size, time of change and SHA-256
    lock           held by the process that adds rows

Rows are only added, and the index is replaced after its rows are on the disk: what a killed process leaves is valid.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

Image = str | os.PathLike[str] | bytes

_FORMAT = 1


class FeatureCacheError(Exception):
    """The cache cannot give or compute features; the message says why and what to do."""


class Identity(NamedTuple):
    """What an image is known by. Bytes have neither path nor stat."""

    sha256: str
    path: str | None = None
    stat: tuple[int, int] | None = None  # size in bytes, time of change in nanoseconds


class FeatureStore:
    """The files of one folder.

    Args:
        folder: made when the first row is written.
        row_shape: of each row.

    Example:
        >>> store = FeatureStore(Path(tempfile.mkdtemp()), (2,))
        >>> with store.writing() as writer:
        ...     writer.append([store.identify(b"a photo")], np.array([[1, 2]], "float16"))
        >>> store.find(b"a photo"), store.row(0).tolist()
        (0, [1.0, 2.0])
    """

    def __init__(self, folder: Path, row_shape: tuple[int, ...]) -> None:
        self.folder = folder
        self.row_shape = row_shape
        self.rows: dict[str, int] = {}  # by SHA-256
        self.paths: dict[str, list[Any]] = {}
        self._version: tuple[int, int] | None = None
        self._map: np.ndarray | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}

    def identify(self, image: Image) -> Identity:
        """Reads a file only if its path is new, or its size or time of change is. Raises `OSError` if that fails."""
        if isinstance(image, bytes):
            return Identity(hashlib.sha256(image).hexdigest())
        path, stat = os.path.abspath(image), _stat(image)
        size, changed, sha = self.paths.get(path, (None, None, None))
        if stat != (size, changed):
            with open(path, "rb") as file:
                sha = hashlib.file_digest(file, "sha256").hexdigest()
        return Identity(str(sha), path, stat)

    def find(self, image: Image) -> int | None:
        """The number of the image's row; None if it has none or cannot be read."""
        try:
            identity = self.identify(image)
        except OSError:
            return None
        if identity.sha256 not in self.rows:
            self.refresh()  # another process may have added it
        return self.rows.get(identity.sha256)

    def row(self, number: int) -> np.ndarray:
        """A read-only view of one row."""
        if self._map is None or number >= len(self._map):
            self._map = self._open()
        return self._map[number]

    def refresh(self) -> None:
        """Reads the index if it is another one than at the last look."""
        path = self.folder / "index.json"
        try:
            version = _stat(path)
            if version == self._version:
                return
            index = json.loads(path.read_bytes())
            rows, paths = dict(index["rows"]), dict(index["paths"])
        except FileNotFoundError:
            rows, paths, version = {}, {}, None
        except (ValueError, TypeError, KeyError) as error:
            raise FeatureCacheError(
                f"{path} is damaged ({error}). Delete its folder and fill the cache again."
            ) from error
        self.rows, self.paths, self._version, self._map = rows, paths, version, None

    @contextlib.contextmanager
    def writing(self) -> Iterator[Writer]:
        """The right to append, once no other process has it. What was appended is kept, also after an exception."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FeatureCacheError(f"No folder can be made at {self.folder}. {error.strerror}.") from error
        path = self.folder / "features.npy"
        with _lock(self.folder / "lock"):
            self.refresh()
            path.touch()
            with open(path, "r+b") as file:
                writer = Writer(self, file)
                try:
                    yield writer
                finally:
                    writer.commit()

    def _open(self) -> np.ndarray:
        path = self.folder / "features.npy"
        shape = (1 + max(self.rows.values(), default=-1), *self.row_shape)
        if not path.exists() or path.stat().st_size < _offset(*shape):
            raise FeatureCacheError(
                f"{path} is missing or shorter than its index says. Delete its folder and fill the cache again."
            )
        return np.memmap(path, np.float16, "r", _offset(0, *self.row_shape), shape)


class Writer:
    """Appends rows; `FeatureStore.writing` makes it."""

    def __init__(self, store: FeatureStore, file: BinaryIO) -> None:
        self._store = store
        self._file = file
        self._count = 1 + max(store.rows.values(), default=-1)
        self._changed = False
        self._last_commit = time.monotonic()

    def append(self, identities: list[Identity], rows: np.ndarray) -> None:
        """Adds a row for each image. They count, and are safe from a crash, from the next `commit` on."""
        self._file.seek(_offset(self._count, *self._store.row_shape))
        self._file.write(np.ascontiguousarray(rows, dtype=np.float16).data)
        for identity in identities:
            self._store.rows[identity.sha256] = self._count
            self._count += 1
            self.note(identity)
        self._changed = True

    def note(self, identity: Identity) -> None:
        """Remembers that a file is as it is, so that it need not be read again."""
        if identity.path is not None and identity.stat is not None:
            entry = [*identity.stat, identity.sha256]
            self._changed |= self._store.paths.get(identity.path) != entry
            self._store.paths[identity.path] = entry

    def commit(self, after_seconds: float = 0.0) -> None:
        """Rows first, then the index that names them. Does nothing if the last time was under `after_seconds` ago."""
        if not self._changed or time.monotonic() - self._last_commit < after_seconds:
            return
        store = self._store
        self._file.seek(0)
        self._file.write(_header(self._count, *store.row_shape))
        self._file.flush()
        os.fsync(self._file.fileno())
        index = {"format": _FORMAT, "rows": store.rows, "paths": store.paths}
        path = store.folder / "index.json"
        _replace(path, json.dumps(index).encode())
        store._version = _stat(path)
        self._changed = False
        self._last_commit = time.monotonic()


def _stat(path: str | os.PathLike[str]) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def _header(*shape: int) -> bytes:
    """The head of an .npy file. NumPy leaves room in it, so its length does not depend on the number of rows."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f2", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def _offset(row: int, *row_shape: int) -> int:
    """Where a row begins in the file."""
    return len(_header(0, *row_shape)) + 2 * row * int(np.prod(row_shape))


def _replace(path: Path, data: bytes) -> None:
    """Writes a file atomically."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Waits until no other process holds the file. The operating system lets go of it however a process ends."""
    with open(path, "a+b") as file:
        while True:
            try:
                if os.name == "nt":
                    import msvcrt

                    msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
                else:
                    import fcntl

                    fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.2)
        yield
