"""What the commands write to the terminal, and what they keep off it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # what a terminal may obey
_NO_JSON = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # what a terminal may obey or a reader take for a line's end
# What the libraries of TensorFlow and grain print while they are being loaded, before any setting can reach them.
_START_UP_NOTICE = re.compile(
    rb"WARNING: All log messages before absl"
    rb"|[IW]\d{4} \d\d:\d\d:\S+ +\d+ \w+\.cc:\d+\]"
    rb"|WARNING:absl:Failed to load jax profiler"
)


class UsageError(Exception):
    """The command line asks for something that can't be; the message says what would fit."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does, with exit code 143."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM a `Terminated` here, so that what is being done can end in words."""

    def stop(*_: Any) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Holds back TensorFlow's start-up notices while its libraries are loaded, and ends them by Ctrl-C for certain."""
    with _interruptible(), _without_notices():
        yield


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """A Ctrl-C counts at the end, too: some libraries catch whatever is raised while they are loaded."""
    came: list[int] = []

    def stop(number: int, _: Any) -> None:
        came.append(number)
        raise KeyboardInterrupt

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _without_notices() -> Iterator[None]:
    """Passes on everything else that is written to standard error.

    C++ code prints them before it reads any setting. A user who sets TF_CPP_MIN_LOG_LEVEL to less than 3 gets them all.
    """
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3") != "3":  # a process that we started has our own 3
        yield
        return
    try:
        real = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
            held.seek(0)
            for line in held:
                if not _START_UP_NOTICE.match(line):
                    os.write(2, line)


def complain(text: str) -> None:
    """One line on standard error, after what standard output has so far."""
    sys.stdout.flush()
    text = harmless(text).encode(errors="backslashreplace").decode()  # a file name may be no UTF-8
    print(f"mmattn: {text}", file=sys.stderr)


def put(text: str) -> None:
    """Whole lines to standard output: as they are, in UTF-8, to a file or a pipe; to a terminal without what it obeys.

    A tab stays a tab.
    """
    if sys.stdout.isatty():
        lines = text.split("\n")
        text = "\n".join("\t".join(map(harmless, line.split("\t"))) for line in lines)
    buffer = None if sys.stdout.isatty() else getattr(sys.stdout, "buffer", None)
    sys.stdout.flush()
    if buffer is None:
        sys.stdout.write(text)
    else:
        buffer.write(text.encode(errors="surrogateescape"))
    sys.stdout.flush()


def harmless(text: str) -> str:
    """A text of unknown origin, its control characters written as escapes: no line break, no command to a terminal."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable(name: str) -> str:
    r"""A path or a caption on one line, from which it can be told exactly: a backslash is doubled.

    >>> print(printable("a\tb.jpg"))
    a\tb.jpg
    """
    return harmless(name.replace("\\", "\\\\"))


def json_line(record: dict[str, Any]) -> str:
    """One JSON object on one line; ASCII escapes only where UTF-8 can't hold a file name."""
    text = json.dumps(record, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(record)
    return _NO_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def count(text: str) -> int:
    """A whole number of at least 1, from the command line."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, not {text!r}")
    return int(text)
