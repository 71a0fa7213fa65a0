"""An output file that is not complete yet, and what a later run must know to go on with it.

    OUTPUT.part        the lines that are done
    OUTPUT.part.json   how many lines of the input and bytes of the output that is, of which input and by which settings

Nothing has to be done when a run ends early, however it ends: what OUTPUT.part.json doesn't count yet is cut off by
the next run. OUTPUT appears when it is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmattn.cli.console import UsageError


class PartFile:
    """The part of one output file; held by one process at a time.

    Args:
        output: the file that it becomes.
        job: plain data on which the output depends, apart from the input: a part made by another job is refused.
        force: an existing `output` may be replaced.
        restart: what an earlier run left is thrown away.

    Attributes:
        lines: lines of the input that are done.
        digest: of these lines, as the run that wrote them said.

    Raises:
        UsageError: `output` can't be written, or the part is another job's or another process's.
    """

    def __init__(self, output: str, job: Mapping[str, Any], force: bool = False, restart: bool = False) -> None:
        self.output = Path(os.path.realpath(output))
        self.part = self.output.with_name(f"{self.output.name}.part")
        self.state = self.output.with_name(f"{self.output.name}.part.json")
        self.job = json.loads(json.dumps(dict(job)))
        self.lines, self.bytes, self.digest = 0, 0, ""
        with _refused(f"{output!r} can't be written"):
            if os.path.lexists(self.output):
                _check_output(self.output, force)
            self.file = os.fdopen(os.open(self.part, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666), "r+b")
        try:
            self._lock()
            with _refused(f"{os.fspath(self.state)!r} can't be used"):
                self._begin(restart)
        except BaseException:
            self.file.close()
            raise

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            return
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"Another process is writing {os.fspath(self.part)!r}") from error
        except OSError:  # a file system without locks
            return

    def _begin(self, restart: bool) -> None:
        size = os.fstat(self.file.fileno()).st_size
        if size and self.state.exists() and not restart:
            self._go_on(json.loads(self.state.read_bytes()), size)
        elif size and not self.state.exists():
            raise UsageError(f"{os.fspath(self.part)!r} wasn't written by this command. Move it away")
        self.file.truncate(self.bytes)
        self.file.seek(self.bytes)
        self._note()

    def _go_on(self, state: Any, size: int) -> None:
        if not state["lines"]:
            return
        found = state["job"]
        changed = [name for name in sorted(self.job.keys() | found.keys()) if self.job.get(name) != found.get(name)]
        if changed:
            name = changed[0]
            values = f": {name}={found.get(name)!r}, now {self.job.get(name)!r}" if name != "bundle" else ": the bundle"
            raise UsageError(
                f"{os.fspath(self.part)!r} was begun with other settings{values}. Give the same ones to go on with it, "
                "or --restart to throw it away"
            )
        if size < state["bytes"]:
            raise UsageError(f"{os.fspath(self.part)!r} was changed: it is too short. --restart throws it away")
        self.lines, self.bytes, self.digest = int(state["lines"]), int(state["bytes"]), str(state["input"])

    def add(self, data: bytes, lines: int, digest: str) -> None:
        """Appends what came of the next `lines` lines of the input; `digest` is of all lines up to there."""
        self.file.write(data)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.lines, self.bytes, self.digest = self.lines + lines, self.bytes + len(data), digest
        self._note()

    def _note(self) -> None:
        """Writes the state, whole or not at all."""
        state = {"job": self.job, "lines": self.lines, "bytes": self.bytes, "input": self.digest}
        fresh = self.state.with_name(f".{self.state.name}")
        with open(fresh, "w", encoding="utf-8") as file:
            json.dump(state, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self.state)

    def finish(self) -> None:
        """The part is complete and takes the output's name."""
        if os.name == "nt":  # which renames no open file; elsewhere the lock is held until all is done
            self.file.close()
        os.replace(self.part, self.output)
        self.state.unlink(missing_ok=True)
        self.file.close()

    def close(self) -> None:
        """Leaves the part to a later run, if there is a line in it."""
        if self.file.closed:
            return
        if not self.lines:
            self.state.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # Windows keeps an open file
                self.part.unlink(missing_ok=True)
        self.file.close()


def _check_output(output: Path, force: bool) -> None:
    if not stat.S_ISREG(output.stat().st_mode):
        raise UsageError(f"{os.fspath(output)!r} is no ordinary file. Standard output is: --output -")
    if not force:
        raise UsageError(f"{os.fspath(output)!r} exists. --force replaces it")


@contextlib.contextmanager
def _refused(what: str) -> Any:
    """Makes what the file system refuses, and a state that says nothing, a wrong command line."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{what}: it is damaged. --restart throws the part away") from error
