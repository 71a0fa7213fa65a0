"""The lines of a file, translated window by window: a file of any size passes, and a run that stops loses little."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmattn.cli.console import UsageError, complain, printable, put, terminable
from mmattn.cli.part_file import PartFile
from mmattn.cli.progress import Progress
from mmattn.cli.rendering import rendered

_SECONDS, _MOST_LINES = 15.0, 8192  # of one window: what Ctrl-C loses, and what is held in memory


class LineError(Exception):
    """A line that can't be translated."""


def translate_file(
    arguments: argparse.Namespace, translator: Any, options: Mapping[str, Any], part: PartFile | None
) -> int:
    """Translates the lines of the input into `part`, or to standard output; returns the exit code."""
    from mmattn.data.text_files import TextFileError, read_lines

    name = "standard input" if arguments.input == "-" else printable(arguments.input)
    lines = iter(read_lines(input_path(arguments)))
    job = _Job(arguments, translator, options, part)
    try:
        with terminable():
            job.skip(lines, name)
            job.run(lines, name)
    except (TextFileError, LineError, FloatingPointError) as error:
        complain(str(error))
        job.say_kept()
        return 1
    except KeyboardInterrupt:
        job.say_kept()
        raise
    return 1 if job.failures else 0


class _Job:
    """The lines of a file, from one window to the next."""

    def __init__(
        self, arguments: argparse.Namespace, translator: Any, options: Mapping[str, Any], part: PartFile | None
    ) -> None:
        self.arguments, self.translator, self.options, self.part = arguments, translator, options, part
        self.window = min(4 * arguments.batch_size, _MOST_LINES)
        self.digest = hashlib.sha256()
        self.lines = self.place = self.failures = 0  # lines and bytes of the input that are done; lines skipped

    def skip(self, lines: Iterator[Any], name: str) -> None:
        """Passes over what an earlier run has done, once it is the same text."""
        part = self.part
        if part is None or not part.lines:
            return
        for line in itertools.islice(lines, part.lines):
            self._count(line)
        if (self.lines, self.digest.hexdigest()) != (part.lines, part.digest):
            raise UsageError(
                f"{os.fspath(part.part)!r} was begun with another input: its first {part.lines} lines are not those of "
                f"{name}. Give the same one to go on with it, or --restart to throw it away"
            )

    def run(self, lines: Iterator[Any], name: str) -> None:
        """Translates the rest."""
        progress = Progress(_size(self.arguments), self.lines, self.place)
        ended = False
        while not ended:
            window, error = self._read(lines, name)
            ended = error is not None or len(window) < self.window
            began = time.monotonic()
            output, done, problem = self._translated(window, progress, name)
            progress.clear()
            for line in window[:done]:
                self._count(line)
            if self.part is None:
                put(output)
            elif done:
                self.part.add(output.encode(), done, self.digest.hexdigest())
            if problem or error:
                raise problem or error  # type: ignore[misc]
            if time.monotonic() - began < _SECONDS / 2:
                self.window = min(2 * self.window, _MOST_LINES)
        if self.part is not None:
            self.part.finish()

    def say_kept(self) -> None:
        """After an early end: where the work is."""
        if self.part is not None and self.part.lines and not self.part.file.closed:
            complain(
                f"{self.part.lines} lines are done and kept in {printable(os.fspath(self.part.part))}; "
                "the same command goes on after them"
            )

    def _read(self, lines: Iterator[Any], name: str) -> tuple[list[Any], Exception | None]:
        """The next lines, and what stopped the reading: damaged data, or the first bad line if those aren't skipped."""
        from mmattn.data.text_files import TextFileError

        window: list[Any] = []
        try:
            for line in lines:
                if line.fault is not None and self.arguments.errors == "stop":
                    return window, _line_error(name, line.number, line.fault)
                window.append(line)
                if len(window) == self.window:
                    break
        except TextFileError as error:
            return window, error
        return window, None

    def _translated(self, window: Sequence[Any], progress: Progress, name: str) -> tuple[str, int, Exception | None]:
        """The output for the lines of a window, for how many of them, and the error that it stopped at."""
        begin, size = self.place, sum(map(_bytes, window))

        def show(done: int, total: int) -> None:
            progress.show(self.lines + done, begin + size * done / total)

        texts = [line.text for line in window if line.fault is None]
        found = iter(self.translator.translate(texts, progress=show, **self.options))
        output: list[str] = []
        for place, line in enumerate(window):
            result = next(found) if line.fault is None else LineError(line.fault)
            if isinstance(result, Exception):
                reason = str(getattr(result, "reason", result))
                if self.arguments.errors == "stop":
                    return "".join(output), place, _line_error(name, line.number, reason)
                self.failures += 1
                progress.clear()
                complain(f"{name}:{line.number}: {reason}")
            output.append(rendered(line.number, line.text, result, self.arguments))
        return "".join(output), len(window), None

    def _count(self, line: Any) -> None:
        self.digest.update(f"{line.fault or ''}\n{line.text}\n".encode())
        self.lines += 1
        self.place += _bytes(line)


def _line_error(name: str, number: int, reason: str) -> LineError:
    return LineError(f"{name}:{number}: {reason}. --errors skip leaves such lines empty")


def _bytes(line: Any) -> int:
    return len(line.text.encode()) + 1


def input_path(arguments: argparse.Namespace) -> str:
    """The file that is read."""
    return "/dev/stdin" if arguments.input == "-" else arguments.input


def _size(arguments: argparse.Namespace) -> int | None:
    """Bytes of the input, if it is a plain file."""
    path = input_path(arguments)
    if path.lower().endswith((".gz", ".xz", ".bz2")) or not os.path.isfile(path):
        return None
    return os.path.getsize(path)
