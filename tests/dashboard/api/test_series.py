"""The quick way of a series to its reader: number for number what a plain loop over its rows finds."""

from __future__ import annotations

import json
import math
import struct
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.compacting import compact, over
from dashboard.helpers.recorder import Recorder
from django.test import Client
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.accounts.services import create_token, revoke_token
from fp8scope_dashboard.api.telemetry import _line_as_json
from fp8scope_dashboard.db import sql
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry import series as telemetry_series
from fp8scope_dashboard.telemetry.downsample import keep

pytestmark = pytest.mark.django_db

NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def client_of(project: Project) -> Client:
    return Client(headers={"authorization": f"Bearer {create_token(project, 'reader')[1]}"})


def strictly(body: bytes) -> Any:
    """JSON as every parser takes it: `NaN` and the like are Python's own."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(body, parse_constant=refuse)


def series(recorder: Recorder, query: str) -> dict[int, float]:
    """Values by step, as a reader over HTTP gets them."""
    answer = client_of(recorder.run.project).get(f"/api/v1/runs/{recorder.run.id}/series?{query}")
    assert answer.status_code == 200, answer.content
    body = strictly(answer.content)
    assert body["steps"] == sorted(set(body["steps"]))
    values = [NAMES[value] if isinstance(value, str) else value for value in body["values"]]
    return dict(zip(body["steps"], values, strict=True))


def bits(value: float) -> bytes:
    return b"NaN" if math.isnan(value) else struct.pack("<d", value)


def two_ranks(random: np.random.Generator) -> Iterator[tuple[Recorder, dict[str, dict[int, float]]]]:
    """Rows in batches, some out of order, and after each state of the store what a loop over them finds."""
    first = Recorder.of_new_run(["a", "b"])
    second = first.another(1, ["b", "a"])
    found: dict[str, dict[int, float]] = {"amax": {}, "saturated": {}}
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
                _note(found["amax"], begin + row, amax[row, column], max)
                _note(found["saturated"], begin + row, saturated[row, column], lambda one, two: one + two)
        yield first, found
        compact(first)
        yield first, found
    over()
    compact(first)
    yield first, found


def _note(found: dict[int, float], step: int, value: float, merge: Any) -> None:
    if not math.isnan(value):
        found[step] = merge(found[step], value) if step in found else float(value)


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


def test_without_times_the_rest_is_the_same() -> None:
    for recorder, _ in two_ranks(np.random.default_rng(1)):
        for points in (None, 20):
            with_times = queries.tensor_series(recorder.run.id, 0, "amax", points=points)
            without = queries.tensor_series(recorder.run.id, 0, "amax", points=points, timed=False)
            np.testing.assert_array_equal(with_times.steps, without.steps)
            np.testing.assert_array_equal(with_times.values, without.values)
            assert len(without.times) == len(without.steps) and not np.isnat(with_times.times).any()


def test_what_is_left_out_of_a_block_is_its_times() -> None:
    recorder = Recorder.of_new_run(["a"])
    # Neither steps nor messages grow evenly: each of a block's axes has bytes of its own.
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


def test_a_row_that_says_the_same_everywhere() -> None:
    """Steps, times and messages that are equal are stored once, and cannot be told apart."""
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
    assert [bits(NAMES.get(each, each)) for each in body["values"]] == list(map(bits, values))


def test_numbers_that_lie_apart_in_memory() -> None:
    table = np.arange(12.0).reshape(4, 3)
    line = telemetry_series.Series(np.arange(8)[::2], table[:, 1], np.zeros(4, "datetime64[us]"))
    assert strictly(_line_as_json(line)) == {"steps": [0, 2, 4, 6], "values": [1.0, 4.0, 7.0, 10.0]}


def test_an_answer_takes_four_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder.of_new_run(["a"])
    recorder.send([1, 2], None, {"amax": [[1.0], [2.0]]})
    client = client_of(recorder.run.project)
    asked: list[str] = []
    fetch = sql.fetch

    def count(statement: str, *others: Any) -> list[tuple[Any, ...]]:
        asked.append(statement)
        return fetch(statement, *others)

    monkeypatch.setattr(sql, "fetch", count)
    answer = client.get(f"/api/v1/runs/{recorder.run.id}/series?tensor=a")
    assert answer.json() == {"steps": [1, 2], "values": [1.0, 2.0]}
    assert len(asked) == 4


@pytest.mark.parametrize("query", ["scalar=loss", "tensor=a", "tensor=no+such", ""])
def test_another_projects_run_is_unknown_whatever_is_asked(query: str) -> None:
    recorder = Recorder.of_new_run(["a"])
    recorder.send([1], {"loss": [1.0]}, {"amax": [[1.0]]})
    other = Project.objects.create(slug="other", name="Other")
    client = client_of(other)
    theirs = client.get(f"/api/v1/runs/{recorder.run.id}/series?{query}")
    nobodys = client.get(f"/api/v1/runs/{uuid.uuid4()}/series?{query}")
    assert theirs.status_code == nobodys.status_code == 404
    assert theirs.json()["error"]["code"] == nobodys.json()["error"]["code"] == "unknown_run"


def test_a_revoked_token_reads_nothing_more() -> None:
    recorder = Recorder.of_new_run(["a"])
    recorder.send([1], {"loss": [1.0]})
    token, secret = create_token(recorder.run.project, "reader")
    client = Client(headers={"authorization": f"Bearer {secret}"})
    address = f"/api/v1/runs/{recorder.run.id}/series?scalar=loss"
    assert client.get(address).status_code == 200
    revoke_token(token)
    assert client.get(address).status_code == 401


@pytest.mark.parametrize("name", ["a\0", "\udc80", "a' OR true --", "%s", "%(run)s", "x" * 5000])
def test_a_name_is_never_part_of_a_statement(name: str) -> None:
    recorder = Recorder.of_new_run(["a"])
    recorder.send([1], None, {"amax": [[1.0]]})
    query = "tensor=" + "".join(f"%{byte:02x}" for byte in name.encode("utf-8", "surrogatepass"))
    answer = client_of(recorder.run.project).get(f"/api/v1/runs/{recorder.run.id}/series?{query}")
    assert answer.status_code == 422 and answer.json()["error"]["code"] == "invalid"


@pytest.mark.parametrize(
    ("steps", "points", "stride"),
    [
        (131_072, 2_000, None),
        (131_073, 2_000, 64),
        (131_073, 100_000, 64),
        (1_000_000, 2_000, 512),
        (1_000_000, 8, 32_768),
        (1_000_000, 100_000, 64),
        (100_000_000, 2_000, 32_768),
        (100_000_000, 100_000, 32_768),
    ],
)
def test_buckets_give_enough_points_to_choose_from(steps: int, points: int, stride: int | None) -> None:
    assert telemetry_series._stride(steps, points) == stride


def test_a_long_line_from_large_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every point is one of the run's, its ends and its extremes among them, wherever it begins and ends."""
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
        found = series(recorder, f"tensor=a&first={first}&last={last}&points={points}")
        assert all(values[step - 3] == value for step, value in found.items())
        inside = values[first - 3 : last - 2]
        assert {first, last} <= set(found) and len(found) <= points
        assert {inside.min(), inside.max()} <= set(found.values())
