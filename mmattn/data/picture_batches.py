"""An endless stream of batches of examples with pictures, prepared ahead by grain."""

from __future__ import annotations

import atexit
import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging as absl_logging

from mmattn.data.examples import Examples, Fault, end_with_parent

Batch = tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]
_ENDLESS = 2**62
_open: weakref.WeakSet[Any] = weakref.WeakSet()
_log = logging.getLogger(__name__)


class PictureBatches:
    """What all batches of pictures have in common: their stream, and the pictures alone in their order.

    Args:
        examples: makes the example at each place of the stream, and a batch of several.
        batch_size: examples in a batch.
        workers: processes that prepare batches; 0 uses `threads` threads of this one.
        threads: threads that prepare batches, in each process; 0 prepares a batch when it is asked for.
        on_error: called as `on_error(record, exception)` once for each unreadable image, in the caller's process.

    Attributes:
        num_examples: how many make a pass.
        unreadable: the exceptions of the images that could not be read, by the number of their record.
    """

    def __init__(
        self,
        examples: Examples,
        batch_size: int,
        workers: int,
        threads: int,
        on_error: Callable[[dict[str, Any], Exception], None] | None,
    ):
        self._examples = examples
        self.source = examples.reading.source
        self.batch_size = batch_size
        self.workers = workers
        self.threads = threads
        self.on_error = on_error
        self.unreadable: dict[int, Exception] = {}
        self.num_examples = len(examples)

    @property
    def steps_per_epoch(self) -> int:
        """Batches until every example has come once; the last may already hold the start of the next pass."""
        return -(-self.num_examples // self.batch_size)

    def iterate(self, start: int = 0) -> Iterator[Batch]:
        """Yield batches number start, start + 1, ... without end.

        Returns:
            A generator of (inputs, labels int32, weights float32), see the class. Close it, or let it go, to stop its
            threads and processes.
        """
        if start < 0:
            raise ValueError(f"start={start}: batches are numbered from 0.")
        return self._stream(start)

    def examples(self, batch_size: int | None = None) -> Iterator[tuple[dict[str, np.ndarray], list[dict[str, Any]]]]:
        """Yield ({image_key: (B, ...)}, records) over the source once, in its order, each image once.

        Unreadable images are reported and missing from their batch; the last batch may be smaller too.
        """
        size = batch_size or self.batch_size
        for records, images, faults in self._run(0, len(self.source), size, None, self._examples.reading.many):
            self._report(faults)
            if records:
                yield {self._examples.reading.image_key: np.stack(images)}, records

    def _stream(self, start: int) -> Iterator[Batch]:
        examples = self._examples
        for inputs, labels, weights, faults in self._run(
            start * self.batch_size, _ENDLESS, self.batch_size, examples.example, examples.collate, self.workers
        ):
            self._report(faults)
            if self.workers:  # out of the memory shared with the worker, which is scarce
                inputs = {name: np.array(array) for name, array in inputs.items()}
                labels, weights = np.array(labels), np.array(weights)
            yield inputs, labels, weights

    def _run(
        self,
        begin: int,
        end: int,
        size: int,
        one: Callable[[int], Any] | None,
        join: Callable[[Sequence[Any]], Any],
        workers: int = 0,
    ) -> Iterator[Any]:
        """Iterate over join([one(n), ...]) for n = begin .. end - 1 in groups of `size`, prepared ahead by grain."""
        grain = _grain()
        numbers = grain.MapDataset.range(begin, end)
        groups = (numbers if one is None else numbers.map(one)).batch(size, batch_fn=join)
        threads = 1 if workers and self.threads else self.threads
        stream = groups.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads))
        if workers:
            options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
            stream = stream.mp_prefetch(options, worker_init_fn=end_with_parent)
        prepared = _prepared(stream)
        _open.add(prepared)
        return prepared

    def _report(self, faults: list[Fault]) -> None:
        for index, error in faults:
            if index not in self.unreadable:
                self.unreadable[index] = error
                record = self.source[index]
                _log.warning("Skipping unreadable image %s: %s", record["id"], error)
                if self.on_error is not None:
                    self.on_error(record, error)


def check_stream(batch_size: int, seed: int, workers: int, threads: int, image_key: str) -> None:
    """Refuses what no batches of pictures can have."""
    for name, value, least in (("batch_size", batch_size, 1), ("workers", workers, 0), ("threads", threads, 0)):
        if value < least:
            raise ValueError(f"{name}={value} is too small: at least {least}.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} is out of range: 0 to {2**32 - 1}.")
    if image_key not in ("pixels", "features"):
        raise ValueError(f"image_key={image_key!r} is unknown. It is 'pixels' or 'features'.")


def _prepared(stream: Any) -> Iterator[Any]:
    iterator = iter(stream)
    try:
        yield from iterator
    finally:
        iterator.close()


@atexit.register
def _close_all() -> None:
    """Close the streams that are still open when Python ends, before the modules that they need are torn down."""
    for stream in list(_open):
        with contextlib.suppress(ValueError):  # another thread is inside
            stream.close()


def _grain() -> Any:
    """Import grain without its warning that jax, which it only wants for profiling, is not installed."""
    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)
    try:
        import grain
    finally:
        absl_logging.set_verbosity(verbosity)
    return grain
