"""An import restores alerts and commands as records: it notifies nobody and repeats no command."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from contract.helpers.wire_client import WireClient
from dashboard.helpers.round_trip import everything, moved, rewritten, settings_of
from django.utils import timezone
from helpers.live_servers import Server
from pyarrow import parquet

from fp8scope.cli.archive import Archive
from fp8scope.cli.export import download
from fp8scope.cli.import_run import Upload
from fp8scope.importing.posting import TransferError
from fp8scope_dashboard.accounts.models import Membership, Project, User
from fp8scope_dashboard.alerts.detection.run_detection import evaluate
from fp8scope_dashboard.alerts.lifecycle import acknowledge, resolve
from fp8scope_dashboard.alerts.models import Alert, Channel, Delivery, HistoryEntry, Rule
from fp8scope_dashboard.alerts.services import create_default_rules, unread_runs
from fp8scope_dashboard.control import imported_history
from fp8scope_dashboard.control.models import Command, CommandResult
from fp8scope_dashboard.db.encryption import encrypt_json
from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.telemetry import compaction, queries, retention
from fp8scope_dashboard.telemetry.models import Block
from fp8scope_dashboard.wire.errors import InvalidError

LOSS = [*(2.0 - 0.001 * step for step in range(200)), math.nan]


def record(client: WireClient, begin: int = 0, seq: int = 0) -> None:
    client.send(client.batch(seq, list(range(begin, begin + len(LOSS))), scalars={"loss": LOSS}))


@pytest.fixture
def member(server: Server) -> User:
    user = User.objects.create_user("ada", password="a long enough word")
    Membership.objects.create(user=user, project=Project.objects.get())
    return user


@pytest.fixture
def client(server: Server, member: User) -> WireClient:
    """A run with an acknowledged, a resolved and an open alert, and commands with results."""
    project = Project.objects.get()
    create_default_rules(project)
    sealed = encrypt_json({"url": "http://127.0.0.1:9/", "secret": "x"})
    Channel.objects.create(project=project, name="hook", sealed=sealed)
    client = WireClient(server.url, server.token)
    client.register(name="eventful", tags=["kept"])
    client.catalogue(["blocks.0.up.input"])
    record(client)
    evaluate(client.run)
    event = Alert.objects.get(run_id=client.run)
    assert event.kind == "loss_not_finite" and event.onset_step == 200 and event.deliveries.exists()
    assert acknowledge(event, member)
    fields = {"run_id": client.run, "severity": "warning", "message": 'saturates, "badly"'}
    first = Alert.objects.create(
        **fields, kind="saturation_rate", onset_step=50, step=60, value=0.25, threshold=0.01,
        evidence={"tensors": [{"name": "blocks.0.up.input", "values": [0.1, "NaN"]}]},
    )  # fmt: skip
    assert resolve(first)
    Alert.objects.create(
        **fields, kind="loss_spike", onset_step=70, step=71, value=math.inf, threshold=math.nan
    )
    given = {"run_id": client.run, "reason": "an alert"}
    now = timezone.now()
    command = Command.objects.create(
        **given, kind="fallback", arguments={"patterns": ["blocks.*"], "precision": "bf16"}, event=first,
        given_at=now - timedelta(hours=1), expires_at=now - timedelta(minutes=45), delivered_at=now,
    )  # fmt: skip
    CommandResult.objects.create(command=command, writer=client.writer, state="done", message="1", step=61)
    CommandResult.objects.create(command=command, writer=uuid.uuid4(), state="refused", message="no")
    Command.objects.create(**given, kind="pause", given_by=member, expires_at=now - timedelta(minutes=1))
    return client


def alerts(run: uuid.UUID) -> list[Any]:
    """The run's alerts with their history, without what belongs to one server."""
    # No detector of the new run sees the condition.
    local = ("id", "run", "rule", "seen_by", "sent_again_as")
    fields = [field.name for field in Alert._meta.fields if field.name not in local]
    entries = HistoryEntry.objects.filter(event__run_id=run).order_by("event_id", "id")
    history = entries.values_list("event__onset_step", "kind", "at", "user__username", "user_name", "text")
    events = Alert.objects.filter(run_id=run).order_by("id").values_list(*fields)
    return [*map(repr, events), *map(repr, history)]


def commands(run: uuid.UUID) -> list[Any]:
    names = ("kind", "arguments", "reason", "given_by", "given_at", "expires_at", "delivered_at")
    event = ("event__kind", "event__onset_step")
    results = ("writer", "state", "message", "step", "at")
    return [
        (fields, list(CommandResult.objects.filter(command_id=pk).order_by("id").values_list(*results)))
        for pk, *fields in Command.objects.filter(run_id=run).order_by("id").values_list("id", *names, *event)
    ]


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_it_works(server: Server, client: WireClient, tmp_path: Path, form: str) -> None:
    new = moved(server, client.run, form, tmp_path / "run")
    assert len(alerts(new)) == 6 and alerts(new) == alerts(client.run)
    assert len(commands(new)) == 2 and commands(new) == commands(client.run)
    assert everything(new) == everything(client.run)
    # A second import changes nothing.
    assert moved(server, client.run, form, tmp_path / "run") == new
    assert alerts(new) == alerts(client.run) and commands(new) == commands(client.run)
    # An export of the import gives the same records.
    third = moved(server, new, form, tmp_path / "again")
    assert alerts(third) == alerts(new) and commands(third) == commands(new)


def test_an_imported_alert_is_not_delivered(server: Server, client: WireClient, tmp_path: Path) -> None:
    """Imported rows are not evaluated again, so that current rules open no further alert."""
    deliveries = Delivery.objects.count()
    Rule.objects.filter(kind="loss_divergence").update(parameters={"patience": 1, "relative": 0.001})
    new = moved(server, client.run, "parquet", tmp_path / "run")
    evaluate(new)
    assert alerts(new) == alerts(client.run) and Delivery.objects.count() == deliveries
    assert new not in unread_runs()


def test_rows_recorded_after_the_import_are_evaluated(
    server: Server, client: WireClient, tmp_path: Path
) -> None:
    new = moved(server, client.run, "parquet", tmp_path / "run")
    again = WireClient(server.url, server.token, run=new)
    again.catalogue([], attempt=1)
    Alert.objects.filter(run_id=new).update(state="resolved")
    record(again, begin=len(LOSS))
    evaluate(new)
    assert Alert.objects.filter(run_id=new).latest("id").onset_step == len(LOSS) + 200


def test_an_imported_command_is_not_delivered(server: Server, client: WireClient, tmp_path: Path) -> None:
    """Not even one that has not expired."""
    later = timezone.now() + timedelta(minutes=10)
    Command.objects.filter(run_id=client.run).update(expires_at=later, delivered_at=None)
    CommandResult.objects.all().delete()
    new = moved(server, client.run, "parquet", tmp_path / "run")
    copy = WireClient(server.url, server.token, run=new)
    copy.writer = client.writer
    answer = copy.request("POST", "/heartbeat?commands_after=0", json={"writer": str(copy.writer)})
    assert answer.json["commands"] == []
    assert all(command.expires_at <= timezone.now() for command in Command.objects.filter(run_id=new))


def test_people_who_are_not_members_are_left_out(server: Server, client: WireClient, tmp_path: Path) -> None:
    """On another server the name may belong to another person."""
    path = tmp_path / "run"
    download(settings_of(server), client.run, "parquet", path)
    Membership.objects.all().delete()
    new = uuid.UUID((upload := Upload(settings_of(server), Archive(path))).run)
    assert list(upload.send())
    assert not Alert.objects.filter(run_id=new).exclude(acknowledged_by=None).exists()
    assert Alert.objects.get(run_id=new, kind="loss_not_finite").state == "acknowledged"


def observe_tensors(client: WireClient) -> None:
    """Send tensor values for steps after those of `record`."""
    tensors = {"amax": [[1.0 + step] for step in range(300)]}
    client.send(client.batch(1, list(range(1000, 1300)), scalars={"loss": [0.5] * 300}, tensors=tensors))


def grow_old(run: uuid.UUID) -> None:
    """Finish and compact the run, and make its blocks 31 days old."""
    Run.objects.filter(pk=run).update(state="finished")
    while compaction.compact_run(run):
        pass
    Block.objects.filter(run_id=run).update(received_at=timezone.now() - timedelta(days=31))


def test_retention_counts_from_the_import(server: Server, client: WireClient, tmp_path: Path) -> None:
    """The values of an old run are not deleted soon after its import."""
    observe_tensors(client)
    Project.objects.update(raw_days=30)
    Run.objects.update(created_at=timezone.now() - timedelta(days=400))
    new = moved(server, client.run, "parquet", tmp_path / "run")
    Run.objects.filter(pk=new).update(state="finished")
    while compaction.compact_run(new):
        pass
    assert Run.objects.get(pk=new).created_at < timezone.now() - timedelta(days=399)
    assert new not in retention.runs_due() and retention.retain_run(new) == 0
    assert Run.objects.get(pk=new).rows_stored == len(LOSS) + 300
    grow_old(new)
    assert new in retention.runs_due()


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_imports_what_retention_has_left(
    server: Server, client: WireClient, tmp_path: Path, form: str
) -> None:
    """The import has every scalar, but no values of tensors, which retention has deleted."""
    observe_tensors(client)
    Project.objects.update(raw_days=30)
    grow_old(client.run)
    before = queries.scalar(client.run, "loss")
    assert len(before) == len(LOSS) + 300 and retention.retain_run(client.run) > 0
    # The exporting server still has the roll-ups.
    assert queries.tensor_series(client.run, 0, "amax").values.max() == 300.0
    new = moved(server, client.run, form, tmp_path / "run")
    after = queries.scalar(new, "loss")
    assert after.steps.tolist() == before.steps.tolist()
    assert repr(after.values.tolist()) == repr(before.values.tolist())
    assert len(queries.tensor_series(new, 0, "amax")) == 0
    grow_old(new)
    assert new not in retention.runs_due()


def test_evaluates_the_import_of_a_file_of_format_2(
    server: Server, client: WireClient, tmp_path: Path
) -> None:
    """A file of this format has no alerts, so that the rules have to evaluate the run."""
    path = tmp_path / "run.parquet"
    download(settings_of(server), client.run, "parquet", path)

    def earlier(table: Any, description: dict[str, Any]) -> Any:
        description["format"] = 2
        description["documents"] = 0
        chosen = [row["alert"] is None and row["command"] is None for row in table.to_pylist()]
        return table.filter(chosen).drop_columns(["alert", "command"])

    rewritten(path, earlier)
    upload = Upload(settings_of(server), Archive(path))
    assert list(upload.send())[-1] == Archive(path).rows == len(LOSS)
    new = uuid.UUID(upload.run)
    assert alerts(new) == [] and not Writer.objects.get(run_id=new).imported
    evaluate(new)
    assert Alert.objects.get(run_id=new).onset_step == 200


def changed(rows: Iterable[Any], **fields: Any) -> list[str | None]:
    return [None if row is None else json.dumps({**json.loads(row), **fields}) for row in rows]


@pytest.mark.parametrize(
    ("column", "fields", "message"),
    [
        ("alert", {"kind": "weather"}, "kind"),
        ("alert", {"state": "lost"}, "state"),
        ("alert", {"onset_step": -1}, "onset_step"),
        ("alert", {"opened_at": None}, "opened_at"),
        ("alert", {"value": "much"}, "value"),
        ("alert", {"message": "x" * 501}, "message"),
        ("alert", {"evidence": {"a": "\0"}}, "NUL"),
        ("alert", {"evidence": {"a": "x" * imported_history.MAX_DOCUMENT}}, "at most"),
        ("command", {"kind": "reboot"}, "kind"),
        ("command", {"results": [{"writer": "nobody"}]}, "writer"),
        ("command", {"given_at": "yesterday"}, "given_at"),
    ],
)
def test_refuses_an_invalid_record(
    server: Server, client: WireClient, tmp_path: Path, column: str, fields: dict[str, Any], message: str
) -> None:
    path = tmp_path / "run.parquet"
    download(settings_of(server), client.run, "parquet", path)

    def damaged(table: Any, description: dict[str, Any]) -> Any:
        index, kind = table.schema.names.index(column), table.schema.field(column)
        return table.set_column(index, kind, [changed(table.column(column).to_pylist(), **fields)])

    rewritten(path, damaged)
    with pytest.raises(TransferError, match=message):
        list(Upload(settings_of(server), Archive(path)).send())


def test_only_an_import_may_send_past_alerts(server: Server, client: WireClient) -> None:
    (_, alert), *_ = imported_history.alerts_of(client.run)
    body = {"writer": str(client.writer), "seq": 1, "kind": "past_alert", "alert": {**alert, "onset_step": 3}}
    assert client.request("POST", "/reports", json=body).status == 422
    assert Alert.objects.filter(run_id=client.run).count() == 3
    Writer.objects.update(imported=True)
    assert client.request("POST", "/reports", json=body).status == 201
    assert Alert.objects.filter(run_id=client.run).count() == 4


def test_the_number_of_records_is_bounded(client: WireClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imported_history, "MAX_RECORDS", 2)
    (_, alert), *_ = imported_history.alerts_of(client.run)
    (_, command), *_ = imported_history.commands_of(client.run)
    run = Run.objects.get(pk=client.run)
    with pytest.raises(InvalidError, match="2 alerts"):
        imported_history.store_alert(
            run, imported_history.PastAlert.model_validate({**alert, "onset_step": 3})
        )
    with pytest.raises(InvalidError, match="2 commands"):
        imported_history.store_command(run, imported_history.PastCommand.model_validate(command))


def test_an_export_has_a_row_per_alert_and_command(
    server: Server, client: WireClient, tmp_path: Path
) -> None:
    path = tmp_path / "run.parquet"
    download(settings_of(server), client.run, "parquet", path)
    rows = parquet.read_table(path).to_pylist()
    assert len(rows) == Archive(path).rows == len(LOSS) + 3 + 2
    alert = json.loads(rows[len(LOSS)]["alert"])
    assert (alert["kind"], alert["acknowledged_by"], rows[len(LOSS)]["step"]) == (
        "loss_not_finite",
        "ada",
        200,
    )
    assert [row["step"] for row in rows if row["command"]] == [61, 0]
