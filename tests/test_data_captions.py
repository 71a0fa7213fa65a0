"""Caption files: each layout gives the same records, each fault is named with its file and line."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from mmattn.data.captions import CaptionFileError, CocoSource, CsvSource, Flickr8kSource, JsonlSource

DATA = Path(os.environ.get("MMATTN_DATA", Path(__file__).parents[2] / "shared" / "data"))
CAPTIONS = {
    "a.jpg": ["A dog .", "One dog"],
    "b c.jpg": ["Two cats , asleep", 'A "stop" sign'],
    "d.jpg": ["猫が寝ている", "x"],
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    for name in CAPTIONS:
        (tmp_path / "images" / name).write_bytes(b"not opened here")
    return tmp_path


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def plain(source):
    return {record["id"]: record["captions"] for record in (source[index] for index in range(len(source)))}


def write_all_layouts(folder):
    write_jsonl(folder / "list.jsonl", [{"image": name, "captions": texts} for name, texts in CAPTIONS.items()])
    rows = [(name, text) for name, texts in CAPTIONS.items() for text in texts]
    write_jsonl(folder / "rows.jsonl", [{"image": name, "captions": text} for name, text in rows])
    for name, delimiter in (("c.csv", ","), ("c.tsv", "\t")):
        with (folder / name).open("w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file, delimiter=delimiter).writerows([("image", "caption"), *rows])
    listed = [{"image": name, "captions": texts} for name, texts in CAPTIONS.items()]
    (folder / "list.json").write_text(json.dumps(listed))
    ids = {name: 100 + number for number, name in enumerate(CAPTIONS)}
    annotations = [{"id": number, "image_id": ids[name], "caption": text} for number, (name, text) in enumerate(rows)]
    images = [{"id": number, "file_name": name} for name, number in ids.items()]
    (folder / "coco.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    tokens = [f"{name}#{number}\t{text}" for name, texts in CAPTIONS.items() for number, text in enumerate(texts)]
    (folder / "Flickr8k.token.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")


def test_every_layout_gives_the_same_records(folder):
    write_all_layouts(folder)
    sources = [
        JsonlSource(folder / "list.jsonl"),
        JsonlSource(folder / "rows.jsonl"),
        CsvSource(folder / "c.csv"),
        CsvSource(folder / "c.tsv"),
        CocoSource(folder / "list.json"),
        CocoSource(folder / "coco.json"),
        Flickr8kSource(folder),
    ]
    for source in sources:
        assert plain(source) == CAPTIONS
        assert [source[index]["image"] for index in range(3)] == [str(folder / "images" / name) for name in CAPTIONS]
        assert source.skipped == []


def test_images_are_found_beside_the_file_under_images_or_where_the_caller_says(folder, tmp_path):
    rows = [{"image": "a.jpg", "captions": ["x"]}]
    deep = folder / "annotations"
    deep.mkdir()
    for place, name in ((folder, "a.jpg"), (deep, "a.jpg"), (folder, "images/a.jpg")):
        source = JsonlSource(write_jsonl(place / "f.jsonl", [dict(rows[0], image=name)]))
        assert source[0]["image"] == str(folder / "images" / "a.jpg")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.jpg").write_bytes(b"")
    source = JsonlSource(write_jsonl(folder / "g.jsonl", rows), images=elsewhere)
    assert source[0]["image"] == str(elsewhere / "a.jpg")
    with pytest.raises(CaptionFileError, match="no such folder"):
        JsonlSource(folder / "g.jsonl", images=folder / "nowhere")


@pytest.mark.parametrize("name", ["dev", "val", "valid", "validation"])
def test_a_split_answers_to_its_synonyms(folder, name):
    splits = ["train", "dev", "test"]
    pairs = zip(CAPTIONS.items(), splits, strict=True)
    rows = [{"image": image, "captions": texts, "split": split} for (image, texts), split in pairs]
    path = write_jsonl(folder / "f.jsonl", rows)
    assert list(plain(JsonlSource(path, name))) == ["b c.jpg"]


def test_an_unknown_split_lists_those_that_exist(folder):
    path = write_jsonl(folder / "f.jsonl", [{"image": "a.jpg", "captions": ["x"], "split": "train"}])
    with pytest.raises(CaptionFileError, match=r"no entry has split 'test'.*train \(1\)"):
        JsonlSource(path, "test")


GOOD = '{"image": "a.jpg", "captions": ["x"]}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + '{"image": "d.jpg", "captions": ["x"\n', "line 2: not JSON"),
        (GOOD + "\n" + '{"image": "d.jpg"}\n', "line 3: no field 'captions'. Fields here: image"),
        (GOOD + '{"image": "a.jpg", "captions": ["y"]}\n', "line 2: a.jpg again, which has its captions at .*line 1"),
        (GOOD + '{"image": "a.jpg", "captions": "y"}\n', "line 2: a.jpg again"),
        ('{"image": "a.jpg", "captions": [null]}\n', "line 1: the captions of a.jpg must be a text"),
        ('{"image": 7, "captions": ["x"]}\n', "line 1: the image's name must be a text in one line, got 7"),
        ('["a.jpg", "x"]\n', "line 1: an object with 'image' and 'captions' is needed"),
        ("", "no usable image with a caption among 0 entries"),
    ],
)
def test_a_bad_jsonl_line_is_named(folder, text, message):
    (folder / "f.jsonl").write_text(text)
    with pytest.raises(CaptionFileError, match=f"f.jsonl.*{message}"):
        JsonlSource(folder / "f.jsonl")


def test_a_byte_that_is_not_utf8_is_named_with_its_line(folder):
    (folder / "f.jsonl").write_bytes(GOOD.encode() + b'{"image": "\xff"}\n')
    with pytest.raises(CaptionFileError, match=r"f.jsonl, line 2: not UTF-8 \(byte 0xff\)"):
        JsonlSource(folder / "f.jsonl")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("f.csv", "image,caption\na.jpg,a dog, asleep\n", "line 2: 3 fields where the header has 2"),
        ("f.csv", "image,text\na.jpg,a dog\n", "line 2: no field 'caption'. Fields here: image, text"),
        ("f.csv", 'image,caption\na.jpg,"a dog\n', "line 2: not CSV"),
        ("f.tsv", 'image\tcaption\na.jpg\t"a\nd.jpg\tb"\n', "line 3: a quoted field .* several lines"),
    ],
)
def test_a_bad_csv_row_is_named(folder, name, text, message):
    (folder / name).write_text(text)
    with pytest.raises(CaptionFileError, match=f"{name}, {message}"):
        CsvSource(folder / name)


def test_quotes_can_be_ordinary_characters(folder):
    (folder / "f.tsv").write_text('image\tcaption\na.jpg\t"stop" sign\n')
    assert CsvSource(folder / "f.tsv", quotes=False)[0]["captions"] == ['"stop" sign']


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["images"].append({"id": 100, "file_name": "e.jpg"}), r"images\[3\]: id 100 again"),
        (lambda data: data["images"].append({"id": 9, "file_name": "a.jpg"}), r"images\[3\]: file_name a.jpg again"),
        (lambda data: data["images"][1].pop("file_name"), r"images\[1\]: no field 'file_name'"),
        (lambda data: data["annotations"][2].pop("caption"), r"annotations\[2\]: no field 'caption'"),
        (lambda data: data["annotations"][2].update(caption=None), r"annotations\[2\]: the caption must be a text"),
        (lambda data: data.pop("images"), "COCO's layout"),
        (
            lambda data: data["annotations"][2].update(image_id=5),
            r"1 problems.*annotations\[2\]: caption of image_id 5",
        ),
    ],
)
def test_a_bad_coco_entry_is_named(folder, change, message):
    write_all_layouts(folder)
    data = json.loads((folder / "coco.json").read_text())
    change(data)
    (folder / "coco.json").write_text(json.dumps(data))
    with pytest.raises(CaptionFileError, match=f"(?s){message}"):
        CocoSource(folder / "coco.json")


def test_broken_coco_json_is_named_with_its_line(folder):
    (folder / "coco.json").write_text('{"images": [],\n "annotations": [}')
    with pytest.raises(CaptionFileError, match=r"coco.json, line 2: not JSON"):
        CocoSource(folder / "coco.json")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no tab here", "line 3: 'name#k<TAB>caption' is needed"),
        ("a.jpg#0\tagain", "line 3: a.jpg#0 again, which is line 1"),
    ],
)
def test_a_bad_flickr_line_is_named(folder, line, message):
    (folder / "Flickr8k.token.txt").write_text(f"a.jpg#0\tone\nd.jpg#0\ttwo\n{line}\n")
    with pytest.raises(CaptionFileError, match=f"Flickr8k.token.txt, {message}"):
        Flickr8kSource(folder)


def test_flickr_lists_choose_the_images_of_a_split_in_their_order(folder):
    write_all_layouts(folder)
    (folder / "Flickr_8k.devImages.txt").write_text("d.jpg\na.jpg\n")
    assert list(plain(Flickr8kSource(folder, "valid"))) == ["d.jpg", "a.jpg"]
    with pytest.raises(CaptionFileError, match=r"no list \*.testImages.txt.*Flickr_8k.devImages.txt"):
        Flickr8kSource(folder, "test")
    (folder / "Flickr_8k.devImages.txt").write_text("d.jpg\nd.jpg\n")
    with pytest.raises(CaptionFileError, match=r"line 2: d\.jpg again"):
        Flickr8kSource(folder, "valid")


def test_common_faults_are_counted_in_one_error_or_skipped_and_listed(folder):
    rows = [
        {"image": "a.jpg", "captions": ["good", "  ", "also   good\n"]},
        {"image": "d.jpg", "captions": []},
        *({"image": f"missing{number}.jpg", "captions": ["x"]} for number in range(20)),
    ]
    path = write_jsonl(folder / "f.jsonl", rows)
    with pytest.raises(CaptionFileError) as caught:
        JsonlSource(path)
    message = str(caught.value)
    assert "22 problems" in message
    assert "problems='skip'" in message
    assert "line 1: empty caption of a.jpg" in message
    assert "line 2: d.jpg has no caption" in message
    assert "line 5: no image file missing2.jpg" in message
    assert "and 17 more" in message
    source = JsonlSource(path, problems="skip")
    assert plain(source) == {"a.jpg": ["good", "also good"]}
    assert len(source.skipped) == 22
    write_jsonl(path, rows[1:])
    with pytest.raises(
        CaptionFileError, match=r"no usable image with a caption among 21 entries.*\n.*d\.jpg has no caption"
    ):
        JsonlSource(path, problems="skip")


def test_a_missing_caption_file_is_named(tmp_path):
    with pytest.raises(CaptionFileError, match=r"f.jsonl: no such file"):
        JsonlSource(tmp_path / "f.jsonl")
    with pytest.raises(CaptionFileError, match=r"no Flickr8k.token.txt"):
        Flickr8kSource(tmp_path)


def test_a_caller_cannot_change_the_source(folder):
    source = JsonlSource(write_jsonl(folder / "f.jsonl", [{"image": "a.jpg", "captions": ["x"]}]))
    source[0]["image"] = "changed"
    assert source[0]["image"].endswith("a.jpg")
    source[0]["captions"].append("y")
    assert source[0]["captions"] == ["x"]


@pytest.mark.skipif(not (DATA / "flickr8k").exists(), reason="needs the flickr8k folder under MMATTN_DATA")
@pytest.mark.parametrize(("split", "count"), [("train", 6000), ("valid", 1000), ("test", 1000)])
def test_flickr8k_has_its_official_splits_in_both_layouts(split, count):
    official = Flickr8kSource(DATA / "flickr8k", split)
    copy = JsonlSource(DATA / "flickr8k" / "captions.jsonl", split, captions_field="en")
    assert len(official) == len(copy) == count
    words = {name: [text.split() for text in texts] for name, texts in plain(official).items()}
    assert words == {name: [text.split() for text in texts] for name, texts in plain(copy).items()}


@pytest.mark.skipif(not (DATA / "coco-ccby").exists(), reason="needs the coco-ccby folder under MMATTN_DATA")
def test_the_coco_list_form_is_read():
    source = CocoSource(DATA / "coco-ccby" / "captions.json")
    assert (len(source), sum(len(source[index]["captions"]) for index in range(len(source)))) == (73, 365)
    assert len(CocoSource(DATA / "coco-ccby" / "captions.json", "val2017")) == 49
