"""`mmattn translate`: sentences from the command line, or the lines of a file of any size."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mmattn.cli.bundles import check_kind
from mmattn.cli.console import UsageError, complain, count, printable, put, quiet_start
from mmattn.cli.part_file import PartFile
from mmattn.cli.rendering import rendered
from mmattn.cli.translate_file import input_path, translate_file

DESCRIPTION = """\
Translates the sentences that are given, or with --input the lines of a file, one line for each. A blank line stays a
blank line. FILE is UTF-8 text, plain or compressed (gzip, xz, bzip2); lines end at \\n or \\r\\n.

With --output, what is done stands in OUTPUT.part until all of it is. A run that was stopped (Ctrl-C, a signal, a
crash) is continued by the same command, if input, bundle and settings are still the same; how it is batched and what
is done with bad lines may change (with other batches, words that are as good as equally likely may change places)."""
EPILOG = """\
--nbest writes up to N lines for each sentence: its number, tab, translation, tab, score. --json writes one object a
line: line, source, translation, score, confidence, alternatives; or line and error. In plain output a line break or
tab inside a translation is written as a blank."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("sentences", nargs="*", metavar="SENTENCE", help="what to translate")
    add("--bundle", metavar="B", help="a model's folder, such as RUN/bundle, or the name of a shipped one")
    add("--input", metavar="FILE", help="translate the lines of this file instead, or of standard input (-)")
    add("--output", metavar="FILE", help="write there; - is standard output (default)")
    add("--force", action="store_true", help="replace an existing output file")
    add("--restart", action="store_true", help="throw away what a stopped run left, instead of going on with it")
    text = (
        "at a line that is not UTF-8 or too long: stop (default), or write an empty line and a message and go on; then "
    )
    add("--errors", choices=("stop", "skip"), default="stop", help=text + "the exit code is 1")
    add("--nbest", type=count, default=1, metavar="N", help="N translations of each sentence, best first, with scores")
    add("--json", action="store_true", help="one JSON object a line")
    text = "also draw which words were looked at for each word: a folder, or a file.png for one sentence"
    add("--attention", metavar="DIR", help=text)
    add("--beams", type=count, metavar="N", help="width of the beam search (default: the bundle's)")
    add("--length-penalty", type=float, metavar="A", help="above 0 favours longer translations (default: the bundle's)")
    text = "end the search after P x beams finished translations; 0: when no other could win (default: the bundle's)"
    add("--patience", type=float, metavar="P", help=text)
    add("--max-length", type=count, metavar="N", help="most tokens of a translation (default: the bundle's)")
    add("--batch-size", type=count, default=32, metavar="N", help="sentences translated at once (default: 32)")


def run(arguments: argparse.Namespace) -> int:
    """Translates and returns the exit code: 1 if a sentence could not be translated."""
    _check_arguments(arguments)
    settings = {
        name: value
        for name, value in (
            ("num_beams", arguments.beams),
            ("length_penalty", arguments.length_penalty),
            ("patience", arguments.patience),
            ("max_length", arguments.max_length),
        )
        if value is not None
    }
    info = check_kind(arguments.bundle, "translator")
    options = {"nbest": arguments.nbest, "batch_size": arguments.batch_size, "on_error": "return", **settings}
    translator = _translator(arguments, options)  # before a file is touched
    if translator is None:
        return 1
    with ExitStack() as stack:
        part = None
        if arguments.output not in (None, "-"):
            job = {"bundle": info.get("digest"), "nbest": arguments.nbest, "json": arguments.json, **settings}
            part = PartFile(arguments.output, job, arguments.force, arguments.restart)
            stack.callback(part.close)
        if arguments.input is not None:
            return translate_file(arguments, translator, options, part)
        return _sentences(arguments, translator, options)


def _check_arguments(arguments: argparse.Namespace) -> None:
    if bool(arguments.sentences) == (arguments.input is not None):
        raise UsageError("give sentences, or a file of them by --input FILE (- is standard input)")
    for number, sentence in enumerate(arguments.sentences, 1):
        if any("\ud800" <= letter <= "\udfff" for letter in sentence):
            raise UsageError(f"sentence {number} is not UTF-8")
    if arguments.input is None:
        if arguments.output is not None:
            raise UsageError("--output goes with --input")
        if arguments.attention is not None:
            _check_pictures(arguments)
        return
    if arguments.attention is not None:
        raise UsageError("--attention draws sentences of the command line, not the lines of a file")
    if arguments.input == "-":
        if sys.stdin is None:
            raise UsageError("standard input is closed")
        if not os.path.exists("/dev/stdin"):
            raise UsageError("standard input can't be read on this system: give a file")
    output = arguments.output
    if output in (None, "-"):
        return
    if output.lower().endswith((".gz", ".xz", ".bz2")):
        raise UsageError(f"the output is written as plain text, so {output!r} would be a wrong name for it")
    for name in (output, f"{output}.part", f"{output}.part.json"):
        if (
            os.path.exists(name)
            and os.path.exists(input_path(arguments))
            and os.path.samefile(name, input_path(arguments))
        ):
            raise UsageError(f"{output!r} can't be the output: the input is {name!r}")


def _check_pictures(arguments: argparse.Namespace) -> None:
    target = Path(arguments.attention)
    single = target.suffix.lower() == ".png"
    if target.suffix.lower() in (".bmp", ".gif", ".jpeg", ".jpg", ".pdf", ".svg", ".tif", ".tiff", ".webp"):
        raise UsageError(f"--attention draws PNG: give a FILE.png or a folder, not {arguments.attention!r}")
    if single and len(arguments.sentences) > 1:
        raise UsageError("--attention FILE.png is for one sentence. Give a folder for several")
    try:
        (target.parent if single else target).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--attention can't write to {arguments.attention!r}: {error.strerror}") from error


def _translator(arguments: argparse.Namespace, options: Mapping[str, Any]) -> Any:
    """The translator, once the options fit it; None after saying why it can't be had."""
    with quiet_start():
        from mmattn.bundle import BundleError
        from mmattn.inference import Translator
    try:
        translator = Translator.load(arguments.bundle)
    except BundleError as error:
        complain(str(error))
        return None
    try:
        translator.translate([], **options)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return translator


def _sentences(arguments: argparse.Namespace, translator: Any, options: Mapping[str, Any]) -> int:
    try:
        results = translator.translate(arguments.sentences, **options)
    except FloatingPointError as error:  # weights that are finite and yet useless
        complain(str(error))
        return 1
    failures = 0
    for number, (sentence, result) in enumerate(zip(arguments.sentences, results, strict=True), 1):
        more = {}
        if isinstance(result, Exception):
            complain(f"sentence {number}: {getattr(result, 'reason', result)}")
            failures += 1
        elif arguments.attention is not None:
            path = Path(arguments.attention)
            path = path if path.suffix.lower() == ".png" else path / f"{number}.attention.png"
            try:
                translator.save_attention(sentence, path, result)
                more = {"attention": str(path)}
            except (OSError, ValueError) as error:
                complain(f"{printable(str(path))}: no attention picture: {error}")
                failures += 1
        put(rendered(number, sentence, result, arguments, more))
    return 1 if failures else 0
