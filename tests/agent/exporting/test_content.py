"""What is exported of runs without times, without values, and with odd configurations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent.helpers.answer_server import AnswerServer, Prepared, answer_server
from agent.helpers.stored_rows import RUN, row, verdict

from fp8scope.client import Client, reading
from fp8scope.exporting import tensorboard
from fp8scope.exporting.content import ExportedSeries, RunContent, content_of, flat, iso, time_of_step

BEGAN = 1_767_225_600.0
WHOLE = row(
    name="../..//x",
    config={"lr": 1e-3, "deep": {"list": [1], "none": None}},
    statistics=["amax", "scale"],
    step_notes=[],
    note=None,
)
SCALARS = {"first_step": 1, "last_step": 2, "scalars": [{"name": "loss", "title": "Loss", "last": 1.0}]}
NO_SCORES: dict[str, Any] = {"scores": [], "comparisons": []}
NO_ALERTS = {"alerts": [], "total": 0, "next": None}
SCORE = {
    "name": "heldout", "metric": "accuracy", "step": 3, "kind": "proportion", "higher_is_better": True,
    "score": 0.5, "interval": [0.4, 0.6], "items": 10, "precision": None,
}  # fmt: skip


def tensors(*names: str) -> dict[str, Any]:
    entry = {"module": "a", "role": "input", "format": "e4m3", "shape": [2], "numel": 2}
    listed = [{"index": index, "name": name, **entry} for index, name in enumerate(names)]
    return {"total": len(names), "statistics": ["amax"], "roles": ["input"], "tensors": listed}


def content_from(server: AnswerServer, part: str | None = None) -> RunContent:
    return content_of(Client(server.url, "fp8s_secret", patience=0.0).run(RUN), part)


def nothing(done: int, total: int) -> None:
    """No progress is shown."""


@pytest.fixture(autouse=True)
def without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are JSON, as for a machine without pyarrow."""
    monkeypatch.setattr(reading, "has_arrow", lambda: False)


def test_it_works() -> None:
    read: list[tuple[int, int]] = []
    line = {"steps": [1, 2], "values": [1.5, "NaN"], "times": [1_767_225_600_000_001, None], "thinned": False}
    answers = [WHOLE, WHOLE, SCALARS, tensors("a.input"), NO_SCORES, NO_ALERTS, line]
    with answer_server([Prepared(body=answer) for answer in answers]) as server:
        content = content_from(server, "a.")
        series = list(content.series(lambda done, total: read.append((done, total))))
        assert "filter=a." in server.asked[3] and all("times=true" in path for path in server.asked[6:])
    assert content.names == (("loss", "", ""), ("", "a.input", "amax"), ("", "a.input", "scale"))
    assert [entry.tag for entry in series] == ["loss", "amax/a.input", "scale/a.input"]
    assert read == [(0, 3), (1, 3), (2, 3)]
    assert series[0].seconds(7.0).tolist() == [1_767_225_600.000001, 7.0]
    assert np.isnan(series[0].values[1]) and np.isnat(series[0].times[1])


def test_tensors_are_read_only_if_asked_for() -> None:
    with answer_server(
        [Prepared(body=answer) for answer in (WHOLE, WHOLE, SCALARS, NO_SCORES, NO_ALERTS)]
    ) as server:
        assert content_from(server).names == (("loss", "", ""),)
        assert not any("/tensors" in path for path in server.asked)


def test_series_without_values_are_left_out() -> None:
    empty = {"steps": [], "values": [], "times": [], "thinned": False}
    answers = (WHOLE, WHOLE, SCALARS, NO_SCORES, NO_ALERTS, empty)
    with answer_server([Prepared(body=answer) for answer in answers]) as server:
        assert list(content_from(server).series(nothing)) == []


def test_a_run_without_values_has_a_file_that_is_read(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    none: dict[str, Any] = {"first_step": None, "last_step": None, "scalars": []}
    scored = {"scores": [SCORE], "comparisons": []}
    answers = (WHOLE, WHOLE, none, scored, NO_ALERTS)
    with answer_server([Prepared(body=answer) for answer in answers]) as server:
        path = tensorboard.write(content_from(server), tmp_path, nothing)
    # A name is no path.
    assert path.parent.parent == tmp_path and path.parent.name == f"_..__x {RUN[:8]}"
    accumulator = EventAccumulator(str(path.parent))
    accumulator.Reload()
    (event,) = accumulator.Tensors("evaluation/heldout/accuracy")
    # Its step has no time, so it has that of the beginning.
    assert (event.step, event.wall_time, event.tensor_proto.double_val[0]) == (3, BEGAN, 0.5)


def test_an_export_that_fails_leaves_the_earlier_file(tmp_path: Path) -> None:
    line = {"steps": [1], "values": [1.5], "times": [None], "thinned": False}
    facts = [Prepared(body=answer) for answer in (WHOLE, WHOLE, SCALARS, NO_SCORES, NO_ALERTS)]
    with answer_server([*facts, Prepared(body=line)]) as server:
        path = tensorboard.write(content_from(server), tmp_path, nothing)
    before = path.read_bytes()
    with answer_server([*facts, Prepared(status=500, body={})]) as server, pytest.raises(RuntimeError):
        tensorboard.write(content_from(server), tmp_path, nothing)
    assert path.read_bytes() == before


def test_settings_name_the_run() -> None:
    with answer_server(
        [Prepared(body=answer) for answer in (WHOLE, WHOLE, SCALARS, NO_SCORES, NO_ALERTS)]
    ) as server:
        settings = content_from(server).settings()
    assert settings == {
        **{"lr": 1e-3, "deep.list": "[1]", "deep.none": "None"},
        **{
            "fp8scope.precision": "fp8",
            "fp8scope.group": "g",
            "fp8scope.baseline": "bf16",
            "fp8scope.seed": 1,
        },
    }


@pytest.mark.parametrize(
    ("document", "entries"),
    [
        ({}, {}),
        (
            {"a": {"b": {"c": 1}}, "d": [1, {"e": 2}], "f": None},
            {"a.b.c": 1, "d": "[1, {'e': 2}]", "f": "None"},
        ),
        ({"a": {}}, {}),
        ({"a.b": 1, "a": {"b": 2}}, {"a.b": 2}),
        ({"on": True, "x": 1.5, "n": 2, "s": "t"}, {"on": True, "x": 1.5, "n": 2, "s": "t"}),
    ],
    ids=str,
)
def test_nested_settings_become_flat(document: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    assert flat(document) == entries


@pytest.mark.parametrize(("step", "second"), [(0, 9.0), (1, 1.0), (4, 1.0), (5, 5.0), (100, 5.0)])
def test_the_time_of_a_step_is_that_of_the_last_before_it(step: int, second: float) -> None:
    assert time_of_step({1: 1.0, 5: 5.0}, step, 9.0) == second


def test_times_as_text() -> None:
    assert iso(None) == ""
    with answer_server([Prepared(body=row(verdict=verdict()))]) as server:
        run = Client(server.url, "fp8s_secret").run(RUN)
    assert iso(run.created_at) == "2026-01-01T00:00:00+00:00"


def test_a_series_is_named_by_its_scalar_or_its_tensor() -> None:
    steps = np.arange(1)
    arrays: dict[str, Any] = {
        "steps": steps,
        "values": np.zeros(1),
        "times": np.zeros(1, "datetime64[us]"),
        "thinned": False,
    }
    assert ExportedSeries(scalar="loss", tensor="", statistic="", **arrays).tag == "loss"
    assert ExportedSeries(scalar="", tensor="a", statistic="amax", **arrays).tag == "amax/a"
    json.dumps(ExportedSeries(scalar="", tensor="a", statistic="amax", **arrays).seconds(0.0).tolist())
