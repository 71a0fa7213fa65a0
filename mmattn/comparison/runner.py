"""Members of a comparison as processes of their own: started, continued, stopped at their limit, and remembered."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mmattn.comparison.members import read_json
from mmattn.training.callbacks import Interrupted
from mmattn.training.folder import write_json

GRACE = 180.0  # seconds that a member has for its checkpoint once it is told to stop
STATE = "member.json"


class MemberRun:
    """One member in its folder: `run/` holds its one run folder, log.txt all that it printed, member.json the rest.

    Args:
        name: of the member.
        folder: its own.
        overrides: of `mmattn train`, without those that say where the run goes.
        config: the resolved configuration that they make; a member that was begun keeps its own.

    Raises:
        ValueError: the folder holds a run of another configuration.
    """

    def __init__(self, name: str, folder: Path, overrides: Sequence[str], config: dict[str, Any]) -> None:
        self.name, self.folder, self.overrides = name, folder, list(overrides)
        self.state: dict[str, Any] = {"minutes": 0.0, "problem": "not started", **read_json(folder / STATE)}
        begun = self.state.setdefault("config", config)
        if begun != config:
            keys = ", ".join(sorted(_differences(begun, config))[:5])
            raise ValueError(f"{name} was begun in {folder} with another configuration ({keys}). Take another folder.")

    @property
    def run_folder(self) -> Path | None:
        found = sorted(path.parent for path in (self.folder / "run").glob("*/config.yaml"))
        return found[-1] if found else None

    @property
    def finished(self) -> bool:
        return self.run_folder is not None and (self.run_folder / "results.json").exists()

    def train(self, minutes: float, say: Callable[[str], None]) -> None:
        """Trains, or goes on, for as long as `minutes`, all legs together, allow; afterwards `state` says how it went.

        Raises:
            Interrupted: a signal came; the member has written its checkpoint.
        """
        left = 60.0 * (minutes - self.state["minutes"])
        if left <= 0:
            self.state["problem"] = self._limit(minutes)
            return
        command = [sys.executable, "-m", "mmattn", "train"]
        if self.run_folder is not None:
            command.append(f"resume={self.run_folder}")
        else:
            command += [*self.overrides, f"run.root={self.folder / 'run'}", f"run.name={self.name}"]
        self.folder.mkdir(parents=True, exist_ok=True)
        code, late = self._process(command, left, say)
        if self.finished:
            self.state["problem"] = None
        elif late:
            self.state["problem"] = self._limit(minutes)
        else:
            last = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            self.state["problem"] = f"exit code {code}: {last[-1] if last else 'no output'}"
        self._save()

    def measure(self, module: str, options: Sequence[str], output: Path, say: Callable[[str], None]) -> None:
        """Runs `python -m module BUNDLE OUTPUT options`, once; a failure is said and costs nothing else."""
        assert self.run_folder is not None
        if output.exists():
            return
        command = [sys.executable, "-m", module, str(self.run_folder / "bundle"), str(output), *options]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            last = done.stderr.strip().splitlines()
            say(f"{self.name}: not measured, exit code {done.returncode}: {last[-1] if last else ''}")

    def _limit(self, minutes: float) -> str:
        return f"stopped after {self.state['minutes']:.0f} minutes (minutes={minutes:g}); it can go on with more"

    def _process(self, command: Sequence[str], seconds: float, say: Callable[[str], None]) -> tuple[int, bool]:
        begin, before = time.monotonic(), self.state["minutes"]
        late = threading.Event()
        with (
            open(self.folder / "log.txt", "a", encoding="utf-8") as log,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            ) as process,
        ):

            def stop() -> None:
                late.set()
                process.terminate()

            timer = threading.Timer(seconds, stop)
            timer.start()
            saved = 0.0
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    log.write(line)
                    log.flush()
                    say(f"[{self.name}] {line.rstrip()}")
                    self.state["minutes"] = before + (time.monotonic() - begin) / 60.0
                    if time.monotonic() - saved > 30:
                        self._save()
                        saved = time.monotonic()
                code = process.wait()
            except (Interrupted, KeyboardInterrupt):
                self.state["problem"] = "interrupted"
                raise
            finally:
                timer.cancel()
                _stop(process)
                self.state["minutes"] = before + (time.monotonic() - begin) / 60.0
                self._save()
        return code, late.is_set()

    def _save(self) -> None:
        write_json(self.folder / STATE, self.state)


def _stop(process: subprocess.Popen[str]) -> None:
    """Ends a process that may be writing its checkpoint."""
    if process.poll() is not None:
        return
    with _ignored(signal.SIGINT, signal.SIGTERM):
        process.terminate()
        try:
            process.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def _ignored(*signals: int) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _differences(ours: Any, theirs: Any, path: str = "") -> set[str]:
    """The keys of nested dicts that differ.

    >>> sorted(_differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 2}, "c": 2}))
    ['a.b']
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = ours.keys() | theirs.keys()
        parts = (_differences(ours.get(k), theirs.get(k), f"{path}.{k}" if path else str(k)) for k in keys)
        return set().union(*parts)
    return set() if ours == theirs else {path}
