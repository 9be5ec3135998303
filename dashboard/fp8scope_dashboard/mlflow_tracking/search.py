"""The endpoint runs/search, over the newest runs of some experiments."""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpRequest

from fp8scope_dashboard.api.auth import project_of
from fp8scope_dashboard.mlflow_tracking import experiments, filters
from fp8scope_dashboard.mlflow_tracking.errors import MlflowError
from fp8scope_dashboard.mlflow_tracking.fields import Body, text
from fp8scope_dashboard.mlflow_tracking.models import MlflowRun
from fp8scope_dashboard.mlflow_tracking.runs import document

MAX_EXPERIMENTS: Final = 1_000
MAX_SEARCHED: Final = 5_000
MAX_PAGE: Final = 1_000


def search(request: HttpRequest, body: Body) -> dict[str, Any]:
    """runs/search"""
    documents = (document(run) for run in _runs(request, body))
    page = filters.page_of(documents, body, filters.RUNS, _entries, MAX_PAGE)
    return {"runs": page.documents, **page.next_token}


def _runs(request: HttpRequest, body: Body) -> list[MlflowRun]:
    ids = body.get("experiment_ids") or []
    if not isinstance(ids, list) or len(ids) > MAX_EXPERIMENTS:
        raise MlflowError(f"'experiment_ids' must be a list of at most {MAX_EXPERIMENTS} ids.")
    project = project_of(request)
    chosen = [experiments.experiment_of(project, str(name)).pk for name in ids]
    runs = MlflowRun.objects.filter(experiment__in=chosen, run__deleted_at=None)
    token = request.auth  # type: ignore[attr-defined]
    if not token.may("read"):
        runs = runs.filter(run__registered_with=token)
    view = text(body, "run_view_type", default="ACTIVE_ONLY")
    if view != "ALL":
        runs = runs.filter(run__archived_at__isnull=view != "DELETED_ONLY")
    newest = runs.select_related("experiment", "run").defer(
        "run__config", "run__environment", "run__summary", "run__error"
    )
    return list(newest.order_by("-start_time", "pk")[:MAX_SEARCHED])


def _entries(run: dict[str, Any]) -> filters.Entries:
    data = run["data"]
    return {
        "info": run["info"],
        **{
            kind: {entry["key"]: entry["value"] for entry in data[kind]}
            for kind in ("metrics", "params", "tags")
        },
    }
