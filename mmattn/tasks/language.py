"""Language modelling: what comes next in a text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import keras

from mmattn.bundle import Bundle, save_bundle, update_bundle
from mmattn.data.text import TextBatches
from mmattn.inference import Writer
from mmattn.tasks.parts import Report, blame, check_part, check_settings, tokenizer_of
from mmattn.training.folder import write_json
from mmattn.training.likelihood import SCORES, measurer


class LanguageModelling:
    """The language model's side of a run.

    Args:
        parts: the objects of the configuration: tokenizer, batches, decoder, model, validation, final.
        sources: train, valid and test, records with `text` and `id`.
        folder: the run folder.
        seed: of the batches.
        say: takes each line for the user.
        reject: not needed here.
    """

    command: ClassVar = "generate"  # of mmattn, to try the bundle
    nodes: ClassVar = ()
    fields: ClassVar = ("text",)  # of a record
    scores: ClassVar = SCORES

    def __init__(
        self,
        parts: dict[str, Any],
        sources: dict[str, Any],
        folder: Path,
        seed: int,
        say: Callable[[str], None],
        reject: Report,
    ) -> None:
        self.parts, self.say = parts, say
        text = "".join(sources["train"][index]["text"] for index in range(len(sources["train"])))
        with blame("tokenizer"):
            self.tokenizer = tokenizer_of(folder / "tokenizer.model", parts["tokenizer"], [text])
        self.batches = {}
        for split, source in sources.items():
            with blame("batches" if split == "train" else f"data.{split}"):
                self.batches[split] = self._batches(seed)(source=source, encode_text=self.tokenizer.encode)
        say(f"Tokens: {', '.join(f'{b.num_tokens} {split}' for split, b in self.batches.items())}. {self.tokenizer}.")
        with blame("model"):
            self.language_model = _model(parts, self.tokenizer.vocabulary_size)
            self.language_model.build({"target_ids": (None, None)})
            self.model = self._trained()
        self._measure = self.measurer(self.language_model)

    @staticmethod
    def trials(parts: dict[str, Any], vocabulary_size: int) -> dict[str, Callable[[], Any]]:
        """What to try before data are read, by place in the configuration; a setting that cannot work raises."""
        length = parts["batches"].keywords.get("length", 1)
        source = [{"id": "1", "text": "a" * (length + 1)}]
        return {
            "batches.length": lambda: check_settings("language_model", context_length=length),
            "model": lambda: _model(parts, vocabulary_size),
            "encoder": lambda: check_part(parts["encoder"], type(None), "no encoder: encoder=none"),
            "batches": lambda: parts["batches"](source=source, encode_text=lambda text: [4] * len(text)),
        }

    def _batches(self, seed: int) -> Callable[..., Any]:
        """What makes the batches of a source."""
        return partial(self.parts["batches"], seed=seed)

    def _trained(self) -> keras.Model:
        """The model that is trained."""
        return self.language_model

    @staticmethod
    def measurer(model: keras.Model) -> Callable[[Any], dict[str, float]]:
        """A function that takes a split's batches and gives their scores."""
        measure = measurer(model)
        return lambda batches: measure(batches.windows())

    def validate(self, step: int) -> dict[str, float]:
        """The scores of the validation split."""
        return self._measure(self.batches["valid"])

    def finish(self, folder: Path, card: dict[str, Any], monitor: str) -> dict[str, Any]:
        """Writes the bundle and scores it on the test split."""
        bundle = save_bundle(
            folder / "bundle", self.language_model, self.tokenizer, generation=self._generation(), card=card,
            weights_dtype=self.parts["final"].weights_dtype,
        )  # fmt: skip
        self.say("Test split, by the bundle.")
        tested, more = self._tested(bundle)
        [sample] = Writer(bundle.model, bundle.tokenizer, bundle.generation).write(seed=1, max_length=300)
        self.say(f"A sample:\n{sample}\n")
        results = {"valid": self.validate(0), "test": tested, **more, "sample": sample}
        update_bundle(bundle.folder, card={"scores": {"test": {n: round(v, 4) for n, v in tested.items()}}})
        write_json(folder / "results.json", results)
        return results

    def _generation(self) -> dict[str, Any]:
        """The bundle's settings that come from how it was trained."""
        return {"context_length": self.batches["train"].length}

    def _tested(self, bundle: Bundle) -> tuple[dict[str, float], dict[str, Any]]:
        """The bundle's scores on the test split, and what more is to be noted."""
        return self.measurer(bundle.model)(self.batches["test"]), {}


def _model(parts: dict[str, Any], vocabulary_size: int) -> keras.Model:
    """Not built yet."""
    decoder = parts["decoder"](vocabulary_size=vocabulary_size)
    if getattr(decoder, "has_cross_attention", False):
        raise ValueError("a language model has nothing to look at: decoder.cross_attention=false.")
    return parts["model"](decoder=decoder)


def evaluate(bundle: Bundle, source: Any, settings: dict[str, Any], batch_size: int) -> dict[str, float]:
    """A bundle's scores on a source, in windows of the length that it was trained on."""
    length = settings["context_length"] or 256
    batches = TextBatches(source, bundle.tokenizer.encode, batch_size, length, shuffle=False)
    return measurer(bundle.model)(batches.windows())
