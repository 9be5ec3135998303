"""Wait with a deadline for something that another thread or process does."""

import time
from collections.abc import Callable

PATIENCE_SECONDS = 120.0
"""Longer than any of these conditions takes, even on a busy machine."""


def wait_until(
    condition: Callable[[], object],
    expected: str = "the condition",
    *,
    seconds: float = PATIENCE_SECONDS,
    pause: float = 0.01,
) -> None:
    """Return once `condition` holds. Raises AssertionError with `expected` if that takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"Not within {seconds:.0f} seconds: {expected}."
        time.sleep(pause)
