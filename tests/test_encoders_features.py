"""The feature cache: what it returns is what the backbone computes, however it was filled, killed, moved or shared."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from PIL import Image

from mmattn.encoders import FeatureCache
from mmattn.encoders.feature_store import FeatureCacheError
from mmattn.preprocess.image import ImageReader, ImageReadError

SIZE = (8, 12)


def make_backbone(scale: float = 1 / 255, activation: str = "relu") -> keras.Model:
    """(B, 8, 12, 3) -> (B, 2, 3, 5); the same weights each time, other layer names in each call."""
    layers = [
        keras.layers.Rescaling(scale),
        keras.layers.Conv2D(5, 4, 4, activation=activation, kernel_initializer=keras.initializers.GlorotNormal(seed=1)),
    ]
    return keras.Sequential([keras.Input((*SIZE, 3)), *layers])


def make_photos(folder: Path, count: int) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = []
    for i in range(count):
        paths.append(folder / f"{i:03d}.png")
        noise = np.random.default_rng(i).integers(0, 256, (16, 20, 3), dtype="uint8")
        Image.fromarray(noise).save(paths[-1])
    return paths


def direct(backbone: keras.Model, pixels: np.ndarray) -> np.ndarray:
    return keras.ops.convert_to_numpy(backbone(pixels[None])).reshape(6, 5)


class CountingReader(ImageReader):
    """Counts what it reads."""

    def __call__(self, image: Any, name: str | None = None) -> np.ndarray:
        self.__dict__["reads"] = self.__dict__.get("reads", 0) + 1
        return super().__call__(image, name)


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    return make_photos(tmp_path / "photos", 11)


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return FeatureCache(tmp_path / "cache", make_backbone(), CountingReader(SIZE))


def test_cached_features_equal_computed_ones_in_float16(cache: FeatureCache, photos: list[Path]) -> None:
    assert cache.fill(photos, batch_size=4, progress=False) == 11
    assert len(cache) == 11 and photos[0] in cache
    for path in photos:
        features = cache(path)
        assert features.dtype == np.float16 and features.shape == (6, 5)
        np.testing.assert_allclose(features, direct(cache.backbone, cache.reader(path)), rtol=1e-3, atol=1e-4)
    features[:] = 0  # a fresh array: the cache is not touched
    assert cache(path).any()


def test_mirrored_features_are_those_of_the_mirrored_photo(tmp_path: Path, photos: list[Path]) -> None:
    cache = FeatureCache(tmp_path / "cache", make_backbone(), ImageReader(SIZE), mirrored=True)
    cache.fill(photos, batch_size=3, progress=False)
    for path in photos:
        pixels = cache.reader(path)
        np.testing.assert_allclose(cache(path), direct(cache.backbone, pixels), rtol=1e-3, atol=1e-4)
        mirrored = direct(cache.backbone, pixels[:, ::-1])
        np.testing.assert_allclose(cache(path, mirrored=True), mirrored, rtol=1e-3, atol=1e-4)
    assert not np.array_equal(cache(path), cache(path, mirrored=True))
    with pytest.raises(FeatureCacheError, match="mirrored=True"):
        FeatureCache(tmp_path / "other", make_backbone(), ImageReader(SIZE))(path, mirrored=True)


def test_a_second_fill_reads_no_photo(tmp_path: Path, cache: FeatureCache, photos: list[Path]) -> None:
    cache.fill(photos, progress=False)
    again = FeatureCache(tmp_path / "cache", make_backbone(), CountingReader(SIZE))  # other layer names
    assert again.folder == cache.folder
    assert again.fill(photos, progress=False) == 0
    assert "reads" not in again.reader.__dict__
    np.testing.assert_array_equal(again(photos[3]), cache(photos[3]))


def test_a_fill_adds_only_what_is_new(cache: FeatureCache, photos: list[Path]) -> None:
    assert cache.fill(photos[:5], batch_size=2, progress=False) == 5
    before = [cache(path) for path in photos[:5]]
    assert cache.fill(photos, batch_size=4, progress=False) == 6
    assert cache.reader.__dict__["reads"] == 11
    for path, features in zip(photos, before, strict=False):
        np.testing.assert_array_equal(cache(path), features)
    stored = np.load(cache.folder / "features.npy")  # any NumPy opens the file
    assert stored.shape == (11, 1, 6, 5) and stored.dtype == np.float16
    np.testing.assert_array_equal(stored[10, 0], cache(photos[10]))


def test_same_bytes_share_a_row_by_any_path(cache: FeatureCache, photos: list[Path], tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.png"
    moved.write_bytes(photos[0].read_bytes())
    assert cache.fill([photos[0], moved, photos[0].read_bytes(), photos[0]], progress=False) == 1
    for image in (photos[0], str(moved), moved.read_bytes()):
        np.testing.assert_array_equal(cache(image), cache(photos[0]))
    again = tmp_path / "never_filled.png"
    again.write_bytes(photos[0].read_bytes())
    np.testing.assert_array_equal(cache(again), cache(photos[0]))


def test_a_changed_photo_is_noticed(cache: FeatureCache, photos: list[Path]) -> None:
    cache.fill(photos[:2], progress=False)
    first, second = cache(photos[0]), cache(photos[1])
    photos[0].write_bytes(photos[5].read_bytes())
    os.utime(photos[0], ns=(1, 1))
    with pytest.raises(FeatureCacheError, match=r"000\.png.*new or has changed"):
        cache(photos[0])
    assert photos[0] not in cache
    assert cache.fill(photos[:2], progress=False) == 1
    np.testing.assert_allclose(cache(photos[0]), direct(cache.backbone, cache.reader(photos[5])), rtol=1e-3, atol=1e-4)
    assert not np.array_equal(cache(photos[0]), first)
    np.testing.assert_array_equal(cache(photos[1]), second)


def test_anything_that_changes_the_features_changes_the_folder(tmp_path: Path) -> None:
    def folder(backbone: keras.Model, reader: Any, mirrored: bool = False) -> str:
        return FeatureCache(tmp_path, backbone, reader, mirrored).folder.name

    other_weights = make_backbone()
    other_weights.set_weights([w + 1e-3 for w in other_weights.get_weights()])
    folders = [
        folder(make_backbone(), ImageReader(SIZE)),
        folder(make_backbone(), ImageReader(SIZE), mirrored=True),
        folder(make_backbone(), ImageReader(SIZE, resize="crop")),
        folder(make_backbone(scale=1 / 128), ImageReader(SIZE)),
        folder(make_backbone(activation="tanh"), ImageReader(SIZE)),
        folder(other_weights, ImageReader(SIZE)),
    ]
    assert len(set(folders)) == len(folders)
    assert folders[0] == folder(make_backbone(), ImageReader(SIZE))
    with pytest.raises(FeatureCacheError, match="get_config"):
        folder(make_backbone(), lambda image: image)


def test_unreadable_photos_are_reported_and_left_out(cache: FeatureCache, photos: list[Path], tmp_path: Path) -> None:
    broken, missing = tmp_path / "broken.png", tmp_path / "missing.png"
    broken.write_bytes(photos[0].read_bytes()[:60])
    images = [photos[0], broken, photos[1], missing, photos[2], b"no photo"]
    with pytest.raises(ImageReadError, match="broken"):
        cache.fill(images, progress=False)
    errors: list[tuple[Any, Exception]] = []
    cache.fill(images, on_error=lambda image, error: errors.append((image, error)), progress=False)
    assert [image for image, _ in errors] == [broken, missing, b"no photo"]
    assert all(isinstance(error, ImageReadError) for _, error in errors)
    assert len(cache) == 3
    for image in (broken, missing, b"no photo"):
        with pytest.raises(ImageReadError):  # as the reader itself would say
            cache(image)


def test_work_before_an_error_is_kept(cache: FeatureCache, photos: list[Path], tmp_path: Path) -> None:
    missing = tmp_path / "missing.png"
    with pytest.raises(ImageReadError):
        cache.fill([*photos[:6], missing], batch_size=2, progress=False)
    assert len(cache) == 6
    assert cache.fill(photos, progress=False) == 5


def test_a_pickled_cache_looks_up_but_does_not_fill(cache: FeatureCache, photos: list[Path]) -> None:
    cache.fill(photos[:3], progress=False)
    cache(photos[0])
    data = pickle.dumps(cache)
    assert len(data) < 20_000  # neither the network nor the features travel
    worker = pickle.loads(data)
    np.testing.assert_array_equal(worker(photos[2]), cache(photos[2]))
    cache.fill(photos, progress=False)
    np.testing.assert_array_equal(worker(photos[9]), cache(photos[9]))  # it sees what was added later
    with pytest.raises(FeatureCacheError, match="process that made it"):
        worker.fill(photos)


def test_an_index_or_row_file_that_is_damaged_is_named(cache: FeatureCache, photos: list[Path]) -> None:
    cache.fill(photos, progress=False)
    rows = cache.folder / "features.npy"
    index = cache.folder / "index.json"
    data = rows.read_bytes()
    rows.write_bytes(data[:-2])
    fresh = pickle.loads(pickle.dumps(cache))
    with pytest.raises(FeatureCacheError, match=r"features\.npy.*shorter"):
        fresh(photos[10])
    rows.write_bytes(data)
    index.write_text(index.read_text()[:-9])
    with pytest.raises(FeatureCacheError, match=r"index\.json is damaged"):
        len(cache)


def test_backbone_and_reader_must_agree_on_the_size(tmp_path: Path, photos: list[Path]) -> None:
    with pytest.raises(FeatureCacheError, match=r"\(8, 12, 3\).*\(9, 9, 3\)"):
        FeatureCache(tmp_path / "c", make_backbone(), ImageReader((9, 9))).fill(photos, progress=False)


def test_features_beyond_float16_are_refused(tmp_path: Path, photos: list[Path]) -> None:
    cache = FeatureCache(tmp_path / "c", make_backbone(scale=1e4), ImageReader(SIZE))
    with pytest.raises(FeatureCacheError, match="float16"):
        cache.fill(photos, progress=False)


def test_two_fills_at_once_compute_each_photo_once(tmp_path: Path, photos: list[Path]) -> None:
    caches = [FeatureCache(tmp_path / "cache", make_backbone(), CountingReader(SIZE)) for _ in range(2)]
    added: list[int] = []
    threads = [
        threading.Thread(target=lambda c=c: added.append(c.fill(photos, batch_size=2, progress=False))) for c in caches
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(added) == [0, 11]
    np.testing.assert_array_equal(caches[0](photos[7]), caches[1](photos[7]))


_FILL = """
import sys, time
sys.path[:0] = {path!r}
import mmattn.encoders.features as features
from test_encoders_features import FeatureCache, ImageReader, SIZE, make_backbone
from pathlib import Path

features._COMMIT_SECONDS = 0.0
class Slow(ImageReader):
    def __call__(self, image, name=None):
        time.sleep(0.05)
        return super().__call__(image, name)
Slow.__name__ = "ImageReader"
cache = FeatureCache({folder!r}, make_backbone(), Slow(SIZE))
print("started", flush=True)
cache.fill(sorted(Path({photos!r}).iterdir()), batch_size=2, progress=False)
print("done", flush=True)
"""


@pytest.mark.slow
def test_killed_fills_go_on_where_they_were(tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 40)
    folder = tmp_path / "cache"
    code = _FILL.format(
        path=[str(Path(__file__).parent), str(Path(__file__).parents[1])],
        folder=str(folder),
        photos=str(photos[0].parent),
    )
    cache = FeatureCache(folder, make_backbone(), ImageReader(SIZE))
    lengths = [0]
    for wanted in (4, 20):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        while process.poll() is None and len(cache) < wanted:
            time.sleep(0.02)
        process.kill()
        output, _ = process.communicate()
        assert "started" in output and "done" not in output
        json.loads((cache.folder / "index.json").read_text())
        lengths.append(len(cache))
    assert lengths == sorted(set(lengths)), "each run added rows, none lost any"
    assert cache.fill(photos, progress=False) == 40 - lengths[-1]
    for path in photos:
        np.testing.assert_allclose(cache(path), direct(cache.backbone, cache.reader(path)), rtol=1e-3, atol=1e-4)


def test_progress_counts_every_image(
    cache: FeatureCache, photos: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cache.fill(photos, batch_size=4)
    assert "11/11" in capsys.readouterr().out


def test_bytes_of_a_photo_work_without_a_file(cache: FeatureCache) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20), "teal").save(buffer, "jpeg")
    assert cache.fill([buffer.getvalue()], progress=False) == 1
    expected = direct(cache.backbone, cache.reader(buffer.getvalue()))
    np.testing.assert_allclose(cache(buffer.getvalue()), expected, rtol=1e-3, atol=1e-4)
