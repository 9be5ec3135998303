"""The endpoints of metrics: values become rows of the store, and come back as MLflow's history."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from django.db import transaction
from django.http import HttpRequest

from fp8scope_dashboard.ingest.json_batch import read_json
from fp8scope_dashboard.ingest.services import store_batch
from fp8scope_dashboard.mlflow_tracking.errors import MlflowError
from fp8scope_dashboard.mlflow_tracking.fields import (
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
from fp8scope_dashboard.mlflow_tracking.models import MlflowRun
from fp8scope_dashboard.mlflow_tracking.runs import add_params, add_tags, mlflow_run
from fp8scope_dashboard.receipts.dedup import identify
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.text.numbers import json_number
from fp8scope_dashboard.wire.limits import FIRST_TIME_US, LAST_TIME_US, SCALARS
from fp8scope_dashboard.wire.standard_names import LOSS, meaning_of

MAX_METRICS: Final = 1_000
MAX_PARAMS, MAX_TAGS = 100, 100
PAGE: Final = 25_000


@dataclass(frozen=True, kw_only=True)
class LoggedMetric:
    """A value that a client has logged; `timestamp` in milliseconds since 1970."""

    key: str
    value: float
    timestamp: int
    step: int


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
        timestamp=integer(
            body, "timestamp", low=0, high=LAST_TIME_US // 1000, default=int(time.time() * 1e3)
        ),
        step=integer(body, "step", low=0, default=0),
    )


def add_metrics(stored: MlflowRun, metrics: Sequence[LoggedMetric]) -> None:
    """Store values as one batch: a row for each step. Of a key and a step the last value counts."""
    if not metrics:
        return
    rows: dict[int, dict[str, Any]] = {}
    for metric in metrics:
        name = _note(stored, metric)
        row = rows.setdefault(metric.step, {"step": metric.step, "scalars": {}})
        # Clients may give any number as a time. Those before the store's first time count as that.
        moment = max(metric.timestamp, FIRST_TIME_US // 1000)
        row["time"] = datetime.fromtimestamp(moment / 1e3, UTC).isoformat()
        row["scalars"][name] = json_number(metric.value)
        if metric.key == stored.loss_key and name != LOSS:
            row["scalars"][LOSS] = json_number(metric.value)
    batch = {
        "protocol": 1,
        "writer": str(stored.writer),
        "seq": stored.next_seq,
        "rows": [rows[step] for step in sorted(rows)],
    }
    raw = json.dumps(batch).encode()
    message = identify(stored.run_id, stored.writer, stored.next_seq, "batch", raw)
    store_batch(stored.run, message, read_json(batch, stored.run_id, {}))
    stored.next_seq += 1
    stored.rows_sent += len(rows)
    stored.points_sent += sum(len(row["scalars"]) for row in rows.values())


def _note(stored: MlflowRun, metric: LoggedMetric) -> str:
    """Keep a value if it is the latest of its key; returns the name of its scalar."""
    latest = stored.metrics.get(metric.key)
    if latest is None and len(stored.metrics) >= SCALARS:
        raise MlflowError(f"A run has at most {SCALARS} metrics. Keep step numbers out of their keys.")
    name = latest[3] if latest is not None else _scalar_of(stored, metric.key)
    if latest is None or metric.step >= latest[2]:
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


def history(request: HttpRequest, body: Body) -> dict[str, Any]:
    """metrics/get-history: a value for each step, ascending, in pages."""
    stored = mlflow_run(request, body)
    key = text(body, "metric_key", MAX_KEY)
    if key not in stored.metrics:
        return {"metrics": []}
    limit = min(integer(body, "max_results", low=1, high=10**6, default=PAGE), PAGE)
    first = integer(body, "page_token", low=0, default=0)
    line = queries.scalar(stored.run_id, stored.metrics[key][3], first=first)
    milliseconds = line.times.astype("datetime64[ms]").astype("int64")
    entries = list(zip(line.steps.tolist(), line.values.tolist(), milliseconds.tolist(), strict=True))
    answer: dict[str, Any] = {
        "metrics": [
            {"key": key, "value": json_number(value), "timestamp": moment, "step": step}
            for step, value, moment in entries[:limit]
        ]
    }
    if len(entries) > limit:
        answer["next_page_token"] = str(entries[limit][0])
    return answer
