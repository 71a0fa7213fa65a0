"""`mmattn generate`: text that a language model writes."""

from __future__ import annotations

import argparse
import secrets
import sys

from mmattn.cli.bundles import check_kind
from mmattn.cli.console import UsageError, complain, count, json_line, put, quiet_start

_SETTINGS = ("max_length", "temperature", "top_k", "top_p")
_BETWEEN = "---"  # a line between two texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("prompt", nargs="?", default="", metavar="PROMPT", help="what the text begins with; - reads standard input")
    add("--bundle", metavar="B", help="a model's folder, such as RUN/bundle, or the name of a shipped one")
    add("--max-length", type=count, metavar="N", help="most tokens, the prompt's included (default: the bundle's)")
    add("--temperature", type=float, metavar="T", help="below 1 safer, above 1 wilder (default: the bundle's)")
    add("--top-k", type=count, metavar="K", help="draw among the K likeliest tokens only")
    add("--top-p", type=float, metavar="P", help="draw among the likeliest tokens that have the share P together")
    add("--seed", type=int, metavar="N", help="the same seed, the same text (default: another one each time)")
    add("--count", type=count, default=1, metavar="N", help="N texts, a line of --- between them")
    add("--json", action="store_true", help="one JSON object a line: prompt, text, seed")


def run(arguments: argparse.Namespace) -> int:
    """Writes the texts and returns the exit code."""
    prompt = _prompt(arguments.prompt)
    check_kind(arguments.bundle, "language_model")
    with quiet_start():
        from mmattn.bundle import BundleError
        from mmattn.inference import Writer
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    settings = {name: getattr(arguments, name) for name in _SETTINGS if getattr(arguments, name) is not None}
    try:
        writer = Writer.load(arguments.bundle)
    except BundleError as error:
        complain(str(error))
        return 1
    try:
        texts = writer.write(prompt, count=arguments.count, seed=seed, **settings)
    except FloatingPointError as error:  # weights that are finite and yet useless
        complain(str(error))
        return 1
    except ValueError as error:
        raise UsageError(str(error)) from error
    if arguments.json:
        put("".join(json_line({"prompt": prompt, "text": text, "seed": seed}) + "\n" for text in texts))
    else:
        put(f"{_BETWEEN}\n".join(text if text.endswith("\n") else f"{text}\n" for text in texts))
    return 0


def _prompt(argument: str) -> str:
    if argument != "-":
        data = argument.encode(errors="surrogateescape")
    elif sys.stdin is None:
        raise UsageError("standard input is closed")
    else:
        data = sys.stdin.buffer.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError("the prompt is not UTF-8") from error
