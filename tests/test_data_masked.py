"""Hidden words: whole, in the right share, drawn anew and repeatably; each once in an evaluation; counts as a bar."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from mmattn.data.masked import MaskedBatches, hidden_once
from mmattn.data.sentences import SentenceSource
from mmattn.data.text_files import TextFileError
from mmattn.metrics.neighbours import Neighbours

V, MASK, EOS = 60, 60, 3
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def encode(text: str) -> list[int]:
    """A token a letter; those that begin a word have ids of their own."""
    return [(30 if place else 4) + LETTERS.index(letter) for word in text.split() for place, letter in enumerate(word)]


def words(ids) -> list[tuple[str, list[int]]]:
    starts = [place for place, i in enumerate(ids) if i < 30] + [len(ids)]
    return [("", list(range(a, b))) for a, b in itertools.pairwise(starts)]


def sentences(count: int = 40, seed: int = 0) -> list[dict[str, str]]:
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        chosen = ["".join(rng.choice(list(LETTERS), rng.integers(1, 4))) for _ in range(rng.integers(3, 12))]
        made.append({"id": str(number), "text": " ".join(chosen)})
    return made


def batches(source=None, **options) -> MaskedBatches:
    source = sentences() if source is None else source
    return MaskedBatches(source, encode, words, V, **{"tokens_per_batch": 120, "max_length": 64, **options})


def restored(inputs, labels, weights) -> np.ndarray:
    """The rows with what was hidden put back."""
    ids = inputs["source_ids"].copy()
    real = weights > 0
    ids.ravel()[inputs["label_places"][real]] = labels[real]
    return ids


def plain(rows) -> list[tuple[int, ...]]:
    """Rows without padding; an empty row is one end token."""
    return [tuple(int(i) for i in row if i) for row in rows]


def test_labels_are_what_was_hidden_and_all_else_is_as_it_was():
    source = sentences()
    wanted = Counter(tuple([*encode(record["text"]), EOS]) for record in source)
    made = batches(source)
    found: Counter = Counter()
    for inputs, labels, weights in itertools.islice(made.iterate(), made.steps_per_epoch):
        assert inputs["source_ids"].dtype == labels.dtype == np.int32 and weights.dtype == np.float32
        assert inputs["label_places"].shape == labels.shape == weights.shape
        real = weights > 0
        places = inputs["label_places"][real]
        assert len(set(places.tolist())) == len(places) > 0
        assert (labels[real] > 3).all() and not labels[~real].any()  # no end, no padding
        found.update(row for row in plain(restored(inputs, labels, weights)) if row != (EOS,))
        masks = np.flatnonzero(inputs["source_ids"].ravel() == MASK)
        assert set(masks.tolist()) <= set(places.tolist())
    assert found == wanted  # each sentence once a pass


def test_the_pieces_of_a_word_are_hidden_together_and_alike():
    made = batches(replace=(0.4, 0.3, 0.3))
    kinds: Counter = Counter()
    for inputs, labels, weights in itertools.islice(made.iterate(), 90):
        hidden = set(inputs["label_places"][weights > 0].tolist())
        ids, width = restored(inputs, labels, weights), inputs["source_ids"].shape[1]
        for row in range(len(ids)):
            text = [int(i) for i in ids[row] if i > 3]
            for _, places in words(text):
                inside = [row * width + place in hidden for place in places]
                assert all(inside) or not any(inside)
                if all(inside):
                    shown, true = inputs["source_ids"][row, places], ids[row, places]
                    assert (shown == MASK).all() or (shown != MASK).all()
                    kinds["mask" if (shown == MASK).all() else "same" if (shown == true).all() else "other"] += 1
    total = sum(kinds.values())
    assert total > 300
    for kind, share in (("mask", 0.4), ("other", 0.3), ("same", 0.3)):
        assert abs(kinds[kind] / total - share) < 4 * np.sqrt(share * (1 - share) / total), kinds


def test_single_tokens_are_hidden_where_that_is_asked_for():
    inputs, labels, weights = next(batches(whole_words=False, share=0.3).iterate())
    ids, hidden = restored(inputs, labels, weights), set(inputs["label_places"][weights > 0].tolist())
    broken = 0
    for row in range(len(ids)):
        for _, places in words([int(i) for i in ids[row] if i > 3]):
            inside = [row * ids.shape[1] + place in hidden for place in places]
            broken += any(inside) and not all(inside)
    assert broken > 0


@pytest.mark.parametrize("share", [0.15, 0.4])
def test_the_share_of_hidden_tokens_is_the_one_asked_for(share):
    made = batches(share=share)
    hidden = real = 0
    for inputs, _, weights in itertools.islice(made.iterate(), made.steps_per_epoch):
        hidden += weights.sum()
        real += (inputs["source_ids"] > 3).sum()
    assert abs(hidden / real - share) < 0.03


def same(one, two) -> bool:
    return all(
        np.array_equal(a, b) for a, b in zip((*one[0].values(), *one[1:]), (*two[0].values(), *two[1:]), strict=True)
    )


def test_batch_k_depends_on_seed_and_k_alone():
    count = 2 * batches().steps_per_epoch + 3
    straight = list(itertools.islice(batches().iterate(), count))
    for start in (1, batches().steps_per_epoch, count - 2):
        for one, two in zip(straight[start:], batches().iterate(start), strict=False):
            assert same(one, two)
    assert not same(straight[0], next(batches(seed=1).iterate()))


def test_masks_are_drawn_anew_in_each_pass():
    made = batches(sentences(1))
    first, second = itertools.islice(made.iterate(), 2)
    many = {tuple(inputs["source_ids"].ravel()) for inputs, _, _ in itertools.islice(made.iterate(), 12)}
    assert plain(restored(*first)) == plain(restored(*second)) and len(many) > 5


def test_the_fingerprint_tells_everything_that_decides_the_batches():
    others = [
        batches(),
        batches(seed=1),
        batches(share=0.2),
        batches(replace=(1, 0, 0)),
        batches(whole_words=False),
        batches(tokens_per_batch=60),
        batches(sentences(seed=2)),
        batches(max_length=8),
    ]
    assert len({made.fingerprint() for made in others}) == len(others)
    assert batches().fingerprint() == others[0].fingerprint()


def test_a_long_sentence_is_cut_and_one_without_a_word_left_out():
    source = [{"id": "a", "text": "ab cd ef"}, {"id": "b", "text": ""}, {"id": "c", "text": "ab"}]
    made = batches(source, max_length=5)
    assert made.faults == [("a", "7 tokens; at most max_length=5 fit: cut"), ("b", "no word: left out")]
    assert [s.ids.tolist() for s in made.sentences] == [[*encode("ab cd"), EOS], [*encode("ab"), EOS]]
    told: list = []
    list(hidden_once(source, encode, words, V, max_length=5, on_fault=lambda *fault: told.append(fault)))
    assert told == made.faults


def test_a_word_longer_than_the_share_is_hidden_all_the_same():
    inputs, _, weights = next(batches([{"id": "a", "text": "abcdefgh"}], replace=(1, 0, 0)).iterate())
    assert weights.sum() == 8 and (inputs["source_ids"][0, :8] == MASK).all()


@pytest.mark.parametrize("tokens", [40, 300])
def test_an_evaluation_masks_every_word_once_whatever_the_batches(tokens):
    source = sentences(12)
    seen: Counter = Counter()
    for inputs, labels, weights in hidden_once(source, encode, words, V, tokens_per_batch=tokens):
        ids, width = restored(inputs, labels, weights), inputs["source_ids"].shape[1]
        for place in inputs["label_places"][weights > 0].tolist():
            row = plain(ids[place // width : place // width + 1])[0]
            assert inputs["source_ids"].ravel()[place] == MASK
            seen[(row, place % width)] += 1
        for row, shown in zip(ids, inputs["source_ids"], strict=True):  # whole words
            for _, places in words([int(i) for i in row if i > 3]):
                assert len({bool(shown[place] == MASK) for place in places}) == 1
    texts = {tuple([*encode(record["text"]), EOS]) for record in source}
    assert seen == {(text, place): 1 for text in texts for place in range(len(text) - 1)}


def test_the_hidden_words_of_an_evaluation_depend_on_the_sentence_alone():
    def shown(source, tokens):
        made = hidden_once(source, encode, words, V, tokens_per_batch=tokens)
        return Counter(row for inputs, _, _ in made for row in plain(inputs["source_ids"]) if row != (EOS,))

    source = sentences(12)
    assert shown(source, 40) == shown(source[::-1], 300)


def test_impossible_batches_are_refused():
    for options, message in (
        ({"share": 0.0}, r"share=0\.0 must be in \(0, 1\)"),
        ({"replace": (0.9, 0.2, 0.1)}, "shares of masks, other tokens and the same are needed, sum 1"),
        ({"tokens_per_batch": 1}, "tokens_per_batch=1 is too small"),
        ({"seed": -1}, "seed=-1 is out of range"),
        ({"source": []}, "no word to hide: 0 records"),
    ):
        with pytest.raises(ValueError, match=message):
            batches(**options)
    with pytest.raises(ValueError, match="vocabulary_size=4 is too small"):
        MaskedBatches(sentences(), encode, words, 4)
    with pytest.raises(ValueError, match="numbered from 0"):
        batches().iterate(-1)


# What counting alone tells


def test_the_most_frequent_token_and_the_better_neighbour_are_guessed():
    counted = Neighbours([np.array(row) for row in ([5, 6, 7, 3], [5, 6, 8, 3], [5, 9, 7, 3], [6, 6, 4, 3])], V + 1)
    assert counted.unigram == 6
    ids = np.array([[5, MASK, 7, 3], [MASK, 6, 9, 3], [MASK, MASK, 4, 3], [40, MASK, 41, 3]])
    places = np.array([1, 4, 8, 9, 13])
    # behind 5: 6 in 2 of 3; before 7: 6 in 1 of 2  ->  6
    # at the start: 5 in 3 of 4; before 6: 5 in 2 of 4  ->  5
    # at the start 5 in 3 of 4, the right neighbour is hidden  ->  5;  before 4: 6 in 1 of 1  ->  6
    # neighbours that were never seen  ->  6, the most frequent
    assert counted.bigram(ids, places).tolist() == [6, 5, 5, 6, 6]


def test_accuracies_of_counts_are_those_of_a_plain_loop():
    source = sentences(60, seed=3)
    rows = [np.array([*encode(record["text"]), EOS]) for record in source]
    made = list(hidden_once(sentences(20, seed=4), encode, words, V))
    after = {i: Counter() for i in range(V + 1)}
    before = {i: Counter() for i in range(V + 1)}
    for row in rows:
        for a, b in itertools.pairwise([2, *row.tolist()]):
            after[a][b] += 1
            before[b][a] += 1
    single = Counter(int(i) for row in rows for i in row if i > 3)
    top = min(single, key=lambda i: (-single[i], i))
    right = {"unigram": 0, "bigram": 0}
    count = 0
    for inputs, labels, weights in made:
        ids = inputs["source_ids"]
        for place, label in zip(inputs["label_places"][weights > 0], labels[weights > 0], strict=True):
            row, column = divmod(int(place), ids.shape[1])
            best, share = top, 0.0
            for table, beside in ((after, 2 if column == 0 else ids[row, column - 1]), (before, ids[row, column + 1])):
                seen = {i: n for i, n in table[int(beside)].items() if i > 3}
                if beside != MASK and seen:
                    guess = min(seen, key=lambda i: (-seen[i], i))
                    if seen[guess] / sum(table[int(beside)].values()) > share:
                        best, share = guess, seen[guess] / sum(table[int(beside)].values())
            right["unigram"] += top == label
            right["bigram"] += best == label
            count += 1
    found = Neighbours(rows, V + 1).accuracies(made)
    assert found == pytest.approx({name: n / count for name, n in right.items()})
    assert found["bigram"] != found["unigram"]


# Sentences of a file


def test_sentences_of_a_file_are_dealt_out_by_what_they_say(tmp_path):
    lines = [f"sentence number {n}" for n in range(200)] + ["Sentence number 7 !", "", "  "]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    parts = {split: SentenceSource(tmp_path / "a.txt", split, (0.6, 0.2, 0.2)) for split in ("train", "valid", "test")}
    whole = SentenceSource(tmp_path / "a.txt")
    assert len(whole) == 201 == sum(map(len, parts.values())) and whole[-1]["id"] == "a.txt:201"
    assert all(len(part) > 20 for part in parts.values())
    of = {part[index]["text"]: split for split, part in parts.items() for index in range(len(part))}
    assert of["Sentence number 7 !"] == of["sentence number 7"]


def test_faults_of_a_file_of_sentences_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntw\xff\n")
    with pytest.raises(TextFileError, match=r"problems='skip' leaves such lines out\.\n.*a\.txt:2: not UTF-8"):
        SentenceSource(tmp_path / "a.txt")
    skipping = SentenceSource(tmp_path / "a.txt", problems="skip")
    assert len(skipping) == 1 and len(skipping.skipped) == 1
    with pytest.raises(IndexError, match="no record 1"):
        skipping[1]
    (tmp_path / "a.txt").write_text("\n")
    with pytest.raises(TextFileError, match="no sentence"):
        SentenceSource(tmp_path / "a.txt")
