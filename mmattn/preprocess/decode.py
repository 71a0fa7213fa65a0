"""Opens a picture of unknown origin with Pillow: upright, RGB, over white, or one `ImageReadError` that says why not.

Nothing here knows a model or its input size; `image.ImageReader` does the rest.
"""

from __future__ import annotations

import io
import os
import re
import stat
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from mmattn.preprocess.colour import to_rgb
from mmattn.preprocess.quiet import quiet

# Raster formats that Pillow decodes by itself. Left out on purpose: EPS (starts ghostscript), WMF and other stubs, and
# formats without a signature (TGA), which would claim any file. The common ones come first: they need no more plugins.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "AVIF", "JPEG2000", "DIB", "ICO")
MAX_BYTES = 1 << 29  # 512 MiB: more than any photo; a bigger file is not read into memory
_MAX_SCANS = 20  # passes over a full-sized (max_pixels) progressive JPEG; encoders write about 10

Size = tuple[int, int]  # (width, height), Pillow's order
Box = tuple[float, float, float, float]  # (left, top, right, bottom)


class ImageReadError(Exception):
    """A picture could not be read.

    Attributes:
        name: The file, or what stood for it.
        reason: Why, in words.

    >>> print(ImageReadError("cat.jpg", "there is no such file"))
    cat.jpg: there is no such file
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)  # both, so that the error survives the way back from a worker process
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Decoded(NamedTuple):
    """`image` is RGB and upright; the photo fills `extent` of it (fractional after draft mode).

    `size` counts pixels of the upright photo as stored, whatever the scale that `image` was decoded at.
    """

    image: Image.Image
    extent: Box
    size: Size


def decode(
    source: Any,
    *,
    name: str,
    max_pixels: int,
    time_limit: float,
    wanted: Callable[[Size], Size] | None = None,
) -> Decoded:
    """Reads the first frame of `source` upright (EXIF), as RGB, composed over white.

    Args:
        source: Path, encoded bytes, PIL image or uint8 array.
        name: What errors call it.
        max_pixels: Bigger pictures are refused from their header.
        time_limit: Seconds of this thread's processor time, see `ImageReader`.
        wanted: Full size (width, height) -> smallest size that is still useful. A JPEG is then decoded at 1/2, 1/4
            or 1/8 if that is enough. None: always the full size.

    Raises:
        ImageReadError: For every picture that cannot be read.
    """
    try:
        with quiet():
            return _decode(source, max_pixels, time_limit, wanted)
    except _Refused as error:
        raise ImageReadError(name, str(error)) from None
    except Exception as error:  # Pillow's plugins raise a dozen kinds on damaged files, from KeyError to zlib.error
        raise ImageReadError(name, _in_words(error)) from error


def describe(source: Any) -> str:
    """The name of a picture in messages."""
    if isinstance(source, str | os.PathLike):
        return os.fsdecode(os.fspath(source))
    if isinstance(source, Image.Image):
        return os.fsdecode(getattr(source, "filename", "") or f"<PIL image {source.width}x{source.height}>")
    if isinstance(source, np.ndarray):
        return f"<array of shape {source.shape}>"
    return f"<{type(source).__name__}>"


class _Refused(Exception):
    """Raised on the way with the reason; `decode` adds the name."""


def _in_words(error: Exception) -> str:
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    match error:
        case FileNotFoundError():
            return "there is no such file"
        case PermissionError():
            return "no permission to read this file"
        case UnidentifiedImageError():
            return f"this is not a readable picture in one of the formats {', '.join(sorted(FORMATS))}"
        case MemoryError():
            return "decoding it needs more memory than there is"
        case Image.DecompressionBombError():
            return f"the picture is too big ({str(error).partition(',')[0]})"
        case OSError() if error.errno is not None:
            return f"the file cannot be read ({said})"
    return f"the picture is damaged or of an unsupported kind ({said})"


def _decode(source: Any, max_pixels: int, time_limit: float, wanted: Callable[[Size], Size] | None) -> Decoded:
    image = _open(source, max_pixels, time_limit)
    _check_pixels(image.size, max_pixels)
    jpeg = image.format in ("JPEG", "MPO")
    orientation = _orientation(image) if jpeg else 1
    size = _upright_size(image.size, orientation)
    shown: Box = (0, 0, *image.size)  # where the photo lies in the decoded pixels, still as stored
    ours = isinstance(image, ImageFile.ImageFile) and isinstance(image.fp, _TimedBytes)
    if jpeg and ours and wanted is not None:
        draft = image.draft(None, _upright_size(wanted(size), orientation))  # that swap is its own inverse
        shown = draft[1] if draft else shown
    rawmode = image.tile[0][3] if isinstance(image, ImageFile.ImageFile) and image.tile else None
    image.load()
    if not jpeg:
        _check_pixels(image.size, max_pixels)  # an icon's true size shows only now
        orientation = _orientation(image)
        size = _upright_size(image.size, orientation)
        shown = (0, 0, *image.size)
    rgb = to_rgb(image, rawmode)
    extent = _turn_box(shown, rgb.size, orientation)
    return Decoded(rgb.transpose(_TURNS[orientation]) if orientation in _TURNS else rgb, extent, size)


class _TimedBytes(io.BytesIO):
    """Bytes in memory that refuse to be read once the thread has used up its time."""

    def __init__(self, data: bytes, seconds: float) -> None:
        super().__init__(data)
        self.seconds = seconds
        self.end = time.thread_time() + seconds

    def read(self, size: int | None = -1, /) -> bytes:
        if time.thread_time() > self.end:
            raise _Refused(f"decoding took more than the time limit of {self.seconds:g} s")
        return super().read(size)


def _open(source: Any, max_pixels: int, time_limit: float) -> Image.Image:
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if isinstance(source, Image.Image):
        if not isinstance(source, ImageFile.ImageFile):
            return source
        if source.format not in (*FORMATS, "MPO"):  # MPO: what Pillow calls a JPEG that holds several pictures
            raise _Refused(f"format {source.format} is not one of {', '.join(sorted(FORMATS))}; pass image.copy()")
        if source.fp is None or not source.tile or source.tell() or source.decoderconfig:
            return source
        data = _file_content(source.fp)  # not decoded yet: read it ourselves, as if its path had been given
    elif isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
    elif isinstance(source, str | os.PathLike):
        data = _path_content(source)
    else:
        raise _Refused(f"{type(source).__name__} is not a path, encoded bytes, a PIL image or a NumPy array")
    if not data:
        raise _Refused("the file is empty")
    if data[4:12] in (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftypmsf1"):
        raise _Refused("HEIC is not supported; convert the picture to JPEG or PNG")
    image = Image.open(_TimedBytes(data, time_limit), formats=FORMATS)
    if image.info.get("progressive") and _jpeg_scans(data) * image.width * image.height > _MAX_SCANS * max_pixels:
        raise _Refused(f"a progressive JPEG of {image.width}x{image.height} with {_jpeg_scans(data)} scans is no photo")
    return image


def _path_content(path: Any) -> bytes:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # a pipe or a device could keep us waiting for ever
        raise _Refused("this is a folder" if stat.S_ISDIR(status.st_mode) else "this is not a regular file")
    if status.st_size > MAX_BYTES:
        raise _Refused(f"the file has {status.st_size:,} bytes, the limit is {MAX_BYTES:,}")
    with open(path, "rb") as file:
        return file.read(MAX_BYTES)


def _file_content(file: Any) -> bytes:
    position = file.tell()
    file.seek(0)
    try:
        return file.read(MAX_BYTES)
    finally:
        file.seek(position)


def _from_array(array: np.ndarray) -> Image.Image:
    if array.dtype != np.uint8:
        raise _Refused(f"an array must be uint8, 0 to 255, this one is {array.dtype}: scale and convert it first")
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)) or 0 in array.shape:
        raise _Refused(f"an array must be (height, width) or (height, width, 1, 3 or 4), this one is {array.shape}")
    return Image.fromarray(np.ascontiguousarray(array))


def _check_pixels(size: Size, max_pixels: int) -> None:
    if size[0] * size[1] > max_pixels:
        raise _Refused(
            f"the picture has {size[0]}x{size[1]} = {size[0] * size[1]:,} pixels, the limit is {max_pixels:,}"
        )
    if 0 in size:
        raise _Refused(f"the picture has no pixels ({size[0]}x{size[1]})")


_MARKER = re.compile(rb"\xff[\x02-\xcf\xd9-\xfe]")


def _jpeg_scans(data: bytes) -> int:
    """Counts the scans of the first picture: each costs a pass over all pixels, however few bytes it has."""
    position, scans = 2, 0
    while (found := _MARKER.search(data, position)) and found[0] != b"\xff\xd9":
        scans += found[0] == b"\xff\xda"
        position = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")
    return scans


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(0x0112, 1)
    except Exception:  # damaged metadata: the pixels may still be good
        return 1
    return value if value in _TURNS else 1


def _upright_size(size: Size, orientation: int) -> Size:
    return (size[1], size[0]) if orientation >= 5 else size


def _turn_box(box: Box, size: Size, orientation: int) -> Box:
    """Where `box` of a stored picture of `size` lies after it has been turned upright."""
    left, top, right, bottom = box
    if orientation in (2, 3, 7, 8):
        left, right = size[0] - right, size[0] - left
    if orientation in (3, 4, 6, 7):
        top, bottom = size[1] - bottom, size[1] - top
    return (top, left, bottom, right) if orientation >= 5 else (left, top, right, bottom)
