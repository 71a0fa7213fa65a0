"""A report of headings, paragraphs, tables and pictures, written as Markdown and as one HTML file."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ccc; padding: .3rem .7rem; text-align: right; }
th:first-child, td:first-child, .words th, .words td { text-align: left; }
img { max-width: 100%; } code { background: #f2f2f2; padding: 0 .2rem; }
"""
# What Markdown reads as more than text: anywhere (an underscore where it is not inside a word), and where a paragraph
# begins.
_MARKS = re.compile(r"[\\`*<\[\]~]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)")
_FIRST = re.compile(r"^(?=[#>+-])|^(\d+)(?=[.)](?:\s|$))")
_CLOSING = re.compile(r"(#+)$")  # at the end of a heading, Markdown leaves them out


@dataclass
class Page:
    """Blocks in their order; text is plain text.

    >>> page = Page("Two models")
    >>> page.table(("model", "BLEU"), [("a|b", "1.0"), ("post_norm *", "-1.0")])
    >>> print(page.markdown())
    # Two models
    <BLANKLINE>
    | model | BLEU |
    | --- | ---: |
    | a\\|b | 1.0 |
    | post_norm \\* | -1.0 |
    <BLANKLINE>
    """

    title: str
    _blocks: list[tuple[str, Any]] = field(default_factory=list)

    def heading(self, text: str) -> None:
        self._blocks.append(("heading", text))

    def text(self, text: str) -> None:
        self._blocks.append(("text", text))

    def code(self, text: str, before: str = "") -> None:
        """What can be copied, such as a command, and words before it."""
        self._blocks.append(("code", (before, text)))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = True) -> None:
        """`numbers`: all columns but the first hold numbers, which stand at the right."""
        self._blocks.append(("table", (tuple(columns), [tuple(row) for row in rows], numbers)))

    def picture(self, path: Path, about: str) -> None:
        """A PNG file that lies beside the page."""
        self._blocks.append(("picture", (path, about)))

    def markdown(self) -> str:
        parts = [f"# {_heading(self.title)}"]
        for kind, block in self._blocks:
            if kind == "heading":
                parts.append(f"## {_heading(block)}")
            elif kind == "text":
                parts.append(_FIRST.sub(r"\1\\", _plain(block)))
            elif kind == "code":
                fence = "`" * (1 + max(map(len, re.findall("`+", block[1])), default=0))
                parts.append(f"{_plain(block[0])} {fence} {block[1]} {fence}".lstrip())
            elif kind == "table":
                columns, rows, numbers = block
                rule = ("---", *["---:" if numbers else "---"] * (len(columns) - 1))
                lines = [map(_cell, columns), rule, *(map(_cell, row) for row in rows)]
                parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
            else:
                path, about = block
                parts.append(f"![{_plain(about)}]({path.name})")
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        parts = [f"<h1>{html.escape(self.title)}</h1>"]
        for kind, block in self._blocks:
            if kind in ("heading", "text"):
                tag = "h2" if kind == "heading" else "p"
                parts.append(f"<{tag}>{html.escape(block)}</{tag}>")
            elif kind == "code":
                parts.append(f"<p>{html.escape(block[0])} <code>{html.escape(block[1])}</code></p>")
            elif kind == "table":
                columns, rows, numbers = block
                lines = [_row("th", columns), *(_row("td", row) for row in rows)]
                parts.append(f"<table{'' if numbers else ' class=words'}>{''.join(lines)}</table>")
            else:
                path, about = block
                data = base64.b64encode(path.read_bytes()).decode()
                parts.append(f'<p><img src="data:image/png;base64,{data}" alt="{html.escape(about)}"></p>')
        head = f'<meta charset="utf-8"><title>{html.escape(self.title)}</title><style>{_STYLE}</style>'
        return f"<!doctype html>\n<html><head>{head}</head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _plain(text: str) -> str:
    """One line of Markdown that reads as the text.

    >>> print(_plain("ein <unk> in transformer_post_norm\\nund _so_ &amp; weiter"))
    ein \\<unk> in transformer_post_norm und \\_so\\_ \\&amp; weiter
    """
    return _MARKS.sub(r"\\\g<0>", re.sub(r"\s*[\r\n]\s*", " ", text.strip()))


def _heading(text: str) -> str:
    """The same for a heading.

    >>> print(_heading("C #"))
    C \\#
    """
    return _CLOSING.sub(r"\\\1", _plain(text))


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
