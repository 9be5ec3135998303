"""The facts that MLflow's clients ask back, and the store of runs does not have."""

import uuid
from typing import ClassVar

from django.db import models
from django.utils import timezone

from fp8scope_dashboard.accounts.models import ApiToken, Project
from fp8scope_dashboard.runs.models import Run


class MlflowExperiment(models.Model):
    """An experiment of MLflow. Its id is that of the row."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="mlflow_experiments")
    name = models.CharField(max_length=500)
    tags = models.JSONField(default=dict, blank=True)
    artifact_location = models.CharField(max_length=1024, blank=True, default="", db_default="")
    deleted_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField(default=timezone.now)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["project", "name"], name="mlflow_experiment_name"),
        ]


class MlflowRun(models.Model):
    """The part of a run that only MLflow has. Its row is locked while a request of the run is stored.

    `params` are the texts that were logged; the run's configuration has their values. `metrics` has for each
    key [value, timestamp in ms, step, name of the scalar] of its latest value: that of the largest step, and
    of these the last. `datasets` are the data sets that it read, as `runs/log-inputs` describes them, and
    `model_inputs` and `model_outputs` the models that it read and made. A run is `deleted` if a client has
    deleted it: it then takes no values, while a run that a person archived goes on.
    """

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="mlflow")
    experiment = models.ForeignKey(MlflowExperiment, on_delete=models.CASCADE, related_name="runs")
    user_id = models.CharField(max_length=256, blank=True, default="")
    status = models.CharField(max_length=16, default="RUNNING")
    start_time = models.BigIntegerField(default=0)
    end_time = models.BigIntegerField(null=True, blank=True)
    params = models.JSONField(default=dict, blank=True)
    tags = models.JSONField(default=dict, blank=True)
    metrics = models.JSONField(default=dict, blank=True)
    datasets = models.JSONField(default=list, db_default=[], blank=True)
    model_inputs = models.JSONField(default=list, db_default=[], blank=True)
    model_outputs = models.JSONField(default=list, db_default=[], blank=True)
    deleted = models.BooleanField(default=False, db_default=False)
    loss_key = models.CharField(max_length=250, blank=True, default="")
    writer = models.UUIDField(default=uuid.uuid4)
    next_seq = models.BigIntegerField(default=0)
    rows_sent = models.BigIntegerField(default=0)
    points_sent = models.BigIntegerField(default=0)


class MlflowModel(models.Model):
    """A model that a client has logged: what it is called, and where its files are. They do not come here.

    `metrics` has the latest value of each key and data set, as MLflow's clients read it.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    experiment = models.ForeignKey(MlflowExperiment, on_delete=models.CASCADE, related_name="models")
    run = models.ForeignKey(
        Run, on_delete=models.CASCADE, null=True, blank=True, related_name="mlflow_models"
    )
    registered_with = models.ForeignKey(
        ApiToken, on_delete=models.SET_NULL, null=True, blank=True, related_name="+"
    )
    source_run = models.CharField(max_length=64, blank=True, default="")
    name = models.CharField(max_length=500)
    model_type = models.CharField(max_length=500, blank=True, default="")
    status = models.CharField(max_length=32, default="LOGGED_MODEL_PENDING")
    params = models.JSONField(default=dict, blank=True)
    tags = models.JSONField(default=dict, blank=True)
    metrics = models.JSONField(default=list, blank=True)
    deleted_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField(default=timezone.now)
    updated_at = models.DateTimeField(auto_now=True)
