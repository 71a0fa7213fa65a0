"""What the commands write to the terminal, and what they keep off it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # what a terminal may obey
# What the libraries of TensorFlow and grain print while they are being loaded, before any setting can reach them.
_START_UP_NOTICE = re.compile(
    rb"WARNING: All log messages before absl"
    rb"|[IW]\d{4} \d\d:\d\d:\S+ +\d+ \w+\.cc:\d+\]"
    rb"|WARNING:absl:Failed to load jax profiler"
)


class UsageError(Exception):
    """The command line asks for something that can't be; the message says what would fit."""


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Holds back TensorFlow's start-up notices while its libraries are loaded; passes on everything else.

    C++ code prints them before it reads any setting. A user who sets TF_CPP_MIN_LOG_LEVEL gets them all.
    """
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
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


def harmless(text: str) -> str:
    """A text of unknown origin, its control characters written as escapes: no line break, no command to a terminal."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable(name: str) -> str:
    r"""A path or a caption on one line, from which it can be told exactly: a backslash is doubled.

    >>> print(printable("a\tb.jpg"))
    a\tb.jpg
    """
    return harmless(name.replace("\\", "\\\\"))


def print_json(record: dict[str, Any]) -> None:
    """One JSON object on one line; ASCII escapes only where UTF-8 can't hold a file name."""
    text = json.dumps(record, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(record)
    print(_CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text))
