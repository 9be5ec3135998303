"""Freed memory is kept for reuse instead of being returned to the kernel."""

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


def page_faults(how: str) -> int:
    """The number of page faults of fifty arrays of 2 MB, allocated one after the other."""
    done = subprocess.run([sys.executable, "-c", ARRAYS, how], check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_it_works() -> None:
    kept = page_faults("kept")
    assert kept < 1_000
    # With huge pages the kernel maps 2 MB at a time, so the difference is small.
    assert kept <= page_faults("by default")
