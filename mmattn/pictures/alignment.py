"""Which words of a source each word of a target looked at: a heat map with both sentences on its axes.

Shapes: S source words (columns), T target words (rows).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from mmattn.pictures.letters import INK, SOFT, cut, length, letters, write
from mmattn.pictures.ramp import ramp

_PAPER = (255, 255, 255)
_EDGE, _GAP, _BAR = 16, 8, 14  # around the picture, beside the words, width of the colour bar
_TURN = 55  # degrees by which the words above the columns are turned
_LONGEST = 170  # pixels of a word; what is longer is cut
_SIDE = 4096  # of the map, about: beyond it cells shrink and only some words are written


def alignment_sheet(source_words: Sequence[str], target_words: Sequence[str], weights: np.ndarray) -> Image.Image:
    """A heat map: a row for each target word, a column for each source word, a cell the brighter the bigger its weight.

    The colour bar at the right runs from 0 to the biggest weight, which is printed at its top. Words that are too long
    are cut with an ellipsis. Of several hundred words only as many are written as there is room for. Letters that
    Pillow's own font lacks are taken from a font of the system, or from the font file that the environment variable
    MMATTN_FONT names; without one, accents are dropped and other letters are written by their number, such as U+72AC.

    Args:
        source_words: S words, at least one.
        target_words: T words, at least one.
        weights: (T, S), finite and not negative; usually each row sums to 1.

    Returns:
        an RGB picture.

    Raises:
        ValueError: no words, or weights that don't belong to them.

    >>> weights = np.array([[0.9, 0.1], [0.0, 1.0]])
    >>> alignment_sheet(["ein", "Hund"], ["a", "dog"], weights).mode
    'RGB'
    """
    weights = np.asarray(weights, "float32")
    expected = (len(target_words), len(source_words))
    if not all(expected):
        raise ValueError(
            f"an alignment needs at least one word on each side; there are {expected[1]} source words and "
            f"{expected[0]} target words"
        )
    if weights.shape != expected or not np.isfinite(weights).all() or weights.min() < 0:
        raise ValueError(
            f"weights must be finite, not negative and (target words, source words) = {expected}; their shape is "
            f"{weights.shape}"
        )
    cell = max(1, min(44, max(22, 900 // max(expected)), _SIDE // max(expected)))
    size = max(11, min(16, round(cell * 0.62)))
    every = math.ceil((size + 3) / cell)  # words that are written
    columns = [_turned(cut(word, size, _LONGEST), size) for word in source_words[::every]]
    rows = [cut(word, size, _LONGEST) for word in target_words[::every]]
    left = _EDGE + math.ceil(max(length(word, size) for word in rows)) + _GAP
    left = max(left, math.ceil(max(x - (n * every + 0.5) * cell + 2 for n, (_, (x, _)) in enumerate(columns))))
    top = _EDGE + max(math.ceil(y) for _, (_, y) in columns) + _GAP
    width, height = cell * expected[1], cell * expected[0]
    bar = _bar(float(weights.max()), max(height, 60), size)
    ends = [left + (n * every + 0.5) * cell + name.width - x for n, (name, (x, _)) in enumerate(columns)]
    right = max(left + width + 2 * _GAP + bar.width, math.ceil(max(ends)))
    page = Image.new("RGB", (right + _EDGE, top + max(height, bar.height) + _EDGE), _PAPER)
    page.paste(_map(weights, cell), (left, top))
    page.paste(bar, (left + width + 2 * _GAP, top))
    for n, (name, (x, y)) in enumerate(columns):
        place = (round(left + (n * every + 0.5) * cell - x), round(top - _GAP - y))
        page.paste(INK, place, name)
    for n, word in enumerate(rows):
        write(page, (left - _GAP, top + (n * every + 0.5) * cell), word, size, INK, anchor="rm")
    return page


def _map(weights: np.ndarray, cell: int) -> Image.Image:
    """The cells, with a thin line between them where they are big enough for one."""
    high = float(weights.max())
    colors = ramp(weights / high if high > 0 else weights).round().astype("uint8")
    pixels = colors.repeat(cell, axis=0).repeat(cell, axis=1)
    if cell >= 8:
        pixels[cell - 1 :: cell], pixels[:, cell - 1 :: cell] = 72, 72
    return Image.fromarray(pixels)


def _bar(high: float, height: int, size: int) -> Image.Image:
    """The scale: colours from the biggest weight down to 0, and both numbers."""
    label = f"{high:.2g}" if high < 0.995 else f"{high:.2f}"
    bar = Image.new("RGB", (_BAR + 6 + math.ceil(length(label, size)), height), _PAPER)
    shades = ramp(np.linspace(1.0, 0.0, height))[:, None].repeat(_BAR, axis=1)
    bar.paste(Image.fromarray(shades.round().astype("uint8")), (0, 0))
    write(bar, (_BAR + 6, 0), label, size, SOFT)
    write(bar, (_BAR + 6, height), "0", size, SOFT, anchor="ld")
    return bar


def _turned(word: str, size: int) -> tuple[Image.Image, tuple[float, float]]:
    """A word turned upwards as a mask, and the place (x, y) in it at which the word starts, halfway up its letters.

    It is drawn at twice its size and made smaller afterwards, which keeps its edges smooth.
    """
    shown, font = letters(word, 2 * size)
    across, tall = math.ceil(font.getlength(shown)) + 2, 3 * size
    flat = Image.new("L", (across, tall))
    ImageDraw.Draw(flat).text((0, tall / 2), shown, fill=255, font=font, anchor="lm")
    turned = flat.rotate(_TURN, Image.Resampling.BICUBIC, expand=True)
    small = turned.resize((math.ceil(turned.width / 2), math.ceil(turned.height / 2)), Image.Resampling.LANCZOS)
    angle = math.radians(_TURN)
    x, y = turned.width - across * math.cos(angle), turned.height + across * math.sin(angle)
    return small, (x / 4, y / 4)
