"""The photos of a command line: which are meant, and what becomes of each."""

from __future__ import annotations

import argparse
import glob
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mmattn.cli.console import UsageError, complain, count, json_line, printable
from mmattn.data.photo_names import SUFFIXES

PICTURE = ".attention.png"
_MOST_STDIN_BYTES = 256 * 2**20


def add_photos(parser: argparse.ArgumentParser, done: str, bundle: str) -> None:
    """The photos and their options. `done`: what is done to them, in a word; `bundle`: what is said of --bundle."""
    add = parser.add_argument
    add("photos", nargs="+", metavar="PHOTO", help="an image file, a folder, a pattern, or - for standard input")
    add("--bundle", metavar="B", help=bundle)
    add("--json", action="store_true", help="one JSON object a line instead, failures included")
    add("--batch-size", type=count, default=16, metavar="N", help=f"photos {done} at once (default: 16)")


def check_photos(arguments: argparse.Namespace) -> None:
    """Raises UsageError for photos that can't be had."""
    if arguments.photos.count("-") > 1:
        raise UsageError("standard input ('-') can be read only once")


def each_photo(
    arguments: argparse.Namespace,
    make: Callable[[list[Any]], Sequence[Any]],
    report: Callable[[str, Any, Any], bool],
) -> int:
    """Goes through the photos and returns the exit code: 1 if anything went wrong.

    Args:
        make: (photos) -> for each its result, or the exception that says why it can't be read.
        report: (name, photo, result) writes one; whether all went well.
    """
    failures = 0
    items = photos(arguments.photos)
    while batch := list(itertools.islice(items, arguments.batch_size)):
        readable = [image for _, image in batch if not isinstance(image, OSError)]
        try:
            results = iter(make(readable) if readable else [])
        except FloatingPointError as error:  # weights that are finite and yet useless
            complain(str(error))
            return 1
        for name, image in batch:
            result = image if isinstance(image, OSError) else next(results)
            if isinstance(result, Exception):
                failures += 1
                _report_fault(name, result, arguments.json)
            else:
                failures += not report(name, image, result)
        sys.stdout.flush()
    return 1 if failures else 0


def photos(arguments: Sequence[str]) -> Iterator[tuple[str, str | bytes | OSError]]:
    """What each argument stands for: (name, path), ("-", the bytes of standard input) or (name, what is wrong).

    A folder gives its image files, also those in its sub-folders, sorted, without hidden ones and without pictures that
    `--attention` has written there. A pattern that the shell has left alone gives the files that it fits, sorted.
    """
    for argument in arguments:
        if argument == "-":
            yield "-", _standard_input()
        elif glob.has_magic(argument) and not os.path.lexists(argument):
            found = sorted(glob.glob(argument, recursive=True))
            if not found:
                yield argument, OSError("no file fits this pattern")
            for path in found:
                yield from _folder(path) if os.path.isdir(path) else [(path, path)]
        else:
            yield from _folder(argument) if os.path.isdir(argument) else [(argument, argument)]


def _standard_input() -> bytes | OSError:
    if sys.stdin is None:
        return OSError("standard input is closed")
    try:
        data = sys.stdin.buffer.read(_MOST_STDIN_BYTES + 1)
    except OSError as error:
        return OSError(f"standard input cannot be read ({error.strerror})")
    return data if len(data) <= _MOST_STDIN_BYTES else OSError(f"more than {_MOST_STDIN_BYTES >> 20} MiB")


def _folder(folder: str) -> Iterator[tuple[str, str | OSError]]:
    failures: list[OSError] = []
    found = []
    for parent, folders, files in os.walk(folder, onerror=failures.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        images = (name for name in files if os.path.splitext(name)[1].lower() in SUFFIXES)
        found += [
            os.path.join(parent, name) for name in images if not name.startswith(".") and not name.endswith(PICTURE)
        ]
    yield from ((path, path) for path in sorted(found))
    yield from ((str(failure.filename), OSError(failure.strerror)) for failure in failures)
    if not found and not failures:
        yield folder, OSError("no image file in this folder")


def _report_fault(name: str, fault: Exception, as_json: bool) -> None:
    reason = str(getattr(fault, "reason", fault))
    complain(f"{printable(name)}: {reason}")
    if as_json:
        print(json_line({"image": name, "error": reason}))
