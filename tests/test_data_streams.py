"""Streams of text: rows that go on from batch to batch, each label once, a batch that depends on its number alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmattn.data.streams import StreamBatches

TEXT = "First Citizen:\nSpeak, speak.\n\nAll: é 猫\nNo end"
PARTS = ["one", "to be or not", "", "a", "and so on, and on"]
BOS, EOS = 2, 3


def encode(text: str) -> list[int]:
    return [ord(char) for char in text]


def records(texts):
    return [{"id": f"a:{n}", "text": text} for n, text in enumerate(texts)]


def streams(texts=(TEXT,), **options) -> StreamBatches:
    return StreamBatches(records(texts), encode, **{"batch_size": 3, "length": 4, **options})


def rows_of(batches):
    """For each row what is read, told, real and reset, over all batches."""
    batches = list(batches)
    size = len(batches[0][1])
    return [
        [
            (inputs["target_ids"][row], labels[row], weights[row] > 0, bool(inputs["reset"][row]))
            for inputs, labels, weights in batches
        ]
        for row in range(size)
    ]


def same(one, two) -> bool:
    arrays = [
        (one[0]["target_ids"], two[0]["target_ids"]),
        (one[0]["reset"], two[0]["reset"]),
        *zip(one[1:], two[1:], strict=True),
    ]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in arrays)


@given(
    text=st.text("abcdefg", min_size=2, max_size=60),
    rows=st.integers(1, 7),
    length=st.integers(1, 9),
    bos=st.sampled_from([BOS, None]),
)
def test_a_pass_tells_every_token_once_in_order_and_each_row_goes_on(text, rows, length, bos):
    made = streams([text[: len(text) // 2], text[len(text) // 2 :]], batch_size=rows, length=length, bos_id=bos)
    batches = list(made.one_pass())
    segments = -(-(len(text) - (bos is None)) // length)
    assert len(batches) == made.steps_per_epoch == -(-segments // rows)
    assert all(labels.shape == weights.shape == (rows, length) for _, labels, weights in batches)
    told = ""
    for row in rows_of(batches):
        before = None
        for read, labels, real, reset in row:
            assert not labels[~real].any() and not read[~real].any() and (np.diff(real.astype(int)) <= 0).all()
            if not real.any():
                continue
            told += "".join(map(chr, labels[real]))
            np.testing.assert_array_equal(read[real][1:], labels[real][:-1])
            assert reset == (before is None)
            if not reset:
                assert read[0] == before
            elif bos is not None:
                assert read[0] == bos
            before = labels[real][-1]
    assert told == text[bos is None :]


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_documents_begin_with_a_segment_and_a_reset(rows):
    made = streams(PARTS, documents=True, batch_size=rows)
    told, begun = [], 0
    for row in rows_of(made.one_pass()):
        before = None
        for read, labels, real, reset in row:
            if not real.any():
                assert not reset
                continue
            text = "".join(map(chr, labels[real]))
            begins = not told or told[-1].endswith(chr(EOS))
            assert reset == (begins or before is None)
            assert read[0] == (BOS if reset else before)
            told = [*told, text] if begins else [*told[:-1], told[-1] + text]
            begun += begins
            before = labels[real][-1]
    assert told == [text + chr(EOS) for text in PARTS] and begun == len(PARTS)
    assert made.num_tokens == sum(map(len, PARTS))


def test_documents_without_a_start_token_lose_their_first_label():
    made = streams(PARTS, documents=True, bos_id=None, batch_size=1)
    told = [labels[real] for (row,) in [rows_of(made.one_pass())] for _, labels, real, _ in row]
    expected = "".join(text[1:] + chr(EOS) for text in PARTS if text)
    assert "".join(map(chr, np.concatenate(told))) == expected


def test_batch_k_depends_on_k_alone_and_a_pass_follows_the_other():
    made, again = streams(), streams()
    steps = made.steps_per_epoch
    straight = list(itertools.islice(made.iterate(), 2 * steps + 1))
    for start in (0, 1, steps - 1, steps, 2 * steps):
        for one, two in zip(straight[start:], again.iterate(start), strict=False):
            assert same(one, two)
    for one, two in zip(straight, [*made.one_pass(), *made.one_pass()], strict=False):
        assert same(one, two)
    assert [bool(inputs["reset"].all()) for inputs, *_ in straight] == [n % steps == 0 for n in range(2 * steps + 1)]
    inputs, labels, weights = straight[0]
    assert (inputs["target_ids"].dtype, labels.dtype, weights.dtype) == (np.int32, np.int32, np.float32)
    assert inputs["reset"].dtype == bool


def test_rows_begin_anew_by_chance_in_training_alone():
    made = streams(["".join(PARTS) * 40], restarts=0.3)
    steps = made.steps_per_epoch
    batches = list(itertools.islice(made.iterate(), steps))
    resets = np.array([inputs["reset"] for inputs, *_ in batches[1:-1]])
    assert resets.size > 100 and 0.2 < resets.mean() < 0.4 and (resets[0] != resets[1:]).any(axis=1).mean() > 0.5
    for inputs, *_ in batches:
        assert (inputs["target_ids"][inputs["reset"], 0] == 2).all()
    for one, two in zip(batches[3:], made.iterate(3), strict=False):
        assert same(one, two)
    other = streams(["".join(PARTS) * 40], restarts=0.3, seed=1).iterate()
    assert any((one["reset"] != two["reset"]).any() for (one, *_), (two, *_) in zip(batches, other, strict=False))
    assert [inputs["reset"].any() for inputs, *_ in made.one_pass()] == [True] + [False] * (steps - 1)


def test_one_stream_is_the_text_itself():
    batches = list(streams().one_pass(batch_size=1))
    assert len(batches) == -(-len(TEXT) // 4)
    assert "".join(chr(i) for _, labels, weights in batches for i in labels[weights > 0]) == TEXT
    assert [bool(inputs["reset"][0]) for inputs, *_ in batches] == [True] + [False] * (len(batches) - 1)


def test_the_fingerprint_tells_other_batches_apart():
    plain = streams(PARTS)
    assert plain.fingerprint() == streams(PARTS).fingerprint() == streams(["".join(PARTS)]).fingerprint()
    others = [
        streams(PARTS, batch_size=2),
        streams(PARTS, length=5),
        streams(PARTS, bos_id=None),
        streams(PARTS, documents=True),
        streams(PARTS, restarts=0.1),
        streams(PARTS, seed=1),
        streams([*PARTS, "x"]),
    ]
    assert len({each.fingerprint() for each in [plain, *others]}) == 1 + len(others)


def test_impossible_streams_are_refused():
    for options, message in (
        ({"length": 0}, "length=0 is too small"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"restarts": 1.5}, "restarts=1.5 is a probability"),
        ({"texts": [""]}, "needs a text of one token; the source has 0 in 1"),
        ({"texts": ["a"], "bos_id": None}, "needs a text of two tokens; the source has 1 in 1"),
        ({"texts": []}, "needs a text of one token"),
        ({"texts": [], "documents": True}, "needs a text of one token; the source has 0 in 0"),
    ):
        with pytest.raises(ValueError, match=message):
            streams(**options)
    with pytest.raises(ValueError, match="numbered from 0"):
        streams().iterate(-1)
    with pytest.raises(ValueError, match="batch_size=0"):
        streams().one_pass(0)
