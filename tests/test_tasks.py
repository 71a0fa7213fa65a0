"""Whole runs of the text tasks on small files: what they leave, what a bundle gives, what is refused."""

from __future__ import annotations

import json
import random
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import diversify, evaluate, train
from mmattn import Translator, Writer, metrics
from mmattn.bundle import load_bundle
from mmattn.data.pairs import ParallelSource
from mmattn.preprocess.text import Tokenizer
from mmattn.tasks.translation import TranslationScoring
from mmattn.training.checkpoint import CheckpointFolder, read
from mmattn.training.validation import Prediction

WORDS = {"a": "ein", "dog": "Hund", "cat": "Katze", "runs": "läuft", "sleeps": "schläft", "and": "und", "here": "hier"}
QUICK = ["size=tiny", "schedule.warmup_steps=0", "final.num_beams=[1]"]


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


R_DROP = "mmattn.training.losses.RDropCrossEntropy"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Parallel files of a made-up language pair, one sentence of which is too long."""
    root, rng = tmp_path_factory.mktemp("pairs"), random.Random(1)
    for split, count in (("train", 60), ("valid", 8), ("test", 9)):
        chosen = [rng.choices(list(WORDS), k=rng.randint(2, 7)) for _ in range(count)]
        if split == "train":
            chosen[4] = ["dog"] * 80
        (root / f"{split}.en").write_text("".join(" ".join(c) + "\n" for c in chosen), encoding="utf-8")
        (root / f"{split}.de").write_text(
            "".join(" ".join(WORDS[w] for w in c) + "\n" for c in chosen), encoding="utf-8"
        )
    return root


def settings(folder, runs):
    languages = ["data.source_language=en", "data.target_language=de"]
    return [*QUICK, "experiment=multi30k_de_en", "data=parallel", f"data.root={folder}", *languages, f"run.root={runs}"]


@pytest.fixture(scope="module", params=["joint", "separate"])
def translation(request, folder, tmp_path_factory):
    """The folder of a whole translation run."""
    runs = tmp_path_factory.mktemp(request.param)
    more = ["fit.epochs=2", "fit.snapshots=2", "fit.validate_every=1"]
    if request.param == "separate":
        own = {"_target_": "mmattn.preprocess.text.Tokenizer.train", "_partial_": True, "vocabulary_size": 40,
               "normalization": "nfkc", "shrink": True}  # fmt: skip
        text = "{" + ",".join(f"{key}:{value}" for key, value in own.items()) + "}"
        more += ["model.share_embeddings=false", f"source_tokenizer={text}"]
    assert train.main([*settings(folder, runs), *more]) == 0
    (made,) = runs.iterdir()
    return made


def test_a_translation_run_leaves_all_that_it_promises(translation):
    results = json.loads((translation / "results.json").read_text())
    assert {"bleu", "chrf", "bp", "mean_length", "exact"} == results["test"].keys()
    assert results["test_examples"] == len(lines_of(translation / "predictions.jsonl")) == 8
    assert any("tok:none" in signature for signature in results["signatures"].values())
    assert results["generation"]["max_source_length"] == 16
    rejected = lines_of(translation / "rejected.jsonl")
    assert [entry["id"] for entry in rejected] == ["train.en:5"]
    assert re.search(r"\d+ tokens; at most max_length=16 fit: left out", rejected[0]["reason"])
    card = (translation / "bundle" / "README.md").read_text()
    assert "mmattn translate" in card and "Translator" in card
    assert "tok:none" in card and "From en to de" in card and "weights: " in card


def test_predictions_lie_in_the_order_of_the_test_file(translation):
    lines = lines_of(translation / "predictions.jsonl")
    assert [line["id"] for line in lines] == [f"test.en:{n}" for n in range(1, 9)]


def test_the_bundle_gives_the_scores_of_the_run(translation, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ["data=parallel", f"data.root={folder}", "data.source_language=en", "data.target_language=de"]
    assert (
        evaluate.main([f"bundle={translation / 'bundle'}", *data, "scoring.tokenize=none", "limit=8", "output=s.json"])
        == 0
    )
    found, results = (
        json.loads((tmp_path / "s.json").read_text()),
        json.loads((translation / "results.json").read_text()),
    )
    assert found["scores"] == pytest.approx(results["test"])
    assert found["scores_shuffled"] == pytest.approx(results["test_shuffled"])
    texts = {line["id"]: line["text"] for line in lines_of(translation / "predictions.jsonl")}
    assert {p["id"]: p["text"] for p in found["predictions"]} == texts


def test_a_number_of_beams_makes_a_greedy_bundle_search(translation, folder, tmp_path):
    data = ["data=parallel", f"data.root={folder}", "data.source_language=en", "data.target_language=de"]
    more = ["+generation.num_beams=2", "limit=2", f"output={tmp_path / 's.json'}"]
    assert evaluate.main([f"bundle={translation / 'bundle'}", *data, *more]) == 0
    generation = json.loads((tmp_path / "s.json").read_text())["generation"]
    assert (generation["method"], generation["num_beams"]) == ("beam", 2)


def test_the_translator_translates_as_the_run_did(translation, folder):
    translator = Translator.load(translation / "bundle")
    sources = (folder / "test.en").read_text().splitlines()[:8]
    texts = [line["text"] for line in lines_of(translation / "predictions.jsonl")]
    assert [t.text for t in translator.translate(sources)] == texts


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """The folder of a whole run of a language model."""
    root = tmp_path_factory.mktemp("text")
    (root / "input.txt").write_text("To be, or not to be:\n\nthat is  the question.\n" * 40)
    more = ["fit.epochs=1", "fit.steps_per_epoch=3", f"run.root={root / 'runs'}"]
    assert train.main([*QUICK[:2], "experiment=shakespeare_chars", f"data.root={root}", *more]) == 0
    (made,) = (root / "runs").iterdir()
    return made


def test_a_language_model_run_leaves_scores_and_a_bundle_that_writes(language, tmp_path, monkeypatch):
    results = json.loads((language / "results.json").read_text())
    assert results["test"]["loss"] == -results["test"]["log_likelihood"] > 0
    [text] = Writer.load(language / "bundle").write("To be\n\n", max_length=14, seed=3)
    assert text.startswith("To be\n\n") and len(text) <= 14
    monkeypatch.chdir(tmp_path)
    data = ["data=tinyshakespeare", f"data.root={language.parent.parent}", "limit=8"]
    assert evaluate.main([f"bundle={language / 'bundle'}", *data, "output=s.json"]) == 0
    assert json.loads((tmp_path / "s.json").read_text())["scores"] == pytest.approx(results["test"], abs=1e-4)


@pytest.fixture(scope="module")
def remembering(tmp_path_factory):
    """The folder of a whole run of a language model that remembers."""
    root = tmp_path_factory.mktemp("stream")
    (root / "input.txt").write_text("To be, or not to be:\n\nthat is  the question.\n" * 40)
    more = ["fit.epochs=2", "fit.steps_per_epoch=5", "fit.checkpoint_minutes=0", f"run.root={root / 'runs'}"]
    more += ["batches.length=16", "decoder.memory_length=16"]
    assert train.main([*QUICK[:2], "experiment=shakespeare_xl", f"data.root={root}", *more]) == 0
    (made,) = (root / "runs").iterdir()
    return made


def test_a_run_on_streams_leaves_scores_by_memory_and_a_bundle_that_writes(remembering, tmp_path, capsys):
    results = json.loads((remembering / "results.json").read_text())
    assert list(results["test_by_memory"]) == ["0", "16", "32", "64"]
    assert results["test"] == results["test_by_memory"]["16"] == results["valid"] | results["test"]
    writer = Writer.load(remembering / "bundle")
    assert writer.generation["context_length"] == 16
    [text] = writer.write("To be\n\n", max_length=40, seed=3)  # several segments
    assert text.startswith("To be\n\n") and 7 < len(text) <= 40
    data = ["data=tinyshakespeare", f"data.root={remembering.parent.parent}", "limit=8"]
    asked = [*data, "memory_length=[0,16,64]", f"output={tmp_path / 's.json'}"]
    assert evaluate.main([f"bundle={remembering / 'bundle'}", *asked]) == 0
    assert re.search(r"memory  loss .*\n +0  .*\n +16  .*\n +64  ", capsys.readouterr().out)
    scored = json.loads((tmp_path / "s.json").read_text())
    found = scored["scores_by_memory"]
    assert scored["streams"] == results["test_streams"] == 8
    for length, scores in found.items():
        assert scores == pytest.approx(results["test_by_memory"][length], abs=2e-3)
    assert evaluate.main([f"bundle={remembering / 'bundle'}", *data, f"output={tmp_path / 't.json'}"]) == 0
    assert json.loads((tmp_path / "t.json").read_text())["scores"] == pytest.approx(found["16"], abs=1e-5)


def test_the_run_on_streams_keeps_its_memory_in_the_checkpoints_alone(remembering):
    arrays, _ = read(CheckpointFolder(remembering / "checkpoints").files()[-1])
    held = [name for name in arrays if name.endswith("stream_model/state")]
    assert len(held) == 2 and all(arrays[name].any() for name in held)
    info = json.loads((remembering / "bundle" / "bundle.json").read_text())
    assert not [name for name in info["weights"]["arrays"] if "state" in name]
    assert info["model"]["class_name"] == "LanguageModel"


@pytest.mark.parametrize(
    ("asked", "message"),
    [("memory_length=8", "memory_length is for language models that remember"), ("memory_length=[8,-1]", "0 or more"),
     ("+generation.memory_length=8", "is for language models that remember"), ("memory_length=long", "0 or more"),
     ("+generation.documents=true", "generation.documents is for language models that remember"),
     ("+generation.documents=1", "generation.documents=1 must be true or false")],
)  # fmt: skip
def test_a_memory_that_cannot_be_is_refused_in_words(language, asked, message, capsys):
    data = ["data=tinyshakespeare", f"data.root={language.parent.parent}"]
    assert evaluate.main([f"bundle={language / 'bundle'}", *data, asked]) == 2
    assert message in capsys.readouterr().err


def test_a_bundle_is_not_scored_on_data_of_another_kind(language, capsys):
    assert evaluate.main([f"bundle={language / 'bundle'}", "data=shapes"]) == 2
    assert "data, for a language_model: records with text are wanted; these have " in capsys.readouterr().err


def test_a_translator_is_not_trained_on_pictures(tmp_path, capsys):
    assert train.main([*QUICK, "experiment=transformer_base", "data=shapes", f"run.root={tmp_path / 'runs'}"]) == 2
    assert "data.train: records with source and targets are wanted; these have" in capsys.readouterr().err


def test_a_captioner_is_not_trained_on_sentences(folder, tmp_path, capsys):
    data = ["data=parallel", f"data.root={folder}", "data.source_language=en", "data.target_language=de"]
    assert train.main([*QUICK, *data, f"run.root={tmp_path / 'runs'}"]) == 2
    assert "records with image and captions are wanted; these have id, source, targets" in capsys.readouterr().err
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=encoder_decoder"], "model: TypeError"),
        (["decoder.cross_attention=true"], r"model: a language model has nothing to look at"),
        (
            ["decoder.positions=learned", "+decoder.max_length=8"],
            r"batches\.length=16 is more than decoder\.max_length=8",
        ),
        (["batches.length=70000"], r"batches\.length: .*context_length=70000 must be .* from 0 to 65536"),
        (["task=language_stream"], "model: .* remembers nothing from batch to batch: decoder=transformer_xl does"),
    ],
)
def test_wrong_settings_of_a_language_model_are_refused_in_words(overrides, message, tmp_path, capsys):
    (tmp_path / "input.txt").write_text("to be or not to be " * 20)
    data = ["experiment=shakespeare_chars", f"data.root={tmp_path}", f"run.root={tmp_path / 'runs'}"]
    assert train.main([*QUICK[:2], *data, *overrides]) == 2
    assert re.search(message, shown := capsys.readouterr().err), shown


def test_a_file_with_tabs_is_scored_whole_where_that_is_asked_for(translation, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.tsv").write_text("".join(f"dog {word}\tHund {WORDS[word]}\n" for word in WORDS))
    data = ["data=tsv", "data.path=pairs.tsv", "split=all", "output=s.json"]
    assert evaluate.main([f"bundle={translation / 'bundle'}", *data]) == 0
    assert json.loads((tmp_path / "s.json").read_text())["examples"] == len(WORDS)
    assert evaluate.main([f"bundle={translation / 'bundle'}", *data, "scoring=x"]) == 2
    assert "scoring=x is a group of keys" in capsys.readouterr().err


def test_evaluation_tells_which_sources_it_had_to_cut(translation, folder, capsys):
    data = ["data=parallel", f"data.root={folder}", "data.source_language=en", "data.target_language=de"]
    more = ["split=train", "limit=6", "scoring.tokenize=none"]
    assert evaluate.main([f"bundle={translation / 'bundle'}", *data, *more]) == 1
    assert re.search(r"train\.en:5: the source has \d+ tokens; at most 16 fit: cut", capsys.readouterr().err)


def test_no_limit_by_the_sources_length_is_none_in_the_bundle_too(folder, tmp_path):
    more = ["validation.length_factor=null", "validation.length_offset=null", "fit.epochs=1"]
    assert train.main([*settings(folder, tmp_path), *more]) == 0
    (made,) = tmp_path.iterdir()
    results = json.loads((made / "results.json").read_text())
    assert results["generation"]["length_factor"] * 1 >= results["generation"]["max_length"]
    assert results["test"]["mean_length"] > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["scoring.tokenize=words"], "scoring: "),
        (["scoring=none"], r"scoring=none is a group of keys, one of which is set by scoring\.KEY=VALUE"),
        (
            ["+source_tokenizer._target_=mmattn.preprocess.text.Tokenizer.train"],
            "share_embeddings=true needs one vocabulary",
        ),
        (["fit.monitor=cider_d"], r"fit\.monitor=cider_d is no score\. Scores: bleu, chrf"),
        (["batches.too_long=drop"], "batches: too_long='drop' is unknown"),
        (["encoder.num_heads=3"], "encoder: num_heads=3 does not divide hidden_dim=16"),
        (["encoder=vit"], r"encoder: this task needs an encoder of tokens: encoder=text\. Received VisionTransformer"),
        (["+optimizer.gradient_accumulation_steps=1"], "optimizer: .*gradient_accumulation_steps"),
        (["data.train_files=none"], r"none\.en"),
        (["final.num_beams=[1,65]"], r"final: generation\.num_beams=65 must be a whole number from 1 to 64"),
        (["validation.length_offset=0"], r"final: generation\.length_offset=0 must be"),
        (
            ["encoder.positions=learned", "+encoder.max_length=8"],
            r"batches\.max_length=16 is more than encoder\.max_length=8",
        ),
        (["optimizer.adam_beta_2=2.0"], r"optimizer\.adam_beta_2=2\.0 must be in \[0, 1\)"),
        (["+scoring.detokenize=de"], "scoring.detokenize is for mmattn evaluate"),
        (["encoder=none"], r"encoder: this task needs an encoder of tokens: encoder=text\. Received none"),
        (["model=language_model"], r"model\.share_embeddings is unknown"),
        (["+decoder.cross_attention=false"], "model: a translator's decoder looks at the source"),
        (["fit.snapshots=1"], r"fit: snapshots=1 must be 0 \(none\), or 2 or more"),
        (["task=captioning"], "scoring is unknown"),
        ([f"loss._target_={R_DROP}"], "batches.twins=true and RDropCrossEntropy as the loss go together"),
        (["batches.twins=true"], "batches.twins=true and RDropCrossEntropy as the loss go together"),
        ([f"loss._target_={R_DROP}", "+loss.alpha=-1", "batches.twins=true"], "loss: .*alpha=-1"),
    ],
)
def test_wrong_settings_of_a_translation_are_refused_in_words(overrides, message, folder, tmp_path, capsys):
    assert train.main([*settings(folder, tmp_path / "runs"), *overrides]) == 2
    shown = capsys.readouterr().err
    assert re.search(message, shown), shown
    assert "Traceback" not in shown


def test_a_file_that_is_not_utf8_is_refused_with_its_line(folder, tmp_path, capsys):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    lines = (tmp_path / "train.de").read_bytes().split(b"\n")
    lines[2] = "läuft".encode("latin-1")
    (tmp_path / "train.de").write_bytes(b"\n".join(lines))
    assert train.main(settings(tmp_path, tmp_path / "runs")) == 2
    assert re.search(r"train\.de.*:3", capsys.readouterr().err)


class Backwards:
    """A translator that says the words of a text backwards, and of one text something else."""

    def __init__(self, odd, said, joiner):
        self.odd, self.said, self.source_tokenizer = odd, said, None
        self.tokenizer = SimpleNamespace(joiner=joiner)

    def translate(self, texts, **settings):
        assert settings["method"] == "greedy" and not (self.tokenizer.joiner is None and "@@" in "".join(texts))
        words = [self.said if text == self.odd else " ".join(text.split()[::-1]) for text in texts]
        return [SimpleNamespace(text=text.replace("@@ ", "")) for text in words]


def test_more_pairs_are_made_of_the_ones_there_are(tmp_path, monkeypatch):
    pytest.importorskip("subword_nmt")
    (tmp_path / "codes").write_text("#version: 0.2\na b</w>\n")
    (tmp_path / "a").write_text("ab c@@ d\nab\nab d\n")
    (tmp_path / "b").write_text("ab ab\nc@@ d\nd\n")
    models = {"there": Backwards("ab", "x y", "@@"), "back": Backwards("d", "", None)}
    monkeypatch.setattr(diversify, "Translator", SimpleNamespace(load=models.__getitem__))
    files = ["--source", str(tmp_path / "a"), "--target", str(tmp_path / "b"), "--codes", str(tmp_path / "codes")]
    assert diversify.main([*files, "--forward", "there", "--backward", "back", "--output", str(tmp_path / "o")]) == 0
    found = [(tmp_path / "o" / f"train.{side}").read_text().splitlines() for side in ("source", "target")]
    pairs = list(zip(*found, strict=True))
    assert pairs[:3] == [("ab c@@ d", "ab ab"), ("ab", "c@@ d"), ("ab d", "d")]
    assert pairs[3:5] == [("ab ab", "ab ab"), ("c@@ d", "c@@ d")]  # made of targets; one is empty
    assert pairs[5:] == [("ab c@@ d", "d c@@ ab"), ("ab d", "d ab")]  # made of sources; one has unknown words


def test_what_pairs_cannot_be_made_of_is_refused_in_words(tmp_path, capsys):
    (tmp_path / "a").write_text("one\n")
    (tmp_path / "b").write_text("eins\nzwei\n")
    models = ["--forward", str(tmp_path), "--backward", str(tmp_path), "--output", str(tmp_path / "o")]
    for target, words in (("b", "the same number of lines"), ("c", "c"), ("a", "bundle.json")):
        assert diversify.main(["--source", str(tmp_path / "a"), "--target", str(tmp_path / target), *models]) == 1
        said = capsys.readouterr().err
        assert said.startswith("mmattn: ") and words in said and "Traceback" not in said
    assert not (tmp_path / "o").exists()
    models[-1] = str(tmp_path / "a" / "o")
    assert diversify.main(["--source", str(tmp_path / "a"), "--target", str(tmp_path / "a"), *models]) == 1
    assert f"{tmp_path}/a is a file" in capsys.readouterr().err


def test_the_mark_of_subwords_is_taken_out_of_references_before_scoring():
    scoring = TranslationScoring("none", joiner="@@")
    made = [Prediction("1", "das Haus brennt hell", ["das Ha@@ us bre@@ nnt hell"], 1.0)]
    assert scoring(made)["bleu"] == pytest.approx(100.0) and scoring(made)["exact"] == 1.0
    plain = Tokenizer.train(["a b"] * 9, vocabulary_size=16, shrink=True)
    assert scoring.joining(plain)(made)["bleu"] == pytest.approx(100.0)  # a setting of the user's stays


def test_what_scoring_needs_is_asked_for_before_anything_is_translated(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    metrics.translation._moses.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        TranslationScoring("13a", detokenize="fr")


def test_moses_tokens_are_turned_into_raw_text_before_scoring():
    pytest.importorskip("sacremoses")
    scoring = TranslationScoring("13a", lowercase=True, detokenize="en")
    made = [Prediction("1", "the dog &apos;s ball , is red .", ["The dog's ball, is red."], 1.0)]
    assert scoring(made)["bleu"] == pytest.approx(100.0)
    assert scoring(made)["exact"] == 1.0


def test_a_run_with_r_drop_goes_to_its_end(folder, tmp_path):
    more = [f"loss._target_={R_DROP}", "+loss.alpha=2", "batches.twins=true", "fit.epochs=1"]
    assert train.main([*settings(folder, tmp_path / "runs"), *more]) == 0
    (made,) = (tmp_path / "runs").iterdir()
    assert lines_of(made / "metrics.jsonl")[-1]["loss"] > 0


@pytest.mark.slow
def test_with_accumulated_gradients_the_schedule_still_ends_with_the_run(folder, tmp_path):
    """Keras gives a schedule the number of batches, not of updates."""
    more = ["+optimizer.gradient_accumulation_steps=2", "fit.epochs=2"]
    assert train.main([*settings(folder, tmp_path / "runs"), *more]) == 0
    (made,) = (tmp_path / "runs").iterdir()
    rates = [line["learning_rate"] for line in lines_of(made / "metrics.jsonl")]
    assert rates[0] > 3e-3 / 4 and rates[1] < 3e-3 / 100  # half-way down after half of the batches, not at the end


def test_the_perplexity_of_the_references_is_that_of_each_pair_alone(translation):
    """One pair at a time, without padding, in float64."""
    results = json.loads((translation / "results.json").read_text())
    bundle = load_bundle(translation / "bundle")
    predictions = lines_of(translation / "predictions.jsonl")
    sources = (translation / "config.yaml").read_text()
    root = re.search(r"root: (\S*pairs\S*)", sources)[1]
    source = ParallelSource(f"{root}/test.en", f"{root}/test.de")
    total = count = 0.0
    for index in range(len(predictions)):
        ids = [*(bundle.source_tokenizer or bundle.tokenizer).encode(source[index]["source"]), 3]
        labels = [*bundle.tokenizer.encode(source[index]["targets"][0]), 3]
        if max(len(ids), len(labels)) > bundle.generation["max_source_length"]:
            continue
        inputs = {"source_ids": np.array([ids], "int32"), "target_ids": np.array([[2, *labels[:-1]]], "int32")}
        logits = np.asarray(bundle.model(inputs), "float64")[0]
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        total -= logs[np.arange(len(labels)), labels].sum()
        count += len(labels)
    assert results["perplexity_tokens"] == count
    assert results["perplexity"] == pytest.approx(np.exp(total / count), rel=1e-4)


def test_a_run_says_its_limits_its_faulty_lines_and_that_it_cannot_write_yet(folder, tmp_path, capsys):
    (tmp_path / "broken.tsv").write_text("a dog\tein Hund\nno tab\n" + "".join(f"a {i}\tein {i}\n" for i in range(90)))
    overrides = [*QUICK, "experiment=pairs", f"data.path={tmp_path}/broken.tsv", "data.problems=skip"]
    assert train.main([*overrides, "size.epochs=1", f"run.root={tmp_path}/runs"]) == 0
    out = capsys.readouterr().out
    assert "Faulty lines left out: 1, see rejected.jsonl." in out
    assert re.search(r"Limited by `limit`: 24 of \d+ train records", out)
    assert "No validation has scored more than 0" in out


def test_an_evaluation_that_had_to_cut_says_why_it_ends_with_1(translation, tmp_path, capsys):
    (tmp_path / "long.tsv").write_text(f"{'dog ' * 200}\t{'Hund ' * 200}\na dog\tein Hund\n", encoding="utf-8")
    bundle = f"bundle={translation / 'bundle'}"
    assert evaluate.main([bundle, "data=tsv", f"data.path={tmp_path}/long.tsv", "split=all"]) == 1
    assert "exit code 1 because 1 records could not be read whole" in capsys.readouterr().err
    assert evaluate.main([bundle]) == 2
    assert "data=... chooses another source" in capsys.readouterr().err
