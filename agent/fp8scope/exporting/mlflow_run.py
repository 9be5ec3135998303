"""MLflow: a run of a tracking server, or of a folder or database that MLflow writes."""

import math
from itertools import islice
from typing import Any, Final

import numpy as np

from fp8scope.exporting.content import ExportError, Progress, RunContent, iso, time_of_step

METRICS_AT_ONCE: Final = 1_000
PARAMS_AT_ONCE: Final = 100
MAX_PARAM: Final = 6_000
MAX_NAME: Final = 250
ALLOWED: Final = frozenset("_-. /:")
ID_TAG: Final = "fp8scope.run"


def metric_name(text: str) -> str:
    """A name that MLflow takes: letters, digits and `_-. /:`; others become underscores."""
    allowed = "".join(char if char.isascii() and char.isalnum() or char in ALLOWED else "_" for char in text)
    return allowed[:MAX_NAME]


def write(content: RunContent, uri: str, experiment: str, progress: Progress) -> str:
    """Write the run; returns its id at MLflow.

    Raises:
        ExportError: the experiment has this run already, two series would have one name, or MLflow refuses.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        return _write(MlflowClient(tracking_uri=uri), content, experiment, progress)
    except MlflowException as error:
        raise ExportError(f"MLflow refuses: {error}") from error


def _write(client: Any, content: RunContent, experiment: str, progress: Progress) -> str:
    stored = client.get_experiment_by_name(experiment)
    number = stored.experiment_id if stored is not None else client.create_experiment(experiment)
    _check_new(client, number, content.run.id)
    names = [metric_name(scalar or f"{statistic}/{tensor}") for scalar, tensor, statistic in content.names]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ExportError(f"MLflow would have two metrics {repeated[0]!r}: rename one of them")
    run = content.run
    began = round(1000 * content.began)
    tags = {ID_TAG: run.id, "fp8scope.url": run.url, "fp8scope.state": run.state}
    tags |= {f"fp8scope.tag.{number}": tag[:5_000] for number, tag in enumerate(run.tags)}
    created = client.create_run(number, start_time=began, tags=tags, run_name=run.name).info.run_id
    _write_params(client, created, content)
    times = _write_metrics(client, created, content, progress)
    _write_scores(client, created, content, times)
    if content.ended is not None:
        status = "FAILED" if run.state == "failed" else "FINISHED"
        client.set_terminated(created, status=status, end_time=round(1000 * content.ended))
    return str(created)


def _check_new(client: Any, experiment: str, run: str) -> None:
    stored = client.search_runs([experiment], f"tags.`{ID_TAG}` = '{run}'", max_results=1)
    if stored:
        raise ExportError(
            f"the experiment has this run already, as {stored[0].info.run_id}: delete it there, or name "
            "another experiment"
        )


def _write_params(client: Any, run: str, content: RunContent) -> None:
    from mlflow.entities import Param

    entries = iter(
        {metric_name(key): str(value)[:MAX_PARAM] for key, value in content.settings().items()}.items()
    )
    while part := list(islice(entries, PARAMS_AT_ONCE)):
        client.log_batch(run, params=[Param(key, value) for key, value in part])


def _write_metrics(client: Any, run: str, content: RunContent, progress: Progress) -> dict[int, float]:
    """Write every series; returns the seconds of the steps."""
    from mlflow.entities import Metric

    times: dict[int, float] = {}
    for series in content.series(progress):
        seconds = series.seconds(content.began)
        times |= dict(zip(series.steps.tolist(), seconds.tolist(), strict=True))
        milliseconds = np.rint(1000.0 * seconds).astype(np.int64).tolist()
        name = metric_name(series.tag)
        points = list(zip(series.values.tolist(), milliseconds, series.steps.tolist(), strict=True))
        for begin in range(0, len(points), METRICS_AT_ONCE):
            part = points[begin : begin + METRICS_AT_ONCE]
            client.log_batch(run, metrics=[Metric(name, value, time, step) for value, time, step in part])
    return times


def _write_scores(client: Any, run: str, content: RunContent, times: dict[int, float]) -> None:
    """Evaluation scores as metrics, and alerts as a tag."""
    from mlflow.entities import Metric

    metrics = [
        Metric(
            metric_name(f"evaluation/{score.name}/{score.metric}"),
            score.score,
            round(1000 * time_of_step(times, score.step, content.began)),
            score.step,
        )
        for score in reversed(content.scores)
        if score.score is not None and not math.isnan(score.score)
    ]
    for begin in range(0, len(metrics), METRICS_AT_ONCE):
        client.log_batch(run, metrics=metrics[begin : begin + METRICS_AT_ONCE])
    for alert in content.alerts:
        since = f"{alert.severity} from step {alert.onset_step}, {alert.state}, {iso(alert.opened_at)}"
        text = f"{since}: {alert.message}"
        client.set_tag(run, f"fp8scope.alert.{alert.id}", text[:5_000])
