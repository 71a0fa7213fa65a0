"""Every Pillow mode as 8-bit RGB over white, by the rules that `image.ImageReader` states."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image


def to_rgb(image: Image.Image, rawmode: Any) -> Image.Image:
    """Any mode as RGB, over white where it is transparent."""
    if image.mode == "F" or image.mode.startswith("I"):
        return _grey(image).convert("RGB")
    if image.mode == "LAB":
        from PIL import ImageCms

        transform = ImageCms.buildTransform(ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB")
        return ImageCms.applyTransform(image, transform) or image
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    if rawmode in ("L;2", "L;4", "RGB;16B"):  # Pillow scales such pixels to 8 bits, but not the transparent colour
        image, clear = image.copy(), image.info["transparency"]
        if rawmode == "RGB;16B":
            image.info["transparency"] = tuple(part >> 8 for part in clear)
        else:
            image.info["transparency"] = clear * (85 if rawmode == "L;2" else 17)
    if image.mode in ("La", "RGBa"):
        image = image.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
    rgba = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(rgba, mask=rgba)
    return white


def _grey(image: Image.Image) -> Image.Image:
    """16-bit, 32-bit and float grey as 8 bits."""
    values = np.asarray(image)
    if image.mode.startswith("I;16"):
        values = values.astype(np.uint16, copy=False)  # some are big-endian
        grey = (values // 257 + (values % 257 > 128)).astype(np.uint8)  # = round(values / 257), without a float copy
        if isinstance(clear := image.info.get("transparency"), int):
            grey[values == clear] = 255
        return Image.fromarray(grey)
    values = np.nan_to_num(values.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    if low >= 0:
        steps = (1.0, 255.0, 65535.0) if image.mode == "F" else (65535.0,)
        low, high = 0.0, next((step for step in steps if high <= step), high)
    return Image.fromarray(np.rint((values - low) * (255.0 / max(high - low, 1e-30))).astype(np.uint8))
