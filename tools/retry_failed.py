"""Run pytest, and run the tests that failed a second time, alone: what continuous integration does.

    python tools/retry_failed.py --numprocesses 3 -m "not slow"

The suite starts real servers and trainings on few cores, where a test can miss its deadline beside
others. The second run is one process without other tests. It hides nothing: the tests that needed it are
listed at the end. The result is a failure if a test fails twice, if more than ten failed at first, or if
pytest could not collect or run the tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_RETRIED = 10
"""More failures than this are no coincidence: there is no second run."""
TESTS_FAILED = 1
"""pytest's exit status if tests failed and nothing worse happened."""
NO_WORKERS = ("-p", "no:xdist")
WORKER_OPTIONS = ("--numprocesses", "--dist", "--maxprocesses")


def run_pytest(arguments: list[str], cache: Path) -> int:
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
    return subprocess.run(command, check=False).returncode


def failed_tests(cache: Path) -> list[str]:
    """The node ids that pytest's cache lists as failed."""
    file = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(file.read_text())) if file.exists() else []


def without_workers(arguments: list[str]) -> list[str]:
    """The arguments without the long options of pytest-xdist, each of which has a value."""
    kept: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, _ = argument.partition("=")
        if name not in WORKER_OPTIONS:
            kept.append(argument)
        elif not equals:
            next(remaining, None)
    return kept


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="fp8scope-pytest-") as folder:
        cache = Path(folder)
        status = run_pytest(arguments, cache)
        if status != TESTS_FAILED:
            return status
        failed = failed_tests(cache)
        if not 0 < len(failed) <= MAX_RETRIED:
            print(f"\n{len(failed)} tests failed: no second run above {MAX_RETRIED}.")
            return status
        print(f"\n{len(failed)} tests failed. They run again, alone:", *failed, sep="\n  ", flush=True)
        again = ["--last-failed", "--last-failed-no-failures", "none", *NO_WORKERS]
        status = run_pytest([*without_workers(arguments), *again], cache)
        failed_twice = failed_tests(cache)
        passed_alone = sorted(set(failed) - set(failed_twice))
        if passed_alone:
            print("\nFailed beside other tests, passed alone:", *passed_alone, sep="\n  ")
        if failed_twice:
            # Also a test that the second run did not find.
            print("\nFailed twice:", *failed_twice, sep="\n  ")
            return TESTS_FAILED
        return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
