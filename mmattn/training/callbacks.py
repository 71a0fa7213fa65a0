"""What happens around the batches: a progress line, a clean stop on a signal, moving averages for a while."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

import keras

from mmattn.training.checkpoint import value_of


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop (Ctrl-C, SIGTERM, or SIGHUP of a terminal that was closed).

    `exit_code` is 128 + the signal's number, as shells have it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class StopSignals:
    """Turns Ctrl-C, SIGTERM and SIGHUP into a stop at the end of the batch, while `busy` is set.

    A SIGHUP that is ignored, as by nohup, stays so.

    A second signal, or one at another time, stops at once.

    Use it as a context manager in the main thread; the handlers from before come back at its end.
    """

    def __init__(self) -> None:
        self.busy = False
        self.requested: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            try:
                self._before[number] = signal.signal(number, self._handle)
            except ValueError:  # not the main thread: whoever runs us there stops us there
                break
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises `Interrupted` when a signal has come."""
        if self.requested is not None:
            raise Interrupted(self.requested)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.busy or self.requested is not None:
            raise Interrupted(number)
        self.requested = number
        with suppress(OSError):  # print may be in the middle of a line of its own
            os.write(2, b"\nStopping after this step, with a checkpoint. Once more stops at once.\n")


@contextmanager
def averaged_weights(model: keras.Model) -> Iterator[None]:
    """Puts the optimizer's moving averages (`use_ema`) into the model; the raw weights come back bit for bit."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if not getattr(optimizer, "use_ema", False) or int(optimizer.iterations) == 0:
        yield
        return
    variables = model.trainable_variables
    raw = [value_of(variable) for variable in variables]
    optimizer.finalize_variable_values(variables)
    try:
        yield
    finally:
        for variable, value in zip(variables, raw, strict=True):
            variable.assign(value)


class ProgressLine:
    """One line that says how far training is; in a log file, a new line every 30 seconds.

    Args:
        steps_per_epoch: batches an epoch.
        epochs: of the whole run.
        stream: where to write.
    """

    def __init__(self, steps_per_epoch: int, epochs: int, stream: TextIO | None = None) -> None:
        self.steps_per_epoch = steps_per_epoch
        self.epochs = epochs
        self.stream = sys.stdout if stream is None else stream
        self.interval = 0.2 if self.stream.isatty() else 30.0
        self._started: tuple[float, int] | None = None
        self._shown = time.monotonic()
        self._width = 0

    def batch(self, step: int, logs: dict[str, Any]) -> None:
        """To be called after update `step` (1 is the first)."""
        now = time.monotonic()
        if self._started is None:  # the first update compiles: it says nothing about the speed
            self._started = (now, step)
            return
        if now - self._shown < self.interval and step % self.steps_per_epoch:
            return
        self._shown = now
        each = (now - self._started[0]) / max(step - self._started[1], 1)
        self._show(f"{self._where(step)}  {listed(logs)}  {_duration(each)}/step  {self._left(step, each)} to go")
        if step % self.steps_per_epoch == 0:
            self._end_line()

    def pause(self) -> None:
        """Forgets the clock, since something else than training will take time now."""
        self._started = None

    def _where(self, step: int) -> str:
        epoch, batch = divmod(step - 1, self.steps_per_epoch)
        return f"epoch {epoch + 1}/{self.epochs}  step {batch + 1}/{self.steps_per_epoch}"

    def _left(self, step: int, each: float) -> str:
        return _duration(each * (self.steps_per_epoch * self.epochs - step))

    def _show(self, text: str) -> None:
        if self.stream.isatty():
            self.stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self.stream.write(text + "\n")
        self.stream.flush()

    def _end_line(self) -> None:
        if self.stream.isatty():
            self.stream.write("\n")
            self._width = 0


def listed(logs: dict[str, Any]) -> str:
    """
    >>> listed({"loss": 2.34567, "learning_rate": 0.00012, "pictures": 1000})
    'loss 2.346  learning_rate 1.2e-04  pictures 1000'
    """
    return "  ".join(f"{name} {_number(value)}" for name, value in logs.items())


def _number(value: Any) -> str:
    if isinstance(value, (int, str, bool)) or value is None:
        return str(value)
    return f"{value:.1e}" if 0 < abs(value) < 0.001 else f"{value:.4g}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
