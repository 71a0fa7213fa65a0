"""Letters on pictures: the fonts that can draw a text, how long it is, where its lines break."""

from __future__ import annotations

import functools
import os
import unicodedata
from typing import Any

from PIL import Image, ImageDraw, ImageFont

INK, SOFT = (24, 24, 28), (112, 112, 120)
_PLAIN = str.maketrans({"\u2013": "-", "\u2014": "-", "\u2018": "'", "\u2019": "'", "\u2047": "??", "\u00df": "ss"})
# Fonts with more letters than Pillow's own, where a system has them.
_FONTS = (
    "NotoSansCJK-Regular.ttc",
    "NotoSans-Regular.ttf",
    "DejaVuSans.ttf",
    "Arial Unicode.ttf",
    "Hiragino Sans GB.ttc",
    "msyh.ttc",
    "YuGothM.ttc",
    "arial.ttf",
)


def write(
    picture: Image.Image,
    place: tuple[float, float],
    text: str,
    size: int,
    color: tuple[int, int, int],
    anchor: str = "la",
) -> None:
    """Draws one line of text, its top left corner at `place`, or what Pillow's `anchor` says of it."""
    shown, font = letters(text, size)
    ImageDraw.Draw(picture).text(place, shown, fill=color, font=font, anchor=anchor)


def wrapped(text: str, size: int, width: int) -> list[str]:
    """Lines no wider than `width` pixels, broken between words, or inside a word that is too long alone."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if length(longer, size) <= width:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if lines[-1] and length(lines[-1] + letter, size) > width:
                lines.append("")
            lines[-1] += letter
    return lines


def cut(text: str, size: int, width: int) -> str:
    """The text, or as much of its start as `width` pixels hold with an ellipsis behind it.

    >>> cut("over", 15, 200), cut("Donaudampfschifffahrtsgesellschaft", 15, 100).endswith("\u2026")
    ('over', True)
    """
    if length(text, size) <= width:
        return text
    while text and length(f"{text}\u2026", size) > width:
        text = text[:-1]
    return f"{text}\u2026"


def length(text: str, size: int) -> float:
    """How many pixels a line of text takes."""
    shown, font = letters(text, size)
    return font.getlength(shown)


def letters(text: str, size: int) -> tuple[str, Any]:
    """The text and a font that has its letters; without one, accents are dropped and other letters become U+72AC.

    The environment variable MMATTN_FONT names a font file that is tried first.

    Raises:
        OSError: MMATTN_FONT is no font file.
    """
    text = "".join(c for c in unicodedata.normalize("NFC", text) if c.isprintable())
    own = os.environ.get("MMATTN_FONT")
    if own and _font(own, size) is None:
        raise OSError(f"MMATTN_FONT={own!r} is no font file that can be read")
    for name in (*([own] if own else []), None, *_FONTS):
        font = _font(name, size)
        if font is not None and all(_has(name, c) for c in text):
            return text, font
    plain = ""
    for c in text.translate(_PLAIN):
        bare = "".join(b for b in unicodedata.normalize("NFKD", c) if not unicodedata.combining(b))
        plain += c if _has(None, c) else bare if bare and all(_has(None, b) for b in bare) else f"U+{ord(c):04X} "
    return plain.strip(), _font(None, size)


@functools.lru_cache(maxsize=64)
def _font(name: str | None, size: int) -> Any:
    """A font file or a font of the system, None if it isn't there; Pillow's own for the name None."""
    if name is None:
        return ImageFont.load_default(size)
    try:
        return ImageFont.truetype(name, size)
    except OSError:
        return None


@functools.lru_cache(maxsize=4096)
def _has(name: str | None, letter: str) -> bool:
    """Whether the font draws the letter, rather than its box for unknown ones."""
    if letter.isspace():
        return True
    font = _font(name, 24)
    drawn, missing = font.getmask(letter), font.getmask("\U0010fffe")
    return drawn.size != missing.size or bytes(drawn) != bytes(missing)
