"""Pictures with the class of each: photos in a folder a class, drawn shapes, and batches of either.

A source is random access over records `{"image": path or pixels, "label": name of its class, "id": str}`, and has
`classes`, the names in a fixed order, and `label_of(index)` and `id_of(index)`, which open and draw nothing. Where the
mirror image of a picture may be of another class, it says `mirrors = False`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from mmattn.data.captions import CaptionFileError
from mmattn.data.drawing import SHAPES
from mmattn.data.examples import Examples, Fault, Reading
from mmattn.data.photo_names import SUFFIXES
from mmattn.data.picture_batches import PictureBatches, check_stream
from mmattn.data.shapes import ShapesSource
from mmattn.data.splits import SPLITS, check_split, exact_shares
from mmattn.data.targets import CaptionTable, fingerprint_of


class FolderSource:
    """Random access to photos that lie in one folder a class: `folder/cat/1.jpg` is of the class "cat".

    Photos are told by their names' endings and not opened here. Those in deeper folders belong to the class of the
    outermost; hidden files and folders are passed over. Photos are in the order of a hash of their names, so that the
    first of them are of all classes. With a split, those of each class are dealt out in that order, so that each split
    has its share of each class.

    Args:
        folder: holds a folder a class.
        split: "train", "valid" or "test". None takes all photos.
        shares: how much of each class goes to train, valid and test.
        seed: another seed gives another order, and deals the photos out otherwise.

    Raises:
        CaptionFileError: no such folder, or no photo in it.
        ValueError: an unknown split or impossible shares.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     for name in ("cat/1.jpg", "cat/2.png", "dog/1.jpg", "dog/notes.txt"):
    ...         Path(root, name).parent.mkdir(exist_ok=True)
    ...         Path(root, name).touch()
    ...     source = FolderSource(root)
    >>> source.classes, sorted(source.id_of(index) for index in range(len(source)))
    (('cat', 'dog'), ['cat/1.jpg', 'cat/2.png', 'dog/1.jpg'])
    """

    def __init__(
        self,
        folder: str | Path,
        split: str | None = None,
        shares: Sequence[float] = (0.8, 0.1, 0.1),
        seed: int = 0,
    ):
        check_split(split)
        exact = exact_shares(shares)
        root = Path(folder)
        if not root.is_dir():
            raise CaptionFileError(f"{root}: no such folder.")
        found = {path.name: _photos(path) for path in sorted(root.iterdir()) if path.is_dir() and path.name[0] != "."}
        found = {name: photos for name, photos in found.items() if photos}
        self.classes = tuple(found)

        def dealt(photo: str) -> bytes:
            return blake2b(f"{seed}\n{photo}".encode(), digest_size=8).digest()

        self._records: list[tuple[str, str, str]] = []  # path, class, id
        for name, photos in found.items():
            ids = sorted((f"{name}/{photo}" for photo in photos), key=dealt)
            if split is not None:
                cuts = [0, *(round(len(ids) * share) for share in accumulate(exact[:-1])), len(ids)]
                place = SPLITS.index(split)
                ids = ids[cuts[place] : cuts[place + 1]]
            self._records += [(str(root / each), name, each) for each in ids]
        self._records.sort(key=lambda record: dealt(record[2]))
        if not self._records:
            where = f" in split {split!r}" if split else ""
            raise CaptionFileError(f"{root}: no photo{where}. A folder a class is wanted, as in {root / 'cat/1.jpg'}.")

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, name, photo = self._records[index]
        return {"id": photo, "image": path, "label": name}

    def label_of(self, index: int) -> str:
        """The class of photo `index`."""
        return self._records[index][1]

    def id_of(self, index: int) -> str:
        """The id of photo `index`."""
        return self._records[index][2]


class ShapeClasses(ShapesSource):
    """Drawn pictures of two objects, classified by the shape that lies left of, or above, the other one.

    The 16 classes are "circle left of", "circle above", "square left of" and so on. So a model has to find both
    objects, to see how they lie, and to name the shape of the one but not of the other, whatever the colours; and as in
    `ShapesSource`, whole combinations of colour and shape, or of both objects and their relation, are held out.

    Args:
        split, size, seed, image_size: as for `ShapesSource`.

    >>> source = ShapeClasses("test")
    >>> len(source.classes), source.label_of(0) == source[0]["label"]
    (16, True)
    """

    classes = tuple(f"{shape} {relation}" for shape in SHAPES for relation in ("left of", "above"))
    mirrors = False  # in a mirror the other object lies left

    def __init__(self, split: str, size: int | None = None, seed: int = 0, image_size: int = 64):
        super().__init__(split, size, seed, image_size)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "label": self.label_of(index)}

    def label_of(self, index: int) -> str:
        """The class of picture `index`, without drawing it."""
        _, things, relation, _ = self._scene(index)
        return f"{things[0].pair[1]} {relation}"


class ClassBatches(PictureBatches):
    """Batches (inputs, labels, weights) of pictures with their classes: image_key (B, ...), int32 (B,), ones (B,).

    In each pass every picture comes once, in an order drawn anew for each pass; batch k depends on (seed, k) alone. An
    unreadable picture is reported once, and its place goes to the next readable one of the same pass.

    Args:
        source: see the module.
        read_image: as for `mmattn.data.batches.CaptionBatches`.
        classes: names, in the order of the model's outputs.
        batch_size: B.
        flip: mirror half of the pictures; refused where the source says that this can change their class.
        seed, shuffle, workers, threads, image_key, augment, skip_errors, on_error: as for `CaptionBatches`.

    Raises:
        ValueError: an argument out of range, a source without pictures or whose pictures are not to be mirrored, or one
            with a class that is not in `classes`.

    >>> source = ShapeClasses("train", 100)
    >>> batches = ClassBatches(source, lambda image: image, source.classes, batch_size=8)
    >>> inputs, labels, weights = next(batches.iterate(start=1000))
    >>> inputs["pixels"].shape, labels.shape, batches.steps_per_epoch
    ((8, 64, 64, 3), (8,), 13)
    """

    def __init__(
        self,
        source: Any,
        read_image: Callable[..., np.ndarray],
        classes: Sequence[str],
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        workers: int = 0,
        threads: int = 2,
        image_key: str = "pixels",
        flip: bool = False,
        augment: Callable[[np.ndarray, np.random.Generator], np.ndarray] | None = None,
        skip_errors: tuple[type[Exception], ...] = (),
        on_error: Callable[[dict[str, Any], Exception], None] | None = None,
    ):
        check_stream(batch_size, seed, workers, threads, image_key)
        if not len(source):
            raise ValueError("The source has no picture.")
        if missing := [name for name in ("label_of", "id_of") if not callable(getattr(source, name, None))]:
            raise ValueError(f"A source of classes has {' and '.join(missing)}(index), see the head of {__name__}.")
        if flip and not getattr(source, "mirrors", True):
            raise ValueError("flip=true mirrors pictures, and here a mirror image can be of another class: flip=false.")
        numbers = {name: number for number, name in enumerate(classes)}
        names = [source.label_of(index) for index in range(len(source))]
        if strange := sorted(set(names) - numbers.keys()):
            raise ValueError(
                f"{', '.join(strange[:5])}: {len(strange)} classes here that are not among the {len(numbers)} known: "
                f"{', '.join(list(numbers)[:20])}."
            )
        labels = np.array([numbers[name] for name in names], "int32")
        table = CaptionTable(np.arange(len(names), dtype="int32"), labels, np.arange(1, len(names) + 1), {}, 0, 0)
        reading = Reading(source, read_image, skip_errors, image_key)
        examples = _ClassExamples(table, reading, (), seed, shuffle, "unsided" if flip else "never", augment)
        super().__init__(examples, batch_size, workers, threads, on_error)
        self.labels = labels

    def fingerprint(self) -> str:
        """Of the ids and classes of all pictures and the settings; the pictures are not looked at."""
        examples, ids = self._examples, [self.source.id_of(index) for index in range(len(self.source))]
        return fingerprint_of([self.batch_size, examples.seed, examples.shuffle, examples.flip, ids], [self.labels])


class _ClassExamples(Examples):
    """Examples whose only label is the number of a class."""

    def collate(self, examples: Sequence[tuple[np.ndarray, list[np.ndarray], list[Fault]]]) -> tuple[Any, ...]:
        images, labels, faults = zip(*examples, strict=True)
        numbers = np.array([found[0][0] for found in labels], "int32")
        inputs = {self.reading.image_key: np.stack(images)}
        return inputs, numbers, np.ones(len(numbers), "float32"), [fault for found in faults for fault in found]


def _photos(folder: Path) -> list[str]:
    """The photos in a folder and those below it, as sorted paths relative to it, with / between their parts."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        chosen = [name for name in files if name[0] != "." and os.path.splitext(name)[1].lower() in SUFFIXES]
        found += [(Path(parent) / name).relative_to(folder).as_posix() for name in chosen]
    return sorted(found)
