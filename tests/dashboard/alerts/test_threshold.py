"""The detector of people's own rules: conditions, windows, and one result however the rows are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detectors import ConditionChange, State, threshold
from fp8scope_dashboard.alerts.detectors.threshold import Condition


def detect(
    values: Any, condition: Condition, *, statistic: str = "", cuts: tuple[int, ...] = (), **numbers: float
) -> list[ConditionChange]:
    """The findings in one column for each series, from step 1 on, read in pieces."""
    matrix = np.asarray(values, dtype=np.float64)
    matrix = matrix[:, np.newaxis] if matrix.ndim == 1 else matrix
    names = ["loss"] if not statistic else [f"blocks.{i}.input" for i in range(matrix.shape[1])]
    parameters = rules.validate("threshold", numbers)
    state: State = {}
    findings: list[ConditionChange] = []
    steps = np.arange(1, len(matrix) + 1)
    for rows in np.split(np.arange(len(matrix)), sorted(cuts)):
        state, new = threshold(
            state, steps[rows], matrix[rows], names, condition, parameters, statistic=statistic
        )
        findings += new
    return findings


def test_it_works() -> None:
    opened, closed = detect([1, 1, 5, 5, 5, 1, 1], "above", value=3, points=3, recover=2)
    assert (opened.opened, opened.onset_step, opened.step, opened.value) == (True, 3, 5, 5.0)
    assert opened.message == "loss is 5, above 3, since step 3."
    assert (closed.opened, closed.onset_step, closed.step) == (False, 3, 7)


@pytest.mark.parametrize(
    ("condition", "value", "before", "after"),
    [
        ("above", 3.0, 3.0, 3.1),
        ("above", 3.0, np.nan, np.inf),
        ("below", 3.0, 3.0, 2.9),
        ("rises_by", 1.0, 2.0, 3.5),
        ("falls_by", 1.0, 2.0, 0.5),
        ("changes_by_factor", 2.0, 1.0, 4.0),
        ("changes_by_factor", 2.0, 1.0, 0.2),
        ("changes_by_factor", 2.0, 1.0, -1.0),
        ("changes_by_factor", 2.0, 1.0, 0.0),
        ("not_finite", 0.0, 1e308, np.nan),
        ("not_finite", 0.0, 1.0, -np.inf),
    ],
)
def test_conditions(condition: Condition, value: float, before: float, after: float) -> None:
    values = [before] * 20 + [after] * 3
    (finding,) = detect(values, condition, value=value, points=3, window=20)
    assert finding.onset_step == 21 and finding.step == 23
    assert detect([before] * 40, condition, value=value, points=3, window=20) == []


def test_a_share_of_the_window_is_enough() -> None:
    values = [5.0, 1.0] * 10
    assert detect(values, "above", value=3, points=10) == []
    (finding,) = detect(values, "above", value=3, points=10, share=0.5)
    assert finding.step == 9 and finding.onset_step == 1


def test_names_the_tensors_that_began_first() -> None:
    values = np.ones((30, 4))
    values[10:, 2] = 9.0
    values[11:, 0] = 9.0
    (finding,) = detect(values, "above", statistic="amax", value=3, points=5)
    assert [tensor["name"] for tensor in finding.evidence["tensors"]] == ["blocks.2.input"]
    assert finding.message == "amax of blocks.2.input is 9, above 3, since step 11."
    values[10:, 0] = 9.0
    (finding,) = detect(values, "above", statistic="amax", value=3, points=5)
    assert [tensor["name"] for tensor in finding.evidence["tensors"]] == ["blocks.0.input", "blocks.2.input"]
    assert finding.evidence["tensors_over"] == 2 and finding.message.endswith("; 1 more tensor.")


def test_a_tensor_that_is_not_observed_keeps_its_count() -> None:
    values = np.full((12, 1), np.nan)
    values[::4] = 9.0
    (finding,) = detect(values, "above", statistic="amax", value=3, points=3)
    assert (finding.onset_step, finding.step) == (1, 9)


def test_it_ends_when_the_last_tensor_has_recovered() -> None:
    values = np.full((20, 2), 9.0)
    values[5:, 0] = 1.0
    values[10:, 1] = 1.0
    opened, closed = detect(values, "above", statistic="amax", value=3, points=3, recover=2)
    assert (opened.step, closed.step) == (3, 12)


def test_a_new_level_ends_a_relative_condition() -> None:
    values = [1.0] * 50 + [3.0] * 300
    opened, closed = detect(values, "rises_by", value=1, points=3, window=20, recover=5)
    assert opened.onset_step == 51 and closed.step < 90


def test_ignores_repeated_and_earlier_steps() -> None:
    parameters = rules.validate("threshold", {"value": 3, "points": 2})
    state, _ = threshold({}, np.array([5]), np.array([[9.0]]), ["loss"], "above", parameters)
    _, findings = threshold(state, np.array([5, 4]), np.array([[9.0], [9.0]]), ["loss"], "above", parameters)
    assert findings == []


def test_a_catalogue_may_grow() -> None:
    parameters = rules.validate("threshold", {"value": 3, "points": 2})
    state, _ = threshold({}, np.array([1]), np.array([[9.0]]), ["a"], "above", parameters, statistic="amax")
    _, (finding,) = threshold(
        state, np.array([2]), np.array([[9.0, 1.0]]), ["a", "b"], "above", parameters, statistic="amax"
    )
    assert finding.onset_step == 1


FINITE = st.floats(-1e6, 1e6)
VALUES = st.lists(
    st.one_of(FINITE, st.sampled_from([np.nan, np.inf, -np.inf, 1e308])), min_size=1, max_size=60
)


@given(
    st.lists(VALUES, min_size=1, max_size=3).map(
        lambda rows: np.array([r[: min(map(len, rows))] for r in rows]).T
    ),
    st.sampled_from(["above", "below", "rises_by", "falls_by", "changes_by_factor", "not_finite"]),
    st.lists(st.integers(0, 60), max_size=6),
    st.floats(-100, 100),
    st.integers(1, 6),
    st.floats(0.1, 1),
)
def test_the_result_does_not_depend_on_the_cuts(
    values: Any, condition: Condition, cuts: list[int], value: float, points: int, share: float
) -> None:
    numbers: Any = {"value": value, "points": points, "share": share, "window": 5, "recover": 2}
    whole = detect(values, condition, statistic="amax", **numbers)
    pieces = detect(values, condition, statistic="amax", cuts=tuple(cuts), **numbers)
    assert pieces == whole
    assert [finding.opened for finding in whole] == [i % 2 == 0 for i in range(len(whole))]
    for opened, closed in zip(whole[::2], whole[1::2], strict=False):
        assert opened.onset_step == closed.onset_step <= opened.step < closed.step
