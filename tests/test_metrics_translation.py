"""Scores of translations against sacrebleu's own programs, and the words that papers count."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF

from mmattn.metrics import bleu_interval, corpus_bleu, detokenize, translation_scores, words_for_bleu

WORDS = "The a dog, cat man's sits runs on in (house) tree. Über 3,5 猫 don't ?"


def corpus(size: int, seed: int = 0) -> tuple[list[str], list[list[str]]]:
    """Sentences with one to three references that share much with them."""
    random, vocabulary = np.random.default_rng(seed), WORDS.split()
    hypotheses, references = [], []
    for _ in range(size):
        words = random.choice(vocabulary, size=random.integers(5, 14))
        noisy = [
            np.where(random.random(len(words)) < 0.2, random.choice(vocabulary, len(words)), words) for _ in range(4)
        ]
        hypotheses.append(" ".join(noisy[0]))
        references.append([" ".join(row) for row in noisy[1 : 2 + random.integers(3)]])
    return hypotheses, references


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("tokenize", ["13a", "none", "char", "intl", "zh"])
def test_scores_and_signatures_are_those_of_the_sacrebleu_program(tmp_path, tokenize, lowercase):
    hypotheses, several = corpus(40)
    first = [references[0] for references in several]
    for name, lines in (("hyp", hypotheses), ("ref", first)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["-m", "bleu", "chrf", "-tok", tokenize, "-w", "10", "--format", "json", "--force"]
    if lowercase:
        options += ["-lc", "--chrf-lowercase"]
    command = [sys.executable, "-m", "sacrebleu", str(tmp_path / "ref"), "-i", str(tmp_path / "hyp"), *options]
    printed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    ours = translation_scores(hypotheses, [[reference] for reference in first], tokenize, lowercase)
    for name, theirs in zip(("bleu", "chrf"), printed, strict=True):
        assert ours[name] == pytest.approx(theirs["score"], abs=1e-9)
        assert sorted(ours["signatures"][name].split("|")) == sorted(theirs["signature"].split("|"))
    assert printed[0]["verbose_score"] in ours["bleu_line"]


def test_different_numbers_of_references_score_as_sacrebleus_streams():
    hypotheses, references = corpus(60)
    width = max(map(len, references))
    streams = [[several[k] if k < len(several) else None for several in references] for k in range(width)]
    ours = translation_scores(hypotheses, references)
    bleu = BLEU(force=True)
    theirs = bleu.corpus_score(hypotheses, streams)
    assert (ours["bleu"], ours["bp"]) == (theirs.score, theirs.bp)
    assert ours["chrf"] == CHRF().corpus_score(hypotheses, streams).score
    assert ours["signatures"]["bleu"] == str(bleu.get_signature()) and "nrefs:var" in ours["signatures"]["bleu"]
    assert ours["mean_length"] == theirs.sys_len / 60
    assert ours["bleu"] == corpus_bleu(hypotheses, references, tokenize="13a")


def test_the_interval_is_over_corpus_bleu_of_the_drawn_sentences():
    hypotheses, references = corpus(30)
    other, _ = corpus(30, seed=1)
    made = bleu_interval(hypotheses, references, resamples=40, seed=3)
    random = np.random.default_rng(3)
    drawn = [random.integers(30, size=30) for _ in range(40)]
    scores = [
        translation_scores([hypotheses[i] for i in rows], [references[i] for i in rows])["bleu"] for rows in drawn
    ]
    whole = translation_scores(hypotheses, references)["bleu"]
    np.testing.assert_allclose(made, [whole, *np.quantile(scores, [0.025, 0.975])], rtol=1e-9)
    paired = bleu_interval(hypotheses, references, against=other, resamples=200)
    assert paired.value == pytest.approx(whole - translation_scores(other, references)["bleu"]) and paired.low > 0
    assert bleu_interval(hypotheses, references, against=hypotheses, resamples=20) == (0.0, 0.0, 0.0)


def test_an_empty_translation_counts_and_nothing_to_score_is_refused():
    scores = translation_scores(["", "a cat"], [["a dog"], ["a cat"]])
    assert scores["bp"] == pytest.approx(np.exp(1 - 4 / 2)) and scores["mean_length"] == 1.0
    for hypotheses, references, message in (([], [], "at least one"), (["a"], [[]], "references.0. is empty")):
        with pytest.raises(ValueError, match=message):
            translation_scores(hypotheses, references)
    for tokenize, message in (("flores200", "is unknown. It is one of 13a"), ("spacy:", "spacy: and a language code")):
        with pytest.raises(ValueError, match=message):
            translation_scores(["a"], [["a"]], tokenize)


@pytest.mark.parametrize(
    ("module", "call", "message"),
    [
        ("spacy", lambda: words_for_bleu("spacy:xx"), r"mmattn\[spacy\]"),
        ("sacremoses", lambda: detokenize("a .", "xx"), r"mmattn\[moses\]"),
        ("MeCab", lambda: translation_scores(["a"], [["a"]], "ja-mecab"), r"sacrebleu\[ja\]"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, module, call, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=message):
        call()


def test_spacy_words_are_those_of_spacy_and_named_in_the_signature():
    spacy = pytest.importorskip("spacy", reason="spaCy is not installed (extra `spacy`)")
    words = words_for_bleu("spacy:en")
    assert words("A man's  black-and-white dog isn't here.") == "A man 's black - and - white dog is n't here ."
    hypotheses, references = corpus(40)
    scores = translation_scores(hypotheses, references, "spacy:en", lowercase=True)
    split = [[word.lower() for word in words(text.lower()).split()] for text in hypotheses]
    expected = corpus_bleu(list(map(" ".join, split)), [[words(t.lower()) for t in several] for several in references])
    assert scores["bleu"] == pytest.approx(expected)
    assert f"|tok:spacy.en-{spacy.__version__}|" in scores["signatures"]["bleu"]
    assert "case:lc" in scores["signatures"]["bleu"]
    with pytest.raises(ValueError, match="no tokenizer for the language 'qq'"):
        words_for_bleu("spacy:qq")


@pytest.mark.parametrize(("language", "at_least"), [("en", 998), ("de", 997)])
def test_detokenized_multi30k_is_its_raw_text(data_folder, language, at_least):
    pytest.importorskip("sacremoses", reason="sacremoses is not installed (extra `moses`)")
    folder, name = data_folder / "multi30k", "test_2016_flickr"
    tokens = (folder / "tok" / f"{name}.lc.norm.tok.{language}").read_text("utf-8").split("\n")[:-1]
    with gzip.open(folder / "raw" / f"{name}.{language}.gz", "rt", encoding="utf-8") as file:
        raw = [line.strip().lower() for line in file]
    assert sum(detokenize(one, language) == two for one, two in zip(tokens, raw, strict=True)) >= at_least
