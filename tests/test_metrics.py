"""Laws of the scores, against sums written out here and against the COCO caption evaluation's own program."""

from __future__ import annotations

import json
import math
import os
import random
import time
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from mmattn.metrics import (
    bleu_orders,
    bleu_signature,
    bootstrap,
    caption_scores,
    cider_d,
    cider_d_scores,
    corpus_bleu,
    normalize_caption,
    repeats,
    rouge_l,
    rouge_l_scores,
)
from mmattn.metrics.rouge import longest_common_subsequence

DATA = Path(os.environ.get("MMATTN_DATA", Path(__file__).parents[1] / ".." / "shared" / "data"))
FLICKR = DATA / "flickr8k" / "captions.jsonl"
SCORES = [corpus_bleu, cider_d, rouge_l, caption_scores]

words = st.lists(st.sampled_from(["a", "man", "dog", "runs", "red"]), max_size=7)
sets = st.integers(1, 4).flatmap(
    lambda n: st.tuples(
        st.lists(words, min_size=n, max_size=n),
        st.lists(st.lists(words.filter(bool), min_size=1, max_size=3), min_size=n, max_size=n),
    )
)


def texts(drawn) -> tuple[list[str], list[list[str]]]:
    hypotheses, references = drawn
    return [" ".join(h) for h in hypotheses], [[" ".join(r) for r in several] for several in references]


def results(kind: str) -> tuple[list[str], list[list[str]]]:
    """A real result set: one human caption of each Flickr8k test photo, as it is or damaged, and the other four."""
    lines = [json.loads(line) for line in FLICKR.read_text(encoding="utf-8").splitlines()]
    captions = [[normalize_caption(c) for c in line["en"]] for line in lines if line["split"] == "test"]
    captions = [[c for c in several if c] for several in captions]
    hypotheses, references = [several[0] for several in captions], [several[1:] for several in captions]
    draw = random.Random(0)
    if kind == "damaged":  # empty and cut captions, words repeated, photos swapped, references missing
        for i, text in enumerate(hypotheses):
            split, what = text.split(), draw.randrange(6)
            changed = [split, [], split[: len(split) // 2], split * 2, draw.sample(split, len(split)), split[:1] * 9]
            hypotheses[i] = " ".join(changed[what])
            references[i] = references[i][: draw.randint(1, 4)]
        hypotheses[:100] = hypotheses[99::-1]
    return hypotheses, references


def plain_cider_d(hypotheses: list[str], references: list[list[str]]) -> list[float]:
    """CIDEr-D by dense vectors over all n-grams, one order at a time."""
    scores = np.zeros(len(hypotheses))
    for n in range(1, 5):

        def grams(text, n=n):
            split = text.split()
            return [" ".join(split[i : i + n]) for i in range(len(split) - n + 1)]

        every = sorted({g for text in [*hypotheses, *chain(*references)] for g in grams(text)})
        images = np.array([sum(any(g in grams(r) for r in several) for several in references) for g in every])
        idf = math.log(len(references)) - np.log(np.maximum(images, 1))

        def vector(text, every=every, idf=idf, grams=grams):
            return idf * np.array([grams(text).count(g) for g in every])

        for i, several in enumerate(references):
            for reference in several:
                mine, theirs = vector(hypotheses[i]), vector(reference)
                norm = np.linalg.norm(mine) * np.linalg.norm(theirs) if every else 0.0
                gap = len(hypotheses[i].split()) - len(reference.split())
                if norm > 0:
                    cosine = np.minimum(mine, theirs) @ theirs / norm
                    scores[i] += 10 / 4 * cosine * math.exp(-(gap**2) / 72) / len(several)
    return list(scores)


@given(sets)
@settings(max_examples=60, deadline=None)
def test_cider_d_equals_the_sum_written_out(drawn):
    hypotheses, references = texts(drawn)
    expected = plain_cider_d(hypotheses, references)
    assert cider_d_scores(hypotheses, references) == pytest.approx(expected, abs=1e-9)
    assert cider_d(hypotheses, references) == pytest.approx(np.mean(expected), abs=1e-9)


@given(words, words)
@settings(deadline=None)
def test_longest_common_subsequence_equals_the_table(first, second):
    table = np.zeros((len(first) + 1, len(second) + 1), int)
    for i, one in enumerate(first):
        for j, other in enumerate(second):
            table[i + 1, j + 1] = table[i, j] + 1 if one == other else max(table[i, j + 1], table[i + 1, j])
    assert longest_common_subsequence(first, second) == table[-1, -1]


@pytest.mark.skipif(not FLICKR.exists(), reason=f"no flickr8k under {DATA}")
@pytest.mark.parametrize("kind", ["human", "damaged"])
def test_scores_equal_the_coco_caption_evaluation(kind):
    why = "compares with pycocoevalcap: pip install --no-deps pycocoevalcap"
    cider = pytest.importorskip("pycocoevalcap.cider.cider", reason=why)
    rouge = pytest.importorskip("pycocoevalcap.rouge.rouge", reason=why)
    bleu = pytest.importorskip("pycocoevalcap.bleu.bleu", reason=why)
    hypotheses, references = results(kind)
    assert len(hypotheses) == 1000
    theirs = dict(enumerate(references)), {i: [text] for i, text in enumerate(hypotheses)}
    for score, each, other in [(cider_d, cider_d_scores, cider.Cider()), (rouge_l, rouge_l_scores, rouge.Rouge())]:
        mean, single = other.compute_score(*theirs)
        assert mean > 0.2
        assert score(hypotheses, references) == pytest.approx(mean, abs=1e-6)
        np.testing.assert_allclose(each(hypotheses, references), single, atol=1e-6)
    orders, _ = bleu.Bleu(4).compute_score(*theirs, verbose=0)
    assert bleu_orders(hypotheses, references) == pytest.approx([100 * order for order in orders], abs=1e-6)


@pytest.mark.skipif(not FLICKR.exists(), reason=f"no flickr8k under {DATA}")
def test_a_thousand_images_take_well_under_two_seconds():
    hypotheses, references = results("human")
    start = time.process_time()
    cider_d(hypotheses, references)
    assert time.process_time() - start < 1.5


def test_corpus_bleu_equals_sacrebleu_and_orders_end_with_it():
    hypotheses = ["a dog runs on the green grass", "two men sit in the boat"]
    references = [["a dog runs over the green grass", "the dog"], ["two men sit in a boat", "men in the boat"]]
    expected = sacrebleu.corpus_bleu(hypotheses, list(zip(*references, strict=True)), tokenize="none").score
    assert expected > 10
    assert corpus_bleu(hypotheses, references) == pytest.approx(expected)
    assert bleu_orders(hypotheses, references)[3] == pytest.approx(expected)
    assert "tok:none" in bleu_signature(hypotheses, references)
    assert "nrefs:var" in bleu_signature(hypotheses, [references[0], references[1][:1]])


def test_a_missing_reference_is_as_none_and_a_repeated_one_changes_no_bleu():
    hypotheses = ["a dog runs on the green grass", "two men sit in the boat"]
    one = [["a dog runs over the green grass", "the dog runs"], ["two men sit in a boat"]]
    two = [one[0], one[1] * 2]
    assert corpus_bleu(hypotheses, one) == pytest.approx(corpus_bleu(hypotheses, two))
    assert rouge_l_scores(hypotheses, one) == pytest.approx(rouge_l_scores(hypotheses, two))


def test_perfect_captions_score_the_most_and_empty_ones_nothing():
    references = [["a dog runs on the grass"], ["two men sit in a boat"], ["the red ball lies there"]]
    perfect, empty = [several[0] for several in references], [""] * 3
    assert corpus_bleu(perfect, references) == pytest.approx(100)
    assert cider_d_scores(perfect, references) == pytest.approx([10] * 3)
    assert rouge_l_scores(perfect, references) == pytest.approx([1] * 3)
    assert corpus_bleu(empty, references) == cider_d(empty, references) == rouge_l(empty, references) == 0


@given(sets, st.randoms())
@settings(max_examples=40, deadline=None)
def test_the_order_of_images_and_references_is_nothing(drawn, shuffler):
    hypotheses, references = texts(drawn)
    order = list(range(len(hypotheses)))
    shuffler.shuffle(order)
    mixed = [hypotheses[i] for i in order], [shuffler.sample(references[i], len(references[i])) for i in order]
    assert caption_scores(*mixed) == pytest.approx(caption_scores(hypotheses, references))


def test_caption_scores_are_of_normalised_text():
    hypotheses, references = ["A dog RUNS on grass !"], [["a dog, runs on grass.", "..."]]
    scores = caption_scores([*hypotheses, "Men sit there now"], [*references, ["men sit there now ."]])
    assert scores["bleu4"] == pytest.approx(100)
    assert scores["cider_d"] == pytest.approx(10)
    assert scores["rouge_l"] == pytest.approx(1)
    assert scores["mean_length"] == 4.5
    assert set(scores) == {
        *(f"bleu{n}" for n in range(1, 5)), "cider_d", "rouge_l", "distinct", "mean_length", "repetition"
    }  # fmt: skip


def test_one_caption_for_every_image_shows_in_distinct():
    references = [[f"a picture of number {i}"] for i in range(10)]
    assert caption_scores(["a picture"] * 10, references)["distinct"] == pytest.approx(0.1)


def test_chinese_is_scored_by_characters_on_request_and_refused_otherwise():
    hypotheses, references = ["两只狗在打架。", "穿裙子的女孩。"], [["两只狗在路上打架。"], ["穿着裙子的小女孩。"]]
    assert caption_scores(hypotheses, references, normalize=" ".join)["bleu4"] > 10
    with pytest.raises(ValueError, match=r"No reference of image 0 has a word after normalisation.*give normalize="):
        caption_scores(hypotheses, references)


def test_repeats_finds_a_phrase_twice_in_a_row():
    for caption in ("a a dog", "a dog a dog", "he runs with a red hat with a red hat"):
        assert repeats(caption)
    for caption in ("", "a", "a dog and a dog", "a dog is a dog and not a cat"):
        assert not repeats(caption)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    ("hypotheses", "references", "error", "rule"),
    [
        ([], [], ValueError, "at least one hypothesis"),
        (["a", "b"], [["a", "b"]], ValueError, "there are 2 hypotheses and 1 lists"),
        (["a", "b"], [["a"], []], ValueError, r"references\[1\] is empty"),
        (["a"], ["a"], TypeError, r"references\[0\] must be a list of strings"),
        ("a", [["a"]], TypeError, "this is one string"),
        ([None], [["a"]], TypeError, r"hypotheses\[0\] must be a string, not NoneType"),
        (["a"], [[7]], TypeError, r"references\[0\] must hold strings, not int"),
    ],
)
def test_a_score_states_what_is_wrong(score, hypotheses, references, error, rule):
    with pytest.raises(error, match=rule):
        score(hypotheses, references)


def test_the_bootstrap_covers_the_mean_as_often_as_it_says():
    draw = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        values = draw.normal(3.0, 2.0, size=100)
        interval = bootstrap(100, lambda rows, values=values: values[rows].mean(), resamples=200, seed=trial)
        assert interval.low <= interval.value == pytest.approx(values.mean()) and interval.value <= interval.high
        hits += interval.low <= 3.0 <= interval.high
    assert 0.89 <= hits / 200 <= 0.99


def test_a_paired_bootstrap_sees_a_difference_that_single_intervals_hide():
    hard = np.random.default_rng(1).normal(0, 5, size=200)  # what both systems share: how hard a photo is
    ours, theirs = hard + 0.2, hard + np.random.default_rng(2).normal(0, 0.5, size=200)
    single, other = (bootstrap(200, lambda rows, v=values: v[rows].mean()) for values in (ours, theirs))
    paired = bootstrap(200, lambda rows: ours[rows].mean() - theirs[rows].mean())
    assert single.low < other.high
    assert paired.low > 0
    assert paired == bootstrap(200, lambda rows: ours[rows].mean() - theirs[rows].mean())


@pytest.mark.parametrize("wrong", [{"size": 0}, {"resamples": 0}, {"confidence": 0.0}, {"confidence": 95.0}])
def test_an_impossible_bootstrap_is_refused(wrong):
    with pytest.raises(ValueError, match="0 < confidence < 1"):
        bootstrap(**{"size": 5, "score": np.mean, **wrong})
