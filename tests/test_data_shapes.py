"""Drawn shapes: what is shown, said and held out agree, seen from the pixels and from the words alone."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from mmattn.data.drawing import COLOURS, SHAPES
from mmattn.data.shapes import ShapesSource, caption, combinations, patch_coverage, word_roles
from mmattn.data.sheet import contact_sheet

CAPTION = re.compile(r"an? (\w+) (\w+) (left of|right of|above|below) an? (\w+) (\w+)")


def parse(text):
    """The two pairs and their relation, the object that is left or above first: an independent reading."""
    match = CAPTION.fullmatch(text)
    assert match, text
    first, relation, second = (match[1], match[2]), match[3], (match[4], match[5])
    if relation in ("right of", "below"):
        first, second = second, first
    return first, {"right of": "left of", "below": "above"}.get(relation, relation), second


def all_triples(split, size):
    source = ShapesSource(split, size)
    return [parse(source.training_captions(index)[0]) for index in range(size)]


@pytest.fixture(scope="module")
def train_triples():
    return all_triples("train", 6000)


@pytest.fixture(scope="module")
def records():
    return [source[index] for source in map(ShapesSource, ("train", "valid", "test")) for index in range(60)]


def test_a_picture_depends_on_seed_split_and_index_alone():
    source = ShapesSource("train", 50, seed=7)
    backward = [source[index] for index in reversed(range(50))][::-1]
    longer = ShapesSource("train", 1000, seed=7)
    for index in range(50):
        assert np.array_equal(backward[index]["image"], longer[index]["image"])
        assert backward[index]["captions"] == longer[index]["captions"]
    other = ShapesSource("train", 50, seed=8)
    assert sum(np.array_equal(other[index]["image"], backward[index]["image"]) for index in range(50)) == 0
    assert not np.array_equal(ShapesSource("valid", seed=7)[0]["image"], backward[0]["image"])


def test_the_first_caption_is_the_one_to_train_on_and_both_say_the_same(records):
    for record in records:
        source = ShapesSource(record["split"])
        index = int(record["id"].split("-")[1])
        assert source.training_captions(index) == record["captions"][:1]
        assert ShapesSource(record["split"], wording="both").training_captions(index) == record["captions"]
        assert len(set(record["captions"])) == 2
        assert parse(record["captions"][0]) == parse(record["captions"][1])


def test_held_out_combinations_never_occur_in_training(train_triples):
    seen_pairs = {pair for first, _, second in train_triples for pair in (first, second)}
    seen_triples = set(train_triples)
    source = ShapesSource("test")
    kinds = Counter()
    for index, (first, relation, second) in enumerate(all_triples("test", 1000)):
        kind = source._scene(index)[0]
        kinds[kind] += 1
        new_pairs = {first, second} - seen_pairs
        if kind == "pair":
            assert len(new_pairs) == 1
        else:
            assert not new_pairs
            assert (first, relation, second) not in seen_triples
    assert kinds == {"pair": 500, "triple": 500}


def test_validation_and_test_hold_out_different_combinations():
    pairs, triples = combinations()
    held = [set(pairs["valid"]), set(pairs["test"])]
    assert not held[0] & held[1]
    assert not (held[0] | held[1]) & set(pairs["train"])
    assert len(set(pairs["train"]) | held[0] | held[1]) == 64
    assert not set(triples["valid"]) & set(triples["test"])
    kinds = Counter(ShapesSource("valid")._scene(index)[0] for index in range(999))
    assert kinds == {"seen": 333, "pair": 333, "triple": 333}


def test_every_colour_and_shape_is_seen_often_and_with_many_partners(train_triples):
    colours, shapes, pairs = Counter(), Counter(), set()
    for first, _, second in train_triples:
        for colour, shape in (first, second):
            colours[colour] += 1
            shapes[shape] += 1
            pairs.add((colour, shape))
    assert set(colours) == set(COLOURS)
    assert set(shapes) == set(SHAPES)
    assert min(colours.values()) > 0.08 * 12000
    assert min(shapes.values()) > 0.08 * 12000
    for colour, shape in combinations().pairs["test"]:
        assert sum(pair[0] == colour for pair in pairs) >= 6
        assert sum(pair[1] == shape for pair in pairs) >= 6
    relations = Counter(relation for _, relation, _ in train_triples)
    assert min(relations.values()) > 0.45 * 6000


def test_each_relation_word_is_used_equally_often():
    source = ShapesSource("train", 2000, wording="both")
    captions = [text for index in range(2000) for text in source.training_captions(index)]
    words = Counter(CAPTION.fullmatch(text)[3] for text in captions)
    assert len(words) == 4
    assert min(words.values()) > 800


def test_reading_order_names_the_left_or_upper_object_first(records):
    for record in records:
        assert CAPTION.fullmatch(record["captions"][0])[3] in ("left of", "above")


def test_pixels_show_what_the_caption_says(records):
    """The pixels that differ from the ground are the masks', have the named colour, and lie where the relation says."""
    for record in records:
        image = record["image"].astype(float)
        masks = [thing["mask"]() for thing in record["objects"]]
        ground = np.median(image[(masks[0] + masks[1]) == 0], axis=0)
        differs = np.abs(image - ground).max(axis=-1) > 30
        covered = np.maximum(*masks) > 0.5
        assert (differs ^ covered)[np.abs(np.maximum(*masks) - 0.5) > 0.45].sum() == 0
        centres = []
        for thing, mask in zip(record["objects"], masks, strict=True):
            colour = image[mask == 1].mean(axis=0)
            nearest = min(COLOURS, key=lambda name: np.abs(colour - COLOURS[name]).sum())
            assert nearest == thing["colour"]
            rows, columns = np.nonzero(mask)
            assert thing["box"] == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
            centres.append(np.array([thing["box"][0] + thing["box"][2], thing["box"][1] + thing["box"][3]]) / 2)
        offset = centres[1] - centres[0]
        axis = 0 if abs(offset[0]) > abs(offset[1]) else 1
        expected = [("left of", "right of"), ("above", "below")][axis][0 if offset[axis] > 0 else 1]
        assert expected == record["relation"]
        assert abs(offset[axis]) > 1.5 * abs(offset[1 - axis])


def test_objects_never_overlap_nor_leave_the_picture():
    source = ShapesSource("train", 300)
    for index in range(300):
        record = source[index]
        one, two = (thing["box"] for thing in record["objects"])
        assert min(*one, *two) >= 0
        assert max(*one, *two) <= 64
        assert one[2] <= two[0] or two[2] <= one[0] or one[3] <= two[1] or two[3] <= one[1]


def test_shapes_of_one_size_look_different_in_every_turn():
    """The cover of any two shapes, both centred, differs in at least an eighth of the larger one's area."""
    from mmattn.data.drawing import Thing, mask

    turns = np.linspace(-1, 1, 9)
    masks = {
        name: [mask(Thing(("red", name), 16, 16, 12, turn * limit, (0, 0, 0)), 32) for turn in turns]
        for name, limit in SHAPES.items()
    }
    for one in SHAPES:
        for two in SHAPES:
            if one < two:
                closest = min(np.abs(a - b).sum() / max(a.sum(), b.sum()) for a in masks[one] for b in masks[two])
                assert closest > 0.125, (one, two, closest)


def test_patch_coverage_equals_a_loop_over_patches(records):
    for record, (rows, columns) in zip(records[:6], [(8, 8), (4, 4), (2, 8), (16, 4), (1, 1), (64, 64)], strict=True):
        coverage = patch_coverage(record, (rows, columns))
        assert coverage.shape == (2, rows * columns)
        for number, thing in enumerate(record["objects"]):
            mask, high, wide = thing["mask"](), 64 // rows, 64 // columns
            for row in range(rows):
                for column in range(columns):
                    patch = mask[row * high : (row + 1) * high, column * wide : (column + 1) * wide]
                    assert coverage[number, row * columns + column] == pytest.approx(patch.mean(), abs=1e-6)


def test_patch_coverage_refuses_a_grid_that_does_not_divide(records):
    with pytest.raises(ValueError, match=r"grid=\(7, 8\) does not cut 64 x 64"):
        patch_coverage(records[0], (7, 8))


def test_word_roles_name_the_object_that_each_word_speaks_of(records):
    for record in records:
        for sentence in record["captions"]:
            roles = word_roles(record, sentence)
            assert " ".join(word for word, _, _ in roles) == sentence
            for word, role, number in roles:
                if role in ("colour", "shape"):
                    assert record["objects"][number][role] == word
                else:
                    assert (number is None) == (role == "relation")
    with pytest.raises(ValueError, match="no true caption"):
        word_roles(records[0], "a red circle")


def test_a_picture_of_any_size_shows_the_same_scene():
    small, large = (ShapesSource("train", image_size=side)[3] for side in (64, 128))
    assert small["captions"] == large["captions"]
    assert large["image"].shape == (128, 128, 3)
    for one, two in zip(small["objects"], large["objects"], strict=True):
        assert np.abs(np.array(one["box"]) * 2 - np.array(two["box"])).max() <= 3


def test_unfit_arguments_are_refused():
    with pytest.raises(ValueError, match="Splits of the drawn shapes: train, valid, test"):
        ShapesSource("dev")
    with pytest.raises(ValueError, match="size=0"):
        ShapesSource("train", 0)
    with pytest.raises(ValueError, match="image_size=16"):
        ShapesSource("train", image_size=16)
    with pytest.raises(IndexError):
        ShapesSource("train", 10)[10]
    assert ShapesSource("train", 10)[-1]["id"] == "train-000009"


def test_an_article_fits_its_colour():
    assert caption(("orange", "star"), "above", ("red", "ring")) == "an orange star above a red ring"


def test_a_contact_sheet_holds_every_picture(records):
    sheet = np.asarray(contact_sheet(records[:5], columns=3, cell=64, captions=2))
    assert sheet.shape[1] == 8 + 3 * 72
    for number in (0, 1, 2):
        left = 8 + number * 72
        assert np.array_equal(sheet[8:72, left : left + 64], records[number]["image"])
    with pytest.raises(ValueError, match="at least one record"):
        contact_sheet([])
