"""Text files a line at a time: plain or compressed, UTF-8, each fault with its file and line.

Rules for every file:

- gzip, xz and bzip2 are told by their first bytes, not by the file's name.
- A line ends at \\n or \\r\\n and nowhere else: a form feed, U+0085 or U+2028 inside a sentence stays inside it.
- The text is UTF-8, with or without a byte order mark. A line that is not, or that has a NUL character, is a fault
  with its number; no other encoding is guessed.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

_FORMATS: tuple[tuple[str, re.Pattern[bytes], Any], ...] = (
    ("gzip", re.compile(rb"\x1f\x8b\x08"), gzip.open),
    ("xz", re.compile(rb"\xfd7zXZ\x00"), lzma.open),
    ("bzip2", re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), bz2.open),
)
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, OSError)
_SHOWN = 5  # how many faults an error lists


class TextFileError(ValueError):
    """A text file breaks a rule; the message names the file, the line, the rule and what came."""


class Line(NamedTuple):
    """One line without its end, numbered from 1; `fault` says in words why its text cannot be had (then it is "")."""

    number: int
    text: str
    fault: str | None = None


def read_lines(path: str | Path) -> Iterator[Line]:
    """Yield the lines of a file one after the other; the file need not fit into memory.

    Raises:
        TextFileError: no such file, compressed data that are damaged or cut short, or UTF-16.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder, "two.txt.gz")
    ...     _ = file.write_bytes(gzip.compress(b"a dog\\r\\nna\\xefve\\n"))
    ...     for line in read_lines(file):
    ...         print(line)
    Line(number=1, text='a dog', fault=None)
    Line(number=2, text='', fault='not UTF-8 (byte 0xef)')
    """
    with _opened(Path(path)) as file:
        for number, raw in enumerate(file, 1):
            yield _line(number, raw)


def read_text(path: str | Path) -> str:
    """The whole text of a file, with every \\r\\n turned into \\n.

    Raises:
        TextFileError: as `read_lines`, and for the first line that is not UTF-8 or has a NUL character.
    """
    with _opened(Path(path)) as file:
        raw = file.read()
    try:
        text = raw.decode("utf-8-sig")
        bad = text.find("\0")
        line, why = text.count("\n", 0, max(bad, 0)) + 1, "a NUL character"
    except UnicodeDecodeError as error:
        bad, line, why = error.start, raw.count(b"\n", 0, error.start) + 1, _not_utf8(error)
    if bad >= 0:
        raise TextFileError(f"{path}:{line}: {why}.")
    return text.replace("\r\n", "\n")


def is_blank(text: str) -> bool:
    """Whether a text has nothing but white space and invisible format characters (such as U+200B).

    >>> is_blank("\\u3000\\u200b "), is_blank(".")
    (True, False)
    """
    return all(char.isspace() or unicodedata.category(char) in ("Cc", "Cf") for char in text)


def refusal(where: str, rule: str, faults: Sequence[str]) -> TextFileError:
    """The error for one or more faults: where, the rule, then the first faults one a line and how many more there
    are."""
    shown = "".join(f"\n  {fault}" for fault in faults[:_SHOWN])
    more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return TextFileError(f"{where}: {rule}{shown}{more}")


def _line(number: int, raw: bytes) -> Line:
    if raw.endswith(b"\n"):
        raw = raw[:-2] if raw.endswith(b"\r\n") else raw[:-1]
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        return Line(number, "", _not_utf8(error))
    return Line(number, "", "a NUL character") if "\0" in text else Line(number, text)


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 (byte 0x{error.object[error.start]:02x})"


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed; what goes wrong while they are read becomes a TextFileError."""
    kind = None
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
            head = file.peek(16)
            if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise TextFileError(f"{path}: UTF-8 is needed, and this begins as UTF-16 does.")
            kind, unpack = next(((name, open_) for name, magic, open_ in _FORMATS if magic.match(head)), (None, None))
            yield stack.enter_context(unpack(file)) if unpack else cast(IO[bytes], file)
        except FileNotFoundError as error:
            raise TextFileError(f"{path}: no such file.") from error
        except _DAMAGE as error:
            what = f"the {kind} data are damaged or cut short" if kind else "cannot be read"
            raise TextFileError(f"{path}: {what} ({error}).") from error
