"""How a translation is written: a line of text, lines of an n-best list, or a line of JSON."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from mmattn.cli.console import json_line

_BREAKS = re.compile(r"[\t-\r\x1c-\x1f\x85\u2028\u2029]")  # what some reader takes for the end of a line or a field


def rendered(
    number: int, source: str, result: Any, arguments: argparse.Namespace, more: Mapping[str, Any] | None = None
) -> str:
    """What is written for one sentence, line ends included."""
    failed = isinstance(result, Exception)
    if arguments.json:
        record: dict[str, Any] = {"line": number, "source": source}
        if failed:
            return json_line(record | {"error": str(getattr(result, "reason", result))}) + "\n"
        record |= {"translation": result.text, "score": result.score, "confidence": result.confidence}
        record["alternatives"] = [{"translation": other.text, "score": other.score} for other in result.alternatives]
        return json_line(record | dict(more or {})) + "\n"
    if arguments.nbest == 1:
        return "\n" if failed else f"{one_line(result.text)}\n"
    if failed:
        return f"{number}\t\t\n"
    return "".join(f"{number}\t{one_line(one.text)}\t{one.score:.4f}\n" for one in (result, *result.alternatives))


def one_line(text: str) -> str:
    r"""The text with a blank for each character that would end a line or a field of a text file.

    >>> one_line("a\tb\r\nc")
    'a b  c'
    """
    return _BREAKS.sub(" ", text)
