"""`mmattn caption`: which photos are meant, their captions, their attention pictures."""

from __future__ import annotations

import argparse
import glob
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmattn.cli.bundles import check_kind
from mmattn.cli.console import UsageError, complain, count, json_line, printable, quiet_start

_FORMATS = (
    "avif",
    "bmp",
    "gif",
    "jfif",
    "jp2",
    "jpe",
    "jpeg",
    "jpg",
    "pbm",
    "pgm",
    "png",
    "pnm",
    "ppm",
    "tga",
    "tif",
    "tiff",
    "webp",
)
SUFFIXES = frozenset(f".{name}" for name in _FORMATS)
PICTURE = ".attention.png"
_MOST_STDIN_BYTES = 256 * 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("photos", nargs="+", metavar="PHOTO", help="an image file, a folder, a pattern, or - for standard input")
    add("--bundle", metavar="B", help="a model's folder, or the name of a shipped one (default: the shipped one)")
    add("--beams", type=count, metavar="N", help="width of the beam search (default: the bundle's)")
    add("--nbest", type=count, default=1, metavar="N", help="N lines a photo, best first, with the score in column 3")
    add("--json", action="store_true", help="one JSON object a line instead, failures included")
    add("--attention", metavar="DIR", help="also write pictures there: where the model looked for each word")
    add("--batch-size", type=count, default=16, metavar="N", help="photos described at once (default: 16)")


def run(arguments: argparse.Namespace) -> int:
    """Captions the photos and returns the exit code: 1 if any of them failed."""
    if arguments.photos.count("-") > 1:
        raise UsageError("standard input ('-') can be read only once")
    pictures = None if arguments.attention is None else Pictures(arguments.attention)
    with quiet_start():
        from mmattn.bundle import BundleError
        from mmattn.inference import Captioner
    check_kind(arguments.bundle, "captioner")
    try:
        captioner = Captioner.load(arguments.bundle)
    except BundleError as error:
        complain(str(error))
        return 1
    options: dict[str, Any] = {"nbest": arguments.nbest, "batch_size": arguments.batch_size, "on_error": "return"}
    if arguments.beams is not None:
        options["num_beams"] = arguments.beams
    try:
        captioner.caption([], **options)
    except ValueError as error:
        raise UsageError(str(error)) from error
    failures = 0
    items = photos(arguments.photos)
    while batch := list(itertools.islice(items, arguments.batch_size)):
        readable = [image for _, image in batch if not isinstance(image, OSError)]
        try:
            results = iter(captioner.caption(readable, **options) if readable else [])
        except FloatingPointError as error:  # weights that are finite and yet useless
            complain(str(error))
            return 1
        for name, image in batch:
            result = image if isinstance(image, OSError) else next(results)
            failures += not _report(name, image, result, arguments.json, captioner, pictures)
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


def _report(name: str, image: Any, result: Any, as_json: bool, captioner: Any, pictures: Pictures | None) -> bool:
    """Writes what became of one photo; returns whether all went well."""
    if isinstance(result, Exception):
        reason = str(getattr(result, "reason", result))
        complain(f"{printable(name)}: {reason}")
        if as_json:
            print(json_line({"image": name, "error": reason}))
        return False
    record: dict[str, Any] = {"image": name, "caption": result.text, "score": result.score}
    record |= {"confidence": result.confidence, "low_confidence": result.low_confidence}
    record["alternatives"] = [{"caption": other.text, "score": other.score} for other in result.alternatives]
    if pictures is not None:
        try:
            record["attention"] = pictures.write(captioner, name, image, result)
        except (OSError, ValueError) as problem:
            record["error"] = f"no attention picture: {problem}"
            complain(f"{printable(name)}: {record['error']}")
    if as_json:
        print(json_line(record))
    else:
        for one in (result, *result.alternatives):
            score = [f"{one.score:.4f}"] if result.alternatives else []
            mark = ["[low confidence]"] if one.low_confidence else []
            print("\t".join([printable(name), printable(one.text), *score, *mark]))
    return "error" not in record


class Pictures:
    """Attention pictures in one folder: photo.attention.png for photo.jpg, with a number where that name is taken."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.taken: set[str] = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--attention needs a folder, and {folder!r} can't be one: {error.strerror}") from error

    def write(self, captioner: Any, name: str, image: str | bytes, caption: Any) -> str:
        """Draws one picture and returns its path."""
        stem = "stdin" if name == "-" else Path(name).stem
        numbered = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        free = next(candidate for candidate in numbered if candidate.lower() not in self.taken)
        self.taken.add(free.lower())
        path = self.folder / f"{free}{PICTURE}"
        captioner.save_attention(image, path, caption)
        return str(path)
