"""Members of a comparison as processes of their own: started, continued, stopped at their limit, and remembered."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmattn.comparison.members import read_json
from mmattn.training.callbacks import Interrupted
from mmattn.training.folder import write_json

GRACE = 180.0  # seconds that a member has for its checkpoint once it is told to stop
LONGEST = 1800.0  # seconds that one measurement may take
STATE = "member.json"
FAILED = (1, 2)  # exit codes of `mmattn train` that say why by themselves


class MemberRun:
    """One member in its folder: `run/` holds its one run folder, log.txt all that it printed, member.json the rest.

    Args:
        name: of the member.
        folder: its own.
        overrides: of `mmattn train`, without those that say where the run goes.
        config: the resolved configuration that they make, without where the run goes; a member that was begun keeps
            its own.

    Raises:
        ValueError: the folder holds a run of another configuration, or one whose configuration was not noted.
    """

    def __init__(self, name: str, folder: Path, overrides: Sequence[str], config: dict[str, Any]) -> None:
        self.name, self.folder, self.overrides = name, folder, list(overrides)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{name}: {folder} is no folder, and the member's would be there. Take another folder.")
        try:
            noted = read_json(folder / STATE)
        except ValueError as error:
            raise ValueError(f"{name}: {folder / STATE} is damaged ({error}). Take another folder.") from error
        if self.run_folder is not None and "config" not in noted:
            raise ValueError(
                f"{name}: {folder} holds a run, and no {STATE} says with what configuration it was begun. "
                "Take another folder, or delete this one."
            )
        self.state: dict[str, Any] = {"minutes": 0.0, "problem": "not started", **noted}
        if self.run_folder is None:  # whatever was noted, nothing was trained with it
            self.state.update(config=config, minutes=0.0)
        begun = self.state["config"]
        if begun != config:
            keys = ", ".join(sorted(_differences(begun, config))[:5])
            raise ValueError(
                f"{name} was begun in {folder} with another configuration ({keys}). Take another folder, "
                "or delete this one to train it anew."
            )

    @property
    def run_folder(self) -> Path | None:
        found = sorted(path.parent for path in (self.folder / "run").glob("*/config.yaml"))
        return found[-1] if found else None

    @property
    def finished(self) -> bool:
        """Whether it has results; they may have come while nobody was there to note it."""
        return self.run_folder is not None and (self.run_folder / "results.json").exists()

    def train(self, minutes: float, say: Callable[[str], None]) -> None:
        """Trains, or goes on, for as long as `minutes`, all legs together, allow; afterwards `state` says how it went.

        Raises:
            Interrupted: a signal came; the member has written its checkpoint.
        """
        left = 60.0 * (minutes - self.state["minutes"])
        if left <= 0:
            self.state["problem"] = self._limit(minutes)
            self._save()
            return
        command = [sys.executable, "-m", "mmattn", "train"]
        if self.run_folder is not None:
            command.append(f"resume={self.run_folder}")
        else:
            command += [*self.overrides, f"run.root={self.folder / 'run'}", f"run.name={self.name}"]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._save()  # with its configuration, before there is a run of it
        log = self.folder / "log.txt"
        before = log.stat().st_size if log.exists() else 0
        code, late = self._process(command, left, say)
        if self.finished:
            self.state["problem"] = None
        elif late and code not in FAILED:
            self.state["problem"] = self._limit(minutes)
        else:
            lines = log.read_bytes()[before:].decode(errors="replace").strip().splitlines()
            ours = list(itertools.takewhile(lambda line: line.startswith("mmattn: "), lines[:-4:-1]))[::-1]
            said = [line.removeprefix("mmattn: ") for line in ours or lines[-1:]]
            self.state["problem"] = f"exit code {code}: {' '.join(said) or 'no output'}"
        self._save()

    def measure(self, options: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """Writes costs.json into the run folder, of the lengths that are not there or were measured otherwise.

        Each length has a process of its own, and one that fails has its reason in place of numbers and is not tried
        again.

        Args:
            options: lengths, and rows, repeats and threads as `mmattn.comparison.costs` takes them.
        """
        assert self.run_folder is not None
        path, lengths = self.run_folder / "costs.json", options["lengths"]
        rest = {name: value for name, value in options.items() if name != "lengths"}
        before = read_json(path)
        entries = before["lengths"] if before.get("options") == rest else []
        entries = [entry for entry in entries if entry["length"] in lengths]
        words = [f"--{name}={value}" for name, value in rest.items() if value is not None]
        for length in sorted(set(lengths) - {entry["length"] for entry in entries}):
            say(f"{self.name}: measuring its costs at {length} tokens")
            entry = self._asked("mmattn.comparison.costs", f"--length={length}", *words)
            if "problem" in entry:
                say(f"{self.name}: {length} tokens not measured: {entry['problem']}")
            entries = sorted([*entries, {"length": length, **entry}], key=lambda entry: entry["length"])
            write_json(path, {"options": rest, "lengths": entries})

    def translate(self, sentence: str, say: Callable[[str], None]) -> None:
        """Writes alignment.json into the run folder, unless it is there for that sentence; tries again what failed."""
        assert self.run_folder is not None
        path = self.run_folder / "alignment.json"
        before = read_json(path)
        if before.get("sentence") == sentence and "problem" not in before:
            return
        found = self._asked("mmattn.comparison.sentence", "--", sentence)
        if "problem" in found:
            say(f"{self.name}: the sentence is not translated: {found['problem']}")
        write_json(path, {"sentence": sentence, **found})

    def _asked(self, module: str, *words: str) -> dict[str, Any]:
        """The JSON object that `python -m module BUNDLE words` prints in its last line; {"problem": why} where it fails
        or prints none."""
        assert self.run_folder is not None
        command = [sys.executable, "-m", module, str(self.run_folder / "bundle"), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LONGEST)
        except subprocess.TimeoutExpired:
            return {"problem": f"longer than {LONGEST / 60:g} minutes"}
        if done.returncode:
            last = done.stderr.strip().splitlines()
            return {"problem": f"exit code {done.returncode}: {last[-1] if last else 'no output'}"}
        last = done.stdout.strip().splitlines()[-1:]
        with contextlib.suppress(ValueError):
            found = json.loads("".join(last))
            if isinstance(found, dict):
                return found
        return {
            "problem": f"exit code 0, and its last line is no JSON object: {last[0][:200] if last else 'no output'}"
        }

    def _limit(self, minutes: float) -> str:
        return f"stopped after {self.state['minutes']:.3g} minutes (minutes={minutes:g}); it can go on with more"

    def _process(self, command: Sequence[str], seconds: float, say: Callable[[str], None]) -> tuple[int, bool]:
        begin, before = time.monotonic(), self.state["minutes"]
        late = threading.Event()
        with (
            open(self.folder / "log.txt", "a", encoding="utf-8") as log,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                start_new_session=True,  # a terminal sends Ctrl-C to all processes of its session
            ) as process,
        ):  # fmt: skip
            ending = _Ending(process)

            def stop() -> None:
                late.set()
                ending.begin()

            timer = threading.Timer(seconds, stop)
            saved = 0.0
            try:
                timer.start()
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
                names = ("SIGINT", "SIGTERM", "SIGHUP")
                with _ignored(*(getattr(signal, name) for name in names if hasattr(signal, name))):
                    if process.poll() is None:
                        say(f"{self.name}: stopping after its step, with a checkpoint")
                        ending.begin()
                        log.write(process.communicate()[0])
                    ending.over()
                self.state["minutes"] = before + (time.monotonic() - begin) / 60.0
                self._save()
        return code, late.is_set()

    def _save(self) -> None:
        write_json(self.folder / STATE, self.state)


class _Ending:
    """The end of a process that may be writing its checkpoint: it is told once, since a second signal would stop it at
    once, and killed with all that it has started when it is not over GRACE seconds later."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._once = threading.Lock()
        self._killer = threading.Timer(GRACE, self._kill)

    def begin(self) -> None:
        if self._once.acquire(blocking=False):
            self.process.terminate()
            self._killer.start()

    def over(self) -> None:
        self._once.acquire(blocking=False)
        self._killer.cancel()

    def _kill(self) -> None:
        if os.name == "nt":
            self.process.kill()
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


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
