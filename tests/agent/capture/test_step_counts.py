"""The relation of a tracker's steps to those of the run, as a sentence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope.capture.step_counts import MAX_SHOWN, StepCount, TrackerSteps

RELATIONS = {
    "the steps of the run": [(1, 1), (2, 2), (9, 9)],
    "the steps of the run minus 1": [(1, 0), (2, 1), (3, 2)],
    # A run that a script continues from step 1,000.
    "the steps of the run plus 1,000": [(1, 1001), (2, 1002), (5, 1005)],
    # Epochs of 50 steps.
    "1 for every 50 steps of the run, from 0 at step 50": [(50, 0), (100, 1), (150, 2)],
    # Tokens.
    "4,096 for each step of the run, from 4,096 at step 1": [(1, 4096), (2, 8192), (7, 28672)],
    "3 for every 2 steps of the run, from 0 at step 0": [(0, 0), (2, 3), (4, 6)],
    "always 0": [(1, 0), (2, 0), (3, 0)],
    "9 to 14 over the steps 3 to 20 of the run": [(3, 9), (4, 11), (20, 14)],
    # Episodes before the first update.
    "12 to 40 over the steps 0 to 0 of the run": [(0, 12), (0, 31), (0, 40)],
}


def counted(pairs: list[tuple[int, int]]) -> StepCount:
    count = StepCount()
    for step, own in pairs:
        count.note(step, own)
    return count


@pytest.mark.parametrize("sentence", RELATIONS)
def test_it_works(sentence: str) -> None:
    assert counted(RELATIONS[sentence]).sentence() == sentence


@given(
    first=st.integers(0, 10**6),
    offset=st.integers(-(10**6), 10**6),
    gaps=st.lists(st.integers(1, 1000), min_size=2, max_size=20),
)
def test_an_offset_is_found_whatever_the_interval(first: int, offset: int, gaps: list[int]) -> None:
    steps = [first]
    for gap in gaps:
        steps.append(steps[-1] + gap)
    count = counted([(step, step + offset) for step in steps])
    assert count.is_same == (offset == 0)
    wanted = f" {'plus' if offset > 0 else 'minus'} {abs(offset):,}" if offset else ""
    assert count.sentence() == f"the steps of the run{wanted}"


@given(st.lists(st.tuples(st.integers(0, 2**53), st.integers(-(2**53), 2**53)), min_size=1, max_size=30))
def test_any_pairs_have_a_sentence(pairs: list[tuple[int, int]]) -> None:
    count = counted(pairs)
    assert count.sentence()
    assert not count.is_same or count.sentence() == "the steps of the run"


def test_a_difference_is_said_once_for_a_tracker_and_only_if_there_is_one() -> None:
    steps = TrackerSteps()
    same = [steps.note("loss", step, step) for step in range(1, 9)]
    other = [steps.note("val", 10 * step, step) for step in range(1, 9)]
    third = [steps.note("late", 10 * step, step) for step in range(1, 9)]
    assert set(same) == {None} and set(third) == {None}
    assert [text for text in other if text] == ["val: 1 for every 10 steps of the run, from 1 at step 10"]
    assert other.index("val: 1 for every 10 steps of the run, from 1 at step 10") == 2


def test_names_and_sentences_are_bounded() -> None:
    steps = TrackerSteps()
    for name in range(2000):
        steps.note(f"n{name}", 1, name)
    facts = steps.facts()
    assert len(facts) == MAX_SHOWN and all(len(names) <= MAX_SHOWN for names in facts.values())
