"""Masked language modelling: which words are hidden in a sentence, told from those on both sides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import keras

from mmattn.bundle import Bundle, save_bundle, update_bundle
from mmattn.data.masked import MaskedBatches, hidden_once
from mmattn.metrics.neighbours import Neighbours
from mmattn.tasks.parts import Report, blame, check_part, check_settings, tokenizer_of
from mmattn.training.folder import write_json
from mmattn.training.likelihood import SCORES, measurer


class MaskedModelling:
    """The masked language model's side of a run.

    Args:
        parts: the objects of the configuration: tokenizer, batches, encoder, model, validation, final.
        sources: train, valid and test, records with `text` and `id`.
        folder: the run folder.
        seed: of the batches.
        say: takes each line for the user.
        reject: called with the id of a sentence that is left out or cut and the reason.
    """

    command: ClassVar = 'fill "A SENTENCE WITH [MASK] ."'  # of mmattn, to try the bundle
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
        self.parts, self.sources, self.say, self.reject = parts, sources, say, reject
        train = sources["train"]
        with blame("tokenizer"):
            texts = (train[index]["text"] for index in range(len(train)))
            self.tokenizer = tokenizer_of(folder / "tokenizer.model", parts["tokenizer"], texts)
        self.options: dict[str, Any] = {
            "encode_text": self.tokenizer.encode,
            "words": self.tokenizer.words,
            "vocabulary_size": self.tokenizer.vocabulary_size,
        }
        with blame("batches"):
            batches: MaskedBatches = parts["batches"](source=train, seed=seed, **self.options)
        self.batches = {"train": batches}
        for name, why in batches.faults:
            reject(name, why)
        counts = ", ".join(f"{len(source)} {split}" for split, source in sources.items())
        faults = f" {len(batches.faults)} left out or cut: see rejected.jsonl." if batches.faults else ""
        say(f"Sentences: {counts}.{faults} {self.tokenizer}.")
        with blame("data.valid"):
            self.valid = list(self._hidden("valid"))
        with blame("model"):
            self.model = _model(parts, self.tokenizer.vocabulary_size)
            self.model.build({"source_ids": (None, None)})
        self._measure = measurer(self.model)

    @staticmethod
    def trials(parts: dict[str, Any], vocabulary_size: int) -> dict[str, Callable[[], Any]]:
        """What to try before data are read, by place in the configuration; a setting that cannot work raises."""
        source = [{"id": "1", "text": "a"}]
        size, longest = max(vocabulary_size, 5), parts["batches"].keywords.get("max_length", 256)
        return {
            "batches.max_length": lambda: check_settings("masked_language_model", max_source_length=longest),
            "encoder": lambda: check_part(parts["encoder"], partial, "an encoder of tokens: encoder=text"),
            "decoder": lambda: check_part(parts["decoder"], type(None), "no decoder: decoder=none"),
            "model": lambda: _model(parts, vocabulary_size),
            "batches": lambda: parts["batches"](
                source=source, encode_text=lambda text: [4], words=None, vocabulary_size=size
            ),
        }

    def validate(self, step: int) -> dict[str, float]:
        """The scores of the validation split."""
        return self._measure(self.valid)

    def finish(self, folder: Path, card: dict[str, Any], monitor: str) -> dict[str, Any]:
        """Writes the bundle and scores it on the test split, beside what counting alone would tell."""
        train = self.batches["train"]
        bundle = save_bundle(
            folder / "bundle", self.model, self.tokenizer, generation={"max_source_length": train.max_length},
            card=card, weights_dtype=self.parts["final"].weights_dtype,
        )  # fmt: skip
        self.say("Test split, by the bundle.")
        hidden = list(self._hidden("test"))
        tested = measurer(bundle.model)(hidden)
        counted = Neighbours((s.ids for s in train.sentences), self.tokenizer.vocabulary_size + 1)
        guessed = {"valid": counted.accuracies(self.valid), "test": counted.accuracies(hidden)}
        said = ", ".join(f"{name} {value:.4g}" for name, value in guessed["test"].items())
        self.say(f"Accuracy by counting alone: {said}.")
        results = {
            "valid": self.validate(0),
            "test": tested,
            "test_tokens": int(sum(weights.sum() for _, _, weights in hidden)),
            "accuracy_by_counting": guessed,
        }
        shown = {name: round(value, 4) for name, value in tested.items()}
        shown |= {f"accuracy of {name} counts": round(value, 4) for name, value in guessed["test"].items()}
        update_bundle(bundle.folder, card={"scores": {"test": shown}})
        write_json(folder / "results.json", results)
        return results

    def _hidden(self, split: str) -> Any:
        """Every word of a split hidden once."""
        longest = self.batches["train"].max_length
        return hidden_once(self.sources[split], **self.options, max_length=longest, on_fault=self.reject)


def evaluate(
    bundle: Bundle, source: Any, settings: dict[str, Any], batch_size: int, reject: Report
) -> dict[str, float]:
    """A bundle's scores on a source of sentences, every word of which is hidden once.

    A sentence of more than `max_source_length` tokens is cut and told to `reject`.
    """
    tokenizer = bundle.tokenizer
    batches = hidden_once(
        source, tokenizer.encode, tokenizer.words, tokenizer.vocabulary_size,
        tokens_per_batch=32 * batch_size, max_length=settings["max_source_length"], on_fault=reject,
    )  # fmt: skip
    return measurer(bundle.model)(batches)


def _model(parts: dict[str, Any], vocabulary_size: int) -> keras.Model:
    """Not built yet; it has a token more than the tokenizer, the mask."""
    return parts["model"](encoder=parts["encoder"](vocabulary_size=vocabulary_size + 1))
