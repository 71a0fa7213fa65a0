"""The one image reader for training, inference and export: a picture in, uint8 pixels of the model's input size out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from mmattn.preprocess.decode import Box, ImageReadError, Size, decode, describe

__all__ = ["ImageReadError", "ImageReader"]

_INTERPOLATIONS = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "box": Image.Resampling.BOX,
    "lanczos": Image.Resampling.LANCZOS,
}
_POLICIES = ("squash", "pad", "crop")
_DRAFT_GAP = 2.0  # a JPEG is decoded at no less than twice the size it is needed at
_REDUCING_GAP = 3.0  # and box-reduced to no less than three times; Pillow calls that indistinguishable


@dataclass(frozen=True)
class ImageReader:
    """Reads a picture as uint8 pixels (height, width, 3), RGB, the same wherever the model runs.

    Rules:
        - The first frame or page, turned upright by its EXIF orientation.
        - Transparent parts over white. CMYK by Pillow's own conversion (Adobe's inverted values included); colour
          profiles are not applied.
        - 16-bit grey is v / 257, so 65535 is white. 32-bit integers: the same if all lie in 0 .. 65535, else minimum to
          maximum (0 to maximum if none is negative) becomes 0 .. 255. Floats: 0 .. 1, else 0 .. 255, else 0 .. 65535,
          whichever first holds them all, becomes 0 .. 255; others as 32-bit integers; NaN and infinity count as 0.
        - "squash" brings both sides to the input size, "pad" keeps the whole picture and its shape and fills the rest
          with `fill`, "crop" keeps its shape and takes the largest centred part.
        - A big JPEG is decoded at 1/2, 1/4 or 1/8 where that leaves twice the size needed. The same picture given as
          decoded pixels (an array, a loaded PIL image) is therefore bit-equal except for such JPEGs, where it is close.

    Args:
        size: (height, width) of the model's input.
        resize: "squash", "pad" or "crop".
        interpolation: "bicubic", "bilinear", "box" or "lanczos", all of them antialiased.
        fill: Red, green and blue, 0 to 255, around a padded picture.
        max_pixels: Pictures with more are refused from their header, before they are decoded. Above 178 million,
            Pillow's own limit (`PIL.Image.MAX_IMAGE_PIXELS`) refuses them too. The true size of an icon shows after
            decoding. A picture at the default limit takes about 3 s and, with alpha, 1.2 GB.
        time_limit: Seconds of the reading thread's processor time (so a busy machine or a slow disk refuses nothing)
            after which decoding is stopped. It works in any thread and is looked at whenever the decoder asks for more
            bytes (64 kB for JPEG and PNG). WebP, AVIF and compressed TIFF take all their bytes at once: there only
            `max_pixels` bounds the time. A progressive JPEG may also not cost more than 20 passes over `max_pixels`
            pixels, since a pass can have very few bytes. A picture already decoded is not timed.

    Reading is safe in several threads at once, gives no Python warnings (libtiff itself writes about damaged TIFF files
    to the standard error stream), never starts another program, and accepts the formats AVIF, BMP, GIF, ICO, JPEG,
    JPEG 2000, MPO, PNG, PPM, TIFF and WebP. A file with missing or damaged data is refused, never filled with grey.

    >>> reader = ImageReader(size=(224, 224), resize="pad")
    >>> reader(np.zeros((100, 400, 3), "uint8")).shape
    (224, 224, 3)
    >>> reader.box((400, 100))
    (0.0, -150.0, 400.0, 250.0)
    >>> ImageReader.from_config(reader.get_config()) == reader
    True
    """

    size: tuple[int, int]
    resize: str = "squash"
    interpolation: str = "bicubic"
    fill: tuple[int, int, int] = (0, 0, 0)
    max_pixels: int = 100_000_000
    time_limit: float = 20.0

    def __post_init__(self) -> None:
        for name in ("size", "fill"):  # a configuration brings lists
            values = getattr(self, name)
            if not isinstance(values, list | tuple) or not all(isinstance(value, int) for value in values):
                raise ValueError(
                    f"{name}={values!r} must be whole numbers, such as {[224, 224] if name == 'size' else [0, 0, 0]}."
                )
            object.__setattr__(self, name, tuple(values))
        if len(self.size) != 2 or min(self.size) < 1:
            raise ValueError(f"size={self.size} must be (height, width), both at least 1.")
        if len(self.fill) != 3 or min(self.fill) < 0 or max(self.fill) > 255:
            raise ValueError(f"fill={self.fill} must be three numbers from 0 to 255.")
        if self.resize not in _POLICIES:
            raise ValueError(f"resize={self.resize!r} must be one of {', '.join(_POLICIES)}.")
        if self.interpolation not in _INTERPOLATIONS:
            raise ValueError(f"interpolation={self.interpolation!r} must be one of {', '.join(_INTERPOLATIONS)}.")
        if self.max_pixels < 1 or not self.time_limit > 0:
            raise ValueError(f"max_pixels={self.max_pixels} and time_limit={self.time_limit} must be above 0.")

    def __call__(self, image: Any, name: str | None = None) -> np.ndarray:
        """Reads one picture.

        Args:
            image: A path, the bytes of an image file, a PIL image, or a uint8 array (H, W) or (H, W, 1, 3 or 4).
            name: What an error calls the picture. Default: its path.

        Returns:
            uint8 (height, width, 3), a fresh array.

        Raises:
            ImageReadError: If it cannot be read, whatever is wrong with it.
        """
        decoded = self._decode(image, name, draft=True)
        left, top, right, bottom = self._placed(decoded.size)
        box = self._source_box(decoded.size, decoded.extent)
        width, height = min(right, self.size[1]) - max(left, 0), min(bottom, self.size[0]) - max(top, 0)
        resized = decoded.image.resize(
            (round(width), round(height)), _INTERPOLATIONS[self.interpolation], box=box, reducing_gap=_REDUCING_GAP
        )
        if resized.size != (self.size[1], self.size[0]):
            canvas = Image.new("RGB", (self.size[1], self.size[0]), self.fill)
            canvas.paste(resized, (round(left), round(top)))
            resized = canvas
        return np.array(resized)

    def photo(self, image: Any, name: str | None = None) -> Image.Image:
        """Reads one picture upright and in RGB at its full size: what `box` refers to. Raises `ImageReadError`.

        The result is a copy without metadata, so that reading it again turns nothing twice.
        """
        return Image.fromarray(np.asarray(self._decode(image, name, draft=False).image))

    def box(self, original_size: Size) -> Box:
        """The rectangle of the model's input on the original photo.

        Args:
            original_size: (width, height) of the upright photo, as `photo(...).size`.

        Returns:
            (left, top, right, bottom) in pixels of the photo. Outside of the photo where it was padded.
        """
        left, top = self.to_original((0.0, 0.0), original_size)
        right, bottom = self.to_original((self.size[1], self.size[0]), original_size)
        return (float(left), float(top), float(right), float(bottom))

    def to_input(self, points: Any, original_size: Size) -> np.ndarray:
        """Points (..., 2) as x, y on the upright photo of (width, height) -> the same points in the model's input."""
        left, top, right, bottom = self._placed(original_size)
        return np.asarray(points, np.float64) * (right - left, bottom - top) / original_size + (left, top)

    def to_original(self, points: Any, original_size: Size) -> np.ndarray:
        """Points (..., 2) as x, y in the model's input -> the same points on the upright photo of (width, height)."""
        left, top, right, bottom = self._placed(original_size)
        return (np.asarray(points, np.float64) - (left, top)) * original_size / (right - left, bottom - top)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments as plain JSON values."""
        return {
            "size": list(self.size),
            "resize": self.resize,
            "interpolation": self.interpolation,
            "fill": list(self.fill),
            "max_pixels": self.max_pixels,
            "time_limit": self.time_limit,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ImageReader:
        """The reader that `get_config` described."""
        return cls(**config)

    def _decode(self, image: Any, name: str | None, draft: bool) -> Any:
        return decode(
            image,
            name=describe(image) if name is None else name,
            max_pixels=self.max_pixels,
            time_limit=self.time_limit,
            wanted=self._wanted if draft else None,
        )

    def _placed(self, original_size: Size) -> Box:
        """Where the whole photo lies in the model's input; outside of it where it is cropped."""
        (width, height), (rows, columns) = original_size, self.size
        if self.resize == "squash":
            return (0.0, 0.0, columns, rows)
        if self.resize == "crop":
            scale = max(columns / width, rows / height)
            across, down = (columns - width * scale) / 2, (rows - height * scale) / 2
            return (across, down, columns - across, rows - down)
        scale = min(columns / width, rows / height)
        wide, high = max(1, round(width * scale)), max(1, round(height * scale))
        left, top = (columns - wide) // 2, (rows - high) // 2
        return (left, top, left + wide, top + high)

    def _source_box(self, original_size: Size, extent: Box) -> Box:
        """The part of the decoded picture that goes into the model's input, where the photo fills `extent` of it."""
        (width, height), (x0, y0, x1, y1) = original_size, extent
        left, top, right, bottom = self.box(original_size)
        across, down = (x1 - x0) / width, (y1 - y0) / height
        return (
            max(x0, x0 + left * across),
            max(y0, y0 + top * down),
            min(x1, x0 + right * across),
            min(y1, y0 + bottom * down),
        )

    def _wanted(self, original_size: Size) -> Size:
        left, top, right, bottom = self._placed(original_size)
        return (math.ceil((right - left) * _DRAFT_GAP), math.ceil((bottom - top) * _DRAFT_GAP))
