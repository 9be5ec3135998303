"""The endpoints runs/search and experiments/search-datasets, over the runs of some experiments."""

from __future__ import annotations

from typing import Any, Final

from django.db.models import Case, F, Func, QuerySet, TextField, Value, When
from django.db.models.functions import Cast, Coalesce, Concat
from django.http import HttpRequest

from fp8scope_dashboard.accounts.models import Scope
from fp8scope_dashboard.api.auth import project_of, token_of
from fp8scope_dashboard.mlflow_tracking import experiments, filter_sql, filters
from fp8scope_dashboard.mlflow_tracking.errors import MlflowError
from fp8scope_dashboard.mlflow_tracking.fields import Body, text
from fp8scope_dashboard.mlflow_tracking.models import MlflowRun
from fp8scope_dashboard.mlflow_tracking.runs import NAME_TAG, RUNNING, document
from fp8scope_dashboard.runs.models import RunState

MAX_PAGE: Final = 1_000
MAX_SUMMARISED: Final = 20
MAX_SUMMARIES: Final = 1_000
_CONTEXT_TAG: Final = "mlflow.data.context"

_RUN_ID: Final = Func(
    Cast("run_id", TextField()), Value("-"), Value(""), function="replace", output_field=TextField()
)
_TABLE: Final = filter_sql.FilteredTable(
    filters.RUNS,
    {
        "run_id": _RUN_ID,
        "run_name": Coalesce(filter_sql.entry("tags", NAME_TAG), Cast("run__name", TextField())),
        "status": Case(
            When(status__in=RUNNING, run__state=RunState.FAILED, then=Value("FAILED")),
            default=F("status"),
            output_field=TextField(),
        ),
        "artifact_uri": Concat(
            Case(
                When(experiment__artifact_location="", then=Value("mlartifacts/")),
                default=F("experiment__artifact_location"),
                output_field=TextField(),
            ),
            Case(
                When(experiment__artifact_location="", experiment__name=experiments.DEFAULT, then=Value("0")),
                When(experiment__artifact_location="", then=Cast("experiment_id", TextField())),
                default=Value(""),
                output_field=TextField(),
            ),
            Value("/"),
            _RUN_ID,
            Value("/artifacts"),
            output_field=TextField(),
        ),
        "user_id": F("user_id"),
        "start_time": F("start_time"),
        "end_time": F("end_time"),
    },
)


def search(request: HttpRequest, body: Body) -> dict[str, Any]:
    """runs/search: newest first, unless `order_by` says otherwise."""
    keys = experiments.keys_of(project_of(request), experiments.ids_in(body))
    runs = _runs(request, keys)
    view = text(body, "run_view_type", default="ACTIVE_ONLY")
    if view != "ALL":
        runs = runs.filter(run__archived_at__isnull=view != "DELETED_ONLY")
    newest = runs.select_related("experiment", "run").defer(
        "run__config", "run__environment", "run__summary", "run__error", "run__last_scalars"
    )
    page = filter_sql.page_of(newest.order_by("-start_time", "pk"), body, _TABLE, MAX_PAGE)
    return {"runs": [document(run) for run in page.rows], **page.next_token}


def search_datasets(request: HttpRequest, body: Body) -> dict[str, Any]:
    """experiments/search-datasets: the data sets that runs of some experiments read, each once."""
    ids = experiments.ids_in(body)
    if not ids:
        raise MlflowError("SearchDatasets request must specify at least one experiment_id.")
    if len(ids) > MAX_SUMMARISED:
        raise MlflowError(
            f"SearchDatasets request cannot specify more than {MAX_SUMMARISED} experiment_ids. "
            f"Received {len(ids)} experiment_ids."
        )
    runs = _runs(request, experiments.keys_of(project_of(request), ids)).exclude(datasets=[])
    newest = runs.select_related("experiment").only("datasets", "experiment").order_by("-start_time", "pk")
    summaries: dict[tuple[str, ...], None] = {}
    for run in newest[:MAX_SUMMARIES]:
        for entry in run.datasets:
            contexts = [tag["value"] for tag in entry["tags"] if tag["key"] == _CONTEXT_TAG]
            dataset, context = entry["dataset"], (contexts or [""])[0]
            summaries[experiments.id_of(run.experiment), dataset["name"], dataset["digest"], context] = None
    names = ("experiment_id", "name", "digest", "context")
    return {
        "dataset_summaries": [
            {name: value for name, value in zip(names, summary, strict=True) if value}
            for summary in list(summaries)[:MAX_SUMMARIES]
        ]
    }


def _runs(request: HttpRequest, keys: list[int]) -> QuerySet[MlflowRun]:
    runs = MlflowRun.objects.filter(experiment__in=keys, run__deleted_at=None)
    token = token_of(request)
    return runs if token.may(Scope.READ) else runs.filter(run__registered_with=token)
