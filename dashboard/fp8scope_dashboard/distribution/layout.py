"""The table of each model in a distributed store: in shards by run, on every node, or on the coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from graphlib import TopologicalSorter
from typing import Final

from django.apps import apps
from django.db.models import ForeignKey, Model

from fp8scope_dashboard.runs.models import Run


class Location(StrEnum):
    """The place of a table's rows."""

    # Rows of a run are on one node, in a shard that all these tables share.
    SHARDS = "shards"
    # Each node has all rows. Few are written; statements about a run join them where the run is.
    EVERY_NODE = "every node"
    # Only the coordinator has them: no statement joins them with runs.
    COORDINATOR = "coordinator"


# What grows with steps and messages, or is rewritten by them.
_SHARDS: Final = """
    runs.Run runs.Writer runs.Tensor runs.ConsoleLine receipts.Receipt
    telemetry.Chunk telemetry.Block telemetry.Tile telemetry.RollUp telemetry.Rolling telemetry.Histogram
    evaluations.Evaluation analysis.Comparison diagnosis.Diagnosis alerts.DetectorState
    mlflow_tracking.MlflowRun otlp_metrics.OtlpWriter sql_views.HistoryState sql_views.ScalarHistory
"""
# What people, rules and jobs write, at their rate.
_EVERY_NODE: Final = """
    accounts.User accounts.Project accounts.Membership accounts.ApiToken
    runs.Choice runs.Note runs.StepNote runs.Artefact media.MediaItem media.MediaContent
    analysis.EvaluationComparison analysis.JobProgress
    alerts.Rule alerts.Channel alerts.Rule_channels alerts.Rule_escalation_channels
    alerts.Alert alerts.HistoryEntry alerts.Delivery
    loop.Command loop.CommandResult loop.Listener loop.Report
    mlflow_tracking.MlflowExperiment mlflow_tracking.MlflowModel sql_views.SqlReader
"""
_COORDINATOR: Final = """
    accounts.User_groups accounts.User_user_permissions accounts.SignInLink accounts.Authenticator
    accounts.RecoveryCode accounts.OidcIdentity audit.Entry
    runs.BulkAction runs.SavedView runs.DeletedRun alerts.RuleTrial media.MediaChunk telemetry.ColdFile
    shared_reports.SharedReport shared_reports.ShareLink
    file_imports.ImportJob file_imports.ImportAccess file_imports.ImportChunk
    auth.Permission auth.Group auth.Group_permissions contenttypes.ContentType sessions.Session
"""
_LOCATIONS: Final = {
    label.lower(): location
    for location, labels in (
        (Location.SHARDS, _SHARDS),
        (Location.EVERY_NODE, _EVERY_NODE),
        (Location.COORDINATOR, _COORDINATOR),
    )
    for label in labels.split()
}


def location_of(model: type[Model]) -> Location:
    """Return the location of a model's table.

    Raises:
        LookupError: nobody has decided it.
    """
    try:
        return _LOCATIONS[model._meta.label_lower]
    except KeyError:
        raise LookupError(f"{model._meta.label} is in no list of distribution/layout.py.") from None


def models_in(location: Location) -> list[type[Model]]:
    """The models of a location, each after those that its foreign keys refer to."""
    chosen = {model for model in all_models() if location_of(model) is location}
    graph = {model: {target for _, target in references(model)} & chosen - {model} for model in chosen}
    order = TopologicalSorter(
        {model: sorted(graph[model], key=_table) for model in sorted(chosen, key=_table)}
    )
    return list(order.static_order())


def all_models() -> Iterator[type[Model]]:
    """All models with a table, also those that Django makes for relations of many to many."""
    for model in apps.get_models(include_auto_created=True):
        if model._meta.managed and not model._meta.proxy:
            yield model


def references(model: type[Model]) -> Iterator[tuple[str, type[Model]]]:
    """The foreign keys of a table: the column, and the model that it refers to."""
    for field in model._meta.concrete_fields:
        if isinstance(field, ForeignKey):
            yield field.column, field.related_model


def distribution_column(model: type[Model]) -> str:
    """The column by which a table in shards is distributed: the id of the run."""
    return "id" if model is Run else "run_id"


def _table(model: type[Model]) -> str:
    return model._meta.db_table
