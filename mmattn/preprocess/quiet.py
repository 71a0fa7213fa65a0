"""Silences the warnings of one thread, which the standard library cannot do before Python 3.14."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

_thread = threading.local()


class _HereType(type):
    def __subclasscheck__(cls, other: type) -> bool:
        return getattr(_thread, "quiet", False)


class _Here(Warning, metaclass=_HereType):
    """The category of every warning given by a thread inside `quiet`, of no warning elsewhere."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences this thread's warnings, also where warnings are errors.

    `warnings.catch_warnings` swaps a list that all threads share, so threads that use it at the same time would leave
    it in a random state. The filter set here stays in the list and matches only inside this block, in this thread.
    """
    if not warnings.filters or warnings.filters[0][2] is not _Here:
        warnings.simplefilter("ignore", category=_Here)
    _thread.quiet = True
    try:
        yield
    finally:
        _thread.quiet = False
