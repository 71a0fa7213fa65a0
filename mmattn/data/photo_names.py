"""Which files of a folder are taken for pictures: by their names. What they hold is seen when they are read."""

from __future__ import annotations

_FORMATS = (
    "avif",
    "bmp",
    "gif",
    "jfif",
    "jp2",
    "jpe",
    "jpeg",
    "jpg",
    "pbm",
    "pgm",
    "png",
    "pnm",
    "ppm",
    "tga",
    "tif",
    "tiff",
    "webp",
)
SUFFIXES = frozenset(f".{name}" for name in _FORMATS)
