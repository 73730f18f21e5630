"""Freed memory stays with a process of the host's."""

from __future__ import annotations

import subprocess
import sys

FAULTS = """
import resource, sys
from shardwright.utils.host_memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(3)
for _ in range(3):
    block = bytearray(64 << 20)
    block[:] = b"1" * len(block)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    del block
block = bytearray(64 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_memory_that_was_freed_is_there_again_without_page_faults() -> None:
    assert faults("keep") * 10 < faults("leave")
