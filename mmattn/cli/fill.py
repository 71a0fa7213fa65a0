"""`mmattn fill`: what stands for [MASK] in sentences."""

from __future__ import annotations

import argparse
from typing import Any

from mmattn.cli.bundles import check_kind
from mmattn.cli.console import UsageError, complain, count, json_line, put, quiet_start
from mmattn.cli.rendering import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add(
        "sentences",
        nargs="+",
        metavar="SENTENCE",
        help="a sentence with [MASK] where a token is missing, which is a word or a piece of one",
    )
    add("--bundle", metavar="B", help="a model's folder, such as RUN/bundle, or the name of a shipped one")
    text = "the N likeliest tokens, words or pieces of one, instead: number of sentence and mask, token, probability"
    add("--nbest", type=count, metavar="N", help=text)
    add("--json", action="store_true", help="one JSON object a line, failures included")
    add("--batch-size", type=count, default=32, metavar="N", help="sentences filled in at once (default: 32)")


def run(arguments: argparse.Namespace) -> int:
    """Fills in the sentences and returns the exit code: 1 if any of them failed."""
    for number, sentence in enumerate(arguments.sentences, 1):
        if any("\ud800" <= letter <= "\udfff" for letter in sentence):
            raise UsageError(f"sentence {number} is not UTF-8")
    check_kind(arguments.bundle, "masked_language_model")
    with quiet_start():
        from mmattn.bundle import BundleError
        from mmattn.inference import MaskFiller
    try:
        filler = MaskFiller.load(arguments.bundle)
        results = filler.fill(
            arguments.sentences, nbest=arguments.nbest or 1, batch_size=arguments.batch_size, on_error="return"
        )
    except (BundleError, FloatingPointError) as error:
        complain(str(error))
        return 1
    for number, (sentence, result) in enumerate(zip(arguments.sentences, results, strict=True), 1):
        if isinstance(result, Exception):
            complain(f"sentence {number}: {getattr(result, 'reason', result)}")
        put(_rendered(number, sentence, result, arguments))
    return 1 if any(isinstance(result, Exception) for result in results) else 0


def _rendered(number: int, sentence: str, result: Any, arguments: argparse.Namespace) -> str:
    """What is written for one sentence, line ends included."""
    if isinstance(result, Exception):
        if arguments.json:
            return json_line({"sentence": sentence, "error": str(getattr(result, "reason", result))}) + "\n"
        return "" if arguments.nbest else "\n"
    if arguments.json:
        masks = [[{"word": word, "probability": p} for word, p in words] for words in result.masks]
        return json_line({"sentence": sentence, "text": result.text, "masks": masks}) + "\n"
    if arguments.nbest is None:
        return one_line(result.text) + "\n"
    return "".join(
        f"{number}\t{mask}\t{one_line(word)}\t{probability:.4f}\n"
        for mask, words in enumerate(result.masks, 1)
        for word, probability in words
    )
