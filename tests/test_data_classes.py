"""Pictures with classes: folders of photos, drawn shapes, batches that a restart repeats, and their scores."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from mmattn.data.captions import CaptionFileError
from mmattn.data.classes import ClassBatches, FolderSource, ShapeClasses
from mmattn.data.shapes import ShapesSource
from mmattn.metrics.classes import class_scores, confusion, per_class
from mmattn.preprocess.image import ImageReader, ImageReadError
from mmattn.training.subset import First


@pytest.fixture
def folder(tmp_path):
    """Three classes of 20, 10 and 5 photos of one colour each, some of them deeper, and what is no photo."""
    for name, count, colour in (("cat", 20, (200, 0, 0)), ("dog", 10, (0, 200, 0)), ("emu", 5, (0, 0, 200))):
        for number in range(count):
            place = tmp_path / name / ("deep" if number % 5 == 0 else ".")
            place.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (12, 12), colour).save(place / f"{number}.png")
    (tmp_path / "cat" / "notes.txt").write_text("no photo")
    (tmp_path / "cat" / ".hidden.png").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / ".git").mkdir()
    return tmp_path


def test_a_folder_is_a_class_and_each_split_has_its_share_of_each(folder):
    whole = FolderSource(folder)
    assert whole.classes == ("cat", "dog", "emu") and len(whole) == 35
    parts = {split: FolderSource(folder, split, (0.6, 0.2, 0.2)) for split in ("train", "valid", "test")}
    ids = [part[index]["id"] for part in parts.values() for index in range(len(part))]
    assert sorted(ids) == sorted(whole[index]["id"] for index in range(len(whole)))
    counts = {split: Counter(part.label_of(i) for i in range(len(part))) for split, part in parts.items()}
    assert counts["train"] == {"cat": 12, "dog": 6, "emu": 3}
    assert counts["valid"] == counts["test"] == {"cat": 4, "dog": 2, "emu": 1}
    assert all(part.classes == whole.classes for part in parts.values())
    other = FolderSource(folder, "train", (0.6, 0.2, 0.2), seed=1)
    assert {other[i]["id"] for i in range(len(other))} != {parts["train"][i]["id"] for i in range(len(other))}
    place = next(index for index in range(35) if whole.id_of(index) == "cat/1.png")
    assert whole[place] == {"id": "cat/1.png", "image": str(folder / "cat/1.png"), "label": "cat"}


def test_the_first_photos_are_of_all_classes(folder):
    for split, most in ((None, 12), ("train", 12), ("valid", 5)):
        first = First(FolderSource(folder, split, (0.6, 0.2, 0.2)), most)
        assert {first.label_of(index) for index in range(most)} == {"cat", "dog", "emu"}


def test_folders_without_photos_are_refused(folder):
    with pytest.raises(CaptionFileError, match="no such folder"):
        FolderSource(folder / "none")
    with pytest.raises(CaptionFileError, match=r"no photo\. A folder a class is wanted, as in .*cat/1\.jpg"):
        FolderSource(folder / "empty")
    with pytest.raises(ValueError, match="shares="):
        FolderSource(folder, "train", (0.5, 0.1, 0.1))


def test_the_class_of_a_drawing_is_what_it_shows():
    source = ShapeClasses("test", 60)
    assert len(source.classes) == 16 == len(set(source.classes))
    for index in range(60):
        record = source[index]
        (x0, y0, x1, y1), (u0, v0, u1, v1) = (thing["box"] for thing in record["objects"])
        right, down = u0 + u1 - x0 - x1, v0 + v1 - y0 - y1
        relation = "left of" if abs(right) > abs(down) else "above"
        assert (right if relation == "left of" else down) > 0
        assert record["label"] == f"{record['objects'][0]['shape']} {relation}" == source.label_of(index)
        np.testing.assert_array_equal(record["image"], ShapesSource("test", 60)[index]["image"])


def test_no_class_is_rare_and_neither_colour_nor_one_object_gives_it_away():
    source = ShapeClasses("train", 3000)
    labels = Counter(source.label_of(index) for index in range(3000))
    assert set(labels) == set(source.classes) and max(labels.values()) < 2 * 3000 / 16


def batches(source, **options):
    return ClassBatches(source, **{"read_image": ImageReader((8, 8)), "classes": ("cat", "dog", "emu"), "batch_size": 4,
                                   "threads": 0, **options})  # fmt: skip


def test_batch_k_depends_on_seed_and_k_alone_and_a_pass_has_each_picture_once(folder):
    source = FolderSource(folder)
    straight = list(itertools.islice(batches(source).iterate(), 20))
    for start in (3, 9, 17):
        for one, two in zip(straight[start:], batches(source).iterate(start), strict=False):
            np.testing.assert_array_equal(one[0]["pixels"], two[0]["pixels"])
            np.testing.assert_array_equal(one[1], two[1])
    labels = np.concatenate([labels for _, labels, _ in straight])
    assert Counter(labels[:35].tolist()) == {0: 20, 1: 10, 2: 5}
    assert not np.array_equal(labels[:35], labels[35:70])
    inputs, first, weights = straight[0]
    assert first.dtype == np.int32 and weights.tolist() == [1.0] * 4 and inputs["pixels"].dtype == np.uint8
    np.testing.assert_array_equal(inputs["pixels"][:, 0, 0].argmax(axis=1), first)  # the colour is the class


def test_a_broken_photo_is_told_once_and_its_place_taken(folder):
    (folder / "dog" / "1.png").write_bytes(b"no photo")
    told = []
    made = batches(FolderSource(folder), skip_errors=(ImageReadError,), on_error=lambda record, _: told.append(record))
    labels = np.concatenate([labels for _, labels, _ in itertools.islice(made.iterate(), 18)])
    assert [record["id"] for record in told] == ["dog/1.png"] and len(labels) == 72
    assert sum(len(records) for _, records in made.examples()) == 34


def test_half_of_the_pictures_are_mirrored_where_that_is_asked_for():
    picture = np.zeros((4, 4, 3), "uint8")
    picture[:, :2] = 255

    class Same:
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return {"id": "0", "image": picture, "label": "a"}

        def label_of(self, index):
            return "a"

        def id_of(self, index):
            return "0"

    made = ClassBatches(Same(), lambda image: image, ["a"], 60, threads=0, flip=True)
    pixels = next(made.iterate())[0]["pixels"]
    assert 15 < (pixels[:, 0, 0, 0] == 0).sum() < 45


def test_the_fingerprint_tells_settings_and_classes(folder):
    source = FolderSource(folder)
    made = [batches(source), batches(source, seed=1), batches(source, batch_size=5), batches(source, flip=True),
            batches(First(source, 30)), batches(source, classes=("emu", "cat", "dog"))]  # fmt: skip
    assert len({each.fingerprint() for each in made}) == len(made)
    named = [source.id_of(index) for index in range(len(source))]
    place = named.index("cat/1.png")
    (folder / "cat" / "1.png").rename(folder / "cat" / "one.png")
    other = FolderSource(folder)
    other._records.insert(place, other._records.pop([other.id_of(i) for i in range(35)].index("cat/one.png")))
    assert [other.label_of(index) for index in range(35)] == [source.label_of(index) for index in range(35)]
    assert batches(other).fingerprint() != made[0].fingerprint()  # another picture of the same class


def test_a_fingerprint_draws_nothing(monkeypatch):
    drawn = []
    monkeypatch.setattr("mmattn.data.shapes.draw", lambda *_: drawn.append(1))
    source = ShapeClasses("train", 9)
    batches(First(source, 5), classes=source.classes).fingerprint()
    assert not drawn and [source.id_of(index) for index in (0, -1)] == ["train-000000", "train-000008"]


def test_pictures_are_not_mirrored_where_their_class_tells_left_from_right():
    source = ShapeClasses("train", 9)
    for each in (source, First(source, 5)):
        with pytest.raises(ValueError, match="a mirror image can be of another class: flip=false"):
            batches(each, classes=source.classes, flip=True)


def test_impossible_batches_are_refused(folder):
    source = FolderSource(folder)
    for options, message in (
        ({"classes": ("cat", "emu")}, "dog: 1 classes here that are not among the 2 known: cat, emu"),
        ({"batch_size": 0}, "batch_size=0 is too small"),
        ({"seed": -1}, "seed=-1 is out of range"),
        ({"image_key": "sound"}, "image_key='sound' is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            batches(source, **options)
    with pytest.raises(ValueError, match=r"has label_of and id_of\(index\)"):
        batches([{"id": "1", "label": "cat"}])


def test_scores_are_those_of_plain_loops():
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(7), 40)
    labels = rng.integers(0, 6, 40)  # none of the last class
    found = class_scores(probabilities, labels)
    best = [int(row.argmax()) for row in probabilities]
    assert found["accuracy"] == np.mean([guess == label for guess, label in zip(best, labels, strict=True)])
    top = [
        label in sorted(range(7), key=lambda c, row=row: -row[c])[:5]
        for row, label in zip(probabilities, labels, strict=True)
    ]
    assert found["top5"] == np.mean(top)
    expected = -np.mean([np.log(row[label]) for row, label in zip(probabilities, labels, strict=True)])
    assert found["loss"] == pytest.approx(expected) == -found["log_likelihood"]
    matrix = confusion(probabilities, labels)
    for row, column in itertools.product(range(7), repeat=2):
        assert matrix[row, column] == sum(a == row and b == column for a, b in zip(labels, best, strict=True))
    table = per_class(matrix, list("abcdefg"))
    assert table["g"] == {"examples": 0, "accuracy": None}
    assert table["a"]["accuracy"] == matrix[0, 0] / (labels == 0).sum()
    assert "top5" not in class_scores(probabilities[:, :5], np.zeros(40, int))
