"""The whole way of a captioner on the backend that runs, and with no other one: training, decoding, bundle, reload."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
from arrays import JAX

from mmattn import Captioner
from mmattn.bundle import save_bundle
from mmattn.decoders import TransformerDecoder
from mmattn.encoders.image import VisionTransformer
from mmattn.generation import TextGenerator
from mmattn.model import EncoderDecoder
from mmattn.preprocess.image import ImageReader
from mmattn.preprocess.text import Tokenizer
from mmattn.training.callbacks import StopSignals
from mmattn.training.fit import FitOptions, TrainingLoop
from mmattn.training.losses import MaskedCrossEntropy, TokenAccuracy

CAPTIONS = ["a red circle", "two dogs run", "the sun sets", "a blue boat"]
PICTURES = np.random.default_rng(0).integers(0, 256, (4, 16, 24, 3)).astype("uint8")
TOKENIZER = Tokenizer.train(CAPTIONS * 9, vocabulary_size=40, shrink=True)
LENGTH, STEPS = 12, 40


class Pairs:
    """All pictures and captions, in each batch."""

    def iterate(self, start=0):
        rows = [[TOKENIZER.bos_id, *TOKENIZER.encode(text), TOKENIZER.eos_id] for text in CAPTIONS]
        ids = np.array([row + [TOKENIZER.pad_id] * (LENGTH + 1 - len(row)) for row in rows], "int32")
        labels = ids[:, 1:]
        while True:
            weights = (labels != TOKENIZER.pad_id).astype("float32")
            yield {"pixels": PICTURES, "target_ids": ids[:, :-1]}, labels, weights


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained captioner, and its run folder with the bundle."""
    keras.utils.set_random_seed(1)
    folder = tmp_path_factory.mktemp("run")
    encoder = VisionTransformer((16, 24), patch_size=8, hidden_dim=16, num_layers=1, num_heads=2)
    decoder = TransformerDecoder(TOKENIZER.vocabulary_size, hidden_dim=16, num_layers=1, num_heads=2, dropout=0.05)
    model = EncoderDecoder(encoder, decoder)
    model.build({"pixels": (None, 16, 24, 3), "target_ids": (None, None)})
    model.compile(
        keras.optimizers.Adam(0.02), MaskedCrossEntropy(), weighted_metrics=[TokenAccuracy()], jit_compile=JAX
    )
    model.optimizer.build(model.trainable_variables)
    generate = TextGenerator(model, TOKENIZER).best

    def validate(step):
        texts = generate({"pixels": PICTURES}, max_length=LENGTH)
        return {"exact": np.mean([made.text == text for made, text in zip(texts, CAPTIONS, strict=True)])}

    with StopSignals() as signals:
        options = FitOptions(epochs=2, monitor="exact")
        TrainingLoop(model, Pairs(), STEPS, options, folder, validate, signals, lambda line: None).run()
    save_bundle(folder / "bundle", model, TOKENIZER, ImageReader((16, 24)), {}, weights_dtype="float32")
    return model, folder


def test_training_lowers_the_loss_and_ends_with_captions_known_by_heart(run):
    entries = [json.loads(line) for line in (run[1] / "metrics.jsonl").read_text().splitlines()]
    assert [entry["epoch"] for entry in entries] == [1, 2]
    assert entries[1]["loss"] < entries[0]["loss"]
    assert entries[1]["accuracy"] > 0.95 and entries[1]["val_exact"] == 1.0


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("compiled", [False, "auto", True])
def test_the_reloaded_bundle_gives_the_captions_of_the_model_that_was_trained(run, beams, compiled):
    model, folder = run
    settings = {"method": "beam", "num_beams": beams, "max_length": LENGTH, "compiled": compiled}
    before = TextGenerator(model, TOKENIZER)({"pixels": PICTURES}, beams, **settings)
    after = Captioner.load(folder / "bundle").caption(
        list(PICTURES), nbest=beams, num_beams=beams, max_length=LENGTH, compiled=compiled
    )
    assert [caption.text for caption in after] == CAPTIONS
    for texts, caption in zip(before, after, strict=True):
        hypotheses = (caption, *caption.alternatives)
        assert [text.ids for text in texts] == [hypothesis.ids for hypothesis in hypotheses]
        assert len({hypothesis.ids for hypothesis in hypotheses}) == len(hypotheses) == beams
        for text, hypothesis in zip(texts, hypotheses, strict=True):
            assert hypothesis.confidence == pytest.approx(text.confidence, rel=1e-4)
