"""A training run: a task and its data, the model and its optimizer, training, and what the task makes of the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmattn import backend
from mmattn.tasks.parts import PartError, blame
from mmattn.training import tensorboard
from mmattn.training.callbacks import StopSignals
from mmattn.training.fit import TrainingError, TrainingLoop
from mmattn.training.folder import JsonLines
from mmattn.training.losses import Perplexity, TokenAccuracy
from mmattn.training.subset import First

from .config import ConfigProblem, first_line

SPLITS = ("train", "valid", "test")


class Run:
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
        self.config = config
        self.folder = folder
        self.signals = signals
        self.say = say
        self.weights = ""
        self.rejected = JsonLines(folder / "rejected.jsonl")
        self._known = {(entry["id"], entry["reason"]) for entry in self.rejected.read()}
        faulty = {reason: split for split, source in sources.items() for reason in getattr(source, "skipped", ())}
        for reason, split in faulty.items():  # a faulty line may belong to no split
            if reason not in {told for _, told in self._known}:
                self._reject(split, reason)
        if faulty:
            say(f"Faulty lines left out: {len(faulty)}, see rejected.jsonl.")
        wanted = parts["task"].func.fields
        for split in SPLITS:
            if len(sources[split]) and not set(wanted) <= sources[split][0].keys():
                raise ConfigProblem([f"data.{split}: {wrong_records(wanted, sources[split][0])}"])
        cut = [s for s in SPLITS if limits[s] is not None and limits[s] < len(sources[s])]
        if cut:
            say("Limited by `limit`: " + ", ".join(f"{limits[s]} of {len(sources[s])} {s} records" for s in cut) + ".")
        sources = {s: sources[s] if limits[s] is None else First(sources[s], limits[s]) for s in SPLITS}
        try:
            self.task = parts["task"](
                parts=parts, sources=sources, folder=folder, seed=config["run"]["seed"], say=say, reject=self._reject
            )
        except PartError as error:
            raise ConfigProblem([f"{error.path}: {first_line(error.__cause__ or error)}"]) from error

    def train(self) -> None:
        """Trains or continues; then the model holds the best weights."""
        train, options = self.task.batches["train"], self.parts["fit"]
        try:
            next(train.iterate())  # an unreadable source is our own error here, and TensorFlow's inside fit
        except ValueError as error:
            raise TrainingError(str(error)) from error
        steps = options.steps_per_epoch or train.steps_per_epoch
        self._compile(steps * options.epochs)
        loop = TrainingLoop(
            self.task.model, train, steps, options, self.folder, self.task.validate, self.signals, self.say
        )
        if self.config["run"]["tensorboard"]:
            loop.listeners.append(tensorboard.scalar_writer(self.folder / "tensorboard"))
        state = loop.run()
        self.weights = f"{state.best_weights}, the best of the validations by {options.monitor}"
        self.say(f"Best: {options.monitor} {state.best_score:.4g}, {state.best_weights}.")
        if state.best_score == 0 and options.monitor in ("bleu", "cider_d", "bleu4"):
            self.say(
                "No validation has scored more than 0: the model has not learned to write yet. Train it for longer."
            )

    def finish(self) -> dict[str, Any]:
        """What the task makes of the trained model: bundle and results."""
        given = {name: value for name, value in self.config["card"].items() if value is not None}
        card = {**given, "weights": self.weights, "command": f"mmattn train (see {self.folder.name}/config.yaml)"}
        return self.task.finish(self.folder, card, self.parts["fit"].monitor)

    def _reject(self, name: str, reason: str) -> None:
        """Lists a record that is left out, once."""
        if (name, reason) not in self._known:
            self._known.add((name, reason))
            self.rejected.append({"id": name, "reason": reason})

    def _compile(self, total_steps: int) -> None:
        model = self.task.model
        try:
            with blame("schedule"):
                schedule = self.parts["schedule"](total_steps=total_steps)
        except PartError as error:
            raise ConfigProblem([f"{error.path}: {first_line(error)}"]) from error
        optimizer = self.parts["optimizer"](learning_rate=schedule)
        if optimizer.weight_decay or getattr(optimizer, "adam_weight_decay", None):
            optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta", "embedding", "position"])
        model.compile(
            optimizer=optimizer,
            loss=self.parts["loss"],
            weighted_metrics=[TokenAccuracy(), Perplexity()],
            jit_compile=self.parts["runtime"].jit_compile or backend.name() == "jax",  # which compiles no other way
        )
        model.optimizer.build(model.trainable_variables)
        trained = sum(math.prod(v.shape) for v in model.trainable_variables)
        frozen = sum(math.prod(v.shape) for v in model.weights) - trained
        self.say(f"Model: {trained:,} parameters trained, {frozen:,} frozen. Steps: {total_steps}.")


def wrong_records(wanted: Sequence[str], record: dict[str, Any]) -> str:
    """
    >>> wrong_records(("source", "targets"), {"id": 1, "text": ""})
    'records with source and targets are wanted; these have id, text.'
    """
    return f"records with {' and '.join(wanted)} are wanted; these have {', '.join(sorted(record))}."
