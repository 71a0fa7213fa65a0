"""Drawing one coloured shape with Pillow, smooth at the edges, and the share of each pixel that it covers."""

from __future__ import annotations

import functools
import math
import random
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 35, 40),
    "orange": (245, 130, 20),
    "yellow": (240, 210, 30),
    "green": (40, 150, 60),
    "blue": (40, 80, 215),
    "purple": (130, 50, 165),
    "pink": (245, 140, 190),
    "black": (35, 35, 40),
}
# Shape -> how far it may be turned either way, in degrees, without changing its name.
SHAPES: dict[str, float] = {
    "circle": 180.0,
    "square": 12.0,
    "triangle": 180.0,
    "star": 180.0,
    "cross": 12.0,
    "ring": 180.0,
    "heart": 20.0,
    "moon": 180.0,
}
_SUPERSAMPLE = 4

Pair = tuple[str, str]  # (colour, shape)


class Thing(NamedTuple):
    """One placed object: centre, radius of the circle around it (pixels), turn (degrees) and colour as drawn."""

    pair: Pair
    x: float
    y: float
    radius: float
    turn: float
    rgb: tuple[int, int, int]


def background(rng: random.Random, side: int) -> np.ndarray:
    """A light, slightly tinted ground whose brightness drifts across the picture: uint8 (side, side, 3)."""
    light = rng.uniform(228, 246)
    tint = np.array([rng.uniform(-6, 6) for _ in range(3)], "float32")
    slope_y, slope_x = (rng.uniform(-8, 8) for _ in range(2))
    ramp = np.linspace(-0.5, 0.5, side, dtype="float32")
    ground = light + slope_y * ramp[:, None, None] + slope_x * ramp[None, :, None] + tint
    return np.clip(ground, 0, 255).astype("uint8")


@functools.cache
def outline(shape: str) -> np.ndarray:
    """Corner points of a polygon inside the unit circle, x to the right and y down: float64 (N, 2)."""
    if shape == "square":
        points = [(math.cos(a), math.sin(a)) for a in (math.pi / 4 + k * math.pi / 2 for k in range(4))]
    elif shape == "triangle":
        points = [(math.sin(a), -math.cos(a)) for a in (k * 2 * math.pi / 3 for k in range(3))]
    elif shape == "star":
        radii = [1.0, 0.42] * 5
        points = [(r * math.sin(k * math.pi / 5), -r * math.cos(k * math.pi / 5)) for k, r in enumerate(radii)]
    elif shape == "cross":
        arm, half = 0.94, 0.31
        quarter = [(half, -arm), (half, -half), (arm, -half)]
        points = quarter.copy()
        for _ in range(3):
            quarter = [(-y, x) for x, y in quarter]
            points += quarter
    else:  # heart
        steps = [k * math.pi / 30 for k in range(60)]
        curve = [
            (16 * math.sin(t) ** 3, -sum(c * math.cos(n * t) for n, c in ((1, 13), (2, -5), (3, -2), (4, -1))))
            for t in steps
        ]
        points = [(x / 17.2, (y - 2.3) / 17.2) for x, y in curve]
    return np.array(points)


def draw(thing: Thing) -> tuple[Image.Image, tuple[int, int]]:
    """Draw one object four times too large and shrink it: its cover (0..255 a pixel) and its upper left corner."""
    left, top = math.floor(thing.x - thing.radius) - 1, math.floor(thing.y - thing.radius) - 1
    width = math.ceil(2 * thing.radius) + 3
    big = Image.new("L", (width * _SUPERSAMPLE, width * _SUPERSAMPLE))
    pen = ImageDraw.Draw(big)
    x, y, radius = (value * _SUPERSAMPLE for value in (thing.x - left, thing.y - top, thing.radius))
    shape, angle = thing.pair[1], math.radians(thing.turn)
    if shape in ("circle", "ring", "moon"):
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
        if shape == "ring":
            pen.ellipse((x - 0.55 * radius, y - 0.55 * radius, x + 0.55 * radius, y + 0.55 * radius), fill=0)
        elif shape == "moon":
            hole, x, y = 0.82 * radius, x + 0.52 * radius * math.cos(angle), y + 0.52 * radius * math.sin(angle)
            pen.ellipse((x - hole, y - hole, x + hole, y + hole), fill=0)
    else:
        turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
        points = outline(shape) @ turn * radius + (x, y)
        pen.polygon([tuple(point) for point in points.tolist()], fill=255)
    return big.reduce(_SUPERSAMPLE), (left, top)


def mask(thing: Thing, side: int) -> np.ndarray:
    """The share of each pixel of the picture that the object covers: float32 (side, side)."""
    cover, corner = draw(thing)
    canvas = Image.new("L", (side, side))
    canvas.paste(cover, corner)
    return np.asarray(canvas, "float32") / 255.0
