"""A series over HTTP has exactly the numbers that a plain loop over its rows gives."""

from __future__ import annotations

import json
import math
import operator
import struct
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.compacting import compact, over
from dashboard.helpers.recorder import Recorder
from dashboard.helpers.token_clients import client_with_token
from django.test import Client
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.accounts.tokens import create_token, revoke_token
from fp8scope_dashboard.api.reading.telemetry import _line_as_json
from fp8scope_dashboard.db import sql
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry import series as telemetry_series
from fp8scope_dashboard.telemetry.downsample import keep

pytestmark = pytest.mark.django_db

NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def client_of(project: Project) -> Client:
    return client_with_token(project)


def strictly(body: bytes) -> Any:
    """Parse strict JSON, without Python's extensions such as `NaN`."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(body, parse_constant=refuse)


def series(recorder: Recorder, query: str) -> dict[int, float]:
    """Values by step, read over HTTP."""
    answer = client_of(recorder.run.project).get(f"/api/v1/runs/{recorder.run.id}/series?{query}")
    assert answer.status_code == 200, answer.content
    body = strictly(answer.content)
    assert body["steps"] == sorted(set(body["steps"]))
    values = [NAMES[value] if isinstance(value, str) else value for value in body["values"]]
    return dict(zip(body["steps"], values, strict=True))


def bits(value: float) -> bytes:
    return b"NaN" if math.isnan(value) else struct.pack("<d", value)


def two_ranks(random: np.random.Generator) -> Iterator[tuple[Recorder, dict[str, dict[int, float]]]]:
    """Send rows in batches, some out of order. Yields the expected series in several states of the store."""
    first = Recorder.of_new_run(["a", "b"])
    second = first.another(1, ["b", "a"])
    expected: dict[str, dict[int, float]] = {"amax": {}, "saturated": {}}
    for round_ in range(3):
        batches = [(first, number) for number in range(3)] + [(second, number) for number in range(3)]
        random.shuffle(batches)
        for recorder, number in batches:
            begin = round_ * 120 + number * 40
            amax, saturated = random.random((40, 2)) * 1e-3, random.integers(0, 9, (40, 2)).astype(float)
            amax[random.random((40, 2)) < 0.1] = math.nan
            seq = round_ * 3 + number
            recorder.send(range(begin, begin + 40), None, {"amax": amax, "saturated": saturated}, seq)
            column = 0 if recorder is first else 1
            for row in range(40):
                _merge(expected["amax"], begin + row, amax[row, column], max)
                _merge(expected["saturated"], begin + row, saturated[row, column], operator.add)
        yield first, expected
        compact(first)
        yield first, expected
    over()
    compact(first)
    yield first, expected


def _merge(series: dict[int, float], step: int, value: float, merge: Any) -> None:
    if not math.isnan(value):
        series[step] = merge(series[step], value) if step in series else float(value)


def test_it_works() -> None:
    states = 0
    for recorder, expected in two_ranks(np.random.default_rng(0)):
        states += 1
        for statistic, rows in expected.items():
            assert series(recorder, f"tensor=a&statistic={statistic}&points=100000") == rows
            some = {step: value for step, value in rows.items() if 30 <= step <= 100}
            assert series(recorder, f"tensor=a&statistic={statistic}&first=30&last=100") == some
            steps = np.array(sorted(rows))
            values = np.array([rows[step] for step in steps.tolist()])
            kept = keep(steps, values, 24)
            thinned = dict(zip(steps[kept].tolist(), values[kept].tolist(), strict=True))
            assert series(recorder, f"tensor=a&statistic={statistic}&points=24") == thinned
    assert states == 7


def test_a_series_without_times_has_the_same_steps_and_values() -> None:
    for recorder, _ in two_ranks(np.random.default_rng(1)):
        for points in (None, 20):
            with_times = queries.tensor_series(recorder.run.id, 0, "amax", points=points)
            without = queries.tensor_series(recorder.run.id, 0, "amax", points=points, timed=False)
            np.testing.assert_array_equal(with_times.steps, without.steps)
            np.testing.assert_array_equal(with_times.values, without.values)
            assert len(without.times) == len(without.steps) and not np.isnat(with_times.times).any()


def test_omits_the_times_of_blocks_if_not_requested() -> None:
    recorder = Recorder.of_new_run(["a"])
    # Neither steps nor seqs grow evenly, so that each axis of a block is stored separately.
    steps = np.cumsum(np.random.default_rng(2).integers(1, 9, 300))
    for seq in (0, 2, 1, 5, 9, 3):
        part = steps[seq * 30 : seq * 30 + 30].tolist()
        recorder.send(
            part, {"loss": [float(step) for step in part]}, {"amax": [[step] for step in part]}, seq
        )
    over()
    compact(recorder)
    line = queries.scalar(recorder.run.id, "loss", timed=False)
    assert line.steps.tolist() == line.values.tolist() and np.isnat(line.times).all()
    assert not np.isnat(queries.scalar(recorder.run.id, "loss").times).any()
    line = queries.tensor_series(recorder.run.id, 0, "amax", timed=False)
    assert line.steps.tolist() == line.values.tolist() and len(line) == 180


def test_reads_a_block_whose_axes_are_equal() -> None:
    """Equal axes are stored once."""
    recorder = Recorder.of_new_run(["a"])
    recorder.send([0], {"loss": [2.0]}, {"amax": [[3.0]]})
    over()
    compact(recorder)
    for timed in (True, False):
        assert queries.scalar(recorder.run.id, "loss", timed=timed).values.tolist() == [2.0]


@given(st.lists(st.floats()))
def test_numbers_keep_every_bit(values: list[float]) -> None:
    steps = np.arange(len(values), dtype=np.int64) + 2**53
    line = telemetry_series.Series(steps, np.array(values, float), np.zeros(len(values), "datetime64[us]"))
    body = strictly(_line_as_json(line))
    assert body["steps"] == steps.tolist()
    assert [bits(NAMES.get(value, value)) for value in body["values"]] == list(map(bits, values))


def test_encodes_arrays_that_are_not_contiguous() -> None:
    table = np.arange(12.0).reshape(4, 3)
    line = telemetry_series.Series(np.arange(8)[::2], table[:, 1], np.zeros(4, "datetime64[us]"))
    assert strictly(_line_as_json(line)) == {
        "steps": [0, 2, 4, 6],
        "values": [1.0, 4.0, 7.0, 10.0],
        "thinned": False,
    }


def test_a_response_takes_four_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder.of_new_run(["a"])
    recorder.send([1, 2], None, {"amax": [[1.0], [2.0]]})
    client = client_of(recorder.run.project)
    statements: list[str] = []
    fetch = sql.fetch

    def count(statement: str, *others: Any) -> list[tuple[Any, ...]]:
        statements.append(statement)
        return fetch(statement, *others)

    monkeypatch.setattr(sql, "fetch", count)
    answer = client.get(f"/api/v1/runs/{recorder.run.id}/series?tensor=a")
    assert answer.json() == {"steps": [1, 2], "values": [1.0, 2.0], "thinned": False}
    assert len(statements) == 4


@pytest.mark.parametrize("query", ["scalar=loss", "tensor=a", "tensor=no+such", ""])
def test_a_run_of_another_project_is_unknown_for_any_query(query: str) -> None:
    recorder = Recorder.of_new_run(["a"])
    recorder.send([1], {"loss": [1.0]}, {"amax": [[1.0]]})
    other = Project.objects.create(slug="other", name="Other")
    client = client_of(other)
    forbidden = client.get(f"/api/v1/runs/{recorder.run.id}/series?{query}")
    missing = client.get(f"/api/v1/runs/{uuid.uuid4()}/series?{query}")
    assert forbidden.status_code == missing.status_code == 404
    assert forbidden.json()["error"]["code"] == missing.json()["error"]["code"] == "unknown_run"


def test_refuses_a_revoked_token() -> None:
    recorder = Recorder.of_new_run(["a"])
    recorder.send([1], {"loss": [1.0]})
    token, secret = create_token(recorder.run.project, "reader", scopes=("write", "read"))
    client = Client(headers={"authorization": f"Bearer {secret}"})
    address = f"/api/v1/runs/{recorder.run.id}/series?scalar=loss"
    assert client.get(address).status_code == 200
    revoke_token(token)
    assert client.get(address).status_code == 401


@pytest.mark.parametrize("name", ["a\0", "\udc80", "a' OR true --", "%s", "%(run)s", "x" * 5000])
def test_a_name_is_never_part_of_an_sql_statement(name: str) -> None:
    recorder = Recorder.of_new_run(["a"])
    recorder.send([1], None, {"amax": [[1.0]]})
    query = "tensor=" + "".join(f"%{byte:02x}" for byte in name.encode("utf-8", "surrogatepass"))
    answer = client_of(recorder.run.project).get(f"/api/v1/runs/{recorder.run.id}/series?{query}")
    # PostgreSQL cannot even be asked for the first.
    refusal = (422, "invalid") if name == "a\0" else (404, "unknown_name")
    assert (answer.status_code, answer.json()["error"]["code"]) == refusal


@pytest.mark.parametrize(
    ("steps", "points", "stride"),
    [
        (131_072, 2_000, None),
        (131_073, 2_000, 64),
        # No bucket is short enough for so many points.
        (131_073, 100_000, None),
        (1_000_000, 2_000, 512),
        (1_000_000, 8, 32_768),
        (1_000_000, 31_250, 64),
        (1_000_000, 100_000, None),
        (100_000_000, 2_000, 32_768),
        (100_000_000, 100_000, 32_768),
    ],
)
def test_chooses_the_stride_by_steps_and_points(steps: int, points: int, stride: int | None) -> None:
    assert telemetry_series._stride(steps, points) == stride


def document(recorder: Recorder, query: str) -> dict[str, Any]:
    answer = client_of(recorder.run.project).get(f"/api/v1/runs/{recorder.run.id}/series?{query}")
    parsed: dict[str, Any] = strictly(answer.content)
    return parsed


@pytest.mark.parametrize("is_compacted", [False, True])
def test_every_step_is_returned_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, is_compacted: bool
) -> None:
    """A long run with gaps has few rows: none may be left out without a word."""
    monkeypatch.setattr(telemetry_series, "MAX_ROWS", 100)
    recorder = Recorder.of_new_run(["a"])
    values = np.random.default_rng(5).random(900)
    # Rows in dense stretches far apart: the buckets between them are empty.
    steps = [*range(300), *range(20_000, 20_300), *range(90_000, 90_300)]
    for seq in range(3):
        chosen = slice(300 * seq, 300 * seq + 300)
        losses = {"loss": values[chosen].tolist()}
        recorder.send(steps[chosen], losses, {"amax": values[chosen, None]}, seq)
    if is_compacted:
        over()
        compact(recorder)
    for query in ("scalar=loss", "tensor=a"):
        whole = document(recorder, f"{query}&points=900")
        assert (whole["steps"], whole["values"]) == (steps, values.tolist())
        assert whole["thinned"] is False and "how" not in whole
        part = document(recorder, f"{query}&first=20000&last=20299&points=300")
        assert (part["values"], part["thinned"]) == (values[300:600].tolist(), False)
        thinned = document(recorder, f"{query}&points=100")
        assert len(thinned["steps"]) <= 100 and thinned["thinned"] is True
        assert "first and last" in thinned["how"]


def test_reads_a_long_series_from_large_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every point is a stored one; both ends and the extremes of any range are among them."""
    random = np.random.default_rng(3)
    recorder = Recorder.of_new_run(["a"])
    values = random.random(5000)
    spikes = {700: 9.0, 2048: -9.0, 4990: 8.0}
    for step, value in spikes.items():
        values[step] = value
    recorder.send(range(3, 5003), None, {"amax": values[:, None]})
    over()
    compact(recorder)
    monkeypatch.setattr(telemetry_series, "MAX_ROWS", 100)
    for first, last, points in ((3, 5002, 8), (3, 5002, 16), (100, 4999, 12), (511, 2600, 8), (512, 1023, 8)):
        line = series(recorder, f"tensor=a&first={first}&last={last}&points={points}")
        assert all(values[step - 3] == value for step, value in line.items())
        inside = values[first - 3 : last - 2]
        assert {first, last} <= set(line) and len(line) <= points
        assert {inside.min(), inside.max()} <= set(line.values())


def test_times_are_microseconds_and_null_where_there_is_none() -> None:
    times = np.array(["2026-01-01T00:00:00.000001", "NaT"], "datetime64[us]")
    line = telemetry_series.Series(np.arange(2), np.zeros(2), times)
    assert strictly(_line_as_json(line, times=True))["times"] == [1_767_225_600_000_001, None]
    assert "times" not in strictly(_line_as_json(line))
