"""Contenders in processes of their own, so that the thread pools of TensorFlow and torch never meet.

Each process waits for a command, runs it alone, times it inside and answers.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Failed(Exception):
    """A contender raised, or its process ended; the message says how."""


class Worker:
    """A process that builds `module.make(*args)` and runs its methods on demand.

    Args:
        module, make: where to find the class; the module is imported in the process alone.
        args: for it.
        threads: for OpenMP, before anything is imported.
    """

    def __init__(self, module: str, make: str, args: tuple[Any, ...], threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, module, make, args, threads), daemon=True)
        self.process.start()
        theirs.close()
        self._answer()

    def run(self, method: str, *args: Any, times: int = 1) -> tuple[list[float], Any]:
        """The seconds of each of `times` calls, and what the first one returned."""
        self.connection.send((None, method, args, times))
        return self._answer()

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(object, *args) in the process; the function must be importable there."""
        self.connection.send((function, "", args, 1))
        return self._answer()[1]

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(timeout=10)

    def _answer(self) -> Any:
        try:
            error, answer = self.connection.recv()
        except (EOFError, ConnectionError) as ended:
            self.process.join()
            raise Failed(f"its process ended with exit code {self.process.exitcode}") from ended
        if error:
            raise Failed(error)
        return answer


def _serve(connection: Connection, module: str, make: str, args: tuple[Any, ...], threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    served = None
    while True:
        try:
            if served is None:
                served = getattr(importlib.import_module(module), make)(*args)
                answer = None
            else:
                command = connection.recv()
                if command is None:
                    return
                function, method, arguments, times = command
                calls = [
                    _timed(served, method, arguments) if function is None else (0.0, function(served, *arguments))
                    for _ in range(times)
                ]
                answer = [seconds for seconds, _ in calls], calls[0][1]
            connection.send((None, answer))
        except (EOFError, ConnectionError, KeyboardInterrupt):  # whoever asked is gone
            return
        except Exception:
            connection.send((traceback.format_exc(), None))
            if served is None:
                return


def _timed(served: Any, method: str, args: tuple[Any, ...]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = getattr(served, method)(*args)
    return time.perf_counter() - begin, result
