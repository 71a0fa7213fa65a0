"""Pictures: heat lies where the model looked, in the photo's own geometry, and every text can be drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmattn.pictures import alignment_sheet, attention_sheet, caption_sheet, heat_map, letters, photos

GREY = Image.new("RGB", (400, 100), (128, 128, 128))


def one_hot(rows: int, columns: int, row: int, column: int) -> np.ndarray:
    weights = np.zeros((rows, columns), "float32")
    weights[row, column] = 1.0
    return weights


def brightest(picture: Image.Image) -> tuple[float, float]:
    """(x, y) of the centre of the pixels within 2 % of the brightest."""
    light = np.asarray(picture, "float32").sum(axis=2)
    y, x = np.nonzero(light >= light.max() * 0.98)
    return float(x.mean()), float(y.mean())


@pytest.mark.parametrize("size", [(400, 100), (100, 400), (224, 224), (37, 53)])
@pytest.mark.parametrize("policy", ["squash", "pad", "crop"])
def test_the_heat_of_a_patch_lies_on_that_patch_of_the_photo(size: tuple[int, int], policy: str) -> None:
    """Compared with the patch's centre computed by hand for a square input of 7 x 7 patches."""
    width, height = size
    if policy == "squash":
        box = (0.0, 0.0, width, height)
    else:
        side = max(size) if policy == "pad" else min(size)
        box = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
    photo = Image.new("RGB", size, (128, 128, 128))
    tried = 0
    for row in (1, 3, 5):
        for column in (1, 3, 5):
            x = box[0] + (column + 0.5) / 7 * (box[2] - box[0])
            y = box[1] + (row + 0.5) / 7 * (box[3] - box[1])
            across, down = (box[2] - box[0]) / 7, (box[3] - box[1]) / 7
            if not (across / 2 <= x <= width - across / 2 and down / 2 <= y <= height - down / 2):
                continue  # the patch lies in the padding
            found = brightest(heat_map(photo, one_hot(7, 7, row, column), box))
            assert abs(found[0] - x) <= 0.2 * across + 1, (row, column)
            assert abs(found[1] - y) <= 0.2 * down + 1, (row, column)
            tried += 1
    assert tried >= 3


def test_a_border_patch_is_hot_up_to_the_border() -> None:
    heat = np.asarray(heat_map(GREY, one_hot(4, 4, 0, 0), (0, 0, 400, 100)), "float32").sum(axis=2)
    assert heat[0, 0] >= 0.9 * heat.max()


def test_what_the_model_did_not_see_is_dark_and_the_rest_is_not() -> None:
    seen = np.asarray(heat_map(GREY, one_hot(4, 4, 1, 1), (150, 0, 250, 100)), "float32").sum(axis=2)
    outside = np.concatenate([seen[:, :148], seen[:, 252:]], axis=1)
    assert outside.max() < seen[:, 152:248].min()


def test_the_picture_keeps_the_photos_size_and_shape() -> None:
    assert heat_map(GREY, one_hot(7, 7, 3, 3), (0, 0, 400, 100)).size == (400, 100)


def test_even_attention_looks_even_and_none_looks_dim() -> None:
    even = np.asarray(heat_map(GREY, np.full((7, 7), 1 / 49), (0, 0, 400, 100)), "int32")
    assert np.ptp(even, axis=(0, 1)).max() <= 1
    none = np.asarray(heat_map(GREY, np.zeros((7, 7)), (0, 0, 400, 100)), "int32")
    assert np.ptp(none, axis=(0, 1)).max() <= 1
    assert none.sum() < even.sum()


@pytest.mark.parametrize("size", [(1600, 400), (400, 1600), (640, 480), (1, 1), (3000, 10)])
def test_a_sheet_has_a_tile_for_the_photo_and_for_each_word(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    tile = photos._tile
    monkeypatch.setattr(
        photos, "_tile", lambda picture, text, *rest, **more: drawn.append(text) or tile(picture, text, *rest, **more)
    )
    words = ["a", "dog", "runs", "on", "the", "beach"]
    weights = np.random.default_rng(0).random((6, 5, 7))
    sheet = attention_sheet(Image.new("RGB", size, "green"), "a dog runs on the beach", words, weights)
    assert drawn == ["photo", *words]
    assert sheet.mode == "RGB"
    assert sheet.width <= 1440
    assert sheet.height <= 3200


def test_weights_that_do_not_belong_to_the_words_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(words, rows, columns\) with 1 words; their shape is \(2, 3, 3\)"):
        attention_sheet(GREY, "dog", ["dog"], np.ones((2, 3, 3)))


def test_a_very_tall_photo_leaves_room_for_its_words() -> None:
    sheet = attention_sheet(Image.new("RGB", (3, 900)), "a dog", ["a", "swimming"], np.ones((2, 7, 7)))
    assert sheet.width >= 3 * 90
    assert sheet.height < 900 * 1440 / 900 + 200


def test_contact_sheet_lays_clear_parts_on_white_as_the_model_sees_them() -> None:
    sheet = np.asarray(caption_sheet([(Image.new("RGBA", (60, 60)), "nothing", "")], columns=1, width=300))
    assert sheet[100, 150].tolist() == [255, 255, 255]


def test_contact_sheet_turns_photos_upright_and_takes_paths_images_and_arrays(tmp_path: Path) -> None:
    image = Image.new("RGB", (60, 20), "blue")
    image.paste("red", (0, 0, 30, 20))  # left half red; upright it is the top half
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.png", exif=exif)
    upright = image.transpose(Image.Transpose.ROTATE_270)
    rows = [(tmp_path / "turned.png", "a flag", ""), (upright, "a flag", ""), (np.asarray(upright), "a flag", "")]
    sheet = np.asarray(caption_sheet(rows, columns=3, width=640))
    side = (640 - 16) // 3
    tiles = [sheet[:, 16 + i * side : 16 + i * side + side - 16] for i in range(3)]
    np.testing.assert_array_equal(tiles[0], tiles[1])
    np.testing.assert_array_equal(tiles[1], tiles[2])
    with pytest.raises(ValueError, match="at least one photo"):
        caption_sheet([])


@pytest.mark.parametrize(
    "text", ["dog", "café", "犬が走る", "Hund — läuft", "🐕", "سلام", "", "a\u0000b\tc\n", "\u2047", "x" * 400]
)
@pytest.mark.parametrize("fonts", ["system", "none"])
def test_every_text_is_drawn_within_its_tile(text: str, fonts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fonts == "none":
        monkeypatch.setattr(letters, "_FONTS", ())
    for line in letters.wrapped(text, 20, 200):
        assert letters.length(line, 20) <= 200 or len(line) == 1
        shown, font = letters.letters(line, 20)
        assert font.getlength(shown) >= 0
    sheet = np.asarray(caption_sheet([(GREY, text, text)], columns=1, width=260))
    assert sheet[:, 250:].min() == 255  # nothing beyond the margin


def test_letters_the_font_lacks_become_plain_ones_or_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "_FONTS", ())
    assert letters.letters("café", 20)[0] == "cafe"
    assert letters.letters("犬", 20)[0] == "U+72AC"
    assert letters.letters("dog's", 20)[0] == "dog's"


def lit(sheet: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    """Where an alignment's map has its darkest and its brightest colour; the bar right of it has them too."""
    dark, bright = (np.all(np.asarray(sheet) == shade, axis=2) for shade in ([10, 8, 38], [250, 250, 170]))
    bar = np.nonzero(dark)[1].max() - 13
    return dark[:, :bar], bright[:, :bar]


@pytest.mark.parametrize("targets, sources", [(1, 1), (5, 6), (25, 30), (3, 90), (90, 3)])
def test_each_weight_lights_its_own_cell(targets: int, sources: int) -> None:
    """The bright cell's place in the map, against the place of the weight in its array."""
    for row, column in {(0, 0), (targets - 1, sources - 1), (targets // 2, sources // 3)}:
        weights = one_hot(targets, sources, row, column)
        dark, bright = lit(alignment_sheet(["wort"] * sources, ["word"] * targets, weights))
        y, x = np.nonzero(dark | bright)
        place_y, place_x = np.nonzero(bright)
        cell = (y.max() + 2 - y.min()) / targets  # the last line of the grid is neither dark nor bright
        assert abs(place_y.mean() - (y.min() + (row + 0.5) * cell)) <= 1.5
        assert abs(place_x.mean() - (x.min() + (column + 0.5) * cell)) <= 1.5


@pytest.mark.parametrize(
    "words",
    [["a"], ["Donaudampfschifffahrtsgesellschaft"] * 3, ["", "läuft", "犬", "ماء", "\x1b[2J\n"], ["x"] * 300],
    ids=["short", "long", "odd", "many"],
)
def test_words_on_both_axes_stay_inside_the_picture(words: list[str]) -> None:
    sheet = np.asarray(alignment_sheet(words, words, np.eye(len(words))), "int32")
    for border in (sheet[:8], sheet[-8:], sheet[:, :8], sheet[:, -8:]):
        assert border.min() == 255


def test_long_words_are_cut_and_short_ones_are_not() -> None:
    assert letters.cut("Fahrkarten", 16, 170) == "Fahrkarten"
    assert letters.cut("Donaudampfschifffahrtsgesellschaft", 16, 170).startswith("Donaudampf")
    assert letters.length(letters.cut("W" * 500, 16, 170), 16) <= 170


def test_an_alignment_is_no_bigger_than_a_picture_should_be() -> None:
    assert max(alignment_sheet(["a"] * 700, ["b"] * 600, np.ones((600, 700))).size) < 5000


@pytest.mark.parametrize(
    "sources, targets, weights, words",
    [
        (0, 1, np.ones((1, 0)), "at least one word on each side; there are 0 source words and 1 target words"),
        (2, 3, np.ones((2, 3)), r"\(target words, source words\) = \(3, 2\); their shape is \(2, 3\)"),
        (1, 1, np.array([[np.nan]]), "must be finite"),
        (1, 1, np.array([[-0.1]]), "not negative"),
    ],
)
def test_weights_that_do_not_fit_the_two_sentences_are_refused(
    sources: int, targets: int, weights: np.ndarray, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        alignment_sheet(["a"] * sources, ["b"] * targets, weights)


def test_a_font_of_the_users_own_is_used_or_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(letters, "_FONTS", ())
    monkeypatch.setenv("MMATTN_FONT", str(tmp_path / "none.ttf"))
    with pytest.raises(OSError, match=r"MMATTN_FONT='.*none\.ttf' is no font file"):
        letters.letters("a", 20)
    (tmp_path / "own.ttf").write_bytes(letters._font(None, 20).path.getvalue())
    monkeypatch.setenv("MMATTN_FONT", str(tmp_path / "own.ttf"))
    assert letters.letters("a", 20)[1].path == str(tmp_path / "own.ttf")
