"""Rows and histories become tables; names and numbers stay apart and within their bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fp8scope.importing import tables, values
from fp8scope.importing.encoding import in_parts
from fp8scope.importing.limits import MAX_SCALARS, ROWS_OF_A_TABLE
from fp8scope.importing.model import UnreadableError
from fp8scope.importing.names import MetricNames
from fp8scope.importing.tables import MetricHistory, RowTables, tables_of


def metric(name: str, steps: list[int], scores: list[float], times: list[int] | None = None) -> MetricHistory:
    moments = None if times is None else np.array(times, np.int64)
    return MetricHistory(name, np.array(steps, np.int64), moments, np.array(scores, np.float64))


def test_it_works() -> None:
    rows = RowTables(MetricNames())
    rows.add(3, None, [("a", 1.0)])
    rows.add(1, None, [("a", 2.0), ("b", math.nan)])
    (table,) = rows.take()
    assert table.steps.tolist() == [1, 3] and table.scalars["a"].tolist() == [2.0, 1.0]
    assert table.missing.keys() == {"b"} and table.missing["b"].tolist() == [False, True]
    assert list(rows.take()) == [] and table.times is None


def test_rows_without_a_time_have_that_of_the_row_before() -> None:
    rows = RowTables(MetricNames())
    for step, time_us in ((0, None), (1, 10**15), (2, None), (3, 2 * 10**15)):
        rows.add(step, time_us, [("a", 1.0)])
    (table,) = rows.take()
    assert table.times is not None and table.times.tolist() == [10**15, 10**15, 10**15, 2 * 10**15]


def test_tables_end_at_the_same_row_however_long_the_file_is() -> None:
    def lengths(count: int) -> list[int]:
        rows, sizes = RowTables(MetricNames()), []
        for step in range(count):
            rows.add(step, None, [(f"m{i}", 1.0) for i in range(100 if step > 5_000 else 1)])
            if rows.is_full:
                sizes += [len(table) for table in rows.take()]
        return sizes

    short, long = lengths(12_000), lengths(40_000)
    assert long[: len(short)] == short and max(long) <= ROWS_OF_A_TABLE


def test_histories_share_rows_by_step() -> None:
    metrics = [
        metric("train/loss", [0, 2, 2, 5], [1.0, 2.0, 3.0, 4.0], [10, 30, 40, 50]),
        metric("acc", [5, 2], [0.5, 0.25], [60, 20]),
    ]
    (table,) = tables_of(metrics, MetricNames())
    assert table.steps.tolist() == [0, 2, 2, 5]
    assert table.times is not None and table.times.tolist() == [10, 30, 40, 60]
    assert table.scalars["acc"][~table.missing["acc"]].tolist() == [0.25, 0.5]
    assert table.scalars["loss"].tolist() == [1.0, 2.0, 3.0, 4.0] and "loss" not in table.missing


def test_long_histories_are_cut() -> None:
    steps = list(range(50_000))
    parts = list(tables_of([metric("a", steps, [float(step) for step in steps])], MetricNames()))
    assert [len(part) for part in parts] == [16_384, 16_384, 16_384, 848]
    assert np.concatenate([part.scalars["a"] for part in parts]).tolist() == steps
    assert [len(part) for part in in_parts(parts[0])] == [16_384]


def test_too_many_points_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_SERIES_POINTS", 3)
    with pytest.raises(UnreadableError, match="at most 3"):
        list(tables_of([metric("a", [0, 1], [1.0, 2.0])] * 2, MetricNames()))
    with pytest.raises(UnreadableError, match="too large"):
        list(tables_of([metric("a", [2**61, 2**61], [1.0, 2.0])], MetricNames()))


def test_names_that_differ_stay_different() -> None:
    names = MetricNames()
    raw = ["a b", "a_b", "a?b", "x" * 200, "x" * 201, "", "grad norm"]
    wire = [names.of(name) for name in raw]
    assert len(set(wire)) == len(raw) and wire[0] == "a_b" and wire[6] == "grad_norm"
    assert all(name and len(name) <= 128 for name in wire)
    assert [names.of(name) for name in raw] == wire


def test_a_run_has_no_more_names_than_the_server_takes() -> None:
    names = MetricNames()
    wire = [names.of(f"loss_{step}") for step in range(MAX_SCALARS + 10)]
    assert wire.count(None) == 11 and names.of("loss") == "loss"
    assert names.notes()[0].startswith("11 metrics were left out")


def test_the_loss_has_its_own_name_and_that_of_verdicts() -> None:
    names = MetricNames()
    assert names.is_loss("train/loss") and not names.is_loss("train_loss") and names.is_loss("train/loss")
    assert not names.is_loss("loss") and not names.is_loss("train/loss")
    assert MetricNames("ce").is_loss("ce") and not MetricNames("ce").is_loss("train/loss")


@pytest.mark.parametrize(
    ("text", "step"),
    [("5", 5), ("5.0", 5), ("1e3", 1_000), (7, 7), (7.0, 7), (True, 1), (str(2**62), 2**62)]
    + [("", None), ("5.5", None), (-1, None), ("-7", None), (None, None), ("nan", None), ("1" * 40, None)]
    + [(2**63, None), (math.inf, None), ("٣", 3), ([1], None)],
)  # fmt: skip
def test_steps(text: object, step: int | None) -> None:
    assert values.step_of(text) == step


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(1.7e9, 1.7e9), (1.7e12, 1.7e9), (1.7e15, 1.7e9), (1.7e18, 1.7e9), ("1.7e9", 1.7e9)]
    + [("2026-01-01T00:00:00Z", 1767225600.0), ("2026-01-01 00:00:00", 1767225600.0)]
    + [("2026-01-01T02:00:00+02:00", 1767225600.0)]
    + [(0, None), ("", None), ("1970-01-01", None), (math.nan, None), (True, None), (None, None)]
    + [(10**400, None)],
)  # fmt: skip
def test_times(value: object, seconds: float | None) -> None:
    assert values.seconds_of(value) == seconds


def test_configurations_are_bounded() -> None:
    nested: dict[str, object] = {}
    for _ in range(50):
        nested = {"a": nested}
    document = {"deep": nested, "text": "x\0" * 9_000, "nan": math.nan, "large": 10**100, "half": "\ud800"}
    stored = values.storable(document)
    assert stored["nan"] == "nan" and stored["large"] == str(10**100) and "\0" not in stored["text"]
    assert len(stored["text"]) <= 8_000 and stored["half"] == "?"
    assert len(values.storable({str(i): i for i in range(9_000)})) == 5_000


def test_texts_become_the_numbers_that_they_were() -> None:
    texts = ["1", "0.001", "True", "None", "adam", "1e-3", "007", "1_000", "--"]
    assert [values.from_text(text) for text in texts] == [
        1,
        0.001,
        True,
        None,
        "adam",
        1e-3,
        "007",
        "1_000",
        "--",
    ]


def test_deep_json_is_refused() -> None:
    with pytest.raises(UnreadableError, match="nested too deeply|is not JSON"):
        values.parse_json("[" * 200_000, "it")
