"""After which pause the next batch of a writer suits the server."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest

from fp8scope_dashboard.api.pacing import LONGEST, SendingPace


def test_it_works() -> None:
    """A writer alone may send soon; fifty take turns, the longer a message takes the later."""
    alone, many, slow = SendingPace(), SendingPace(), SendingPace()
    assert alone.after(UUID(int=0), 0.002) < 0.1
    for pace, seconds in ((many, 0.002), (slow, 0.004)):
        for number in range(49):
            pace.after(UUID(int=number), seconds)
    pause, slower = many.after(UUID(int=49), 0.002), slow.after(UUID(int=49), 0.004)
    assert 0.3 < pause < 1.0 and pause < slower


def test_all_writers_together_take_a_bounded_share() -> None:
    """However many there are, if they keep to the pause."""
    pace = SendingPace()
    for _ in range(100):
        pause = pace.after(uuid4(), 0.002)
    assert 100 * 0.003 / pause == pytest.approx(0.2)


def test_a_writer_that_has_left_no_longer_counts() -> None:
    now = [0.0]
    pace = SendingPace(clock=lambda: now[0])
    for number in range(50):
        pace.after(UUID(int=number), 0.002)
    now[0] = 2 * LONGEST
    assert pace.after(UUID(int=0), 0.002) == pytest.approx(0.003 / 0.2)


def test_no_pause_is_longer_than_the_longest() -> None:
    pace = SendingPace()
    for _ in range(5_000):
        pause = pace.after(uuid4(), 0.01)
    assert pause == LONGEST
