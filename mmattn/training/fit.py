"""The training loop: Keras' fit in legs that start and stop anywhere, with validation, early stop and exact resume."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import keras

from mmattn import backend
from mmattn.training.callbacks import ProgressLine, StopSignals, averaged_weights, listed
from mmattn.training.checkpoint import Arrays, CheckpointFolder, capture, read, restore, write
from mmattn.training.folder import JsonLines
from mmattn.training.snapshots import Snapshots

Validate = Callable[[int], dict[str, float]]
Say = Callable[[str], None]


class TrainingError(Exception):
    """Training cannot go on; the message says at which step and why."""


@dataclasses.dataclass(frozen=True)
class FitOptions:
    """How long to train, when to look, when to stop.

    Args:
        epochs: how often to go through the data at most.
        steps_per_epoch: batches an epoch; None for all of the data.
        validate_every: epochs between two validations; the last epoch is always validated.
        monitor: the score of a validation that decides which weights are best; higher is better.
        patience: stop after this many validations without a better score; None to never stop early.
        checkpoint_minutes: the most work that a power cut can take; there is also a checkpoint at each end of an epoch.
        snapshots: n keeps the validated weights of the last n and of the n best validations. At the end the mean of
            each n is validated beside the best single one, and the best of the three is what the run ends with. 0: the
            best single one it is. (Vaswani et al. 2017, section 6.1, average the last 5 or 20.)
    """

    epochs: int
    steps_per_epoch: int | None = None
    validate_every: int = 1
    monitor: str = "cider_d"
    patience: int | None = None
    checkpoint_minutes: float = 5.0
    snapshots: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "steps_per_epoch", "validate_every", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if self.snapshots < 0 or self.snapshots == 1:
            raise ValueError(f"snapshots={self.snapshots} must be 0 (none), or 2 or more, for a mean.")
        if self.checkpoint_minutes < 0:
            raise ValueError(f"checkpoint_minutes={self.checkpoint_minutes} must be 0 (after each batch) or more.")


_CALMER = "A lower learning rate, a longer warm-up or gradient clipping (optimizer.global_clipnorm) usually helps."


@dataclasses.dataclass
class RunState:
    """What the loop itself knows, beside the variables; saved with them in each checkpoint.

    `step`: updates made, which is also the number of batches trained on. `epoch_logs`: the training means of an epoch
    that has ended and is not validated yet. `waited`: validations since the best one. `best_weights`: what they are,
    in words. `data`: the fingerprint of the training data.
    """

    step: int = 0
    epoch_logs: dict[str, float] | None = None
    best_score: float | None = None
    best_step: int | None = None
    waited: int = 0
    stopped: bool = False
    best_weights: str = ""
    data: str = ""


class TrainingLoop:
    """Trains a compiled and built model on an endless stream of batches.

    Args:
        model: compiled, with all its variables made.
        batches: `iterate(start)` yields batch number `start` and on (inputs, labels, weights), each a pure function of
            its number. Its attribute `several_shapes`, where it has one, says that their shapes differ.
        steps_per_epoch: batches an epoch.
        options: see `FitOptions`.
        folder: the run folder: `checkpoints/`, `best.npz` and `metrics.jsonl` are kept there.
        validate: called with the step, with the averaged weights in the model; returns scores, among them
            `options.monitor`.
        signals: entered by the caller.
        say: takes each line for the user.
    """

    def __init__(
        self,
        model: keras.Model,
        batches: Any,
        steps_per_epoch: int,
        options: FitOptions,
        folder: Path,
        validate: Validate,
        signals: StopSignals,
        say: Say = print,
    ) -> None:
        self.model = model
        self.batches = batches
        self.steps_per_epoch = steps_per_epoch
        self.options = options
        self.folder = folder
        self.validate = validate
        self.say = say
        self.state = RunState()
        self.checkpoints = CheckpointFolder(folder / "checkpoints")
        self.metrics = JsonLines(folder / "metrics.jsonl")
        self.best_path = folder / "best.npz"
        self.snapshots = Snapshots(folder / "snapshots", options.snapshots)
        self.progress = ProgressLine(steps_per_epoch, options.epochs)
        self.signals = signals
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self._resume: Arrays | None = None
        self._epoch_end: Arrays | None = None
        self._saved_at = time.monotonic()

    @property
    def total_steps(self) -> int:
        return self.options.epochs * self.steps_per_epoch

    def run(self) -> RunState:
        """Trains to the end, from the newest checkpoint if any. Afterwards the model holds the best weights.

        Raises:
            TrainingError: the loss is no longer a number.
            Interrupted: Ctrl-C or SIGTERM; a checkpoint of the last finished batch is on the disk.
            CheckpointError: the checkpoints cannot be used.
        """
        self._load()
        if self._resume is not None and self.state.epoch_logs is not None:
            restore(self.model, self._resume, ("model", "optimizer"))
            self._resume = None
            self._finish_epoch()
        while not self.state.stopped and self.state.step < self.total_steps:
            self._leg()
        if not self.best_path.exists():
            raise TrainingError(f"{self.best_path} is missing: the run has ended without a validated model.")
        self.load_best()
        return self.state

    def load_best(self) -> None:
        """Puts the best weights into the model: those of the best validation, or a mean that has proved better."""
        arrays, info = read(self.best_path)
        best, name = info["scores"][self.options.monitor], info.get("weights")
        if name is None:
            name = f"of step {info['step']}"
            for candidate, mean in self.snapshots.means(self.say):
                restore(self.model, {**arrays, **mean}, ("model",))
                scores = self._scores()
                self.say(f"{candidate}: {self.options.monitor} {scores[self.options.monitor]:.4g}")
                if scores[self.options.monitor] > best:
                    best, name, arrays = float(scores[self.options.monitor]), candidate, {**arrays, **mean}
            numbers = {**info["scores"], self.options.monitor: best}
            write(self.best_path, arrays, {**info, "scores": numbers, "weights": name})
        self.state.best_score, self.state.best_weights = best, name
        restore(self.model, arrays, ("model",))

    def _load(self) -> None:
        found = self.checkpoints.latest(self.say)
        step = 0
        data = self.batches.fingerprint() if hasattr(self.batches, "fingerprint") else ""
        if found is not None:
            self._resume, info = found
            self.state = RunState(**info)
            step = self.state.step
            if data and self.state.data and data != self.state.data:
                raise TrainingError(
                    f"The training data, their order or the tokenizer are not those that the run has used up to step "
                    f"{step}, so going on would not end where it would have. Put the old ones back, or begin a new run."
                )
        self.state.data = data
        if found is not None:
            epoch, batch = divmod(step, self.steps_per_epoch)
            self._make_metrics()
            self.say(
                f"Continues after step {step} of {self.total_steps} "
                f"(epoch {epoch + 1}, batch {batch} of {self.steps_per_epoch})."
            )
        written = step if self.state.epoch_logs is None else step - 1  # the entry of an epoch follows its validation
        self.snapshots.forget_after(written)
        self.metrics.keep(lambda entry: entry["step"] <= written)

    def _make_metrics(self) -> None:
        """Keras makes the metrics' variables at the first batch; here they must be there before it, to be restored."""
        stream = self._stream(self.state.step)
        inputs, labels, weights = next(stream)
        stream.close()
        self.model.compute_metrics(inputs, labels, self.model(inputs, training=False), weights)

    def _leg(self) -> None:
        """One call of fit: from inside an epoch to its end, or from the start of an epoch to the end of the run."""
        epoch, done = divmod(self.state.step, self.steps_per_epoch)
        self._epoch_end = None
        stream = self._stream(self.state.step)
        try:
            self.signals.busy = True
            self.model.fit(
                backend.batch_stream(stream) if getattr(self.batches, "several_shapes", False) else stream,
                initial_epoch=epoch,
                epochs=epoch + 1 if done else self.options.epochs,
                steps_per_epoch=self.steps_per_epoch - done,
                callbacks=[_LegCallback(self)],
                shuffle=False,
                verbose=0,
            )
        finally:
            self.signals.busy = False
            with contextlib.suppress(ValueError):  # a thread that reads ahead is inside; it ends with its stream
                stream.close()
        if self._epoch_end is not None:
            # fit has ended by writing the moving averages over the weights
            restore(self.model, self._epoch_end, ("model", "optimizer"))

    def _stream(self, start: int) -> Generator[Any, None, None]:
        yield from self.batches.iterate(start)

    def _begin_epoch(self) -> None:
        """After Keras has reset the metrics: puts them and everything else back to the checkpoint's state."""
        if self._resume is not None:
            inside = self.state.step % self.steps_per_epoch != 0
            restore(self.model, self._resume, ("model", "optimizer", "metrics") if inside else ("model", "optimizer"))
            self._resume = None

    def _batch_done(self, logs: dict[str, Any]) -> None:
        self.state.step += 1
        if not math.isfinite(logs["loss"]) and not hasattr(self.model.optimizer, "inner_optimizer"):
            raise TrainingError(f"The loss is {logs['loss']} at step {self.state.step}. {_CALMER}")
        self.progress.batch(self.state.step, logs)
        if self.state.step % self.steps_per_epoch == 0:
            return  # the end of the epoch saves
        due = time.monotonic() - self._saved_at >= 60 * self.options.checkpoint_minutes
        if due or self.signals.requested is not None:
            self._save()
        self.signals.check()

    def _end_epoch(self, logs: dict[str, Any]) -> None:
        self.state.epoch_logs = {name: float(value) for name, value in logs.items()}
        self._finish_epoch()
        self.signals.check()
        if self.state.stopped:
            self.model.stop_training = True
        self._epoch_end = capture(self.model)

    def _finish_epoch(self) -> None:
        """Validates where it is due, then saves. A run killed in here does the validation again and ends the same."""
        state, options = self.state, self.options
        assert state.epoch_logs is not None
        busy, self.signals.busy = self.signals.busy, False  # nothing is lost by stopping at once in here
        epoch = state.step // self.steps_per_epoch
        entry: dict[str, Any] = {
            "step": state.step,
            "epoch": epoch,
            **state.epoch_logs,
            "learning_rate": self._learning_rate(),
        }
        last = epoch >= options.epochs
        if epoch % options.validate_every == 0 or last:
            self._save()
            self.signals.check()
            entry |= self._validate()
        shown = ("loss", "accuracy", "perplexity", "val_bleu4", f"val_{options.monitor}", "val_distinct")
        self.say(f"epoch {epoch}/{options.epochs}  {listed({name: entry[name] for name in shown if name in entry})}")
        if options.patience is not None and state.waited >= options.patience and not last:
            self.say(
                f"Stops early: {options.monitor} has not been better than {state.best_score:.4g} "
                f"for {state.waited} validations."
            )
            state.stopped = True
        state.epoch_logs = None
        self.metrics.append(entry)
        for listen in self.listeners:
            listen(entry)
        self._save()
        self.progress.pause()
        self.signals.busy = busy

    def _validate(self) -> dict[str, float]:
        state, monitor = self.state, self.options.monitor
        with averaged_weights(self.model):
            scores = self._scores()
            if monitor not in scores:
                raise TrainingError(
                    f"fit.monitor={monitor} is not among the scores of a validation: {', '.join(sorted(scores))}."
                )
            score = float(scores[monitor])
            self.snapshots.add(state.step, score, self.model)
            better = state.best_score is None or score > state.best_score
            state.waited = 0 if better else state.waited + 1
            if better or score == state.best_score:  # of equals the one that has learned for longer
                state.best_score, state.best_step = score, state.step
                weights = {name: array for name, array in capture(self.model).items() if name.startswith("model/")}
                write(self.best_path, weights, {"step": state.step, "scores": {k: float(v) for k, v in scores.items()}})
        return {f"val_{name}": float(value) for name, value in scores.items()}

    def _scores(self) -> dict[str, float]:
        try:
            return self.validate(self.state.step)
        except FloatingPointError as error:
            raise TrainingError(f"Validation at step {self.state.step}: {error} {_CALMER}") from error

    def _check_weights(self) -> None:
        """Before a checkpoint is written: a run with a weight that is not a number can't be continued from it."""
        finite = [keras.ops.all(keras.ops.isfinite(variable)) for variable in self.model.trainable_variables]
        if not all(map(bool, keras.ops.convert_to_numpy(keras.ops.stack(finite)))):
            bad = [v.path for v, fine in zip(self.model.trainable_variables, finite, strict=True) if not bool(fine)]
            raise TrainingError(f"{bad[0]} is not finite after step {self.state.step}. {_CALMER}")

    def _learning_rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _save(self) -> None:
        arrays = capture(self.model)  # first, because on JAX a model in training has no weights until it is asked
        self._check_weights()
        info = {name: value for name, value in dataclasses.asdict(self.state).items() if name != "step"}
        self.checkpoints.save(arrays, self.state.step, info)
        self._saved_at = time.monotonic()


class _LegCallback(keras.callbacks.Callback):
    """Keras' hooks, handed to the loop."""

    def __init__(self, loop: TrainingLoop) -> None:
        super().__init__()
        self.loop = loop

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.loop._begin_epoch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.loop._batch_done(dict(logs or {}))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.loop._end_epoch(dict(logs or {}))
