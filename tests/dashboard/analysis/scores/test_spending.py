"""The parts of alpha that the checkpoints of a run get."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.analysis.scores.spending import shares


def test_it_works() -> None:
    assert shares([500, 1000], 1000, ended=False) == pytest.approx([0.25, 0.75])
    assert shares([500], 1000, ended=False) == pytest.approx([0.25])
    assert shares([100, 200], None, ended=False) == pytest.approx([0.25, 0.5 / 6])
    assert shares([], 1000, ended=True) == []


def test_the_only_checkpoint_of_a_run_that_ended_gets_all() -> None:
    assert shares([500], None, ended=True) == [1.0] == shares([1000], 1000, ended=False)


@given(
    st.lists(st.integers(0, 3000), unique=True, max_size=60),
    st.none() | st.integers(1, 2000),
    st.booleans(),
)
def test_the_shares_never_exceed_the_whole(steps: list[int], planned: int | None, ended: bool) -> None:
    parts = shares(sorted(steps), planned, ended=ended)
    assert len(parts) == len(steps) and all(part >= 0.0 for part in parts)
    assert sum(parts) <= 1.0 + 1e-12


@given(st.lists(st.integers(1, 900), unique=True, min_size=2, max_size=30), st.none() | st.just(1000))
def test_a_later_checkpoint_takes_nothing_from_an_earlier_one(steps: list[int], planned: int | None) -> None:
    steps = sorted(steps)
    before, after = (shares(part, planned, ended=False) for part in (steps[:-1], steps))
    assert after[:-1] == pytest.approx(before)
