"""A contact sheet: many pictures with their captions on one page, to look at data before training on it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_TEXT, _PAPER = (20, 20, 20), (255, 255, 255)


def contact_sheet(
    records: Iterable[dict[str, Any]], columns: int = 5, cell: int = 192, captions: int = 1
) -> Image.Image:
    """Draw records as a sheet, each picture with its first captions below it.

    Args:
        records: Dicts with `image` (a path, a PIL image or a uint8 array (H, W, 3)) and `captions` (list of str).
        columns: Pictures in a row.
        cell: Width in pixels of a picture on the sheet; it keeps its proportions.
        captions: How many captions to print under each picture.

    Returns:
        An RGB image.

    Raises:
        ValueError: no records.

    >>> from mmattn.data.shapes import ShapesSource
    >>> source = ShapesSource("train")
    >>> contact_sheet([source[i] for i in range(4)], columns=2, cell=64).width
    152
    """
    tiles = [_tile(record, cell, captions) for record in records]
    if not tiles:
        raise ValueError("A contact sheet needs at least one record, got none.")
    gap = 8
    rows = [tiles[start : start + columns] for start in range(0, len(tiles), columns)]
    heights = [max(tile.height for tile in row) for row in rows]
    sheet = Image.new("RGB", (gap + len(rows[0]) * (cell + gap), gap + sum(heights) + gap * len(rows)), _PAPER)
    top = gap
    for row, height in zip(rows, heights, strict=True):
        for column, tile in enumerate(row):
            sheet.paste(tile, (gap + column * (cell + gap), top))
        top += height + gap
    return sheet


def _tile(record: dict[str, Any], cell: int, captions: int) -> Image.Image:
    picture = _picture(record["image"])
    height = max(1, round(picture.height * cell / picture.width))
    enlarging = cell > picture.width
    picture = picture.resize((cell, height), Image.Resampling.NEAREST if enlarging else Image.Resampling.BICUBIC)
    font = ImageFont.load_default(size=13)
    lines = [line for text in record["captions"][:captions] for line in _wrap(text, cell, font)]
    tile = Image.new("RGB", (cell, height + 4 + 16 * len(lines)), _PAPER)
    tile.paste(picture, (0, 0))
    pen = ImageDraw.Draw(tile)
    for number, line in enumerate(lines):
        pen.text((0, height + 2 + 16 * number), line, fill=_TEXT, font=font)
    return tile


def _picture(image: Any) -> Image.Image:
    if isinstance(image, np.ndarray):
        return Image.fromarray(image)
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    with Image.open(image) as opened:
        return opened.convert("RGB")


def _wrap(text: str, width: int, font: Any) -> list[str]:
    """Break a text into lines no wider than `width` pixels, between words."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
