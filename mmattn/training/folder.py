"""A run's folder: its unique name, its lock, its log, and what is written down about the place it ran."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import secrets
import socket
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mmattn.training.checkpoint import atomic_file

PACKAGES = (
    "mmattn",
    "keras",
    "tensorflow",
    "tensorflow-text",
    "jax",
    "torch",
    "numpy",
    "pillow",
    "sentencepiece",
    "grain",
    "sacrebleu",
    "hydra-core",
)


class RunFolderError(Exception):
    """The run folder cannot be used; the message says why and what to do."""


def new_run_folder(root: Path, name: str) -> Path:
    """Makes `root/<date>_<time>_<name>_<unique>`: two runs that start in the same second get two folders.

    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> new_run_folder(root, "a b").name.split("_")[2]
    'a-b'
    >>> len({new_run_folder(root, "x") for _ in range(20)})
    20
    """
    safe = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
    moment = datetime.datetime.now().strftime("%Y-%m-%d_%H%M%S")
    root.mkdir(parents=True, exist_ok=True)
    while True:
        folder = root / f"{moment}_{safe}_{secrets.token_hex(2)}"
        try:
            folder.mkdir()  # fails when it exists, also when another process has just made it
        except FileExistsError:
            continue
        return folder.resolve()


class RunLock:
    """One process at a time on a run folder. The operating system lets go of it when the process ends, however it ends.

    Raises:
        RunFolderError: another process holds it, and the message has its number; or nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        try:
            self._file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115 (open as long as the lock is held)
        except OSError as error:
            raise RunFolderError(f"Nothing can be written into {folder}. {error.strerror}: {self.path}.") from error
        try:
            _lock(self._file)
        except OSError:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise RunFolderError(
                f"{folder} is in use by another process ({holder}). Wait for its end or stop it, then try again."
            ) from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def release(self) -> None:
        self._file.close()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _lock(file: Any) -> None:
    if os.name == "nt":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    else:
        import fcntl

        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


class JsonLines:
    """A file of one JSON object a line, on the disk when `append` returns.

    >>> import tempfile
    >>> log = JsonLines(Path(tempfile.mkdtemp()) / "metrics.jsonl")
    >>> for step in (1, 2, 3): log.append({"step": step})
    >>> log.keep(lambda entry: entry["step"] <= 2)
    >>> log.read()
    [{'step': 1}, {'step': 2}]
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, *entries: dict[str, Any]) -> None:
        """Adds a line an entry, the first on a line of its own also after one that a killed process left unfinished."""
        with open(self.path, "ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            for entry in entries:
                file.write((json.dumps(entry, ensure_ascii=False, default=float) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; a last line that a killed process left unfinished is passed over."""
        if not self.path.exists():
            return []
        entries = []
        for line in self.path.read_bytes().split(b"\n"):
            try:
                entries.append(json.loads(line))
            except ValueError:
                continue
        return entries

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrites the file with the entries for which `wanted(entry)` holds."""
        if self.path.exists():
            self.write([entry for entry in self.read() if wanted(entry)])

    def write(self, entries: Iterable[dict[str, Any]]) -> None:
        """Replaces the whole file, atomically."""
        write_text(self.path, "".join(json.dumps(entry, ensure_ascii=False, default=float) + "\n" for entry in entries))


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file atomically."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=float) + "\n")


def versions() -> dict[str, str]:
    """Python, the machine and the installed versions of what decides a result."""
    found = {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cpus": str(os.cpu_count()),
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit(source: Path) -> str | None:
    """The commit of the repository that tracks `source`, with "+changes" when the tree differs; None without one."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(source.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", source.name)
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
