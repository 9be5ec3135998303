"""Queries return what was sent, for any batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recorder import Recorder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.models import Chunk

pytestmark = pytest.mark.django_db
NAMES = ["a", "b", "c"]
finite = st.floats(width=64, allow_nan=False)
scalars = st.none() | st.floats(width=64)
observed = st.just(math.nan) | finite


@st.composite
def batches(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Batches of one writer with increasing steps."""
    made, step = [], 0
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(st.integers(1, 4))
        steps = []
        for _ in range(rows):
            step += draw(st.integers(1, 3))
            steps.append(step)
        columns = draw(st.lists(st.sampled_from(["loss", "x/y"]), unique=True))
        statistics = draw(st.lists(st.sampled_from(["amax", "scale"]), unique=True))
        width = draw(st.integers(1, 3))
        row = st.lists(observed, min_size=width, max_size=width)
        made.append(
            {
                "steps": steps,
                "scalars": {n: draw(st.lists(scalars, min_size=rows, max_size=rows)) for n in columns},
                "tensors": {n: draw(st.lists(row, min_size=rows, max_size=rows)) for n in statistics},
            }
        )
    return made


def expected_scalar(sent: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [
        (step, value)
        for batch in sent
        for step, value in zip(batch["steps"], batch["scalars"].get(name, []), strict=False)
        if value is not None
    ]


def expected_series(sent: list[dict[str, Any]], name: str, index: int) -> list[tuple[int, float]]:
    return [
        (step, row[index])
        for batch in sent
        for step, row in zip(batch["steps"], batch["tensors"].get(name, []), strict=False)
        if index < len(row) and not math.isnan(row[index])
    ]


def answered(series: queries.Series) -> str:
    return repr(list(zip(series.steps.tolist(), series.values.tolist(), strict=True)))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(batches(), st.booleans())
def test_it_works(sent: list[dict[str, Any]], backwards: bool) -> None:
    recorder = Recorder.of_new_run(NAMES)
    numbered = list(enumerate(sent))
    for seq, batch in reversed(numbered) if backwards else numbered:
        recorder.send(batch["steps"], batch["scalars"], batch["tensors"], seq=seq)
    run = recorder.run.id
    points = 0
    for name in ("loss", "x/y"):
        expected = expected_scalar(sent, name)
        assert answered(queries.scalar(run, name)) == repr(expected)
        points += len(expected)
    for name in ("amax", "scale"):
        for index in range(len(NAMES)):
            expected = expected_series(sent, name, index)
            assert answered(queries.tensor_series(run, index, name)) == repr(expected)
            points += len(expected)
    stored = Run.objects.get(pk=run)
    assert (
        stored.points_stored == points == sum(Chunk.objects.filter(run=run).values_list("points", flat=True))
    )
    assert stored.rows_stored == sum(len(batch["steps"]) for batch in sent)
    assert stored.last_step == sent[-1]["steps"][-1]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(batches(), st.integers(1, 6))
def test_a_cell_of_a_heat_map_is_the_maximum_of_its_steps(sent: list[dict[str, Any]], columns: int) -> None:
    recorder = Recorder.of_new_run(NAMES)
    for batch in sent:
        recorder.send(batch["steps"], batch["scalars"], batch["tensors"])
    heat = queries.heatmap(recorder.run.id, "amax", columns=columns)
    assert heat.values.shape == (3, len(heat.step_edges) - 1)
    for index in range(3):
        for column, (low, high) in enumerate(zip(heat.step_edges[:-1], heat.step_edges[1:], strict=True)):
            inside = [v for step, v in expected_series(sent, "amax", index) if low <= step < high]
            np.testing.assert_equal(heat.values[index, column], max(inside) if inside else math.nan)
