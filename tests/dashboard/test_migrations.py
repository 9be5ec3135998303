"""Data of the previous version survives the migration to the current one."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyotp
import pytest
from dashboard.helpers.logged_media import log
from dashboard.helpers.old_migrations import OldMigrations, migrate, migrate_to
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seeding import seed_project
from django.apps import apps
from django.core.management import call_command
from django.db import connection, transaction
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.recorder import MigrationRecorder
from django.utils import timezone

from fp8scope_dashboard.accounts.models import ApiToken, OidcIdentity, Role, User
from fp8scope_dashboard.accounts.second_factor import codes
from fp8scope_dashboard.accounts.services import create_project, create_sign_in_link
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.alerts.models import Alert, Channel, Delivery, DetectorState, Rule, RuleTrial
from fp8scope_dashboard.analysis.models import Comparison, JobProgress
from fp8scope_dashboard.audit.log import Actor, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.control.models import Command, CommandResult, Listener, Report
from fp8scope_dashboard.db.encryption import encrypt_json
from fp8scope_dashboard.diagnosis.models import Diagnosis
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.file_imports.models import ImportAccess, ImportChunk, ImportJob
from fp8scope_dashboard.mlflow_tracking.models import MlflowExperiment, MlflowModel, MlflowRun
from fp8scope_dashboard.otlp_metrics.models import OtlpWriter
from fp8scope_dashboard.receipts.models import Receipt
from fp8scope_dashboard.runs.models import (
    Artefact,
    BulkAction,
    Choice,
    ConsoleLine,
    DeletedRun,
    Note,
    Run,
    SavedView,
    StepNote,
    Writer,
)
from fp8scope_dashboard.shared_reports.models import SharedReport, ShareLink
from fp8scope_dashboard.sql_views import history
from fp8scope_dashboard.sql_views.models import SqlReader
from fp8scope_dashboard.telemetry import compaction, histograms, queries
from fp8scope_dashboard.telemetry.models import ColdFile

pytestmark = pytest.mark.django_db(transaction=True)

# The version before receipts and evaluations had apps of their own.
PREVIOUS = (("ingest", "0001_initial"), ("analysis", "0001_initial"))


@pytest.fixture(autouse=True)
def restored_schema() -> Iterator[None]:
    yield
    migrate()


Rows = list[dict[str, Any]]


def rows_by_table() -> dict[str, Rows]:
    """Every row of every table of the dashboard's models that exists, read with SQL."""
    models = [model for model in apps.get_models() if model.__module__.startswith("fp8scope_dashboard.")]
    rows = {}
    with connection.cursor() as cursor:
        existing = set(connection.introspection.table_names(cursor))
        for table in sorted({model._meta.db_table for model in models} & existing):
            cursor.execute(f'SELECT to_jsonb(stored)::text FROM "{table}" AS stored')
            rows[table] = [json.loads(row) for (row,) in cursor.fetchall()]
    return rows


def without_new_columns(rows: Mapping[str, Rows], previous: Mapping[str, Rows]) -> dict[str, Rows]:
    """The rows in the tables and columns of the previous version, in an order of their own."""
    return {
        table: sorted(
            ({column: row[column] for column in previous[table][0]} for row in rows[table]),
            key=lambda row: json.dumps(row, sort_keys=True),
        )
        for table in previous
    }


def fill_every_table() -> Run:
    """Store rows in every table. Returns a compacted run."""
    user = User.objects.create_user("ada")
    project = create_project("research", "Research", owner=user)
    assert Role(project.memberships.get().role) == Role.ADMIN
    create_token(project, "training")
    create_sign_in_link(user, "http://localhost")
    authenticator = codes.begin(user)
    assert codes.confirm(authenticator, pyotp.TOTP(codes.secret_of(authenticator)).now()) is not None
    OidcIdentity.objects.create(user=user, issuer="https://id.example", subject="1")
    run = seed_project(project, steps=1100).faulty
    Run.objects.filter(pk=run.pk).update(state="failed")
    while compaction.compact_run(run.pk):
        pass
    unfinished = Recorder(run=make_run(project, "still running"), tensors=("a.input",))
    unfinished.rows(range(40), {"loss": np.arange(40.0)}, {"amax": np.ones((40, 1))})
    histograms.append(unfinished.run.pk, unfinished.uuid, 100, 3, [0], b"as it was sent")
    Choice.objects.create(run=run, field="baseline", value="bf16", chosen_by=user)
    DeletedRun.objects.create(run_id=uuid.uuid4(), project=project)
    Note.objects.create(run=run, text="Frozen.", version=1, edited_by=user)
    StepNote.objects.create(run=run, step=300, text="Warmer.", written_by=user)
    Artefact.objects.create(run=run, name="log", address="s3://bucket/log", added_by=user)
    BulkAction.objects.create(project=project, kind="archive", runs=[run.pk], done_by=user)
    SavedView.objects.create(project=project, owner=user, name="mine", query="q=x")
    event = Alert.objects.filter(run=run).first() or Alert.objects.create(
        run=run, kind="loss_not_finite", severity="critical", step=1, onset_step=1
    )
    channel = Channel.objects.create(
        project=project, name="chat", sealed=encrypt_json({"url": "https://chat.example"})
    )
    Delivery.objects.get_or_create(event=event, channel=channel)
    DetectorState.objects.get_or_create(run=run, writer=uuid.UUID(int=0))
    command = Command.objects.create(run=run, kind="pause", given_by=user, expires_at=timezone.now())
    CommandResult.objects.create(command=command, writer=unfinished.uuid, state="done")
    Listener.objects.create(run=run, writer=unfinished.uuid, accepts=["pause"])
    Report.objects.create(run=run, writer=unfinished.uuid, seq=0, kind="bisect", step=1)
    JobProgress.objects.create(
        run=run, kind="comparison", job=uuid.uuid4(), stage="Reading", share=0.5,
        started_at=timezone.now(), updated_at=timezone.now(),
    )  # fmt: skip
    RuleTrial.objects.create(project=project, document={}, runs=[str(run.id)])
    report = SharedReport.objects.create(project=project, title="FP8 holds", content={}, created_by=user)
    ShareLink.objects.create(report=report, digest=bytes(32), created_by=user)
    Diagnosis.objects.create(run=run, outcome="clear", sentence="No cause found.", result={}, inputs="")
    record(Actor(user), project, Action.RULES, "none", rules=[])
    writer = Writer.objects.filter(run=run)[0]
    ConsoleLine.objects.create(run=run, writer=writer, number=1, time=run.created_at, text="x")
    experiment = MlflowExperiment.objects.create(project=run.project, name="ablation")
    MlflowRun.objects.create(run=run, experiment=experiment)
    MlflowModel.objects.create(run=run, experiment=experiment, name="model")
    OtlpWriter.objects.create(run=run)
    SqlReader.objects.create(role="no_login_of_postgresql", project=project)
    ColdFile.objects.create(
        run_id=run.pk, digest=bytes(32), bytes=1, bodies=1, state="unneeded", changed_at=timezone.now()
    )
    log(unfinished, "sample", b"Once upon a time")
    assert history.copy_run(run.pk)
    imported = ImportJob.objects.create(project=project, created_by=user, title="a.csv", bytes=1)
    ImportChunk.objects.create(job=imported, name="a.csv", number=0, body=b"x")
    ImportAccess.objects.create(project=project, token=create_token(project, "imports of files")[0])
    return run


def test_it_works() -> None:
    run = fill_every_table()
    losses = queries.scalar(run.pk, "loss")
    before = rows_by_table()
    assert [table for table, rows in before.items() if not rows] == []

    state = migrate_to(*PREVIOUS)
    previous = rows_by_table()
    new_tables = {"analysis_jobprogress", "diagnosis_diagnosis", "runs_consoleline", "runs_stepnote"}
    new_tables.add("telemetry_coldfile")
    assert before.keys() - previous.keys() <= new_tables and previous.keys() <= before.keys()
    kept = without_new_columns(before, previous)
    assert without_new_columns(previous, previous) == kept
    receipts = state.apps.get_model("ingest", "Receipt")
    evaluations = state.apps.get_model("analysis", "Evaluation")
    assert receipts.objects.count() == len(before["ingest_receipt"])
    assert evaluations.objects.count() == len(before["analysis_evaluation"])

    migrate()
    after = rows_by_table()
    assert after.keys() == before.keys() and without_new_columns(after, previous) == kept
    assert Receipt.objects.count() == len(before["ingest_receipt"])
    assert Evaluation.objects.filter(run=run).exists()
    assert Comparison.objects.filter(run=run).exists()
    np.testing.assert_array_equal(queries.scalar(run.pk, "loss").values, losses.values)


def test_the_previous_version_can_still_write() -> None:
    # A server of the previous version may serve requests while the migration runs.
    run = make_run(create_project("research", "Research"))
    receipts = migrate_to(*PREVIOUS).apps.get_model("ingest", "Receipt")
    receipts.objects.create(run_id=run.pk, writer=uuid.uuid4(), seq=1, kind="batch", digest=bytes(32))
    migrate()
    assert Receipt.objects.get(run=run).seq == 1


def test_an_upgrade_goes_on_from_wherever_it_stopped() -> None:
    """Django applies the rest of the old migrations of an app, or the one that replaces all of them."""
    old = OldMigrations(None)
    order = old.graph._generate_plan(old.graph.leaf_nodes(), at_end=True)
    recorder = MigrationRecorder(connection)
    with transaction.atomic():
        recorder.migration_qs.all().delete()
        for number, key in enumerate(order):
            executor = MigrationExecutor(connection)
            executor.loader.check_consistent_history(connection)
            plan = [migration for migration, _ in executor.migration_plan(executor.loader.graph.leaf_nodes())]
            rest = [replaced for m in plan for replaced in m.replaces or [(m.app_label, m.name)]]
            assert sorted(set(rest)) == sorted(order[number:])
            recorder.record_applied(*key)
        transaction.set_rollback(True)


def test_models_and_migrations_agree() -> None:
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)


def test_limits_of_rises_stay_as_strict() -> None:
    project = create_project("research", "Research")
    rules = migrate_to(("alerts", "0010_reason_worse")).apps.get_model("alerts", "Rule")
    rises = rules.objects.filter(project_id=project.pk, kind="saturation_rise")
    rises.update(parameters={"z": 8.0, "points": 3})
    rules.objects.filter(project_id=project.pk, kind="underflow_rise").update(parameters={"z": 90.0})
    migrate()
    stored = dict(Rule.objects.filter(project=project).values_list("kind", "parameters"))
    assert stored["saturation_rise"] == {"z": 11.0, "points": 3} and stored["underflow_rise"] == {"z": 100.0}


def test_tokens_of_version_0_1_go_on_to_write_and_read() -> None:
    migrate_to(("accounts", "0005_time_zone_and_default_baseline"))
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO accounts_project (slug, name, margin, alpha, created_at) VALUES "
            "('p', 'P', 0.1, 0.1, now()) RETURNING id"
        )
        cursor.execute(
            "INSERT INTO accounts_apitoken (project_id, name, prefix, digest, created_at) "
            "VALUES (%s, 't', 'fp8s_x', 'x'::bytea, now())",
            [cursor.fetchone()[0]],
        )
    migrate()
    assert ApiToken.objects.get().scopes == ["write", "read"]
