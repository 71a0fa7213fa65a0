"""Single training examples and how their images are read: what batches are made of, in this process or in another."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mmattn.data.targets import CaptionTable, pad_targets

Fault = tuple[int, Exception]  # index of the record whose image could not be read, and why


class Reading:
    """Reads the images of a source and remembers those that cannot be read. Can be sent to another process."""

    def __init__(
        self, source: Any, read_image: Callable[..., Any], skip_errors: tuple[type[Exception], ...], image_key: str
    ):
        self.source = source
        self.read_image = read_image
        self.skip_errors = tuple(skip_errors)
        self.image_key = image_key
        self._broken: dict[int, Exception] = {}
        self._shape: tuple[int, ...] | None = None

    def one(self, index: int, mirrored: bool = False) -> tuple[dict[str, Any] | None, np.ndarray | None, list[Fault]]:
        """Read the image of record `index`: (record, array, []), or (None, None, [fault]) where it is unreadable."""
        if index in self._broken:
            return None, None, [(index, self._broken[index])]
        record = self.source[index]
        try:
            image = self._read(record["image"], mirrored)
        except self.skip_errors as error:
            self._broken[index] = _portable(error)
            return None, None, [(index, self._broken[index])]
        except Exception as error:
            portable = _portable(error)
            portable.add_note(f"while reading the image of record {record['id']!r}")
            raise portable from (None if portable is error else error)
        return record, self.checked(image, record["id"]), []

    def _read(self, image: Any, mirrored: bool) -> np.ndarray:
        if self.image_key == "features":  # cannot be turned afterwards: whoever keeps them keeps both
            return np.asarray(self.read_image(image, mirrored=True) if mirrored else self.read_image(image))
        pixels = np.asarray(self.read_image(image))
        return pixels[:, ::-1] if mirrored else pixels

    def checked(self, image: np.ndarray, name: str) -> np.ndarray:
        """Hold that all images have one shape, and that pixels are uint8 (height, width, 3)."""
        if self.image_key == "pixels" and (image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3):
            raise ValueError(f"Pixels must be uint8 (height, width, 3), got {image.dtype} {image.shape} for {name!r}.")
        self._shape = self._shape or image.shape
        if image.shape != self._shape:
            raise ValueError(
                f"All images of a batch must have one shape, got {image.shape} for {name!r} after {self._shape}."
            )
        return image

    def many(self, indices: Sequence[int]) -> tuple[list[dict[str, Any]], list[np.ndarray], list[Fault]]:
        """Read several images and leave out those that cannot be read."""
        results = [self.one(int(index)) for index in indices]
        records = [record for record, _, _ in results if record is not None]
        images = [image for _, image, _ in results if image is not None]
        return records, images, [fault for _, _, faults in results for fault in faults]


class Examples:
    """Makes the example at each place of the endless stream. Can be sent to another process.

    An example is one caption with its image, or with `captions_per_image` an image with so many of its captions.
    """

    def __init__(
        self,
        table: CaptionTable,
        reading: Reading,
        lengths: tuple[int, ...],
        seed: int,
        shuffle: bool,
        flip: str,
        augment: Callable[[np.ndarray, np.random.Generator], np.ndarray] | None,
        captions_per_image: int | None = None,
    ):
        self.table = table
        self.reading = reading
        self.lengths = lengths
        self.seed = seed
        self.shuffle = shuffle
        self.flip = flip
        self.augment = augment
        self.captions_per_image = captions_per_image
        self._passes: dict[int, np.ndarray] = {}
        numbers = np.arange(len(table.images))
        if captions_per_image is None:
            self._captions = list(numbers[:, None])  # the caption numbers of each example
        else:
            starts = np.flatnonzero(np.diff(table.images, prepend=-1))
            self._captions = np.split(numbers, starts[1:])

    def __len__(self) -> int:
        return len(self._captions)

    def number(self, place: int) -> int:
        """The example at a place of the endless stream, by a permutation of all examples for each pass."""
        size = len(self)
        passed, offset = divmod(place, size)
        if not self.shuffle:
            return offset
        order = self._passes.get(passed)
        if order is None:
            order = np.random.default_rng([self.seed, passed]).permutation(size)
            self._passes = {**{k: v for k, v in self._passes.items() if k >= passed - 1}, passed: order}
        return int(order[offset])

    def example(self, place: int) -> tuple[np.ndarray, list[np.ndarray], list[Fault]]:
        """Image, labels of its captions and faults at a place.

        An unreadable image gives way to the next example of the same pass.
        """
        size = len(self)
        begin, offset = place - place % size, place % size
        faults: list[Fault] = []
        for step in range(size):
            rng = np.random.default_rng([self.seed, place])
            captions = self._chosen(self._captions[self.number(begin + (offset + step) % size)], rng)
            mirrored, labels = self._turned(captions, rng)
            record, image, new = self.reading.one(int(self.table.images[captions[0]]), mirrored)
            faults += new
            if record is not None and image is not None:
                if self.augment is not None:
                    image = self.reading.checked(np.asarray(self.augment(image, rng)), record["id"])
                return image, labels, faults
        raise ValueError(
            f"None of the source's {len(self.reading.source)} images can be read; the first: {faults[0][1]}"
        )

    def _chosen(self, captions: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        most = self.captions_per_image
        return captions if most is None or len(captions) <= most else rng.choice(captions, most, replace=False)

    def _turned(self, captions: np.ndarray, rng: np.random.Generator) -> tuple[bool, list[np.ndarray]]:
        """Whether to mirror the image, and the labels that go with it."""
        labels = [self.table.label(number) for number in captions]
        if self.flip == "never" or rng.random() >= 0.5:
            return False, labels
        mirrored = [self.table.mirrored.get(int(number), label) for number, label in zip(captions, labels, strict=True)]
        allowed = [label for label in mirrored if label is not None]
        return (True, allowed) if len(allowed) == len(labels) else (False, labels)

    def collate(self, examples: Sequence[tuple[np.ndarray, list[np.ndarray], list[Fault]]]) -> tuple[Any, ...]:
        """Put examples into one batch, with the faults met on the way; an image short of captions gets empty rows."""
        images, labels, faults = zip(*examples, strict=True)
        rows = self.captions_per_image or 1
        flat = [row for found in labels for row in [*found, *[np.zeros(0, "int32")] * (rows - len(found))]]
        target_ids, padded, weights = pad_targets(flat, self.lengths)
        if self.captions_per_image is not None:
            shape = (len(images), rows, -1)
            target_ids, padded, weights = target_ids.reshape(shape), padded.reshape(shape), weights.reshape(shape)
        inputs = {self.reading.image_key: np.stack(images), "target_ids": target_ids}
        return inputs, padded, weights, [fault for found in faults for fault in found]


def end_with_parent(_worker: int = 0, _workers: int = 0) -> None:
    """Let this worker process end as soon as its parent does, however that ends: grain's workers outlive a kill -9."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _portable(error: Exception) -> Exception:
    """The exception itself where it survives being sent between processes, else its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
