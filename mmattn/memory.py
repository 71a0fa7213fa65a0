"""Memory that a process has used stays with it, so that a training step doesn't wait for the system's pages."""

from __future__ import annotations

import ctypes
import os
import platform

# Of mallopt, in glibc's malloc.h: what is set and to what.
_SETTINGS = {
    "M_ARENA_MAX": (-8, 1),  # one heap for all threads: the others are cut into pieces of 64 MiB
    "M_MMAP_MAX": (-4, 0),  # no block from the system by itself, to which it would go back at once
    "M_TRIM_THRESHOLD": (-1, 2**31 - 1),
    "M_TOP_PAD": (-2, 2**26),
}


def keep_memory() -> bool:
    """Tells glibc's allocator to keep freed blocks; for programs that allocate the same large arrays again and again.

    By default glibc fetches each large array from the system and gives it back when it is freed, and the system clears
    every page of it: on a CPU that can cost a training step half of its time. What is set holds for the process, so
    this is for programs (the `mmattn` command does it), before the first threads start; a library leaves it alone.

    Returns:
        whether it was done: not on other systems, and not where the environment sets the allocator already
        (`MALLOC_...`, `GLIBC_TUNABLES`).

    Source:
        The GNU C Library manual, "Malloc Tunable Parameters".
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if chosen or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(parameter, value) == 1 for parameter, value in _SETTINGS.values()])
