"""How far a long job is, on one line of the terminal."""

from __future__ import annotations

import sys
import time


class Progress:
    """One line on standard error that is written over again; nothing where that is no terminal.

    Args:
        size: of the whole input in bytes, None where it isn't known.
        lines, place: of the input, where this run begins.
    """

    def __init__(self, size: int | None, lines: int = 0, place: int = 0) -> None:
        self.size = size
        self.lines, self.place = lines, place
        self.began = time.monotonic()
        self.shown = 0.0
        self.on = sys.stderr.isatty()

    def show(self, lines: int, place: float) -> None:
        """So many lines and bytes of the input are done."""
        now = time.monotonic()
        if not self.on or now - self.shown < 0.2:
            return
        self.shown = now
        seconds = max(now - self.began, 1e-9)
        text = f"{lines:,} lines, {(lines - self.lines) / seconds:.1f} lines/s"
        if self.size is not None and self.place < place <= self.size:
            text += f", {duration(seconds * (self.size - place) / (place - self.place))} left"
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Wipes the line, so that something else can be written."""
        if self.on and self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """A time as a person says it.

    >>> duration(41.6), duration(600), duration(3 * 3600 + 59)
    ('42 s', '10 min', '3 h 1 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60 + 0.49)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
