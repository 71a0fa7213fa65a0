"""Memory that stays with the process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import sys
from mmattn.memory import keep_memory

done = keep_memory() if sys.argv[1] == "keep" else None
b"a" * 2**26
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    b"a" * 2**26  # 64 MiB, written to
print(done, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() // 2**20)
"""


def _run(argument: str, **environment: str) -> tuple[str, int]:
    names = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", FAULTS, argument]
    done = subprocess.run(command, env={**names, **environment}, capture_output=True, text=True, check=True)
    said, mebibytes = done.stdout.split()
    return said, int(mebibytes)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_an_array_that_was_freed_costs_no_new_pages() -> None:
    said, mebibytes = _run("keep")
    assert said == "True" and mebibytes < 8
    assert _run("leave")[1] > 300  # five times 64 MiB, or the test measures nothing


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_who_has_set_the_allocator_is_left_alone() -> None:
    said, mebibytes = _run("keep", MALLOC_ARENA_MAX="2")
    assert said == "False" and mebibytes > 300
