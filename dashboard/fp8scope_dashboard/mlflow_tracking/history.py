"""The endpoints that read metrics: all values of a key, of one or several runs, or some of the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from django.http import HttpRequest
from numpy.typing import NDArray

from fp8scope_dashboard.mlflow_tracking.errors import MlflowError
from fp8scope_dashboard.mlflow_tracking.fields import MAX_INT, MAX_KEY, Body, integer, invalid, text, texts
from fp8scope_dashboard.mlflow_tracking.models import MlflowRun
from fp8scope_dashboard.mlflow_tracking.runs import mlflow_run
from fp8scope_dashboard.telemetry import rows
from fp8scope_dashboard.telemetry.codec import Float64s, Int64s
from fp8scope_dashboard.text.numbers import json_number

PAGE: Final = 25_000
MAX_RUNS: Final = 100
MAX_STEPS: Final = 2_500


@dataclass(frozen=True)
class MetricPoints:
    """Values of a metric: steps int64[N], times int64[N] in milliseconds since 1970, values float64[N]."""

    steps: Int64s
    times: Int64s
    values: Float64s

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, chosen: slice | NDArray[Any]) -> MetricPoints:
        return MetricPoints(self.steps[chosen], self.times[chosen], self.values[chosen])

    def documents(self, key: str, **more: str) -> list[dict[str, Any]]:
        """The values as MLflow's clients read them."""
        columns = (self.steps.tolist(), self.times.tolist(), self.values.tolist())
        return [
            {"key": key, "value": json_number(value), "timestamp": time, "step": step, **more}
            for step, time, value in zip(*columns, strict=True)
        ]


def history(request: HttpRequest, body: Body) -> dict[str, Any]:
    """metrics/get-history: every value of a key, in the order of steps and times, in pages."""
    stored = mlflow_run(request, body)
    key = text(body, "metric_key", MAX_KEY)
    limit = min(integer(body, "max_results", low=1, high=10**6, default=PAGE), PAGE)
    first, skipped = _begin_of(body)
    points = _points(stored, key, first)[skipped:]
    answer: dict[str, Any] = {"metrics": points[:limit].documents(key)}
    if len(points) > limit:
        step = int(points.steps[limit])
        before = int((points.steps[:limit] == step).sum()) + (skipped if step == first else 0)
        answer["next_page_token"] = f"{step}-{before}"
    return answer


def _begin_of(body: Body) -> tuple[int, int]:
    """The first step of a page, and the number of its values that the pages before had."""
    token = text(body, "page_token", 40, default="0-0")
    step, _, skipped = token.partition("-")
    try:
        begin = {"step": int(step), "skipped": int(skipped or 0)}
    except ValueError:
        raise invalid("page_token", token, "it must be the next_page_token of an answer") from None
    return integer(begin, "step", low=0), integer(begin, "skipped", low=0)


def history_bulk(request: HttpRequest, body: Body) -> dict[str, Any]:
    """metrics/get-history-bulk: the values of a key in runs, by run, time and step."""
    if not body.get("run_id"):
        raise MlflowError("GetMetricHistoryBulk request must specify at least one run_id.")
    if not body.get("metric_key"):
        raise MlflowError("GetMetricHistoryBulk request must specify a metric_key.")
    ids = texts(
        body, "run_id", MAX_RUNS, f"GetMetricHistoryBulk request cannot specify more than {MAX_RUNS} run_ids."
    )
    key = text(body, "metric_key", MAX_KEY)
    limit = min(integer(body, "max_results", low=1, high=10**6, default=PAGE), PAGE)
    metrics: list[dict[str, Any]] = []
    for run_id in sorted(set(ids)):
        stored = mlflow_run(request, {"run_id": run_id})
        points = _points(stored, key)
        in_time = points[np.lexsort((points.values, points.steps, points.times))]
        metrics += in_time[:limit].documents(key, run_id=stored.run_id.hex)
        if len(metrics) >= limit:
            break
    return {"metrics": metrics[:limit]}


def history_bulk_interval(request: HttpRequest, body: Body) -> dict[str, Any]:
    """metrics/get-history-bulk-interval: at most some `max_results` steps of a key, the same in each run.

    The first and the last step of each run are among them, as MLflow's own server chooses them.
    """
    ids = texts(
        body,
        "run_ids",
        MAX_RUNS,
        f"GetMetricHistoryBulkInterval request must specify at most {MAX_RUNS} run_ids.",
    )
    key = text(body, "metric_key", MAX_KEY)
    limit = _steps_in(body)
    first, last = _interval_in(body)
    runs = [mlflow_run(request, {"run_id": run_id}) for run_id in dict.fromkeys(ids)]
    points = {stored.run_id.hex: _points(stored, key, first, last) for stored in runs}
    steps = _chosen_steps(list(points.values()), limit)
    metrics: list[dict[str, Any]] = []
    for run_id, of_run in points.items():
        chosen = np.flatnonzero(np.isin(of_run.steps, steps))
        metrics += of_run[_spread(chosen, max(MAX_STEPS, len(steps)))].documents(key, run_id=run_id)
    return {"metrics": metrics}


def _steps_in(body: Body) -> int:
    try:
        return integer(body, "max_results", low=1, high=MAX_STEPS, default=MAX_STEPS)
    except MlflowError:
        raise MlflowError(f"max_results must be between 1 and {MAX_STEPS}.") from None


def _interval_in(body: Body) -> tuple[int, int]:
    missing = [name for name in ("start_step", "end_step") if body.get(name) in (None, "")]
    if len(missing) == 1:
        raise MlflowError("If either start step or end step are specified, both must be specified.")
    if missing:
        return 0, MAX_INT
    first, last = (integer(body, name, low=-MAX_INT) for name in ("start_step", "end_step"))
    if first > last:
        raise MlflowError(
            f"end_step must be greater than start_step. Found start_step={first} and end_step={last}."
        )
    return max(0, first), max(0, last)


def _chosen_steps(points: list[MetricPoints], limit: int) -> Int64s:
    """Some `limit` steps, evenly spaced over all steps, and the first and the last of each run."""
    steps = np.unique(np.concatenate([of_run.steps for of_run in points]))
    ends = [of_run.steps[[0, -1]] for of_run in points if len(of_run)]
    if len(steps) > limit:
        steps = np.unique(np.concatenate([steps[np.arange(limit) * len(steps) // limit], *ends]))
    return steps


def _spread(positions: NDArray[Any], most: int) -> NDArray[Any]:
    """At most `most` of the positions, evenly spaced: a script without steps gives all values the step 0."""
    if len(positions) <= most:
        return positions
    spread: NDArray[Any] = positions[np.linspace(0, len(positions) - 1, most).astype(np.int64)]
    return spread


def _points(stored: MlflowRun, key: str, first: int = 0, last: int = MAX_INT) -> MetricPoints:
    """The values of a key at steps first..last, in the order of steps, times and values, each once."""
    none = np.zeros(0, np.int64)
    if key not in stored.metrics:
        return MetricPoints(none, none, np.zeros(0))
    name = stored.metrics[key][3]
    parts = list(rows.scalar_parts(stored.run_id, name, (first, last)))
    steps = np.concatenate([none, *(part.steps for part in parts)])
    times = np.concatenate([none, *(part.times.astype("datetime64[ms]").astype(np.int64) for part in parts)])
    values = np.concatenate([np.zeros(0), *(part.values[name] for part in parts)])
    points = MetricPoints(steps, times, values)[np.lexsort((values, times, steps))]
    # A client that got no answer sends a value twice.
    again = (np.diff(points.steps) == 0) & (np.diff(points.times) == 0)
    again &= (points.values[1:] == points.values[:-1]) | np.isnan(points.values[:-1])
    return points[np.concatenate([np.ones(min(1, len(points)), bool), ~again])]
