"""A frozen backbone's features, computed once and kept on disk.

A folder holds one subfolder (see `feature_store`) for each combination of backbone (its configuration and weights) and
reader, so that features of another network or another resizing can never be mistaken for these.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from mmattn import backend
from mmattn.encoders.feature_store import FeatureCacheError, FeatureStore, Identity, Image, Writer

_COMMIT_SECONDS = 20.0  # a killed process loses at most this much work


class _Read(NamedTuple):
    """What a reading thread found: an identity, and pixels if their features are not known; or an exception."""

    image: Image
    identity: Identity | None = None
    pixels: np.ndarray | None = None
    error: Exception | None = None


class FeatureCache:
    """Computes a backbone's features of images once, then returns them like a reader returns pixels.

    An image is a path or the bytes of an image file. Call `fill(images)`, then `cache(image)`. A cache can be pickled
    to worker processes, which look up but do not fill. Several processes may fill one folder: they take turns.

    Args:
        folder: where the caches lie; made if need be.
        backbone: a frozen model from pixels (B, height, width, 3), 0 to 255, to a grid (B, rows, columns, C).
        reader: image -> uint8 (height, width, 3), with `get_config()`, such as `ImageReader`.
        mirrored: also keep the features of each image mirrored left to right (mind captions that say left or right).

    Raises:
        FeatureCacheError: the reader has no `get_config`.

    Example:
        >>> import io, tempfile, numpy as np, PIL.Image
        >>> from mmattn.encoders.efficientnet_lite import EfficientNetLite
        >>> from mmattn.preprocess.image import ImageReader
        >>> file = io.BytesIO()
        >>> PIL.Image.new("RGB", (80, 60), "red").save(file, "png")
        >>> cache = FeatureCache(tempfile.mkdtemp(), EfficientNetLite(image_size=64), ImageReader((64, 64)))
        >>> cache.fill([file.getvalue()], progress=False)
        1
        >>> features = cache(file.getvalue())
        >>> features.shape, features.dtype.name
        ((4, 1280), 'float16')
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        backbone: keras.Model,
        reader: Callable[[Any], np.ndarray],
        mirrored: bool = False,
    ) -> None:
        rows, columns, channels = backbone.output_shape[1:]
        self.backbone: keras.Model | None = backbone
        self.reader = reader
        self.mirrored = mirrored
        self.fingerprint = _fingerprint(backbone, reader, mirrored)
        shape = (1 + mirrored, rows * columns, channels)  # view 0 is the photo, view 1 its mirror image
        self._store = FeatureStore(Path(folder) / self.fingerprint[:16], shape)

    @property
    def folder(self) -> Path:
        """Where these features lie."""
        return self._store.folder

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "backbone": None}

    def __len__(self) -> int:
        """The number of different images in the cache."""
        self._store.refresh()
        return len(self._store.rows)

    def __contains__(self, image: Image) -> bool:
        return self._store.find(image) is not None

    def __call__(self, image: Image, mirrored: bool = False) -> np.ndarray:
        """The features of one image, float16 (S, C), a fresh array.

        Raises:
            FeatureCacheError: no features of this image, or the file has changed since they were computed.
            What the reader raises, for an image that it cannot read.
        """
        if mirrored and not self.mirrored:
            raise FeatureCacheError("This cache has no mirrored features: make it with mirrored=True.")
        row = self._store.find(image)
        if row is None:
            self.reader(image)  # an unreadable image gets the reader's own words
            name = f"an image of {len(image)} bytes" if isinstance(image, bytes) else os.fspath(image)
            raise FeatureCacheError(
                f"{self.folder} has no features of {name}: it is new or has changed. Run fill on it."
            )
        return np.array(self._store.row(row)[int(mirrored)])

    def fill(
        self,
        images: Iterable[Image],
        batch_size: int = 32,
        on_error: Callable[[Image, Exception], None] | None = None,
        progress: bool = True,
    ) -> int:
        """Computes what is missing, and returns how many images that was. Killed, it goes on from there the next time.

        Args:
            images: all images. One that is in the cache costs a look at the file's size and time of change.
            batch_size: images in one run of the backbone.
            on_error: called with (image, exception) for each unreadable image, which is then left out. Not given, the
                exception is raised.
            progress: show a progress bar.

        Raises:
            FeatureCacheError: the backbone takes another size than the reader gives, or gives numbers beyond float16.
        """
        if self.backbone is None:
            raise FeatureCacheError("A pickled cache has no backbone. Fill it in the process that made it.")
        images = list(images)
        bar = keras.utils.Progbar(len(images), unit_name="image", verbose=int(progress and bool(images)))
        compute = self._compiled(batch_size)
        added = 0
        with self._store.writing() as writer, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            waiting: dict[str, _Read] = {}
            for read in _ahead(pool, self._read, images, 2 * batch_size):
                if read.identity is None:
                    _report(read, on_error)
                elif read.identity.sha256 in self._store.rows or read.identity.sha256 in waiting:
                    writer.note(read.identity)
                else:
                    waiting[read.identity.sha256] = read
                if len(waiting) == batch_size:
                    added += self._append(writer, compute, waiting)
                writer.commit(after_seconds=_COMMIT_SECONDS)
                bar.add(1)
            added += self._append(writer, compute, waiting)
        return added

    def _read(self, image: Image) -> _Read:
        """Runs in a thread."""
        try:
            try:
                identity = self._store.identify(image)
            except OSError:
                self.reader(image)  # a missing or forbidden file: the reader says it in its own words
                raise
            return _Read(image, identity, None if identity.sha256 in self._store.rows else self.reader(image))
        except Exception as error:
            return _Read(image, error=error)

    def _compiled(self, batch_size: int) -> Callable[[np.ndarray], np.ndarray]:
        """The backbone as a function of any number of uint8 images up to `batch_size`, traced once."""
        backbone: Any = self.backbone

        def run(pixels: Any) -> Any:
            return keras.ops.cast(backbone(pixels, training=False), "float16")

        compiled = backend.compile(run, jit=False, variables_of=backbone)  # XLA: see efficientnet_lite

        def compute(pixels: np.ndarray) -> np.ndarray:
            if pixels.shape[1:] != tuple(backbone.input_shape[1:]):
                raise FeatureCacheError(
                    f"The backbone takes pixels of shape {tuple(backbone.input_shape[1:])}, the reader gives "
                    f"{pixels.shape[1:]}. Give both the same image size."
                )
            padding = np.repeat(pixels[-1:], batch_size - len(pixels), axis=0)
            grid = compiled(keras.ops.convert_to_tensor(np.concatenate([pixels, padding])))
            features = keras.ops.convert_to_numpy(grid)[: len(pixels)]
            if not np.isfinite(features).all():
                raise FeatureCacheError("The backbone gives numbers that float16 cannot hold. Check its weights.")
            return features.reshape(len(pixels), -1, features.shape[-1])

        return compute

    def _append(self, writer: Writer, compute: Callable[[np.ndarray], np.ndarray], waiting: dict[str, _Read]) -> int:
        """Computes the waiting images, empties `waiting`, and returns how many there were."""
        reads = list(waiting.values())
        waiting.clear()
        if reads:
            pixels = np.stack([read.pixels for read in reads if read.pixels is not None])
            views = [pixels, pixels[:, :, ::-1]] if self.mirrored else [pixels]
            rows = np.stack([compute(view) for view in views], axis=1)  # (B, views, S, C)
            writer.append([read.identity for read in reads if read.identity is not None], rows)
        return len(reads)


def _report(read: _Read, on_error: Callable[[Image, Exception], None] | None) -> None:
    assert read.error is not None
    if on_error is None:
        raise read.error
    on_error(read.image, read.error)


def _ahead(
    pool: ThreadPoolExecutor, read: Callable[[Image], _Read], images: list[Image], count: int
) -> Iterator[_Read]:
    """Results in order, at most `count` of them ahead of the consumer."""
    running: collections.deque[Any] = collections.deque()
    try:
        for image in images:
            running.append(pool.submit(read, image))
            if len(running) > count:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()


def _fingerprint(backbone: keras.Model, reader: Any, mirrored: bool) -> str:
    """A SHA-256 of all that decides the features: the network, its weights, and how an image is read."""
    if not hasattr(reader, "get_config"):
        raise FeatureCacheError("The reader needs get_config(), so that another way of reading gets another cache.")
    description = {
        "backbone": _nameless(keras.saving.serialize_keras_object(backbone)),
        "reader": [type(reader).__name__, reader.get_config()],
        "mirrored": mirrored,
    }
    digest = hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode())
    for variable in backbone.weights:
        value = np.ascontiguousarray(variable.numpy())
        digest.update(f"{value.dtype} {value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def _nameless(config: Any) -> Any:
    """A model's configuration without the names that Keras counts up (dense_1, dense_2): they compute nothing."""
    names: dict[str, str] = {}

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            inner = node.get("config")
            if "class_name" in node and isinstance(inner, dict) and isinstance(inner.get("name"), str):
                names.setdefault(inner["name"], f"layer {len(names)}")
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ():
            collect(child)

    def rename(node: Any) -> Any:
        if isinstance(node, dict):
            return {k: rename(v) for k, v in node.items() if k not in ("shared_object_id", "build_config")}
        if isinstance(node, list | tuple):
            return [rename(value) for value in node]
        return names.get(node, node) if isinstance(node, str) else node

    collect(config)
    return rename(config)
