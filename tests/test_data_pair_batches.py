"""Laws of the batches of sentence pairs: every pair once a pass, few shapes, no label lost, the same once more."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmattn.data.buckets import make_buckets
from mmattn.data.pair_batches import PairBatches, pad_rows, source_batches

BOS, EOS = 2, 3


def encode(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def pairs(count: int, seed: int = 0, longest: int = 20) -> list[dict]:
    """Pairs whose target tells which source it belongs to: both begin with the pair's own number."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        words = [" ".join(map(str, [number + 10, *rng.integers(4, 9, rng.integers(0, longest))])) for _ in range(2)]
        made.append({"id": str(number), "source": words[0], "targets": [words[1]]})
    return made


def rows(batch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(source, labels) of each real row, taken from the arrays in the simplest way."""
    inputs, labels, weights = batch
    length = inputs["target_ids"].shape[1]
    made: dict[int, list[int]] = {}
    for place, label, weight in zip(inputs["label_places"], labels, weights, strict=True):
        if weight:
            made.setdefault(int(place) // length, []).append(int(label))
    found = []
    for row, target in made.items():
        source = [int(i) for i in inputs["source_ids"][row] if i != 0]
        assert inputs["target_ids"][row, : len(target)].tolist() == [BOS, *target[:-1]]
        assert not inputs["target_ids"][row, len(target) :].any()
        found.append((tuple(source), tuple(target)))
    return found


@pytest.mark.parametrize("max_shapes", [1, 2, 8])
def test_every_pair_comes_once_a_pass_with_all_its_labels(max_shapes):
    source = pairs(300)
    batches = PairBatches(source, encode, tokens_per_batch=90, max_shapes=max_shapes, seed=5)
    wanted = sorted(((*encode(p["source"]), EOS), (*encode(p["targets"][0]), EOS)) for p in source)
    stream = batches.iterate()
    for _ in range(3):
        found = [row for batch in itertools.islice(stream, batches.steps_per_epoch) for row in rows(batch)]
        assert sorted(found) == wanted


def test_twins_are_the_batch_twice_in_as_many_tokens():
    source = pairs(100)
    once = PairBatches(source, encode, tokens_per_batch=60, max_shapes=2, seed=5)
    twins = PairBatches(source, encode, tokens_per_batch=120, max_shapes=2, seed=5, twins=True)
    assert once.steps_per_epoch == twins.steps_per_epoch
    for batch, both in itertools.islice(zip(once.iterate(), twins.iterate(), strict=True), once.steps_per_epoch):
        assert rows(both) == rows(batch) * 2
        labels, places = both[1], both[0]["label_places"]
        half, positions = len(labels) // 2, both[0]["target_ids"].size // 2
        np.testing.assert_array_equal(labels[:half], labels[half:])
        np.testing.assert_array_equal(places[:half], places[half:] - positions)


def test_shapes_are_few_and_a_batch_keeps_to_its_tokens():
    batches = PairBatches(pairs(500), encode, tokens_per_batch=120, max_shapes=5)
    made = list(itertools.islice(batches.iterate(), batches.steps_per_epoch))
    shapes = {(i["source_ids"].shape, i["target_ids"].shape, labels.shape) for i, labels, _ in made}
    assert len(shapes) <= 5
    for inputs, labels, weights in made:
        count, longest = len(inputs["source_ids"]), max(inputs["source_ids"].shape[1], inputs["target_ids"].shape[1])
        assert count == 1 or count * longest <= 120
        assert labels.dtype == inputs["label_places"].dtype == np.int32 and weights.dtype == np.float32
    assert np.mean([weights.mean() for _, _, weights in made]) > 0.9  # hardly a place of the logits is empty


def test_more_shapes_pad_less():
    source = pairs(400, seed=3)
    shares = [PairBatches(source, encode, tokens_per_batch=200, max_shapes=n).padding for n in (1, 2, 4, 8)]
    assert shares == sorted(shares, reverse=True) and shares[-1] < 0.7 * shares[0]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=14), st.integers(1, 4))
def test_bounds_of_the_buckets_have_the_least_padding_of_all(lengths, most):
    lengths = np.array(lengths)
    keys = lengths.max(axis=1)

    def positions(bounds) -> int:
        groups = [lengths[(keys > low) & (keys <= high)] for low, high in zip((0, *bounds), bounds, strict=False)]
        return sum(len(g) * int(g.max(axis=0).sum()) for g in groups if len(g))

    values = sorted(set(keys.tolist()))
    possible = [(*chosen, values[-1]) for n in range(most) for chosen in itertools.combinations(values[:-1], n)]
    buckets = make_buckets(lengths, tokens_per_batch=10_000, max_shapes=most)
    made = sum(len(b.pairs) * (b.source_length + b.target_length) for b in buckets)
    assert len(buckets) <= most and made == min(map(positions, possible))


def test_batch_k_is_a_function_of_seed_and_k_alone():
    source = pairs(120)
    one = PairBatches(source, encode, tokens_per_batch=60, seed=1)
    stream = one.iterate()
    first = [next(stream) for _ in range(2 * one.steps_per_epoch + 3)]
    for start in (0, 5, one.steps_per_epoch, 2 * one.steps_per_epoch + 2):
        again = next(PairBatches(source, encode, tokens_per_batch=60, seed=1).iterate(start))
        for a, b in zip(again[0].values(), first[start][0].values(), strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(again[1], first[start][1])
    other = PairBatches(source, encode, tokens_per_batch=60, seed=2)
    assert any(rows(a) != rows(b) for a, b in zip(other.iterate(), first[:5], strict=False))


def test_passes_differ_in_order_and_company_and_without_shuffling_they_are_equal():
    batches = PairBatches(pairs(200), encode, tokens_per_batch=60)
    stream = batches.iterate()
    passes = [[frozenset(rows(next(stream))) for _ in range(batches.steps_per_epoch)] for _ in range(2)]
    assert passes[0] != passes[1] and set(passes[0]) != set(passes[1])
    still = PairBatches(pairs(200), encode, tokens_per_batch=60, shuffle=False)
    stream = still.iterate()
    passes = [[rows(next(stream)) for _ in range(still.steps_per_epoch)] for _ in range(2)]
    assert passes[0] == passes[1]


def test_each_translation_of_a_source_is_a_pair():
    source = [{"id": "1", "source": "5 6", "targets": ["7", "8 9"]}]
    batches = PairBatches(source, encode)
    assert batches.num_examples == 2
    found = [row for batch in itertools.islice(batches.iterate(), batches.steps_per_epoch) for row in rows(batch)]
    assert sorted(found) == [((5, 6, EOS), (7, EOS)), ((5, 6, EOS), (8, 9, EOS))]


LONG = [
    {"id": "a", "source": "5", "targets": ["6"]},
    {"id": "b", "source": "5 5 5 5 5", "targets": ["6"]},
    {"id": "c", "source": "5", "targets": ["6 7 8 9 9"]},
]


def test_too_long_pairs_are_left_out_and_listed():
    batches = PairBatches(LONG, encode, max_length=4)
    assert batches.num_examples == 1
    assert batches.faults == [(n, "6 tokens; at most max_length=4 fit: left out") for n in "bc"]


def test_too_long_pairs_are_cut_a_target_without_its_end_token():
    batches = PairBatches(LONG, encode, max_length=4, too_long="cut")
    assert batches.num_examples == 3
    assert batches.faults == [(n, "6 tokens; at most max_length=4 fit: cut") for n in "bc"]
    found = {row for batch in itertools.islice(batches.iterate(), batches.steps_per_epoch) for row in rows(batch)}
    assert found == {((5, EOS), (6, EOS)), ((5, 5, 5, EOS), (6, EOS)), ((5, EOS), (6, 7, 8, 9))}


def test_too_long_pairs_are_refused_by_name():
    with pytest.raises(ValueError, match=r'b: 6 tokens; at most max_length=4 fit\. too_long="skip"'):
        PairBatches(LONG, encode, max_length=4, too_long="error")


def test_sources_come_once_each_the_shortest_first():
    source = pairs(50)
    found = list(source_batches(source, encode, 8, max_length=40))
    assert sorted(r["id"] for _, records in found for r in records) == sorted(p["id"] for p in source)
    widths = [inputs["source_ids"].shape[1] for inputs, _ in found]
    assert widths == sorted(widths) and {len(records) for _, records in found[:-1]} == {8}
    for inputs, records in found:
        for row, record in zip(inputs["source_ids"], records, strict=True):
            assert [i for i in row if i] == [*encode(record["source"]), EOS]


def test_sources_of_different_widths_never_meet():
    source = pairs(50)
    width = lambda length: 4 * -(-length // 4)  # noqa: E731
    found = list(source_batches(source, encode, 8, max_length=40, width=width))
    assert sorted(r["id"] for _, records in found for r in records) == sorted(p["id"] for p in source)
    widths = [{width(len(encode(record["source"])) + 1) for record in records} for _, records in found]
    assert all(len(several) == 1 for several in widths) and len(set.union(*widths)) > 2


@pytest.mark.parametrize("change", ["nothing", "a word", "the order", "the seed", "the shapes"])
def test_a_fingerprint_tells_other_batches(change):
    source, options = pairs(20), {"tokens_per_batch": 64, "seed": 1}
    expected = PairBatches(source, encode, **options).fingerprint()
    if change == "a word":
        source = [*source[:-1], {**source[-1], "targets": [source[-1]["targets"][0] + " " + source[0]["source"]]}]
    elif change == "the order":
        source = source[::-1]
    elif change != "nothing":
        options |= {"seed": 2} if change == "the seed" else {"tokens_per_batch": 32}
    assert (PairBatches(source, encode, **options).fingerprint() == expected) == (change == "nothing")


def test_a_source_that_is_cut_keeps_its_end_token_and_is_told():
    told = []
    made = list(source_batches(LONG, encode, 8, 3, on_fault=lambda *fault: told.append(fault)))
    assert told == [("b", "the source has 6 tokens; at most 3 fit: cut")]
    assert made[0][0]["source_ids"].tolist() == [[5, EOS, 0], [5, EOS, 0], [5, 5, EOS]]
    assert [r["id"] for _, records in source_batches(LONG, encode, 8, 9, most=1) for r in records] == ["a"]


def test_a_side_without_a_token_is_left_out_and_listed():
    empty = [*LONG[:1], {"id": "e", "source": "", "targets": ["5"]}, {"id": "f", "source": "5", "targets": [" "]}]
    batches = PairBatches(empty, encode, too_long="error")
    assert batches.num_examples == 1
    assert batches.faults == [("e", "no token in the source: left out"), ("f", "no token in the target: left out")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 1}, "max_length=1 is too small: at least 2"),
        ({"tokens_per_batch": 0}, "tokens_per_batch=0 is too small"),
        ({"max_shapes": 0}, "max_shapes=0 is too small"),
        ({"too_long": "drop"}, "too_long='drop' is unknown. It is one of skip, cut, error"),
        ({"seed": -1}, "seed=-1 is out of range"),
        ({"max_length": 2}, "no pair to train on: 3 records, 3 pairs empty or too long"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    long = [{"id": "1", "source": "4 4 4", "targets": ["4 4"]}] * 3
    with pytest.raises(ValueError, match=message):
        PairBatches(long, encode, **options)


def test_special_ids_from_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match=r"special id 3 for '3'"):
        PairBatches([{"id": "1", "source": "4", "targets": ["3"]}], encode)


def test_rows_are_padded_on_the_right():
    np.testing.assert_array_equal(pad_rows([[1], [2, 3]], 3), [[1, 0, 0], [2, 3, 0]])
