"""Batches: a pure function of (seed, number), resumable anywhere, with and without workers or broken files."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mmattn.data.batches import CaptionBatches
from mmattn.data.targets import pad_targets, swap_sides

DATA = Path(os.environ.get("MMATTN_DATA", Path(__file__).parents[2] / "shared" / "data"))
WORDS = [f"w{number}" for number in range(40)] + ["left", "right"]


class Broken(Exception):
    """An image error that cannot be sent between processes as it is (two arguments to build, one kept)."""

    def __init__(self, name, reason):
        super().__init__(f"{name}: {reason}")


class Source:
    """`size` images numbered by their pixels, image i with 1 + i % 3 captions that say i and the caption's number."""

    def __init__(self, size=17, text=None):
        self.size = size
        self.text = text

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        texts = [f"w{index} w{number}" + " w1" * (index % 4) for number in range(1 + index % 3)]
        return {"id": f"i{index}", "image": index, "captions": [self.text] if self.text else texts}


def encode(text):
    return [WORDS.index(word) + 4 for word in text.split()]


def read(index):
    return np.full((2, 4, 3), index, "uint8")


def read_broken(index):
    if index in (3, 4, 11):
        raise Broken(f"i{index}", "cut short")
    return read(index)


def noise(image, rng):
    return image + rng.integers(0, 5, image.shape, "uint8")


def make(size=17, read_image=read, **options):
    options = {"batch_size": 4, "max_length": 8, "threads": 0, **options}
    return CaptionBatches(Source(size), read_image, encode, **options)


def take(stream, count):
    with_end = list(itertools.islice(stream, count))
    stream.close()
    return with_end


def equal(one, two):
    flat = [(*inputs.values(), labels, weights) for inputs, labels, weights in (one, two)]
    return all(a.dtype == b.dtype and a.shape == b.shape and (a == b).all() for a, b in zip(*flat, strict=True))


def seen(batches):
    """(image, labels without padding) of every row, from the arrays alone."""
    return [
        (int(pixels.flat[0]), tuple(int(label) for label in row if label))
        for inputs, labels, _ in batches
        for pixels, row in zip(inputs["pixels"], labels, strict=True)
    ]


def expected(size=17):
    """All (image, labels) in the order of the source, by a plain loop."""
    source = Source(size)
    return [(index, (*encode(text), 3)) for index in range(size) for text in source[index]["captions"]]


def test_every_caption_comes_once_in_each_pass_in_a_new_order():
    count = len(expected())
    batches = make(batch_size=1)
    assert batches.num_examples == count
    rows = seen(take(batches.iterate(), 3 * count))
    passes = [rows[start : start + count] for start in range(0, 3 * count, count)]
    for one in passes:
        assert sorted(one) == sorted(expected())
    assert len({tuple(one) for one in passes}) == 3
    assert passes[0] != expected()


def test_without_shuffle_the_order_is_the_sources_in_every_pass():
    rows = seen(take(make(shuffle=False).iterate(), 20))
    assert rows == list(itertools.islice(itertools.cycle(expected()), 80))


def test_the_seed_decides_the_order():
    first = [seen(take(make(seed=seed).iterate(), 8)) for seed in (0, 0, 1)]
    assert first[0] == first[1]
    assert first[0] != first[2]
    count = len(expected())
    zero, one = (seen(take(make(seed=seed, batch_size=1).iterate(), 2 * count)) for seed in (0, 1))
    assert zero[count:] != one[:count]


def test_steps_per_epoch_batches_hold_every_caption():
    batches = make()
    assert set(seen(take(batches.iterate(), batches.steps_per_epoch))) == set(expected())
    assert (batches.steps_per_epoch - 1) * 4 < batches.num_examples


@pytest.mark.parametrize("start", [0, 1, 7, 8, 9, 100])
@pytest.mark.parametrize("threads", [0, 3])
def test_a_restart_gives_the_batches_of_an_uninterrupted_run(start, threads):
    options = {"flip": "unsided", "augment": noise, "seed": 5}
    whole = take(make(**options).iterate(), start + 4)
    options |= {"read_image": read_broken, "skip_errors": (Broken,)}
    rest = take(make(**options, threads=threads).iterate(start), 4)
    uninterrupted = take(make(**options).iterate(), start + 4)[start:]
    assert all(itertools.starmap(equal, zip(rest, uninterrupted, strict=True)))
    assert len(whole) == start + 4


def test_worker_processes_give_the_same_batches_and_report_the_same_files():
    options = {"read_image": read_broken, "skip_errors": (Broken,), "augment": noise, "flip": "unsided"}
    alone, shared, told = make(**options), make(**options, workers=2), []
    shared.on_error = lambda record, error: told.append((record["id"], str(error)))
    expected_batches = take(alone.iterate(), 16)
    assert all(itertools.starmap(equal, zip(take(shared.iterate(), 10), expected_batches, strict=False)))
    later = take(shared.iterate(start=10), 6)
    assert all(itertools.starmap(equal, zip(later, expected_batches[10:], strict=True)))
    assert sorted(told) == [(f"i{index}", f"Broken: i{index}: cut short") for index in (11, 3, 4)]
    assert shared.unreadable.keys() == alone.unreadable.keys()


def test_an_error_in_a_worker_ends_the_stream_and_names_the_image():
    stream = make(read_image=read_broken, workers=1).iterate()
    with pytest.raises(RuntimeError, match="cut short"):
        take(stream, 20)


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from test_data_batches import make
if __name__ == "__main__":
    stream = make(workers=2).iterate()
    next(stream)
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the processes from Linux' /proc")
def test_worker_processes_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(path=[str(Path(__file__).parent), str(Path(__file__).parents[1])]))
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, str(script)], **options) as process:
        assert process.stdout.readline() == b"ready\n"
        tasks = Path(f"/proc/{process.pid}/task").iterdir()
        children = [child for task in tasks for child in (task / "children").read_text().split()]
        assert len(children) >= 2
        process.kill()

    def alive(number):
        stat = Path(f"/proc/{number}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

    deadline = time.monotonic() + 20
    while any(map(alive, children)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, children))


def test_a_late_start_replays_nothing():
    reads = []
    began = time.perf_counter()
    batches = make(read_image=lambda index: reads.append(index) or read(index))
    take(batches.iterate(start=100_000), 1)
    assert len(reads) == 4
    assert time.perf_counter() - began < 5


def test_an_unreadable_image_gives_its_place_to_the_next_readable_example():
    rows = expected()
    following = []
    for place in range(len(rows)):
        step = next(step for step in range(len(rows)) if rows[(place + step) % len(rows)][0] not in (3, 4, 11))
        following.append(rows[(place + step) % len(rows)])
    batches = make(read_image=read_broken, skip_errors=(Broken,), shuffle=False, batch_size=1)
    assert seen(take(batches.iterate(), len(rows))) == following


def test_an_unreadable_image_is_read_and_reported_once():
    reads, told = [], []

    def reading(index):
        reads.append(index)
        return read_broken(index)

    def tell(record, error):
        told.append((record["id"], error))

    batches = make(read_image=reading, skip_errors=(Broken,), on_error=tell)
    take(batches.iterate(), 40)
    list(batches.examples())
    assert sorted(name for name, _ in told) == ["i11", "i3", "i4"]
    assert [reads.count(index) for index in (3, 4, 11)] == [1, 1, 1]


def test_other_errors_end_the_stream_and_name_the_record():
    with pytest.raises(Exception, match="cut short") as caught:
        take(make(read_image=read_broken, skip_errors=(OSError,)).iterate(), 20)
    assert "record 'i" in "".join(caught.value.__notes__)


def test_a_source_without_any_readable_image_is_an_error():
    def fail(index):
        raise OSError(f"no {index}")

    with pytest.raises(ValueError, match="None of the source's 17 images can be read; the first: no 0"):
        take(make(read_image=fail, skip_errors=(OSError,), shuffle=False).iterate(), 1)


def test_targets_equal_a_loop_over_the_contract():
    for inputs, labels, weights in take(make(seed=3).iterate(), 10):
        target_ids = inputs["target_ids"]
        assert (target_ids.dtype, labels.dtype, weights.dtype) == (np.int32, np.int32, np.float32)
        assert inputs["pixels"].dtype == np.uint8
        for target, label, weight in zip(target_ids.tolist(), labels.tolist(), weights.tolist(), strict=True):
            words = [token for token in label if token > 3]
            rest = [0] * (8 - len(words) - 1)
            assert label == [*words, 3, *rest]
            assert target == [2, *words, *rest]
            assert weight == [1.0] * (len(words) + 1) + [0.0] * len(rest)


def test_rows_are_padded_to_the_smallest_length_that_fits_the_batch():
    widths = set()
    for inputs, labels, _ in take(make(lengths=(4, 5, 6), max_length=7, batch_size=2).iterate(), 30):
        longest = int((labels > 0).sum(axis=1).max())
        assert labels.shape[1] == inputs["target_ids"].shape[1] == min(x for x in (4, 5, 6, 7) if x >= longest)
        widths.add(labels.shape[1])
    assert len(widths) > 1


def test_an_over_long_caption_keeps_its_beginning_and_has_no_end():
    batches = make(max_length=4, batch_size=1, shuffle=False)
    whole = [labels for _, labels in expected()]
    assert batches.over_long == sum(len(labels) > 4 for labels in whole) > 0
    assert [labels for _, labels in seen(take(batches.iterate(), len(whole)))] == [labels[:4] for labels in whole]
    _, labels, weights = pad_targets([np.array([7, 8, 9], "int32")], (3,))
    assert (labels.tolist(), weights.tolist()) == ([[7, 8, 9]], [[1.0, 1.0, 1.0]])


def test_a_caption_without_tokens_is_left_out_and_counted():
    batches = CaptionBatches(Source(), read, lambda text: encode(text) if "w1" in text.split() else [], 4, 8)
    kept = [row for row in expected() if encode("w1")[0] in row[1]]
    assert batches.num_examples == len(kept) > 0
    assert batches.without_tokens == len(expected()) - len(kept)
    with pytest.raises(ValueError, match="no caption to train on: 17 images"):
        CaptionBatches(Source(), read, lambda text: [], 4, 8)


def sided(index):
    """Bright on the side that the caption names: even images say left."""
    image = np.zeros((2, 4, 3), "uint8")
    image[:, :2] = 200
    return image


def test_swap_keeps_every_caption_true_of_its_flipped_image():
    batches = CaptionBatches(Source(30, "w5 left w6"), sided, encode, 6, 8, flip="swap", threads=0)
    told = {"left": 0, "right": 0}
    for inputs, labels, _ in take(batches.iterate(), 20):
        for pixels, row in zip(inputs["pixels"], labels.tolist(), strict=True):
            side = "left" if pixels[0, 0, 0] == 200 else "right"
            assert row[:4] == [*encode(f"w5 {side} w6"), 3]
            told[side] += 1
    assert min(told.values()) > 30


def test_unsided_flips_half_of_the_images_whose_caption_names_no_side():
    for text, least, most in (("w5 left w6", 0, 0), ("w5 w6", 40, 80)):
        batches = CaptionBatches(Source(30, text), sided, encode, 6, 8, flip="unsided", threads=0)
        flipped = sum(int((inputs["pixels"][:, 0, 0, 0] == 0).sum()) for inputs, _, _ in take(batches.iterate(), 20))
        assert least <= flipped <= most


def test_swapping_sides_twice_changes_nothing():
    for text in ("Left of RIGHT", "the left-handed man's right, leftover", "nothing"):
        assert swap_sides(swap_sides(text)) == text
    assert swap_sides("leftover Left") == "leftover Right"


def test_examples_give_each_image_once_without_targets():
    batches = make(read_image=read_broken, skip_errors=(Broken,), threads=2)
    found = []
    for inputs, records in batches.examples(batch_size=5):
        assert list(inputs) == ["pixels"]
        assert inputs["pixels"].shape[0] == len(records)
        assert [record["image"] for record in records] == inputs["pixels"][:, 0, 0, 0].tolist()
        found += [record["id"] for record in records]
    assert found == [f"i{index}" for index in range(17) if index not in (3, 4, 11)]


def test_features_take_the_place_of_pixels():
    batches = make(read_image=lambda index: np.full((5, 3), index, "float16"), image_key="features")
    inputs, _, _ = take(batches.iterate(), 1)[0]
    assert (list(inputs), inputs["features"].dtype, inputs["features"].shape) == (
        ["features", "target_ids"],
        np.float16,
        (4, 5, 3),
    )


def test_several_captions_share_their_image_and_fill_up_with_empty_rows():
    batches = make(captions_per_image=2, batch_size=3)
    assert batches.steps_per_epoch == 6
    counts = np.zeros(17, int)
    for inputs, labels, weights in take(batches.iterate(), 17):  # three whole passes
        assert inputs["target_ids"].shape == labels.shape == weights.shape == (3, 2, 8)
        for image, ids, row, weight in zip(inputs["pixels"], inputs["target_ids"], labels, weights, strict=True):
            index = int(image[0, 0, 0])
            counts[index] += 1
            said = [tuple(int(w) for w in line[line > 3]) for line in row]
            true = {tuple(encode(text)[:8]) for text in Source()[index]["captions"]}
            assert set(said) - {()} <= true and len(set(said)) == 2
            assert sum(bool(line) for line in said) == min(2, 1 + index % 3)
            np.testing.assert_array_equal(weight, row > 0)
            np.testing.assert_array_equal(ids[:, 0], 2)
    np.testing.assert_array_equal(counts, 3)


def test_mirrored_features_are_asked_for_with_the_captions_that_allow_it():
    def features(index, mirrored=False):
        return np.full((2, 3), -index if mirrored else index, "float16")

    texts = [["w1", "w2"], ["left", "w3"]]

    class Two(Source):
        def __getitem__(self, index):
            return {"id": str(index), "image": index + 1, "captions": texts[index]}

    batches = CaptionBatches(
        Two(2), features, encode, 4, max_length=4, captions_per_image=2, flip="unsided", image_key="features"
    )
    values = {float(v) for inputs, _, _ in take(batches.iterate(), 10) for v in inputs["features"][:, 0, 0]}
    assert values == {1.0, -1.0, 2.0}  # the second image has a caption that names a side


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 is too small: at least 1"),
        ({"max_length": 1}, "max_length=1 is too small: at least 2"),
        ({"seed": -1}, "seed=-1 is out of range"),
        ({"lengths": (4, 9)}, r"lengths=\(4, 9\) must lie between 2 and max_length=8"),
        ({"image_key": "photos"}, "'pixels' or 'features'"),
        ({"flip": "always"}, "never, unsided, swap"),
        ({"captions_per_image": 0}, "captions_per_image=0 is too small"),
    ],
)
def test_an_unfit_argument_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_special_ids_from_the_tokenizer_and_unfit_pixels_are_refused():
    with pytest.raises(ValueError, match="returned the special id 2"):
        CaptionBatches(Source(), read, lambda text: [2, 7, 3], 4, 8)
    with pytest.raises(ValueError, match=r"Pixels must be uint8 \(height, width, 3\), got float64 \(2, 4, 3\) for 'i"):
        take(make(read_image=lambda index: read(index) / 255.0).iterate(), 1)
    with pytest.raises(ValueError, match="must have one shape"):
        take(make(read_image=lambda index: np.zeros((2, index + 1, 3), "uint8")).iterate(), 2)
    with pytest.raises(ValueError, match="start=-1"):
        make().iterate(-1)


def test_keras_fit_trains_on_the_stream():
    keras = pytest.importorskip("keras")
    pixels, ids = keras.Input((2, 4, 3), name="pixels"), keras.Input((8,), dtype="int32", name="target_ids")
    image = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(pixels))
    hidden = keras.layers.Embedding(50, 8)(ids) + keras.layers.RepeatVector(8)(keras.layers.Dense(8)(image))
    model = keras.Model({"pixels": pixels, "target_ids": ids}, keras.layers.Dense(50)(hidden))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), weighted_metrics=[])
    batches = make(threads=2)
    history = model.fit(batches.iterate(), steps_per_epoch=9, epochs=2, shuffle=False, verbose=0)
    assert history.history["loss"][1] < history.history["loss"][0]


@pytest.mark.skipif(not (DATA / "flickr8k").exists(), reason="needs the flickr8k folder under MMATTN_DATA")
def test_real_photos_come_with_their_own_captions():
    from PIL import Image

    from mmattn.data.captions import Flickr8kSource

    source = Flickr8kSource(DATA / "flickr8k", "test")
    vocabulary = sorted({word for index in range(1000) for text in source[index]["captions"] for word in text.split()})
    index_of = {word: number + 4 for number, word in enumerate(vocabulary)}
    batches = CaptionBatches(
        source, lambda path: np.asarray(Image.open(path)), lambda text: [index_of[word] for word in text.split()], 8, 40
    )
    assert batches.num_examples == 5000
    photos = {
        np.asarray(Image.open(source[index]["image"])).tobytes(): source[index]["captions"] for index in range(1000)
    }
    for inputs, labels, _ in take(batches.iterate(start=77), 3):
        assert inputs["pixels"].shape == (8, 224, 224, 3)
        for pixels, row in zip(inputs["pixels"], labels, strict=True):
            text = " ".join(vocabulary[token - 4] for token in row if token > 3)
            assert text in photos[pixels.tobytes()]
