"""Freed memory is reused instead of being returned to the kernel and requested again."""

import subprocess
import sys

ARRAYS = """
import resource
import sys
import numpy
from fp8scope_dashboard.process_setup import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()
for _ in range(5):
    numpy.ones(250_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    numpy.ones(250_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages_touched_anew(how: str) -> int:
    """The page faults of fifty consecutive arrays of 2 MB."""
    done = subprocess.run([sys.executable, "-c", ARRAYS, how], check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_it_works() -> None:
    kept = pages_touched_anew("kept")
    assert kept < 1_000
    # With large pages the kernel hands out 2 MB at a time, and there is less to save.
    assert kept <= pages_touched_anew("by default")
