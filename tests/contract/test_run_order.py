"""The order of tests in parallel processes."""

from __future__ import annotations

from collections import Counter

from helpers.run_order import in_parts
from hypothesis import given
from hypothesis import strategies as st

BROWSER = [f"e2e/{file}::{test}" for file in "abcd" for test in range(3)]
LONG = [f"contract/{file}::{test}" for file in "efg" for test in range(2)]
SHORT = [f"kernels/k{file}::{test}" for file in range(10) for test in range(20)]


def ordered(tests: list[str], processes: int) -> list[list[str]]:
    """The parts that the processes get first, as pytest-xdist cuts them."""
    order = in_parts(
        tests,
        processes,
        file_of=lambda test: test.partition("::")[0],
        browser=lambda test: test.startswith("e2e/"),
        long=lambda test: test.startswith(("contract/", "e2e/a")),
    )
    parts = []
    for left in range(processes, 0, -1):
        length = len(order) // left
        parts.append(order[:length])
        order = order[length:]
    return parts


def test_each_part_begins_with_long_tests_of_one_kind() -> None:
    parts = ordered([*SHORT, *LONG, *BROWSER], 4)
    assert [part[0].partition("/")[0] for part in parts] == ["e2e", "e2e", "contract", "contract"]
    assert all(test in SHORT for part in parts for test in part[-40:])
    assert {test for part in parts[:2] for test in part} >= set(BROWSER)
    assert {test for part in parts[2:] for test in part} >= set(LONG)


def test_a_file_stays_together() -> None:
    parts = ordered([*SHORT, *LONG, *BROWSER], 4)
    for file in {test.partition("::")[0] for test in (*LONG, *BROWSER)}:
        (part,) = [part for part in parts if any(test.startswith(f"{file}::") for test in part)]
        at = [index for index, test in enumerate(part) if test.startswith(f"{file}::")]
        assert at == list(range(at[0], at[0] + len(at)))


def test_one_process_runs_the_browser_first() -> None:
    (part,) = ordered([*SHORT, *LONG, *BROWSER], 1)
    assert part == [*BROWSER, *LONG, *SHORT]


@given(st.lists(st.sampled_from([*SHORT[:5], *LONG, *BROWSER]), unique=True, max_size=30), st.integers(1, 6))
def test_every_test_runs_once(tests: list[str], processes: int) -> None:
    parts = ordered(tests, processes)
    assert Counter(test for part in parts for test in part) == Counter(tests)
