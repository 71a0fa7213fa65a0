"""Plain text for language models: shares cut by characters, windows that depend on (seed, number) alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mmattn.data.text import TextBatches, TextSource
from mmattn.data.text_files import TextFileError


def hydra_config():
    """Where Hydra is installed: the tests of the other laws do not need it."""
    pytest.importorskip("hydra")
    from experiments import config

    return config


TEXT = "First Citizen:\nSpeak, speak.\n\nAll: é 猫\nNo end"


def encode(text: str) -> list[int]:
    return [ord(char) for char in text]


def said(ids: np.ndarray, weights: np.ndarray | None = None) -> str:
    kept = ids.ravel() if weights is None else ids[weights > 0]
    return "".join(map(chr, kept))


def batches(text: str = TEXT, **options) -> TextBatches:
    return TextBatches([{"id": "a:1", "text": text}], encode, **{"batch_size": 3, "length": 4, **options})


def taken(stream, count: int) -> list:
    return list(itertools.islice(stream, count))


@pytest.mark.parametrize("shares", [(0.9, 0.1), (0.7, 0.2, 0.1), (0.5, 0.5)])
def test_shares_are_contiguous_and_records_join_to_the_text(tmp_path, shares):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    parts = [TextSource(file, split, shares) for split in ("train", "valid", "test")[: len(shares)]]
    assert "".join(part.text for part in parts) == TEXT == TextSource(file).text
    before = 0.0
    for part, share in zip(parts, shares, strict=True):
        assert "".join(part[index]["text"] for index in range(len(part))) == part.text
        assert all("\n" not in part[index]["text"][:-1] for index in range(len(part)))
        begin, before = int(round(before * len(TEXT), 6)), before + share
        assert part.text == TEXT[begin : int(round(before * len(TEXT), 6))]
        assert part[0]["id"] == f"a.txt:{TEXT[:begin].count(chr(10)) + 1}"
    assert TextSource(file, "test", (0.9, 0.1)).text == TextSource(file, "valid", (0.9, 0.1)).text


def test_faults_of_a_text_are_named(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"one\ntw\xff\n")
    with pytest.raises(TextFileError, match=r"a.txt:2: not UTF-8"):
        TextSource(file)
    file.write_bytes(b"one")
    with pytest.raises(TextFileError, match="no text in split 'test': 3 characters"):
        TextSource(file, "test", (0.5, 0.5, 0.0))
    with pytest.raises(ValueError, match="2 or 3 numbers from 0 are needed"):
        TextSource(file, "test", (1.0,))
    with pytest.raises(IndexError, match="no record 1: there are 1"):
        TextSource(file)[1]


def test_batch_k_depends_on_seed_and_k_alone():
    ours, again, other = batches(), batches(), batches(seed=1)
    straight = taken(ours.iterate(), 8)
    for start in (0, 3, 7):
        for one, two in zip(straight[start:], taken(again.iterate(start), 8 - start), strict=True):
            np.testing.assert_array_equal(one[0]["target_ids"], two[0]["target_ids"])
            np.testing.assert_array_equal(one[1], two[1])
    assert len({one[1].tobytes() for one in straight}) > 1
    assert straight[0][1].tobytes() != next(other.iterate())[1].tobytes()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("bos_id", [2, None])
def test_a_window_is_a_piece_of_the_text_shifted_by_one(shuffle, bos_id):
    for inputs, labels, weights in taken(batches(shuffle=shuffle, bos_id=bos_id).iterate(), 40):
        read = inputs["target_ids"]
        assert read.shape == labels.shape == weights.shape == (3, 4) and weights.dtype == np.float32
        assert read.dtype == labels.dtype == np.int32 and (weights == 1).all()
        np.testing.assert_array_equal(read[:, 1:], labels[:, :-1])
        for row, told in zip(read, labels, strict=True):
            assert said(told if bos_id else np.concatenate([row, told[-1:]])) in TEXT
            assert row[0] == 2 or bos_id is None


def test_random_windows_are_uniform_over_all_places():
    text = "".join(map(chr, range(97, 117)))  # 20 tokens, 17 windows
    drawn = np.concatenate([labels[:, 0] for _, labels, _ in taken(batches(text, batch_size=50).iterate(), 100)])
    counts = np.bincount(drawn - 97, minlength=17)
    assert len(counts) == 17 and ((counts - 5000 / 17) ** 2 / (5000 / 17)).sum() < 45  # chi2(16): 1 in 7,000


def test_windows_in_order_go_through_the_text_and_begin_again():
    stream = batches(shuffle=False).iterate()
    whole = len(TEXT) // 4
    rows = [said(row) for _, labels, _ in taken(stream, whole) for row in labels]
    assert rows == [TEXT[4 * i : 4 * i + 4] for i in range(whole)] * 3


@pytest.mark.parametrize("length", [1, 4, 7, len(TEXT) - 1])
@pytest.mark.parametrize("bos_id", [2, None])
def test_evaluation_windows_tell_every_token_once(length, bos_id):
    made = batches(length=length, bos_id=bos_id, batch_size=3)
    windows = list(made.windows(2))
    assert {labels.shape for _, labels, _ in windows} == {(2, length)}
    assert "".join(said(labels, weights) for _, labels, weights in windows) == TEXT[bos_id is None :]
    for inputs, labels, weights in windows:
        assert not labels[weights == 0].any() and set(np.unique(weights)) <= {0.0, 1.0}
        if bos_id is None:
            assert said(inputs["target_ids"], weights) in TEXT
    assert made.steps_per_epoch == -(-(len(TEXT) - (bos_id is None)) // (3 * length))


def test_impossible_batches_are_refused():
    for options, message in (
        ({"length": 0}, "length=0 is too small"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": -1}, "seed=-1 is out of range"),
        ({"length": len(TEXT) + 1}, rf"needs {len(TEXT) + 1} tokens; the text has {len(TEXT)}"),
        ({"length": len(TEXT), "bos_id": None}, rf"needs {len(TEXT) + 1} tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            batches(**options)
    with pytest.raises(ValueError, match="numbered from 0"):
        batches().iterate(-1)


def test_tiny_shakespeare_is_cut_as_nanogpt_cuts_it(data_folder):
    root = f"data.root={data_folder}/tinyshakespeare"
    config = hydra_config().resolve(hydra_config().compose("train", ["data=tinyshakespeare", root]))["data"]
    train, valid, test = (hydra_config().instantiate(config[split]) for split in ("train", "valid", "test"))
    assert (len(train.text), len(valid.text)) == (1003854, 111540) and test.text == valid.text
    whole = (data_folder / "tinyshakespeare" / "input.txt").read_text("utf-8")
    assert train.text + valid.text == whole and len(set(whole)) == 65
    made = TextBatches(valid, encode, batch_size=12, length=64)
    assert made.num_tokens == 111540
    assert sum(weights.sum() for *_, weights in made.windows(256)) == 111540
