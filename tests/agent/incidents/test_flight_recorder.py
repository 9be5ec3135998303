"""The flight recorder in a run: what leaves an incident, what does not, and its bounds."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent.helpers.commanding import alert_arrives, begin, steps_until
from agent.helpers.wire_server import WireServer
from torch import nn

import fp8scope
from fp8scope.config import ConfigurationError, Settings
from fp8scope.incidents import batches as batches_of
from fp8scope.incidents import flight_recorder
from fp8scope.incidents.folder import IncidentError, StoredIncident, target_of
from fp8scope.recording.records import Row
from fp8scope.run import Run


def alert(number: int, step: int, severity: str = "critical") -> dict[str, Any]:
    return {
        "id": number,
        "kind": "loss_not_finite",
        "severity": severity,
        "step": step,
        "onset_step": step,
        "message": "The loss is NaN.",
    }


def incidents(settings: Settings) -> list[Path]:
    return sorted(settings.directory.glob("*/incident-step-*"))


def kept(server: WireServer) -> list[dict[str, Any]]:
    reports = [each for run in server.runs.values() for each in run.reports_of("annotation")]
    return [report["incident"] for report in reports if report["name"] == "incident"]


def trained(run: Run, steps: int) -> Iterator[int]:
    """Train a watched layer with a snapshot every 10 steps; yields the number of each step after its end."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    run.watch(model, optimizer)
    run.allow_snapshots(model, optimizer, every=10)
    for number, batch in enumerate(run.batches(torch.randn(steps, 4, 8)), start=1):
        with run.step() as step:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
        yield number


def test_a_critical_alert_keeps_the_steps(server: WireServer, settings: Settings) -> None:
    run = begin(settings)
    for _ in range(20):
        with run.step() as step:
            step.log(loss=2.0, grad_norm=0.5)
    alert_arrives(run, server, alert(1, 17))
    steps_until(run, lambda: kept(server))
    (folder,) = incidents(settings)
    incident = StoredIncident(folder)
    assert incident.target == 17 and incident.document["alert"]["message"] == "The loss is NaN."
    assert [row.step for row in incident.rows[:20]] == list(range(1, 21))
    assert incident.row(17).scalars["grad_norm"] == 0.5  # type: ignore[union-attr]
    assert incident.random(20) is not None
    (document,) = kept(server)
    assert document["folder"] == str(folder) and document["target"] == 17 and document["reason"] == "alert"
    # The training goes on, and the end of a healthy run keeps nothing more.
    assert run.finish().complete
    assert incidents(settings) == [folder]


@pytest.mark.parametrize(("onset", "target"), [(30, 45), (47, 50), (60, 60), (61, 60)])
def test_the_target_is_the_recorded_step_nearest_to_the_onset(onset: int, target: int) -> None:
    rows = [
        Row(step=step, time_us=0, dropped=0, scalars={"loss": 2.0}, statistics=np.zeros((0, 1)))
        for step in range(45, 65, 5)
    ]
    assert target_of(rows, onset) == target


def test_an_alert_that_began_before_the_recorded_steps_keeps_them(
    server: WireServer, settings: Settings
) -> None:
    """A rise that is noticed now may have begun long before."""
    run = begin(settings)
    for _ in range(20):
        with run.step() as step:
            step.log(loss=2.0)
    alert_arrives(run, server, {**alert(1, 17), "onset_step": 0})
    steps_until(run, lambda: kept(server))
    (folder,) = incidents(settings)
    assert StoredIncident(folder).target == 1
    run.finish()


@pytest.mark.parametrize(
    "sent", [alert(1, 5, "warning"), alert(1, 900), {**alert(1, 5), "step": None, "onset_step": None}]
)
def test_other_alerts_keep_nothing(server: WireServer, settings: Settings, sent: dict[str, Any]) -> None:
    run = begin(settings)
    seen: list[fp8scope.Alert] = []
    run.on_alert(seen.append)
    server.alerts.append(sent)
    steps_until(run, lambda: seen)
    run.finish()
    assert incidents(settings) == []


def test_alerts_about_the_same_steps_are_one_incident(server: WireServer, settings: Settings) -> None:
    run = begin(settings)
    for _ in range(10):
        with run.step() as step:
            step.log(loss=2.0)
    alert_arrives(run, server, alert(1, 5))
    alert_arrives(run, server, alert(2, 6))
    steps_until(run, lambda: kept(server))
    server.alerts.append(alert(3, 7))
    seen: list[fp8scope.Alert] = []
    run.on_alert(seen.append)
    steps_until(run, lambda: 3 in [each.id for each in seen])
    run.finish()
    assert len(incidents(settings)) == 1


def test_a_failure_keeps_the_steps(server: WireServer, settings: Settings) -> None:
    with pytest.raises(ZeroDivisionError), begin(settings) as run:
        for number in range(1, 8):
            with run.step() as step:
                step.log(loss=float("nan") if number == 5 else 1.0)
        print(1 / 0)
    (folder,) = incidents(settings)
    incident = StoredIncident(folder)
    assert incident.target == 5 and "ZeroDivisionError" in incident.document["failure"]
    # The report precedes the end of the run.
    assert kept(server)[0]["reason"] == "failure" and server.run.finish["state"] == "failed"


def test_ctrl_c_keeps_nothing(server: WireServer, settings: Settings) -> None:
    with pytest.raises(KeyboardInterrupt), begin(settings) as run:
        with run.step() as step:
            step.log(loss=1.0)
        raise KeyboardInterrupt
    assert incidents(settings) == [] and run.finished


def test_it_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_FLIGHT_STEPS", "0")
    with pytest.raises(ValueError, match="enough"), fp8scope.init(mode="offline") as run:
        assert run.session.steps.flight is None
        for _ in run.batches(range(3)):
            with run.step() as step:
                step.log(loss=1.0)
        raise ValueError("enough")
    assert list(tmp_path.rglob("incident*")) == []


def test_incidents_are_bounded(
    server: WireServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "MAX_INCIDENTS", 2)
    run = begin(settings)
    seen: list[fp8scope.Alert] = []
    run.on_alert(seen.append)
    for number in range(1, 5):
        for _ in range(3):
            with run.step() as step:
                step.log(loss=1.0)
        alert_arrives(run, server, alert(number, run.session.step))
        steps_until(run, lambda number=number: number in [each.id for each in seen])  # type: ignore[misc]
        steps_until(run, lambda: len(kept(server)) >= min(len(seen), 2))
    run.finish()
    assert len(incidents(settings)) == 2


def test_snapshots_and_batches_are_bounded(settings: Settings) -> None:
    run = begin(settings)
    for _ in trained(run, 95):
        pass
    assert [after for after, _, _ in run.flight.snapshots] == [80, 90]
    assert run.flight.log is not None
    groups = run.flight.log.groups
    assert [group.after_step for group in groups if group.stored] == list(range(80, 95))
    # The last group is of the end of the data.
    assert [len(group.hashes) for group in groups] == [1] * 95 + [0]
    run.finish()
    assert run.flight.trained is None and not run.flight.snapshots


@pytest.mark.parametrize(("groups", "snapshots"), [(256, [20, 80, 90]), (40, [80, 90])])
def test_a_warning_keeps_the_snapshot_before_its_onset(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, groups: int, snapshots: list[int]
) -> None:
    """The two latest were taken after what went wrong; without its batches the early one is of no use."""
    monkeypatch.setattr(batches_of, "MAX_GROUPS", groups)
    run = begin(settings)
    for number in trained(run, 95):
        if number == 35:
            run.flight.take_alert(
                fp8scope.Alert(
                    id=1, kind="loss_spike", severity="warning", message="", step=34, onset_step=25
                )
            )
        if number == 92:
            run.flight.take_alert(
                fp8scope.Alert(
                    id=2, kind="loss_not_finite", severity="critical", message="", step=91, onset_step=91
                )
            )
    run.finish()
    (folder,) = incidents(settings)
    incident = StoredIncident(folder)
    assert incident.snapshots == snapshots
    kept_batches = [group["after_step"] for group in incident.document["groups"] if group["after_step"] >= 20]
    assert kept_batches[0] == max(20, 93 - groups)
    assert run.flight.trained is None and not run.flight.snapshots


@pytest.mark.parametrize(("is_replay", "kept"), [(True, [1, 2]), (False, [1])])
def test_a_replay_keeps_the_random_state_of_short_steps(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, is_replay: bool, kept: list[int]
) -> None:
    """It tells by them whether the script must be seeded; a run without batches is spared the copy."""

    class Driver:
        def step_ended(self, flight: object, number: int) -> None:
            pass

    run = begin(settings)
    monkeypatch.setattr(batches_of, "driver", Driver() if is_replay else None)
    run.flight.step_ends(1)
    run.flight.step_ends(2, is_light=True)
    assert [number for number in (1, 2) if run.flight.random_at(number) is not None] == kept
    monkeypatch.setattr(batches_of, "driver", None)
    run.finish()


def test_no_snapshots_beyond_their_limit(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters())
    run = begin(settings)
    run.allow_snapshots(model, optimizer, every=1, max_bytes=100_000)
    for _ in run.batches(range(3)):
        with run.step() as step:
            step.log(loss=1.0)
    assert not run.flight.snapshots
    assert caplog.text.count("no snapshots are taken") == 1
    run.finish()


def test_batches_beyond_their_memory_are_not_kept() -> None:
    log = batches_of.BatchLog(max_bytes=1000)
    log.keeps = True
    for step in range(4):
        log.begin_group(step)
        log.add(torch.zeros(100))
    assert [group.stored is not None for group in log.groups] == [True, True, True, False]
    assert log.overflowed and log.groups[3].hashes == [fp8scope.data_hash(torch.zeros(100))]
    log.forget_before(3)
    log.begin_group(4)
    log.add(torch.zeros(100))
    assert [group.ordinal for group in log.groups if group.stored] == [3, 5]


def test_wrong_arguments(settings: Settings) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with begin(settings) as run:
        with pytest.raises(ConfigurationError, match="every must be"):
            run.allow_snapshots(model, optimizer, every=-1)
        with pytest.raises(ConfigurationError, match="int has no state_dict"):
            run.allow_snapshots(model, optimizer, also=[3])


def test_a_disabled_run_passes_the_batches_through() -> None:
    run = fp8scope.init(mode="disabled")
    assert list(run.batches([1, 2])) == [1, 2] and len(run.batches([1, 2])) == 2


def test_a_damaged_folder_is_an_error(settings: Settings) -> None:
    with pytest.raises(RuntimeError), begin(settings) as run:
        for _ in range(2):
            with run.step() as step:
                step.log(loss=1.0)
        raise RuntimeError
    (folder,) = incidents(settings)
    rows = folder / "rows"
    rows.write_bytes(rows.read_bytes()[:-3])
    with pytest.raises(IncidentError, match="is damaged"):
        _ = StoredIncident(folder).rows
    document = json.loads((folder / "incident.json").read_text())
    (folder / "incident.json").write_text(json.dumps({**document, "version": 99}))
    with pytest.raises(IncidentError, match="another version"):
        StoredIncident(folder)


def test_what_would_run_code_is_not_loaded(settings: Settings) -> None:
    with pytest.raises(RuntimeError), begin(settings) as run:
        with run.step() as step:
            step.log(loss=1.0)
        raise RuntimeError
    (folder,) = incidents(settings)
    torch.save([[Touch(folder / "touched"), {}]], folder / "batches-0.pt")
    with pytest.raises(IncidentError, match="--trust"):
        StoredIncident(folder).batches(0)
    assert not (folder / "touched").exists()


class Touch:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)
