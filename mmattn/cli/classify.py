"""`mmattn classify`: the classes of photos."""

from __future__ import annotations

import argparse
from typing import Any

from mmattn.cli.bundles import check_kind
from mmattn.cli.console import UsageError, complain, count, json_line, printable, quiet_start
from mmattn.cli.photos import add_photos, check_photos, each_photo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_photos(parser, "classified", "a model's folder, such as RUN/bundle")
    text = "the N likeliest classes of each photo, a line each, likeliest first"
    parser.add_argument("--nbest", type=count, default=1, metavar="N", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Classifies the photos and returns the exit code: 1 if any of them failed."""
    check_photos(arguments)
    with quiet_start():
        from mmattn.bundle import BundleError
        from mmattn.inference import Classifier
    check_kind(arguments.bundle, "classifier")
    try:
        classifier = Classifier.load(arguments.bundle)
    except BundleError as error:
        complain(str(error))
        return 1
    options: dict[str, Any] = {"nbest": arguments.nbest, "batch_size": arguments.batch_size, "on_error": "return"}
    try:
        classifier.classify([], **options)
    except ValueError as error:
        raise UsageError(str(error)) from error

    def report(name: str, image: Any, found: Any) -> bool:
        ranked = [(found.label, found.probability), *found.alternatives]
        if arguments.json:
            classes = [{"label": label, "probability": probability} for label, probability in ranked]
            print(json_line({"image": name, **classes[0], "alternatives": classes[1:]}))
        else:
            for label, probability in ranked:
                print(f"{printable(name)}\t{printable(label)}\t{probability:.4f}")
        return True

    return each_photo(arguments, lambda images: classifier.classify(images, **options), report)
