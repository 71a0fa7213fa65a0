"""`mmattn caption`: captions of photos, their attention pictures."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from mmattn.cli.bundles import check_kind
from mmattn.cli.console import UsageError, complain, count, json_line, printable, quiet_start
from mmattn.cli.photos import PICTURE, add_photos, check_photos, each_photo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_photos(parser, "described", "a model's folder, or the name of a shipped one (default: the shipped one)")
    add = parser.add_argument
    add("--beams", type=count, metavar="N", help="width of the beam search (default: the bundle's)")
    add("--nbest", type=count, default=1, metavar="N", help="N lines a photo, best first, with the score in column 3")
    add("--attention", metavar="DIR", help="also write pictures there: where the model looked for each word")


def run(arguments: argparse.Namespace) -> int:
    """Captions the photos and returns the exit code: 1 if any of them failed."""
    check_photos(arguments)
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

    def make(images: list[Any]) -> list[Any]:
        return captioner.caption(images, **options)

    def report(name: str, image: Any, caption: Any) -> bool:
        return _report(name, image, caption, arguments.json, captioner, pictures)

    return each_photo(arguments, make, report)


def _report(name: str, image: Any, result: Any, as_json: bool, captioner: Any, pictures: Pictures | None) -> bool:
    """Writes the caption of one photo; returns whether all went well."""
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
