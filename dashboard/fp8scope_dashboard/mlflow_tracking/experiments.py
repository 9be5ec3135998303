"""The endpoints of experiments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from django.db import IntegrityError, transaction
from django.db.models import Case, F, TextField, Value, When
from django.db.models.functions import Cast
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.mlflow_tracking import filter_sql, filters
from fp8scope_dashboard.mlflow_tracking.errors import EXISTS, MISSING, MlflowError, missing
from fp8scope_dashboard.mlflow_tracking.fields import MAX_KEY, MAX_TAG, Body, pairs, text
from fp8scope_dashboard.mlflow_tracking.models import MlflowExperiment

DEFAULT: Final = "Default"
DEFAULT_ID: Final = "0"
"""The id of the experiment that is always there."""
MAX_TAGS: Final = 100
MAX_LOCATION: Final = 1_000
MAX_EXPERIMENTS: Final = 10_000
MAX_SEARCHED: Final = 1_000
PAGE: Final = 1_000
_TABLE: Final = filter_sql.FilteredTable(
    filters.EXPERIMENTS,
    {
        "name": F("name"),
        "experiment_id": Case(
            When(name=DEFAULT, then=Value(DEFAULT_ID)),
            default=Cast("id", TextField()),
            output_field=TextField(),
        ),
        "creation_time": filter_sql.milliseconds("created_at"),
        "last_update_time": filter_sql.milliseconds("updated_at"),
    },
)


def create(project: Project, body: Body) -> dict[str, Any]:
    """experiments/create"""
    name, location = text(body, "name"), text(body, "artifact_location", MAX_LOCATION, default="")
    tags = pairs(body, "tags", MAX_TAGS, MAX_TAG)
    if project.mlflow_experiments.count() >= MAX_EXPERIMENTS:
        raise MlflowError(f"The project has {MAX_EXPERIMENTS} experiments, the most that are allowed.")
    try:
        with transaction.atomic():
            made = MlflowExperiment.objects.create(
                project=project, name=name, tags=tags, artifact_location=location.rstrip("/")
            )
    except IntegrityError:
        raise MlflowError(f"Experiment '{name}' already exists.", EXISTS) from None
    return {"experiment_id": id_of(made)}


def get(project: Project, body: Body) -> dict[str, Any]:
    """experiments/get"""
    return {"experiment": document(experiment_of(project, text(body, "experiment_id")))}


def get_by_name(project: Project, body: Body) -> dict[str, Any]:
    """experiments/get-by-name"""
    name = text(body, "experiment_name")
    if name == DEFAULT:
        return {"experiment": document(default_of(project))}
    experiment = project.mlflow_experiments.filter(name=name).first()
    if experiment is None:
        raise missing(f"Experiment '{name}'")
    return {"experiment": document(experiment)}


def search(project: Project, body: Body) -> dict[str, Any]:
    """experiments/search: newest first, unless `order_by` says otherwise."""
    default_of(project)
    view = text(body, "view_type", default="ACTIVE_ONLY")
    experiments = project.mlflow_experiments.order_by("-created_at", "-id")
    if view != "ALL":
        experiments = experiments.filter(deleted_at__isnull=view != "DELETED_ONLY")
    page = filter_sql.page_of(experiments, body, _TABLE, PAGE)
    return {"experiments": [document(experiment) for experiment in page.rows], **page.next_token}


def delete(project: Project, body: Body) -> dict[str, Any]:
    """experiments/delete: hides it from MLflow's clients; its runs stay."""
    return _change(project, body, deleted_at=timezone.now())


def restore(project: Project, body: Body) -> dict[str, Any]:
    """experiments/restore"""
    return _change(project, body, deleted_at=None)


def rename(project: Project, body: Body) -> dict[str, Any]:
    """experiments/update"""
    try:
        with transaction.atomic():
            return _change(project, body, name=text(body, "new_name"))
    except IntegrityError:
        raise MlflowError(f"Experiment '{body['new_name']}' already exists.", EXISTS) from None


def set_tag(project: Project, body: Body) -> dict[str, Any]:
    """experiments/set-experiment-tag"""
    experiment = experiment_of(project, text(body, "experiment_id"))
    tags = {**experiment.tags, text(body, "key", MAX_KEY): text(body, "value", MAX_TAG, default="")}
    if len(tags) > MAX_TAGS:
        raise MlflowError(f"An experiment has at most {MAX_TAGS} tags.")
    MlflowExperiment.objects.filter(pk=experiment.pk).update(tags=tags)
    return {}


def delete_tag(project: Project, body: Body) -> dict[str, Any]:
    """experiments/delete-experiment-tag"""
    experiment = experiment_of(project, text(body, "experiment_id"))
    key = text(body, "key", MAX_KEY)
    if key not in experiment.tags:
        raise MlflowError(f"No tag with name: {key} in experiment with id {id_of(experiment)}.", MISSING, 404)
    tags = {name: value for name, value in experiment.tags.items() if name != key}
    MlflowExperiment.objects.filter(pk=experiment.pk).update(tags=tags)
    return {}


def _change(project: Project, body: Body, **changes: Any) -> dict[str, Any]:
    experiment = experiment_of(project, text(body, "experiment_id"))
    MlflowExperiment.objects.filter(pk=experiment.pk).update(**changes, updated_at=timezone.now())
    return {}


def experiment_of(project: Project, experiment_id: str) -> MlflowExperiment:
    """The experiment with an id; "0" is the default one, which is made when it is asked for."""
    if experiment_id == DEFAULT_ID:
        return default_of(project)
    experiment = None
    if _is_key(experiment_id):
        experiment = project.mlflow_experiments.filter(pk=int(experiment_id)).first()
    if experiment is None:
        raise missing(f"Experiment '{experiment_id[:40]}'")
    return experiment


def keys_of(project: Project, experiment_ids: Sequence[object]) -> list[int]:
    """The primary keys of experiments, by one statement. Raises MlflowError if one of them does not exist."""
    names = list(dict.fromkeys(map(str, experiment_ids)))
    keys = set(
        project.mlflow_experiments.filter(pk__in=[int(name) for name in names if _is_key(name)]).values_list(
            "pk", flat=True
        )
    )
    if DEFAULT_ID in names:
        keys.add(default_of(project).pk)
    for name in names:
        if name != DEFAULT_ID and not (_is_key(name) and int(name) in keys):
            raise missing(f"Experiment '{name[:40]}'")
    return sorted(keys)


def ids_in(body: Body) -> list[object]:
    """The `experiment_ids` of a search. Raises MlflowError if they are no list, or too many."""
    ids = body.get("experiment_ids") or []
    if not isinstance(ids, list) or len(ids) > MAX_SEARCHED:
        raise MlflowError(f"'experiment_ids' must be a list of at most {MAX_SEARCHED} ids.")
    return ids


def _is_key(experiment_id: str) -> bool:
    return experiment_id.isascii() and experiment_id.isdigit() and len(experiment_id) < 19


def default_of(project: Project) -> MlflowExperiment:
    """The experiment of runs that name none."""
    experiment, _ = MlflowExperiment.objects.get_or_create(project=project, name=DEFAULT)
    return experiment


def id_of(experiment: MlflowExperiment) -> str:
    """The id as MLflow's clients see it."""
    return DEFAULT_ID if experiment.name == DEFAULT else str(experiment.pk)


def location_of(experiment: MlflowExperiment) -> str:
    """The place of files: the one that the experiment names, or a path of the machine that trains."""
    return experiment.artifact_location or f"mlartifacts/{id_of(experiment)}"


def document(experiment: MlflowExperiment) -> dict[str, Any]:
    """The experiment as MLflow's clients read it."""
    return {
        "experiment_id": id_of(experiment),
        "name": experiment.name,
        "artifact_location": location_of(experiment),
        "lifecycle_stage": "deleted" if experiment.deleted_at else "active",
        "creation_time": int(experiment.created_at.timestamp() * 1e3),
        "last_update_time": int(experiment.updated_at.timestamp() * 1e3),
        "tags": [{"key": key, "value": value} for key, value in experiment.tags.items()],
    }
