"""The endpoints of logged models, which clients of version 3 make for each `log_model`.

A model has a name, parameters, tags and metrics here. Its files go where those of its experiment go.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from django.db import transaction
from django.db.models import Case, F, Func, Q, TextField, Value, When
from django.db.models.functions import Cast, Concat
from django.http import HttpRequest
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Scope
from fp8scope_dashboard.api.auth import check_registered_with, project_of, token_of
from fp8scope_dashboard.mlflow_tracking import experiments, filter_sql, filters
from fp8scope_dashboard.mlflow_tracking.errors import MISSING, MlflowError, missing
from fp8scope_dashboard.mlflow_tracking.fields import (
    MAX_KEY,
    MAX_NAME,
    MAX_PARAM,
    MAX_TAG,
    Body,
    objects,
    pairs,
    text,
)
from fp8scope_dashboard.mlflow_tracking.models import MlflowModel, MlflowRun
from fp8scope_dashboard.runs.models import Run

STATUSES: Final = ("LOGGED_MODEL_PENDING", "LOGGED_MODEL_READY", "LOGGED_MODEL_UPLOAD_FAILED")
MAX_MODELS: Final = 100_000
MAX_ENTRIES: Final = 1_000
MAX_PAGE: Final = 100
MAX_DATASETS: Final = 20
PREFIX: Final = "m-"

_TABLE: Final = filter_sql.FilteredTable(
    filters.MODELS,
    {
        "name": F("name"),
        "model_id": Concat(
            Value(PREFIX),
            Func(Cast("id", TextField()), Value("-"), Value(""), function="replace"),
            output_field=TextField(),
        ),
        "model_type": F("model_type"),
        "status": Func(
            F("status"), Value("LOGGED_MODEL_"), Value(""), function="replace", output_field=TextField()
        ),
        "source_run_id": F("source_run"),
        "experiment_id": Case(
            When(experiment__name=experiments.DEFAULT, then=Value(experiments.DEFAULT_ID)),
            default=Cast("experiment_id", TextField()),
            output_field=TextField(),
        ),
        "creation_timestamp": filter_sql.milliseconds("created_at"),
        "last_updated_timestamp": filter_sql.milliseconds("updated_at"),
    },
)


@dataclass(frozen=True)
class LoggedValue:
    """A value of a metric of a model, as MLflow's clients read it."""

    model_id: str
    document: dict[str, Any]


def create(request: HttpRequest, body: Body) -> dict[str, Any]:
    """logged-models"""
    project = project_of(request)
    experiment = experiments.experiment_of(
        project, text(body, "experiment_id", default=experiments.DEFAULT_ID)
    )
    if MlflowModel.objects.filter(experiment__project=project).count() >= MAX_MODELS:
        raise MlflowError(f"The project has {MAX_MODELS} models, the most that are allowed. Delete some.")
    key = uuid.uuid4()
    source_run = text(body, "source_run_id", 64, default="")
    made = MlflowModel.objects.create(
        id=key,
        experiment=experiment,
        run=Run.objects.filter(pk=run_key, project=project).first()
        if (run_key := _key_of(source_run))
        else None,
        registered_with=token_of(request),
        source_run=source_run,
        name=text(body, "name", MAX_NAME, default=f"model-{key.hex[:8]}"),
        model_type=text(body, "model_type", MAX_NAME, default=""),
        params=pairs(body, "params", MAX_ENTRIES, MAX_PARAM),
        tags=pairs(body, "tags", MAX_ENTRIES, MAX_TAG),
    )
    return {"model": document(made)}


def get(request: HttpRequest, body: Body) -> dict[str, Any]:
    """logged-models/{model_id}"""
    return {"model": document(_model(request, body, with_deleted=body.get("allow_deleted") == "true"))}


def finalize(request: HttpRequest, body: Body) -> dict[str, Any]:
    """logged-models/{model_id}: its files are there, or have failed to get there."""
    status = text(body, "status", 32)
    if status not in STATUSES:
        raise MlflowError(f"'status' is {status!r}, and not one of {', '.join(STATUSES)}.")
    with transaction.atomic():
        model = _model(request, body, lock=True)
        model.status = status
        model.save()
    return {"model": document(model)}


def delete(request: HttpRequest, body: Body) -> dict[str, Any]:
    """logged-models/{model_id}: hides it; its files stay."""
    model = _model(request, body)
    MlflowModel.objects.filter(pk=model.pk).update(deleted_at=timezone.now())
    return {}


def log_params(request: HttpRequest, body: Body) -> dict[str, Any]:
    """logged-models/{model_id}/params"""
    return _add(request, body, "params", MAX_PARAM)


def set_tags(request: HttpRequest, body: Body) -> dict[str, Any]:
    """logged-models/{model_id}/tags"""
    return _add(request, body, "tags", MAX_TAG)


def _add(request: HttpRequest, body: Body, kind: str, longest: int) -> dict[str, Any]:
    entries = pairs(body, kind, MAX_ENTRIES, longest)
    with transaction.atomic():
        model = _model(request, body, lock=True)
        joined = {**getattr(model, kind), **entries}
        if len(joined) > MAX_ENTRIES:
            raise MlflowError(f"A model has at most {MAX_ENTRIES} {kind}.")
        setattr(model, kind, joined)
        model.save()
    return {"model": document(model)}


def delete_tag(request: HttpRequest, body: Body) -> dict[str, Any]:
    """logged-models/{model_id}/tags/{key}"""
    key = text(body, "key", MAX_KEY)
    with transaction.atomic():
        model = _model(request, body, lock=True)
        if model.tags.pop(key, None) is None:
            raise MlflowError(f"No tag with key {key!r} for model with ID {id_of(model)!r}.", MISSING, 404)
        model.save()
    return {}


def search(request: HttpRequest, body: Body) -> dict[str, Any]:
    """logged-models/search: newest first, unless `order_by` says otherwise."""
    keys = experiments.keys_of(project_of(request), experiments.ids_in(body))
    models = MlflowModel.objects.filter(experiment__in=keys, deleted_at=None)
    token = token_of(request)
    if not token.may(Scope.READ):
        models = models.filter(registered_with=token)
    wanted = Q()
    for entry in objects(body, "datasets", MAX_DATASETS):
        names = {"dataset_name": text(entry, "dataset_name")}
        if digest := text(entry, "dataset_digest", default=""):
            names["dataset_digest"] = digest
        wanted |= Q(metrics__contains=[names])
    orders = [
        f"{text(entry, 'field_name')} {'DESC' if entry.get('ascending') is False else 'ASC'}"
        for entry in objects(body, "order_by", filters.MAX_CONDITIONS)
    ]
    newest = models.filter(wanted).select_related("experiment").order_by("-created_at", "id")
    page = filter_sql.page_of(newest, {**body, "order_by": orders}, _TABLE, MAX_PAGE)
    return {"models": [document(model) for model in page.rows], **page.next_token}


def list_files(request: HttpRequest, body: Body) -> dict[str, Any]:
    """logged-models/{model_id}/artifacts/directories: files do not come here."""
    return {"root_uri": location_of(_model(request, body)), "files": []}


def add_values(stored: MlflowRun, values: Iterable[LoggedValue]) -> None:
    """Keep the latest values of models. Those of a model that is not here are in the run alone."""
    by_model: dict[uuid.UUID, list[dict[str, Any]]] = {}
    for value in values:
        if key := _model_key(value.model_id):
            by_model.setdefault(key, []).append({**value.document, "run_id": stored.run_id.hex})
    if not by_model:
        return
    models = MlflowModel.objects.select_for_update().filter(
        pk__in=by_model, experiment__project=stored.experiment.project_id, deleted_at=None
    )
    # In one order, so that two requests never wait for each other.
    for model in models.order_by("pk"):
        latest = {_series_of(entry): entry for entry in model.metrics}
        for entry in by_model[model.pk]:
            before = latest.get(_series_of(entry), entry)
            if (entry["step"], entry["timestamp"]) >= (before["step"], before["timestamp"]):
                latest[_series_of(entry)] = entry
        model.metrics = list(latest.values())[:MAX_ENTRIES]
        model.save()


def _series_of(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(name) for name in ("key", "dataset_name", "dataset_digest"))


def id_of(model: MlflowModel) -> str:
    """The id as MLflow's clients see it."""
    return f"{PREFIX}{model.pk.hex}"


def location_of(model: MlflowModel) -> str:
    """The place of its files: below that of the experiment."""
    return f"{experiments.location_of(model.experiment)}/models/{id_of(model)}/artifacts"


def document(model: MlflowModel) -> dict[str, Any]:
    """The model as MLflow's clients read it."""
    info: dict[str, Any] = {
        "model_id": id_of(model),
        "experiment_id": experiments.id_of(model.experiment),
        "name": model.name,
        "creation_timestamp_ms": int(model.created_at.timestamp() * 1e3),
        "last_updated_timestamp_ms": int(model.updated_at.timestamp() * 1e3),
        "artifact_uri": location_of(model),
        "status": model.status,
        "model_type": model.model_type,
        "source_run_id": model.source_run,
        "tags": [{"key": key, "value": value} for key, value in model.tags.items()],
    }
    params = [{"key": key, "value": value} for key, value in model.params.items()]
    return {"info": info, "data": {"params": params, "metrics": model.metrics}}


def _model(
    request: HttpRequest, body: Body, *, lock: bool = False, with_deleted: bool = False
) -> MlflowModel:
    """The model that a request names, in the project of its token. `lock`: until the transaction ends."""
    named = text(body, "model_id", 64)
    models = MlflowModel.objects.select_related("experiment").filter(experiment__project=project_of(request))
    key = _model_key(named)
    model = (
        (models.select_for_update(of=("self",)) if lock else models).filter(pk=key).first() if key else None
    )
    if model is None or (model.deleted_at is not None and not with_deleted):
        raise missing(f"Logged model with ID '{named}'")
    check_registered_with(request, model.registered_with_id)
    return model


def _model_key(model_id: str) -> uuid.UUID | None:
    return _key_of(model_id.removeprefix(PREFIX)) if model_id.startswith(PREFIX) else None


def _key_of(text_of_uuid: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text_of_uuid)
    except ValueError:
        return None
