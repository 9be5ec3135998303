"""A clock that goes on only when it is ticked, and a loop that is measured with it."""

from collections.abc import Callable, Iterator

import pytest
from agent.helpers.ticking import Loop, Slow


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """A clock that goes on only when it is ticked."""
    now = [1000.0]

    def tick(units: float) -> None:
        now[0] += units

    monkeypatch.setattr("fp8scope.observe.timing.clock.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Slow, "tick", staticmethod(tick), raising=False)
    yield tick


@pytest.fixture
def loop(clock: Callable[[float], None]) -> Iterator[Loop]:
    built = Loop()
    yield built
    built.measures.close()
