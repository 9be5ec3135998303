"""The endpoints that make, change and describe a run."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from django.db import transaction
from django.http import HttpRequest
from django.utils import timezone

from fp8scope_dashboard.api.auth import project_of, run_of, take_quota, token_of
from fp8scope_dashboard.ingest.services import Ending, store_finish
from fp8scope_dashboard.mlflow_tracking import experiments
from fp8scope_dashboard.mlflow_tracking.errors import MISSING, MlflowError, missing
from fp8scope_dashboard.mlflow_tracking.fields import (
    MAX_INT,
    MAX_KEY,
    MAX_NAME,
    MAX_PARAM,
    MAX_TAG,
    Body,
    integer,
    objects,
    pairs,
    text,
)
from fp8scope_dashboard.mlflow_tracking.models import MlflowRun
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.receipts.dedup import identify
from fp8scope_dashboard.runs.models import Run, RunState, Writer
from fp8scope_dashboard.runs.services import register
from fp8scope_dashboard.text.numbers import json_number

RUNNING: Final = ("RUNNING", "SCHEDULED")
FAILED: Final = ("FAILED", "KILLED")
STATUSES: Final = (*RUNNING, *FAILED, "FINISHED")
MAX_PARAMS: Final = 2_000
MAX_TAGS: Final = 500
OWN_TAG: Final = "fp8scope."
OWN_TAGS: Final = ("group", "baseline", "precision", "seed", "total_steps")
PRECISIONS: Final = ("bf16", "fp8", "fp16", "fp32")
NAME_TAG: Final = "mlflow.runName"
MAX_RUN_NAME: Final = 200
HISTORY_TAG: Final = "mlflow.log-model.history"
MAX_DATASETS: Final = 100
MAX_MODELS: Final = 1_000
MAX_DATASET: Final = 16_384
# Of all data sets of a run, which every answer about the run has.
MAX_DATASETS_TEXT: Final = 262_144


def create(request: HttpRequest, body: Body) -> dict[str, Any]:
    """runs/create"""
    project = project_of(request)
    experiment = experiments.experiment_of(
        project, text(body, "experiment_id", default=experiments.DEFAULT_ID)
    )
    if experiment.deleted_at is not None:
        raise MlflowError(f"Experiment '{experiment.name}' is deleted: restore it first.")
    tags = pairs(body, "tags", MAX_TAGS, MAX_TAG)
    run_id = uuid.uuid4()
    name = text(body, "run_name", MAX_TAG, default=tags.get(NAME_TAG, "")) or f"run {run_id.hex[:8]}"
    tags[NAME_TAG] = name
    now = int(time.time() * 1e3)
    start = integer(body, "start_time", low=0, default=now)
    take_quota(request, runs=1)
    fields = {
        "name": name[:MAX_RUN_NAME],
        "created_at": _moment(start),
        "environment": {"client": "mlflow", "mlflow_experiment": experiment.name},
        "tags": [experiment.name[:64]],
        **own_fields(tags),
    }
    with transaction.atomic():
        run, _ = register(run_id, project, fields, token=token_of(request))
        made = MlflowRun.objects.create(
            run=run,
            experiment=experiment,
            user_id=text(body, "user_id", 256, default=""),
            start_time=start,
            tags=tags,
        )
    return {"run": document(made)}


def get(request: HttpRequest, body: Body) -> dict[str, Any]:
    """runs/get"""
    return {"run": document(mlflow_run(request, body))}


def update(request: HttpRequest, body: Body) -> dict[str, Any]:
    """runs/update: the status, the end and the name."""
    with transaction.atomic():
        stored = mlflow_run(request, body, lock=True)
        if name := text(body, "run_name", MAX_TAG, default=""):
            stored.tags[NAME_TAG] = name
            Run.objects.filter(pk=stored.run_id).update(name=name[:MAX_RUN_NAME])
        if status := text(body, "status", 16, default=""):
            if status not in STATUSES:
                raise MlflowError(f"'status' is {status!r}, and not one of {', '.join(STATUSES)}.")
            end = integer(body, "end_time", low=0, default=int(time.time() * 1e3))
            _change_status(stored, status, end)
        stored.save()
    return {"run_info": document(stored)["info"]}


def _change_status(stored: MlflowRun, status: str, end: int) -> None:
    was_running, stored.status = stored.status in RUNNING, status
    if status in RUNNING:
        stored.end_time = None
        if not was_running:
            _begin_again(stored)
        return
    stored.end_time = end
    if not was_running:
        return
    ending = Ending(
        failed=status in FAILED,
        error=f"MLflow's client ended the run with the status {status}." if status in FAILED else "",
        rows_sent=stored.rows_sent,
        points_sent=stored.points_sent,
        dropped=0,
        errors=0,
        finished_at=_moment(end),
    )
    body = json.dumps([status, end]).encode()
    store_finish(stored.run, identify(stored.run_id, stored.writer, stored.next_seq, "finish", body), ending)
    stored.next_seq += 1
    stored.rows_sent = stored.points_sent = 0


def _begin_again(stored: MlflowRun) -> None:
    """A run that had ended goes on. Its values stay: clients come back to add a score, at step 0."""
    Writer.objects.filter(run=stored.run, uuid=stored.writer).update(finished_at=None, failed=False, error="")
    Run.objects.filter(pk=stored.run_id).update(
        state=RunState.RUNNING, finished_at=None, error="", heartbeat_at=timezone.now()
    )
    run_changed(stored.run_id, stored.run.project_id, "state")


def delete(request: HttpRequest, body: Body) -> dict[str, Any]:
    """runs/delete: archives the run."""
    return _archive(request, body, timezone.now())


def restore(request: HttpRequest, body: Body) -> dict[str, Any]:
    """runs/restore"""
    return _archive(request, body, None)


def _archive(request: HttpRequest, body: Body, moment: datetime | None) -> dict[str, Any]:
    stored = mlflow_run(request, body)
    with transaction.atomic():
        MlflowRun.objects.filter(pk=stored.pk).update(deleted=moment is not None)
        Run.objects.filter(pk=stored.run_id).update(archived_at=moment)
    return {}


def log_parameter(request: HttpRequest, body: Body) -> dict[str, Any]:
    """runs/log-parameter"""
    text(body, "run_id", 64, default="")
    params = {text(body, "key", MAX_KEY): text(body, "value", MAX_PARAM, default="")}
    with transaction.atomic():
        stored = mlflow_run(request, body, lock=True)
        add_params(stored, params)
        stored.save()
    return {}


def set_tag(request: HttpRequest, body: Body) -> dict[str, Any]:
    """runs/set-tag"""
    text(body, "run_id", 64, default="")
    tags = {text(body, "key", MAX_KEY): text(body, "value", MAX_TAG, default="")}
    with transaction.atomic():
        stored = mlflow_run(request, body, lock=True)
        add_tags(stored, tags)
        stored.save()
    return {}


def log_inputs(request: HttpRequest, body: Body) -> dict[str, Any]:
    """runs/log-inputs: the data sets and models that a run reads. A data set with the same name and digest
    is replaced.
    """
    text(body, "run_id", 64)
    if body.get("datasets") is None and not body.get("models"):
        raise MlflowError("Missing value for required parameter 'datasets'.")
    datasets = [_dataset(entry) for entry in objects(body, "datasets", MAX_DATASETS)]
    models = [{"model_id": text(entry, "model_id", 64)} for entry in objects(body, "models", MAX_MODELS)]
    with transaction.atomic():
        stored = mlflow_run(request, body, lock=True)
        named = {_name_of(entry): entry for entry in [*stored.datasets, *datasets]}
        stored.datasets = list(named.values())
        if len(stored.datasets) > MAX_DATASETS:
            raise MlflowError(f"A run has at most {MAX_DATASETS} data sets.")
        if len(json.dumps(stored.datasets)) > MAX_DATASETS_TEXT:
            raise MlflowError(f"The data sets of a run have at most {MAX_DATASETS_TEXT} characters together.")
        stored.model_inputs = _joined(stored.model_inputs, models)
        stored.save()
    return {}


def log_outputs(request: HttpRequest, body: Body) -> dict[str, Any]:
    """runs/outputs: the models that a run makes, each with its step."""
    models = [
        {"model_id": text(entry, "model_id", 64), "step": integer(entry, "step", low=-MAX_INT, default=0)}
        for entry in objects(body, "models", MAX_MODELS)
    ]
    with transaction.atomic():
        stored = mlflow_run(request, body, lock=True)
        stored.model_outputs = _joined(stored.model_outputs, models)
        stored.save()
    return {}


def _joined(before: list[dict[str, Any]], models: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    joined = list({tuple(model.values()): model for model in [*before, *models]}.values())
    if len(joined) > MAX_MODELS:
        raise MlflowError(f"A run names at most {MAX_MODELS} models.")
    return joined


def log_model(request: HttpRequest, body: Body) -> dict[str, Any]:
    """runs/log-model, by which clients of version 2 add the description of a model to a tag of the run."""
    try:
        described = json.loads(text(body, "model_json", MAX_DATASET))
    except (ValueError, RecursionError):
        described = None
    if not isinstance(described, dict):
        raise MlflowError("'model_json' is no JSON object.")
    with transaction.atomic():
        stored = mlflow_run(request, body, lock=True)
        history = [*_history_of(stored), described]
        while len(value := json.dumps(history)) > MAX_TAG:
            # The oldest give way. One that is too large by itself is not kept: the tag is for people.
            history.pop(0)
        add_tags(stored, {HISTORY_TAG: value})
        stored.save()
    return {}


def _dataset(entry: Body) -> dict[str, Any]:
    described = entry.get("dataset")
    if not isinstance(described, dict):
        raise MlflowError("Missing value for required parameter 'dataset'.")
    dataset = {name: text(described, name, MAX_NAME) for name in ("name", "digest", "source_type")}
    dataset["source"] = text(described, "source", MAX_DATASET)
    for name in ("schema", "profile"):
        if value := text(described, name, MAX_DATASET, default=""):
            dataset[name] = value
    tags = pairs(entry, "tags", MAX_TAGS, MAX_NAME)
    return {"dataset": dataset, "tags": [{"key": key, "value": value} for key, value in tags.items()]}


def _name_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    return entry["dataset"]["name"], entry["dataset"]["digest"]


def _history_of(stored: MlflowRun) -> list[Any]:
    try:
        history = json.loads(stored.tags.get(HISTORY_TAG, "[]"))
    except (ValueError, RecursionError):  # a script has set the tag itself
        return []
    return history if isinstance(history, list) else []


def delete_tag(request: HttpRequest, body: Body) -> dict[str, Any]:
    """runs/delete-tag"""
    key = text(body, "key", MAX_KEY)
    with transaction.atomic():
        stored = mlflow_run(request, body, lock=True)
        if stored.tags.pop(key, None) is None:
            raise MlflowError(f"No tag with name: {key} in run with id {stored.run_id.hex}.", MISSING, 404)
        stored.save()
    return {}


def add_params(stored: MlflowRun, params: Mapping[str, str]) -> None:
    """Add parameters, whose values never change, and put their values into the run's configuration."""
    for key, value in params.items():
        if (before := stored.params.get(key)) not in (None, value):
            raise MlflowError(
                f"Changing param values is not allowed. Param with key='{key}' was already logged with "
                f"value='{before[:100]}'. Attempted logging new value '{value[:100]}'."
            )
    stored.params = {**stored.params, **params}
    if len(stored.params) > MAX_PARAMS:
        raise MlflowError(f"A run has at most {MAX_PARAMS} parameters.")
    if params:
        config = {key: value_of(value) for key, value in params.items()}
        register(stored.run_id, stored.run.project, {"config": config})


def add_tags(stored: MlflowRun, tags: Mapping[str, str]) -> None:
    """Add or replace tags. Those that begin with `fp8scope.` say what the run is compared with."""
    stored.tags = {**stored.tags, **tags}
    if len(stored.tags) > MAX_TAGS:
        raise MlflowError(f"A run has at most {MAX_TAGS} tags.")
    if name := tags.get(NAME_TAG):
        Run.objects.filter(pk=stored.run_id).update(name=name[:MAX_RUN_NAME])
    if fields := own_fields(tags):
        # The agent's own clients say these when they register a run; here they may come later.
        register(stored.run_id, stored.run.project, fields)
        late = {name: fields[name] for name in ("group", "seed") if name in fields}
        if late:
            Run.objects.filter(pk=stored.run_id).update(**late)


def own_fields(tags: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a run in tags such as `fp8scope.group`. Raises MlflowError for values that are none."""
    fields: dict[str, Any] = {}
    for name in OWN_TAGS:
        value = tags.get(OWN_TAG + name)
        if value in (None, ""):
            continue
        if name in ("seed", "total_steps"):
            fields[name] = integer({name: value}, name, low=0)
        elif name == "precision" and value not in PRECISIONS:
            raise MlflowError(
                f"The tag fp8scope.precision is {value[:40]!r}, and not {', '.join(PRECISIONS)}."
            )
        else:
            fields[name] = text({name: value}, name, 128)
    return fields


def value_of(param: str) -> Any:
    """A parameter as a number, a truth value or a text, so that searches compare numbers."""
    if param in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[param]
    try:
        return json_number(float(param)) if not param.lstrip("-").isdigit() else int(param[:19])
    except ValueError:
        return param


def mlflow_run(request: HttpRequest, body: Body, *, lock: bool = False) -> MlflowRun:
    """The run that a request names, in the project of its token.

    Args:
        lock: lock it until the transaction ends, to change it.

    Raises:
        MlflowError: there is none, or it is to be changed and a client has deleted it.
    """
    # Older clients send both names.
    named = text({**body, "run_id": body.get("run_id") or body.get("run_uuid")}, "run_id", 64)
    try:
        run_id = uuid.UUID(named)
    except ValueError:
        raise missing(f"Run '{named}'") from None
    run = run_of(request, run_id)
    runs = MlflowRun.objects.select_related("experiment")
    stored = (runs.select_for_update(of=("self",)) if lock else runs).filter(run=run).first()
    if stored is None:
        raise missing(f"Run '{named}' of an MLflow client")
    stored.run = run
    if lock and stored.deleted and run.archived_at is not None:
        raise MlflowError(
            f"The run {run_id.hex} must be in the 'active' state. Current state is deleted. "
            "Restore it first: MlflowClient().restore_run(run_id)."
        )
    return stored


def document(stored: MlflowRun) -> dict[str, Any]:
    """The run as MLflow's clients read it."""
    run_id, run = stored.run_id.hex, stored.run
    experiment = experiments.id_of(stored.experiment)
    status = stored.status
    if status in RUNNING and run.state == RunState.FAILED:
        status = "FAILED"
    info: dict[str, Any] = {
        "run_id": run_id,
        "run_uuid": run_id,
        "run_name": stored.tags.get(NAME_TAG, run.name),
        "experiment_id": experiment,
        "user_id": stored.user_id,
        "status": status,
        "start_time": stored.start_time,
        # A path or an address of the client: files do not come here.
        "artifact_uri": f"{experiments.location_of(stored.experiment)}/{run_id}/artifacts",
        "lifecycle_stage": "deleted" if run.archived_at else "active",
    }
    if stored.end_time is not None:
        info["end_time"] = stored.end_time
    data = {
        "metrics": [
            {"key": key, "value": value, "timestamp": timestamp, "step": step}
            for key, (value, timestamp, step, _) in stored.metrics.items()
        ],
        "params": [{"key": key, "value": value} for key, value in stored.params.items()],
        "tags": [{"key": key, "value": value} for key, value in stored.tags.items()],
    }
    return {
        "info": info,
        "data": data,
        "inputs": {"dataset_inputs": stored.datasets, "model_inputs": stored.model_inputs},
        "outputs": {"model_outputs": stored.model_outputs},
    }


def _moment(milliseconds: int) -> datetime:
    try:
        return datetime.fromtimestamp(milliseconds / 1e3, UTC)
    except (ValueError, OverflowError, OSError):
        raise MlflowError(f"The time {milliseconds} is none in milliseconds since 1970.") from None
