"""What a captioner does: attention sheets and contact sheets.

Shapes: W words, (rows, columns) patches of the model's input.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from mmattn.pictures.letters import INK, SOFT, length, wrapped, write
from mmattn.pictures.ramp import ramp
from mmattn.preprocess.image import ImageReader

Box = tuple[float, float, float, float]

_PAPER = (255, 255, 255)
_GAP, _LEAST = 16, 90  # between tiles; the least width of one


def attention_sheet(
    photo: Image.Image,
    caption: str,
    words: Sequence[str],
    weights: np.ndarray,
    box: Box | None = None,
    width: int = 1440,
) -> Image.Image:
    """The photo with its caption, and for each word the photo under a heat map of where the decoder looked.

    A heat map lies on the photo as the model saw it: squashed, padded or cropped. What the model did not see is dark;
    the brightest spot of each map is its own largest weight, whose share of the word's attention is printed beside the
    word.

    Args:
        photo: upright RGB photo.
        caption: the whole sentence.
        words: W words.
        weights: (W, rows, columns), not negative.
        box: (left, top, right, bottom) of the model's input on the photo, in its pixels; None: the whole photo.
        width: of the sheet, in pixels, about.

    Returns:
        an RGB picture.

    >>> sheet = attention_sheet(Image.new("RGB", (300, 200)), "a dog", ["a", "dog"], np.full((2, 7, 7), 1 / 49))
    >>> sheet.mode, sheet.width <= 1440
    ('RGB', True)
    """
    weights = np.asarray(weights, "float32")
    if weights.ndim != 3 or len(weights) != len(words):
        raise ValueError(
            f"weights must be (words, rows, columns) with {len(words)} words; their shape is {weights.shape}"
        )
    photo = photo.convert("RGB")
    columns, cell = _cell(photo.size, width)
    box = box or (0.0, 0.0, *photo.size)
    small = _fitted(photo, cell)
    scaled = tuple(edge * small.size[axis % 2] / photo.size[axis % 2] for axis, edge in enumerate(box))
    tiles = [_tile(small, "photo", "", soft=True)]
    for word, weight in zip(words, weights, strict=True):
        share = float(weight.max() / weight.sum()) if weight.sum() > 0 else 0.0
        tiles.append(_tile(heat_map(small, weight, scaled), word, f"peak {share:.0%}"))  # type: ignore[arg-type]
    return _page(caption, tiles, columns)


def heat_map(photo: Image.Image, weights: np.ndarray, box: Box) -> Image.Image:
    """The photo, grey and dim, under the weights (rows, columns) laid over `box` and smoothed between patches."""
    high = float(weights.max())
    heat = weights / high if high > 0 else np.zeros_like(weights)  # from 0, so that even attention looks even
    left, top, right, bottom = box
    rows, columns = weights.shape
    # Output pixel (x, y) -> patch coordinates. Edge padding keeps the border patches flat towards the border.
    padded = Image.fromarray(np.pad(heat, 1, mode="edge").astype("float32"))
    across, down = columns / (right - left), rows / (bottom - top)
    matrix = (across, 0.0, 1.0 - left * across, 0.0, down, 1.0 - top * down)
    laid = padded.transform(photo.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
    heat = np.maximum(np.asarray(laid), 0.0)
    heat = heat / max(1.0, float(heat.max()))  # smoothing overshoots
    x, y = np.arange(photo.width) + 0.5, np.arange(photo.height) + 0.5
    seen = ((x >= left) & (x <= right))[None, :] & ((y >= top) & (y <= bottom))[:, None]
    pixels = np.asarray(photo, "float32")
    grey = pixels.mean(axis=2, keepdims=True)
    base = (0.35 * pixels + 0.65 * grey) * 0.62
    strength = (0.80 * heat**0.75)[..., None]
    lit = base * (1.0 - strength) + ramp(heat) * strength + pixels * (0.25 * strength)
    return Image.fromarray(np.clip(np.where(seen[..., None], lit, grey * 0.3), 0, 255).astype("uint8"))


def caption_sheet(
    rows: Iterable[tuple[Any, str, str]], columns: int = 4, width: int = 1440, title: str = ""
) -> Image.Image:
    """A contact sheet: photos with their captions and a smaller note, such as the confidence or a reference.

    Args:
        rows: (photo, caption, note); the photo is a path, a PIL image or a uint8 array, shown upright.
        columns: photos side by side.
        width: of the sheet, in pixels.
        title: a heading.

    Raises:
        ValueError: no rows.
        ImageReadError: a photo that can't be read.

    >>> caption_sheet([(Image.new("RGB", (60, 90)), "a grey wall", "0.71")], columns=2, width=400).width
    400
    """
    read = ImageReader((1, 1))
    side = (width - _GAP) // columns - _GAP
    tiles = []
    for photo, caption, note in rows:
        fitted = _fitted(read.photo(photo), (side, side))
        framed = Image.new("RGB", (side, max(fitted.height, side * 2 // 3)), (240, 240, 242))
        framed.paste(fitted, ((side - fitted.width) // 2, (framed.height - fitted.height) // 2))
        tiles.append(_tile(framed, caption, note))
    if not tiles:
        raise ValueError("a contact sheet needs at least one photo, and there is none")
    return _page(title, tiles, columns, width)


def _cell(size: tuple[int, int], width: int) -> tuple[int, tuple[int, int]]:
    """How many photos side by side, and the place for one: about the same area for every shape of photo."""
    aspect = size[0] / size[1]
    across = min(max(width / 5.5 * math.sqrt(aspect), 120.0), width / 2.2)
    columns = max(1, round((width - _GAP) / (across + _GAP)))
    across = (width - _GAP) // columns - _GAP
    return columns, (across, max(1, min(round(across / aspect), width)))


def _fitted(photo: Image.Image, cell: tuple[int, int]) -> Image.Image:
    """The photo as big as the cell allows, keeping its shape."""
    scale = min(cell[0] / photo.width, cell[1] / photo.height)
    size = (max(1, round(photo.width * scale)), max(1, round(photo.height * scale)))
    return photo.resize(size, Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.BICUBIC)


def _tile(picture: Image.Image, text: str, note: str, soft: bool = False) -> Image.Image:
    """A picture with a text under it, and a smaller grey note beside the text, or below it where there is no room."""
    width = max(picture.width, _LEAST)  # a very tall photo is too narrow for its words
    lines = wrapped(text, 20, width)
    room = width - length(lines[0], 20) - length(note, 14) - 12
    beside = bool(note) and len(lines) == 1 and room >= 0
    notes = wrapped(note, 14, width) if note and not beside else []
    tile = Image.new("RGB", (width, picture.height + 6 + 27 * len(lines) + 19 * len(notes)), _PAPER)
    tile.paste(picture, (0, 0))
    top = picture.height + 6
    if beside:
        write(tile, (width - math.ceil(length(note, 14)), top + 5), note, 14, SOFT)
    for line in lines:
        write(tile, (0, top), line, 20, SOFT if soft else INK)
        top += 27
    for line in notes:
        write(tile, (0, top), line, 14, SOFT)
        top += 19
    return tile


def _page(title: str, tiles: Sequence[Image.Image], columns: int, width: int | None = None) -> Image.Image:
    """Tiles in rows under a heading."""
    columns = max(1, min(columns, len(tiles)))
    across = max(tile.width for tile in tiles) + _GAP
    width = width or _GAP + columns * across
    heading = wrapped(title, 26, width - 2 * _GAP) if title else []
    top = _GAP + 36 * len(heading) + (8 if heading else 0)
    rows = [tiles[start : start + columns] for start in range(0, len(tiles), columns)]
    heights = [max(tile.height for tile in row) + _GAP for row in rows]
    page = Image.new("RGB", (width, top + sum(heights)), _PAPER)
    for number, line in enumerate(heading):
        write(page, (_GAP, _GAP + 36 * number), line, 26, INK)
    for row, height in zip(rows, heights, strict=True):
        for column, tile in enumerate(row):
            page.paste(tile, (_GAP + column * across, top))
        top += height
    return page
