"""Scalars, series, heat maps and histograms: as Arrow and as JSON they have the same values."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from dashboard.helpers.exponents import histogram_of, store_histograms
from dashboard.helpers.reading import Reader
from dashboard.helpers.recorder import Recorder
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.telemetry import queries

pytestmark = pytest.mark.django_db
NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@pytest.fixture
def recorder() -> Recorder:
    recorder = Recorder.of_new_run(["a.input", "b.weight"])
    steps = list(range(1, 201))
    loss = [math.nan if step == 3 else math.inf if step == 4 else 1.0 / step for step in steps]
    amax = [[step, math.nan if step == 2 else math.inf if step == 5 else 10.0 * step] for step in steps]
    recorder.send(steps, {"loss": loss}, {"amax": amax})
    return recorder


@pytest.fixture
def reader(recorder: Recorder) -> Reader:
    return Reader(Project.objects.get(pk=recorder.run.project_id))


def numbers(values: list[float | str | None]) -> list[float]:
    """The numbers of JSON values; NaN for null."""
    return [NAMES[v] if isinstance(v, str) else math.nan if v is None else v for v in values]


def test_it_works(reader: Reader, recorder: Recorder) -> None:
    answer = reader.json(f"/runs/{recorder.run.pk}/scalars")
    assert answer["first_step"] == 1 and answer["last_step"] == 200
    assert answer["scalars"] == [{"name": "loss", "title": "Loss", "last": 1.0 / 200}]


@pytest.mark.parametrize("points", [8, 2_000])
@pytest.mark.parametrize("series", [{"scalar": "loss"}, {"tensor": "b.weight", "statistic": "amax"}])
def test_a_series_as_arrow_is_that_as_json(
    reader: Reader, recorder: Recorder, series: dict[str, str], points: int
) -> None:
    path = f"/runs/{recorder.run.pk}/series"
    answer, table = reader.json(path, **series, points=points), reader.table(path, **series, points=points)
    assert table.column("step").to_pylist() == answer["steps"]
    np.testing.assert_array_equal(table.column("value").to_numpy(), numbers(answer["values"]))
    metadata = {key.decode(): text.decode() for key, text in table.schema.metadata.items()}
    assert metadata["thinned"] == ("true" if points == 8 else "false")
    assert metadata.get("how") == answer.get("how")


def test_an_empty_series_is_an_empty_table(reader: Reader, recorder: Recorder) -> None:
    table = reader.table(f"/runs/{recorder.run.pk}/series", scalar="nothing")
    assert table.num_rows == 0 and table.column_names == ["step", "value"]


def test_a_heat_map_as_json_is_that_as_arrow(reader: Reader, recorder: Recorder) -> None:
    path = f"/runs/{recorder.run.pk}/heatmap"
    answer = reader.json(path, statistic="amax", columns=40, format="json")
    table = reader.table(path, statistic="amax", columns=40)
    assert table.column("tensor").to_pylist() == answer["tensors"] == ["a.input", "b.weight"]
    assert json.loads(table.schema.metadata[b"step_edges"]) == answer["step_edges"]
    for row, values in zip(table.column("values").to_pylist(), answer["values"], strict=True):
        np.testing.assert_array_equal(numbers(row or []), numbers(values))
    assert "Infinity" in answer["values"][1]


def test_histograms_are_those_of_the_store(reader: Reader, seeded: Seeded, viewer: Visitor) -> None:
    reader = Reader(viewer.project)
    run = seeded.healthy
    name = run.tensors.get(index=0).name
    for step in (5, 10, 15):
        store_histograms(run, step, {0: histogram_of(np.exp2(np.arange(-float(step), 5.0)) * 1.5)})
    answer = reader.json(f"/runs/{run.pk}/histograms", tensor=name)
    stored = [read for read in queries.tensor_histograms(run.pk, 0) if read.total]
    assert [row["step"] for row in answer["histograms"]] == [read.step for read in stored]
    table = reader.table(f"/runs/{run.pk}/histograms", tensor=name)
    for i, read in enumerate(stored):
        assert answer["histograms"][i]["counts"] == read.counts.tolist() == table.column("counts")[i].as_py()
        assert answer["histograms"][i]["zeros"] == read.zeros == table.column("zeros")[i].as_py()
    assert table.num_rows == len(stored) == 3 and answer["min_exponent"] == -149


def test_an_unknown_tensor_is_refused(reader: Reader, recorder: Recorder) -> None:
    for tensor in ("nothing", "", "a\0"):
        assert (
            "no such tensor"
            in reader.refused(f"/runs/{recorder.run.pk}/histograms", tensor=tensor)["message"]
        )
