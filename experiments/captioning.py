"""A captioning run from its parts: tokenizer, batches, model, training, the choice of the decoding, bundle, test."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras

from mmattn.bundle import Bundle, save_bundle, update_bundle
from mmattn.encoders.features import FeatureCacheError
from mmattn.inference import Captioner
from mmattn.preprocess.image import ImageReadError
from mmattn.preprocess.text import Tokenizer
from mmattn.training import tensorboard
from mmattn.training.callbacks import StopSignals, listed
from mmattn.training.describe import Describer
from mmattn.training.fit import TrainingError, TrainingLoop
from mmattn.training.folder import JsonLines, write_json
from mmattn.training.losses import Perplexity, TokenAccuracy
from mmattn.training.subset import First
from mmattn.training.validation import (
    Choice,
    choose_decoding,
    confidence_threshold,
    describe_pictures,
    score,
    score_shuffled,
)

from .config import ConfigProblem, first_line
from .grounding import attention_on_shapes

SPLITS = ("train", "valid", "test")


class CaptionRun:
    """One run. `parts` are the objects of the configuration (see conf/train.yaml), `sources` its three splits.

    Args:
        config: the resolved configuration, for what are plain values: run, limit, card.
        folder: the run folder.
        signals: entered by the caller.
        say: takes each line for the user.
    """

    def __init__(
        self,
        parts: dict[str, Any],
        sources: dict[str, Any],
        config: dict[str, Any],
        folder: Path,
        signals: StopSignals,
        say: Callable[[str], None] = print,
    ) -> None:
        limits = config["limit"]
        self.parts = parts
        self.sources = {s: sources[s] if limits[s] is None else First(sources[s], limits[s]) for s in SPLITS}
        self.config = config
        self.folder = folder
        self.signals = signals
        self.say = say
        self.rejected = JsonLines(folder / "rejected.jsonl")
        for split, source in sources.items():
            for reason in getattr(source, "skipped", ()):
                self._list_rejected(split, reason)
        with blame("features"):
            self.features = self._features()
        with blame("tokenizer"):
            self.tokenizer = self._tokenizer()
        self.say(f"Pictures: {', '.join(f'{len(self.sources[s])} {s}' for s in SPLITS)}. {self.tokenizer}.")
        self.batches = {}
        for split in SPLITS:
            fixed: dict[str, Any] = {} if split == "train" else {"shuffle": False, "flip": "never", "augment": None}
            with blame(f"data.{split}"):
                self.batches[split] = self._batches(split, **fixed)
        with blame("model"):
            self.model = self._model()
        self.describe = Describer(self.model, self.tokenizer)

    def train(self) -> None:
        """Trains or continues; then the model holds the best weights."""
        train, options = self.batches["train"], self.parts["fit"]
        try:
            next(train.iterate())  # an unreadable source is our own error here, and TensorFlow's inside fit
        except ValueError as error:
            raise TrainingError(str(error)) from error
        steps = options.steps_per_epoch or train.steps_per_epoch
        self._compile(steps * options.epochs)
        loop = TrainingLoop(self.model, train, steps, options, self.folder, self._validate, self.signals, self.say)
        if self.config["run"]["tensorboard"]:
            loop.listeners.append(tensorboard.scalar_writer(self.folder / "tensorboard"))
        state = loop.run()
        self.say(f"Best: {options.monitor} {state.best_score:.4g} at step {state.best_step}.")

    def finish(self) -> dict[str, Any]:
        """Chooses the decoding on the validation split, writes the bundle, scores it on the test split."""
        final, fixed = self.parts["final"], self.parts["validation"].decoding()
        self.say("Decoding options on the validation split:")
        choice = choose_decoding(
            self.describe, self.batches["valid"].examples, fixed, final, self.parts["fit"].monitor, self.say
        )
        bundle = self._save_bundle(choice)
        self.say(f"Test split, by the bundle, with {listed(choice.options)}.")
        describe = Describer(bundle.model, bundle.tokenizer)
        predictions = describe_pictures(describe, self._pixels("test").examples, choice.options)
        tested = score(predictions)
        results = {
            "generation": bundle.generation,
            "valid": score(choice.predictions),
            "tried": choice.tried,
            "test_pictures": len(predictions),
            "test": tested,
        }
        if final.shuffled:
            results["test_shuffled"] = score_shuffled(predictions)
        captioner = Captioner(bundle.model, bundle.tokenizer, bundle.reader, bundle.generation)
        if looked := attention_on_shapes(captioner, self.sources["test"]):
            results["attention"] = looked
        lines = JsonLines(self.folder / "test_captions.jsonl")
        lines.write([dataclasses.asdict(p) for p in predictions])
        shown = {name: round(value, 4) for name, value in tested.items()}
        update_bundle(bundle.folder, card={"scores": {"test": shown}})
        write_json(self.folder / "results.json", results)
        return results

    def _tokenizer(self) -> Tokenizer:
        """The run's own, trained on its training captions the first time."""
        path = self.folder / "tokenizer.model"
        if not path.exists():
            source = self.sources["train"]
            texts = [caption for index in range(len(source)) for caption in _captions(source, index)]
            self.parts["tokenizer"](texts=texts).save(path)
        return Tokenizer.load(path)

    def _features(self) -> Any:
        """The frozen backbone's features of all pictures, computed now where they are not on the disk."""
        if self.parts["features"] is None:
            return None
        cache = self.parts["features"](backbone=self.parts["encoder"].backbone, reader=self.parts["reader"])
        images = [source[index]["image"] for source in self.sources.values() for index in range(len(source))]
        self.say(f"Features of {len(images)} pictures, kept in {cache.folder}:")
        # A picture that cannot be read is reported when a batch asks for it.
        cache.fill(images, on_error=lambda image, error: None, progress=sys.stdout.isatty())
        return cache

    def _batches(self, split: str, pixels: bool = False, **changes: Any) -> Any:
        if pixels or self.features is None:
            read, changes["image_key"] = self.parts["reader"], "pixels"
        else:
            read, changes["image_key"] = self.features, "features"
        return self.parts["batches"](
            source=self.sources[split],
            read_image=read,
            encode_text=self.tokenizer.encode,
            seed=self.config["run"]["seed"],
            skip_errors=(ImageReadError,),
            on_error=self._reject,
            **changes,
        )

    def _pixels(self, split: str) -> Any:
        """Batches as the bundle reads them, whatever the run trained on."""
        return self._batches(split, pixels=True, shuffle=False, flip="never", augment=None)

    def _reject(self, record: dict[str, Any], error: Exception) -> None:
        self._list_rejected(str(record["id"]), str(error))

    def _list_rejected(self, name: str, reason: str) -> None:
        entry = {"id": name, "reason": reason}
        if entry not in self.rejected.read():
            self.rejected.append(entry)

    def _model(self) -> keras.Model:
        decoder = self.parts["decoder"](vocabulary_size=self.tokenizer.vocabulary_size)
        model = self.parts["model"](encoder=self.parts["encoder"], decoder=decoder)
        height, width = self.parts["reader"].size
        model.build({"pixels": (None, height, width, 3), "target_ids": (None, None)})
        return model

    def _compile(self, total_steps: int) -> None:
        with blame("schedule"):
            schedule = self.parts["schedule"](total_steps=total_steps)
        optimizer = self.parts["optimizer"](learning_rate=schedule)
        if optimizer.weight_decay:
            optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta", "embedding", "position"])
        self.model.compile(
            optimizer=optimizer,
            loss=self.parts["loss"],
            weighted_metrics=[TokenAccuracy(), Perplexity()],
            jit_compile=self.parts["runtime"].jit_compile,
        )
        self.model.optimizer.build(self.model.trainable_variables)
        trained = sum(math.prod(v.shape) for v in self.model.trainable_variables)
        frozen = sum(math.prod(v.shape) for v in self.model.weights) - trained
        self.say(f"Model: {trained:,} parameters trained, {frozen:,} frozen. Steps: {total_steps}.")

    def _validate(self, step: int) -> dict[str, float]:
        options, batches = self.parts["validation"], self.batches["valid"]
        made = describe_pictures(self.describe, batches.examples, options.decoding(), options.pictures)
        return score(made)

    def _save_bundle(self, choice: Choice) -> Bundle:
        threshold = confidence_threshold(choice.predictions, self.parts["final"].low_confidence_share)
        given = {name: value for name, value in self.config["card"].items() if value is not None}
        card = {**given, "command": f"mmattn train (see {self.folder.name}/config.yaml)"}
        return save_bundle(
            self.folder / "bundle",
            self.model,
            self.tokenizer,
            self.parts["reader"],
            {**choice.options, "low_confidence": threshold},
            card,
            self.parts["final"].weights_dtype,
        )


@contextmanager
def blame(path: str) -> Iterator[None]:
    """What cannot work with these data becomes a ConfigProblem of the node at `path`."""
    try:
        yield
    except (ValueError, FeatureCacheError) as error:
        raise ConfigProblem([f"{path}: {first_line(error)}"]) from error


def _captions(source: Any, index: int) -> list[str]:
    """The captions that are trained on; a source that can give them without drawing or opening the picture does so."""
    captions = getattr(source, "training_captions", None)
    return list(captions(index)) if callable(captions) else list(source[index]["captions"])
