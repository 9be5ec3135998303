"""Exporting a run, importing it again, and reading everything that is stored of it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from helpers.live_servers import Server
from pyarrow import parquet

from fp8scope.cli.archive import KEY, Archive
from fp8scope.cli.export import download
from fp8scope.cli.import_run import Upload
from fp8scope.config import Settings
from fp8scope_dashboard.control.models import Report
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.media import contents
from fp8scope_dashboard.media.models import MediaItem
from fp8scope_dashboard.runs.models import Run, Tensor, Writer
from fp8scope_dashboard.telemetry import queries

# Fields that an export and import must preserve.
WRITER = ("uuid", "rank", "hostname", "attempt", "catalogue", "failed", "error")
MEDIA = ("name", "kind", "step", "caption", "file_name")
REPORT = ("writer", "step", "kind", "document")
SCORES = (
    *("writer", "step", "name", "metric", "kind", "items", "item_ids", "clusters"),
    *("precision", "margin", "matrix"),
)
RUN = (
    "name",
    "precision",
    "recipe",
    "config",
    "environment",
    "tags",
    "group",
    "baseline",
    "seed",
    "total_steps",
    "summary",
)


def settings_of(server: Server) -> Settings:
    return Settings(url=server.url, token=server.token)


def everything(run_id: uuid.UUID) -> dict[str, Any]:
    """All stored data of a run with the bytes of every number, in the order of sending."""
    run = Run.objects.get(pk=run_id)
    tensors = list(Tensor.objects.filter(run=run).order_by("index"))
    rows: dict[str, Any] = {}
    for writer in queries.writers(run_id):
        seq, sent = 0, []
        while pieces := queries.stream(run_id, writer, seq, 10):
            seq = pieces[-1][0] + 1
            for _, data in pieces:
                sent += [row_of(data, i) for i in range(len(data))]
        rows[str(writer)] = sent
    return {
        "run": {name: getattr(run, name) for name in (*RUN, "created_at", "state", "error", "last_scalars")},
        "counted": (run.rows_stored, run.points_stored, run.last_step, run.rows_dropped, run.agent_errors),
        "tensors": [(t.name, t.module, t.role, t.format, t.shape, t.numel) for t in tensors],
        "writers": sorted(Writer.objects.filter(run=run).values_list(*WRITER)),
        "reports": list(Report.objects.filter(run=run).values_list(*REPORT)),
        "scores": list(Evaluation.objects.filter(run=run).values_list(*SCORES)),
        "media": [
            (*(getattr(item, name) for name in MEDIA), item.writer.uuid, contents.read(item.content))
            for item in MediaItem.objects.filter(run=run).select_related("content", "writer").order_by("pk")
        ],
        "rows": rows,
    }  # fmt: skip


def row_of(data: Any, i: int) -> tuple[Any, ...]:
    logged = {name: values[i].tobytes() for name, values in data.scalars.items() if data.logged[name][i]}
    # Values that were not observed may be NaN, missing, or beyond the end of a list.
    observed = {
        (name, j): value.tobytes()
        for name, values in data.statistics.items()
        for j, value in enumerate(values[i])
        if not np.isnan(value)
    }
    return int(data.steps[i]), str(data.times[i]), canonical(logged), observed


def canonical(logged: dict[str, bytes]) -> dict[str, bytes]:
    nan = np.float64(np.nan).tobytes()
    return {name: nan if np.isnan(np.frombuffer(raw)[0]) else raw for name, raw in logged.items()}


def moved(server: Server, run: uuid.UUID, form: str, path: Path) -> uuid.UUID:
    """Export a run and import the file. Returns the new run's id."""
    assert download(settings_of(server), run, form, path) == path.stat().st_size
    upload = Upload(settings_of(server), Archive(path))
    for _ in upload.send():
        pass
    assert upload.page.endswith(f"{upload.run}/")
    return uuid.UUID(upload.run)


def rewritten(path: Path, change: Callable[[pa.Table, dict[str, Any]], pa.Table]) -> None:
    """Rewrite a Parquet file with a changed table or description."""
    table = parquet.read_table(path)
    description = json.loads(table.schema.metadata[KEY.encode()])
    table = change(table, description)
    parquet.write_table(table.replace_schema_metadata({KEY: json.dumps(description)}), path)
