"""The endpoints that store metrics: values become rows of the store."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.db import transaction
from django.http import HttpRequest

from fp8scope_dashboard.ingest.json_batch import read_json
from fp8scope_dashboard.ingest.services import store_batch
from fp8scope_dashboard.mlflow_tracking.errors import MlflowError
from fp8scope_dashboard.mlflow_tracking.fields import (
    MAX_INT,
    MAX_KEY,
    MAX_PARAM,
    MAX_TAG,
    Body,
    integer,
    number,
    objects,
    pairs,
    text,
)
from fp8scope_dashboard.mlflow_tracking.logged_models import LoggedValue, add_values
from fp8scope_dashboard.mlflow_tracking.models import MlflowRun
from fp8scope_dashboard.mlflow_tracking.runs import add_params, add_tags, mlflow_run
from fp8scope_dashboard.receipts.dedup import identify
from fp8scope_dashboard.text.numbers import json_number
from fp8scope_dashboard.wire.limits import FIRST_TIME_US, LAST_TIME_US, SCALARS
from fp8scope_dashboard.wire.standard_names import LOSS, meaning_of

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MAX_METRICS: Final = 1_000
MAX_PARAMS, MAX_TAGS = 100, 100
MAX_DATASET_NAME: Final = 500


@dataclass(frozen=True, kw_only=True)
class LoggedMetric:
    """A value that a client has logged; `timestamp` in milliseconds since 1970."""

    key: str
    value: float
    timestamp: int
    step: int
    model_id: str = ""
    dataset_name: str = ""
    dataset_digest: str = ""


def log_metric(request: HttpRequest, body: Body) -> dict[str, Any]:
    """runs/log-metric"""
    text(body, "run_id", 64, default="")
    metric = _metric(body)
    with transaction.atomic():
        stored = mlflow_run(request, body, lock=True)
        add_metrics(stored, [metric])
        stored.save()
    return {}


def log_batch(request: HttpRequest, body: Body) -> dict[str, Any]:
    """runs/log-batch: all of it or nothing."""
    metrics = [_metric(entry) for entry in objects(body, "metrics", MAX_METRICS)]
    params = pairs(body, "params", MAX_PARAMS, MAX_PARAM)
    tags = pairs(body, "tags", MAX_TAGS, MAX_TAG)
    with transaction.atomic():
        stored = mlflow_run(request, body, lock=True)
        add_params(stored, params)
        add_tags(stored, tags)
        add_metrics(stored, metrics)
        stored.save()
    return {}


def _metric(body: Body) -> LoggedMetric:
    return LoggedMetric(
        key=text(body, "key", MAX_KEY),
        value=number(body, "value"),
        timestamp=integer(body, "timestamp", low=-MAX_INT, default=int(time.time() * 1e3)),
        step=max(0, integer(body, "step", low=-MAX_INT, default=0)),
        model_id=text(body, "model_id", 64, default=""),
        dataset_name=text(body, "dataset_name", MAX_DATASET_NAME, default=""),
        dataset_digest=text(body, "dataset_digest", MAX_DATASET_NAME, default=""),
    )


def add_metrics(stored: MlflowRun, metrics: Sequence[LoggedMetric]) -> None:
    """Store values as one batch. Of a key and a step the last value counts; the others are in its history."""
    if not metrics:
        return
    rows = _rows(stored, metrics)
    batch = {"protocol": 1, "writer": str(stored.writer), "seq": stored.next_seq, "rows": rows}
    raw = json.dumps(batch).encode()
    message = identify(stored.run_id, stored.writer, stored.next_seq, "batch", raw)
    store_batch(stored.run, message, read_json(batch, stored.run_id, {}))
    stored.next_seq += 1
    stored.rows_sent += len(rows)
    stored.points_sent += sum(len(row["scalars"]) for row in rows)
    add_values(stored, (_of_model(metric) for metric in metrics if metric.model_id))


def _rows(stored: MlflowRun, metrics: Iterable[LoggedMetric]) -> list[dict[str, Any]]:
    """The values as rows in the order of their steps. Values of a step share a row if they share its time."""
    rows: dict[int, list[dict[str, Any]]] = {}
    for metric in metrics:
        name = _note(stored, metric)
        moment = min(max(metric.timestamp, FIRST_TIME_US // 1000), LAST_TIME_US // 1000)
        shown = (EPOCH + timedelta(milliseconds=moment)).isoformat()
        of_step = rows.setdefault(metric.step, [])
        if not of_step or of_step[-1]["time"] != shown or name in of_step[-1]["scalars"]:
            of_step.append({"step": metric.step, "time": shown, "scalars": {}})
        scalars = of_step[-1]["scalars"]
        scalars[name] = json_number(metric.value)
        if metric.key == stored.loss_key and name != LOSS:
            scalars[LOSS] = json_number(metric.value)
    return [row for step in sorted(rows) for row in rows[step]]


def _of_model(metric: LoggedMetric) -> LoggedValue:
    document = {
        "key": metric.key,
        "value": json_number(metric.value),
        "timestamp": metric.timestamp,
        "step": metric.step,
        "model_id": metric.model_id,
        "dataset_name": metric.dataset_name,
        "dataset_digest": metric.dataset_digest,
    }
    return LoggedValue(metric.model_id, {name: value for name, value in document.items() if value != ""})


def _note(stored: MlflowRun, metric: LoggedMetric) -> str:
    """Keep a value if it is the latest of its key; returns the name of its scalar."""
    latest = stored.metrics.get(metric.key)
    if latest is None and len(stored.metrics) >= SCALARS:
        raise MlflowError(f"A run has at most {SCALARS} metrics. Keep step numbers out of their keys.")
    name = latest[3] if latest is not None else _scalar_of(stored, metric.key)
    if latest is None or (metric.step, metric.timestamp) >= (latest[2], latest[1]):
        stored.metrics[metric.key] = [json_number(metric.value), metric.timestamp, metric.step, name]
    if metric.key == LOSS or (not stored.loss_key and meaning_of(metric.key) == LOSS):
        stored.loss_key = metric.key
    return str(name)


def _scalar_of(stored: MlflowRun, key: str) -> str:
    """The name of a key's scalar: the key, with what no scalar has replaced."""
    name = re.sub(r"[^A-Za-z0-9_./-]", "_", key)
    others = {entry[3] for other, entry in stored.metrics.items() if other != key}
    if len(name) <= 128 and name not in others:
        return name
    return f"{name[:119]}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
