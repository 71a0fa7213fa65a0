"""Captioning: pictures in, one sentence about each out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np

from mmattn.bundle import Bundle, save_bundle
from mmattn.data.batches import CaptionBatches
from mmattn.generation import TextGenerator
from mmattn.inference import Captioner
from mmattn.tasks.grounding import attention_on_shapes
from mmattn.tasks.parts import Report, blame, check_decoding, check_part, features_of, how_to_read, tokenizer_of
from mmattn.training.validation import CAPTIONS, Choice, Prediction, confidence_threshold, decoding_of, finish, predict


class Captioning:
    """The captioner's side of a run.

    Args:
        parts: the objects of the configuration: reader, batches, tokenizer, encoder, decoder, model, features or None,
            validation, final.
        sources: train, valid and test, records with `image`, `captions` and `id`.
        folder: the run folder.
        seed: of the batches.
        say: takes each line for the user.
        reject: called with the id of a picture that cannot be read and the reason.
    """

    command: ClassVar = "caption PHOTO"  # of mmattn, to try the bundle
    nodes: ClassVar = ("reader", "features")
    fields: ClassVar = ("image", "captions")  # of a record
    scores: ClassVar = CAPTIONS.names

    def __init__(
        self,
        parts: dict[str, Any],
        sources: dict[str, Any],
        folder: Path,
        seed: int,
        say: Callable[[str], None],
        reject: Report,
    ) -> None:
        self.parts, self.sources, self.seed, self.say, self.reject = parts, sources, seed, say, reject
        with blame("features"):
            self.features = features_of(parts, sources, say)
        with blame("tokenizer"):
            self.tokenizer = tokenizer_of(folder / "tokenizer.model", parts["tokenizer"], self._texts())
        say(f"Pictures: {', '.join(f'{len(s)} {name}' for name, s in sources.items())}. {self.tokenizer}.")
        self.batches = {}
        for split in sources:
            fixed: dict[str, Any] = {} if split == "train" else {"shuffle": False, "flip": "never", "augment": None}
            with blame(f"data.{split}"):
                self.batches[split] = self._batches(split, **fixed)
        with blame("model"):
            self.model = self._model()
        self.generate = TextGenerator(self.model, self.tokenizer).best

    @staticmethod
    def trials(parts: dict[str, Any], vocabulary_size: int) -> dict[str, Callable[[], Any]]:
        """What to try before data are read, by place in the configuration; a setting that cannot work raises."""
        reader = parts["reader"]
        record = {"id": "0", "image": np.zeros((*reader.size, 3), "uint8"), "captions": ["a"]}
        return {
            "encoder": lambda: check_part(parts["encoder"], keras.layers.Layer, "an encoder of pictures, such as vit"),
            "model": lambda: _model(parts, vocabulary_size),
            "final": lambda: check_decoding(parts, "captioner"),
            "batches": lambda: parts["batches"](source=[record], read_image=reader, encode_text=lambda text: [4]),
        }

    def validate(self, step: int) -> dict[str, float]:
        """The scores of captions of the validation split."""
        options = self.parts["validation"]
        made = predict(self.generate, self.batches["valid"].examples, options.decoding(), CAPTIONS, options.examples)
        return CAPTIONS(made)

    def finish(self, folder: Path, card: dict[str, Any], monitor: str) -> dict[str, Any]:
        """Chooses the decoding on the validation split, writes the bundle, scores it on the test split."""

        def bundled(choice: Choice) -> Bundle:
            final = self.parts["final"]
            threshold = confidence_threshold(choice.predictions, final.low_confidence_share)
            generation = {**choice.options, "low_confidence": threshold}
            return save_bundle(
                folder / "bundle",
                self.model,
                self.tokenizer,
                self.parts["reader"],
                generation,
                card,
                final.weights_dtype,
            )

        def test(bundle: Bundle) -> tuple[list[Prediction], dict[str, Any]]:
            batches = self._batches("test", pixels=True, shuffle=False, flip="never", augment=None)
            generate = TextGenerator(bundle.model, bundle.tokenizer).best
            predictions = predict(generate, batches.examples, decoding_of(bundle.generation), CAPTIONS)
            return predictions, grounded(bundle, bundle.generation, self.sources["test"])

        return finish(
            self.generate, self.batches["valid"].examples, self.parts["validation"].decoding(), self.parts["final"],
            CAPTIONS, monitor, folder, bundled, test, self.say,
        )  # fmt: skip

    def _texts(self) -> Any:
        source = self.sources["train"]
        return (caption for index in range(len(source)) for caption in _captions(source, index))

    def _batches(self, split: str, pixels: bool = False, **changes: Any) -> Any:
        """`pixels`: as the bundle reads pictures, whatever the run trains on."""
        return self.parts["batches"](
            source=self.sources[split],
            encode_text=self.tokenizer.encode,
            seed=self.seed,
            **how_to_read(self.parts["reader"], None if pixels else self.features, self.reject),
            **changes,
        )

    def _model(self) -> keras.Model:
        model = _model(self.parts, self.tokenizer.vocabulary_size)
        height, width = self.parts["reader"].size
        model.build({"pixels": (None, height, width, 3), "target_ids": (None, None)})
        return model


def evaluate(
    bundle: Bundle, source: Any, settings: dict[str, Any], batch_size: int, reject: Report
) -> tuple[list[Prediction], dict[str, float], dict[str, Any]]:
    """A bundle's captions of a source, their scores, and what more there is to say."""
    batches = CaptionBatches(
        source,
        encode_text=bundle.tokenizer.encode,
        batch_size=batch_size,
        max_length=settings["max_length"] + 1,
        shuffle=False,
        **how_to_read(bundle.reader, None, reject),
    )
    generate = TextGenerator(bundle.model, bundle.tokenizer).best
    predictions = predict(generate, batches.examples, decoding_of(settings), CAPTIONS)
    return predictions, CAPTIONS(predictions), grounded(bundle, settings, source)


def grounded(bundle: Bundle, settings: dict[str, Any], source: Any) -> dict[str, Any]:
    """The share of the attention on the objects of the words, where the source knows its objects."""
    captioner = Captioner(bundle.model, bundle.tokenizer, bundle.reader, settings)
    looked = attention_on_shapes(captioner, source)
    return {"attention": looked} if looked else {}


def _model(parts: dict[str, Any], vocabulary_size: int) -> keras.Model:
    """Not built yet."""
    return parts["model"](encoder=parts["encoder"], decoder=parts["decoder"](vocabulary_size=vocabulary_size))


def _captions(source: Any, index: int) -> list[str]:
    """The captions that are trained on; a source that can give them without drawing or opening the picture does so."""
    captions = getattr(source, "training_captions", None)
    return list(captions(index)) if callable(captions) else list(source[index]["captions"])
