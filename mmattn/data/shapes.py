"""Drawn pictures of two coloured shapes with their true captions: no download, and every answer is known.

A picture shows two objects, for example "a red circle left of a blue square". Picture `i` of a split is a pure
function of (seed, split, i): nothing is stored. Some combinations never occur in training, so that a test on them asks
whether a model composes or only remembers:

- pair: a whole (colour, shape) pair that training never shows, although it shows that colour and that shape with many
  partners;
- triple: a whole (pair, relation, pair) that training never shows in either wording, although it shows both pairs in
  other relations.

Which combinations are held out is fixed: it depends neither on the seed nor on the number of pictures, so no two
settings can leak into each other.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from mmattn.data.drawing import COLOURS, SHAPES, Pair, Thing, background, draw, mask

INVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
SPLITS = {"train": ("seen",), "valid": ("seen", "pair", "triple"), "test": ("pair", "triple")}
WORDINGS = ("reading", "both")
DEFAULT_SIZE = {"train": 20_000, "valid": 1_000, "test": 1_000}

Triple = tuple[Pair, str, Pair]  # the first object is left of or above the second


class Combinations(NamedTuple):
    """What each split may show: those of "train" are seen in training, the others are held out."""

    pairs: dict[str, tuple[Pair, ...]]
    triples: dict[str, tuple[Triple, ...]]


@functools.cache
def combinations() -> Combinations:
    """Share all combinations out: one test pair a colour and a shape, four valid pairs, 10 % and 5 % of the triples.

    >>> [len(combinations().pairs[split]) for split in ("train", "valid", "test")]
    [52, 4, 8]
    """
    colours, shapes = list(COLOURS), list(SHAPES)
    test = [(colour, shapes[(3 * i + 1) % 8]) for i, colour in enumerate(colours)]
    valid = [(colours[i], shapes[(3 * i + 2) % 8]) for i in (0, 2, 4, 6)]
    train = [pair for pair in itertools.product(colours, shapes) if pair not in test and pair not in valid]
    triples: dict[str, list[Triple]] = {"train": [], "valid": [], "test": []}
    for first, relation, second in itertools.product(train, ("left of", "above"), train):
        if first != second:
            digest = hashlib.blake2s(repr((first, relation, second)).encode()).digest()
            share = int.from_bytes(digest[:4], "little") % 20
            triples["test" if share < 2 else "valid" if share == 2 else "train"].append((first, relation, second))
    return Combinations(
        {"train": tuple(train), "valid": tuple(valid), "test": tuple(test)},
        {split: tuple(found) for split, found in triples.items()},
    )


class ShapesSource:
    """Random access to drawn pictures: `len(source)` records, `source[i]` draws record `i`.

    Args:
        split: "train" (seen combinations only), "valid" (a third seen, a third pairs, a third triples, held out for
            validation alone) or "test" (half pairs, half triples, held out for the test alone).
        size: Number of pictures. Default: 20,000 for train, 1,000 for valid and test.
        seed: Another seed gives other pictures of the same combinations.
        image_size: Height and width in pixels, at least 32.
        wording: Which of a picture's two true captions are trained on: "reading" names the left or upper object first,
            as one reads; "both" takes either.

    A record is a dict: `id` (str), `image` (uint8 array (image_size, image_size, 3)), `captions` (both true captions,
    the one in reading order first), `objects` (two dicts with `colour`, `shape`, `box` = (x0, y0,
    x1, y1) in pixels and `mask`, a function that returns the share of each pixel it covers as a float32 array; in the
    order of the first caption), `relation` (str), `split` and `kind` ("seen", "pair" or "triple").

    Raises:
        ValueError: an unknown split, a size below 1 or a picture below 32 pixels.

    >>> record = ShapesSource("test")[0]
    >>> record["image"].shape, len(record["captions"]), record["kind"]
    ((64, 64, 3), 2, 'pair')
    """

    def __init__(
        self, split: str, size: int | None = None, seed: int = 0, image_size: int = 64, wording: str = "reading"
    ):
        if split not in SPLITS:
            raise ValueError(f"split={split!r} is unknown. Splits of the drawn shapes: {', '.join(SPLITS)}.")
        if size is not None and size < 1:
            raise ValueError(f"size={size} pictures: at least 1 is needed, or None for {DEFAULT_SIZE[split]:,}.")
        if image_size < 32:
            raise ValueError(f"image_size={image_size} is too small to tell the shapes apart: at least 32 pixels.")
        if wording not in WORDINGS:
            raise ValueError(f"wording={wording!r} is unknown. Wordings: {', '.join(WORDINGS)}.")
        self.wording = wording
        self.split = split
        self.size = DEFAULT_SIZE[split] if size is None else size
        self.seed = seed
        self.image_size = image_size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        kind, things, relation, rng = self._scene(index)
        side = self.image_size
        canvas = Image.fromarray(background(rng, side))
        objects = []
        for thing in things:
            cover, corner = draw(thing)
            canvas.paste(thing.rgb, corner, cover)
            x0, y0, x1, y1 = cover.getbbox() or (0, 0, 0, 0)
            box = (corner[0] + x0, corner[1] + y0, corner[0] + x1, corner[1] + y1)
            cover_of_picture = functools.partial(mask, thing, side)
            objects.append({"colour": thing.pair[0], "shape": thing.pair[1], "box": box, "mask": cover_of_picture})
        first, second = (thing.pair for thing in things)
        return {
            "id": self.id_of(index),
            "image": np.asarray(canvas),
            "captions": true_captions(first, relation, second),
            "objects": objects,
            "relation": relation,
            "split": self.split,
            "kind": kind,
        }

    def id_of(self, index: int) -> str:
        """The id of picture `index`, without drawing it."""
        return f"{self.split}-{index % self.size:06d}"

    def training_captions(self, index: int) -> list[str]:
        """The captions of picture `index` to train on, without drawing it."""
        _, things, relation, _ = self._scene(index)
        return true_captions(things[0].pair, relation, things[1].pair)[: 1 if self.wording == "reading" else 2]

    def _scene(self, index: int) -> tuple[str, tuple[Thing, Thing], str, random.Random]:
        """Choose what picture `index` shows and where; the objects come in the order of the first caption."""
        if not -self.size <= index < self.size:
            raise IndexError(f"picture {index} of {self.size}")
        index %= self.size
        rng = random.Random(f"{self.seed}/{self.split}/{index}")
        kind = SPLITS[self.split][index % len(SPLITS[self.split])]
        first, relation, second = _choose(rng, self.split, kind)
        return kind, _place(rng, first, relation, second, self.image_size), relation, rng


def caption(first: Pair, relation: str, second: Pair) -> str:
    """Word a combination.

    >>> caption(("orange", "heart"), "left of", ("black", "moon"))
    'an orange heart left of a black moon'
    """
    named = [f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {shape}" for colour, shape in (first, second)]
    return f"{named[0]} {relation} {named[1]}"


def true_captions(first: Pair, relation: str, second: Pair) -> list[str]:
    """Both wordings of a picture: the first object in its relation to the second, and the other way round."""
    return [caption(first, relation, second), caption(second, INVERSE[relation], first)]


def word_roles(record: dict[str, Any], sentence: str) -> list[tuple[str, str, int | None]]:
    """Say for each word of a true caption what it is (article, colour, shape or relation) and which of
    `record["objects"]` it speaks of.

    Relation words speak of no single object: None.

    Raises:
        ValueError: the sentence is not one of the record's captions.

    >>> record = ShapesSource("test")[0]
    >>> [role for _, role, _ in word_roles(record, record["captions"][0])][:3]
    ['article', 'colour', 'shape']
    """
    if sentence not in record["captions"]:
        raise ValueError(f"{sentence!r} is no true caption of {record['id']}. Those are: {record['captions']}.")
    words = sentence.split()
    order = (0, 1) if sentence == record["captions"][0] else (1, 0)
    roles = ["article", "colour", "shape"]
    middle = [(word, "relation", None) for word in words[3:-3]]
    return [
        *zip(words[:3], roles, [order[0]] * 3, strict=True),
        *middle,
        *zip(words[-3:], roles, [order[1]] * 3, strict=True),
    ]


def patch_coverage(record: dict[str, Any], grid: tuple[int, int]) -> np.ndarray:
    """Share of each patch that each object covers.

    Args:
        record: A record of `ShapesSource`.
        grid: (rows, columns) of equal patches; they must divide the picture's height and width.

    Returns:
        float32 (2, rows * columns), patches row by row, objects in the order of `record["objects"]`; 1.0 is a patch
        that the object fills.

    >>> coverage = patch_coverage(ShapesSource("test")[0], (8, 8))
    >>> coverage.shape, bool((coverage.sum(axis=0) <= 1.0).all())
    ((2, 64), True)
    """
    rows, columns = grid
    height, width = record["image"].shape[:2]
    if rows < 1 or columns < 1 or height % rows or width % columns:
        raise ValueError(f"grid={grid} does not cut {height} x {width} pixels into equal patches.")
    masks = np.stack([thing["mask"]() for thing in record["objects"]])
    return masks.reshape(2, rows, height // rows, columns, width // columns).mean(axis=(2, 4)).reshape(2, -1)


def _choose(rng: random.Random, split: str, kind: str) -> Triple:
    """Draw the two pairs and their relation as (left or upper, relation, right or lower)."""
    pairs, triples = combinations()
    if kind == "seen":
        return rng.choice(triples["train"])
    if kind == "triple":
        return rng.choice(triples[split])
    chosen = [rng.choice(pairs[split]), rng.choice(pairs["train"])]
    rng.shuffle(chosen)
    return chosen[0], rng.choice(("left of", "above")), chosen[1]


def _place(rng: random.Random, first: Pair, relation: str, second: Pair, side: int) -> tuple[Thing, Thing]:
    """Place both objects clear of each other along the relation's axis, with at most 0.4 of that distance across it."""
    unit = side / 64
    margin, gap = unit, 3 * unit
    r1, r2 = (rng.uniform(9, 14) * unit for _ in range(2))
    slack = side - 2 * margin - gap - 2 * (r1 + r2)
    before, between = sorted(rng.uniform(0, slack) for _ in range(2))
    main1 = margin + before + r1
    main2 = margin + between + 2 * r1 + gap + r2
    across1 = rng.uniform(margin + r1, side - margin - r1)
    reach = 0.4 * (main2 - main1)
    across2 = rng.uniform(max(margin + r2, across1 - reach), min(side - margin - r2, across1 + reach))
    things = []
    for pair, main, across, radius in ((first, main1, across1, r1), (second, main2, across2, r2)):
        x, y = (main, across) if relation == "left of" else (across, main)
        red, green, blue = (min(255, max(0, channel + rng.randint(-10, 10))) for channel in COLOURS[pair[0]])
        turn = rng.uniform(-1, 1) * SHAPES[pair[1]]
        things.append(Thing(pair, x, y, radius, turn, (red, green, blue)))
    return things[0], things[1]
