"""Runs become silent, wake up, and end."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.runs import catalogue, services, tasks
from fp8scope_dashboard.runs.configuration import config_digest
from fp8scope_dashboard.runs.models import Choice, Run, RunState, Writer

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(project: Project) -> Run:
    return services.register(uuid.uuid4(), project, {"name": "a run"})[0]


def end(run: Run, writer: Writer, *, failed: bool = False, rows: int = 1) -> None:
    services.finish(run, writer, failed=failed, error="boom" if failed else "", rows_sent=rows, points_sent=2)


def test_it_works(project: Project) -> None:
    run_id = uuid.uuid4()
    run, created = services.register(run_id, project, {"name": "one"})
    again, created_again = services.register(run_id, project, {"name": "two"})
    assert (created, created_again, run, again.name) == (True, False, again, "one")


def test_later_registrations_fill_empty_fields(project: Project) -> None:
    run_id = uuid.uuid4()
    first = {"name": "a", "environment": {"hostname": "one"}, "precision": "unknown"}
    services.register(run_id, project, first)
    later = {
        "name": "b",
        "environment": {"hostname": "two", "git_commit": "abc"},
        "recipe": {"recipe": "DelayedScaling"},
        "precision": "fp8",
    }
    run, created = services.register(run_id, project, later)
    run.refresh_from_db()
    assert not created and run.name == "a" and run.precision == "fp8"
    assert run.environment == {"hostname": "one", "git_commit": "abc"}
    assert run.recipe == {"recipe": "DelayedScaling"}
    # Fields that are set are not replaced.
    services.register(run_id, project, {**later, "recipe": {"recipe": "MXFP8"}, "precision": "bf16"})
    run.refresh_from_db()
    assert run.recipe == {"recipe": "DelayedScaling"} and run.precision == "fp8"


def test_configuration_that_is_logged_later_is_added(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = uuid.uuid4()
    services.register(run_id, project, {"name": "a", "config": {"lr": 1e-3, "layers": 12}})
    services.register(run_id, project, {"name": "a", "config": {"lr": 1e-4, "trainer": {"max_steps": 2}}})
    run = Run.objects.get()
    assert run.config == {"lr": 1e-4, "layers": 12, "trainer": {"max_steps": 2}}
    monkeypatch.setattr(services, "MAX_CONFIG", 100)
    services.register(run_id, project, {"name": "a", "config": {"text": "x" * 100}})
    services.register(run_id, project, {"name": "a"})
    assert Run.objects.get().config == run.config


def test_summary_and_tags_change_while_it_runs(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = uuid.uuid4()
    services.register(run_id, project, {"name": "a", "tags": ["first"]})
    services.register(run_id, project, {"name": "a", "tags": ["other"], "summary": {"best": 1, "at": 5}})
    run = Run.objects.get()
    assert run.summary == {"best": 1, "at": 5} and run.tags == ["first"]
    changed = {"name": "a", "tags": ["second"], "summary": {"best": 2}}
    services.register(run_id, project, changed, replace_tags=True)
    run = Run.objects.get()
    assert run.summary == {"best": 2, "at": 5} and run.tags == ["second"]
    monkeypatch.setattr(services, "MAX_SUMMARY", 100)
    services.register(run_id, project, {"name": "a", "summary": {"text": "x" * 100}})
    assert Run.objects.get().summary == run.summary
    services.register(run_id, project, {"name": "a", "tags": []}, replace_tags=True)
    assert Run.objects.get().tags == []


def test_a_given_precision_is_not_replaced(project: Project) -> None:
    run_id = uuid.uuid4()
    services.register(run_id, project, {"name": "a", "precision": "bf16"})
    services.register(run_id, project, {"name": "a", "precision": "fp8", "recipe": {"recipe": "MXFP8"}})
    assert Run.objects.get().precision == "bf16"


def test_recipe_and_configuration_are_searchable(project: Project) -> None:
    run_id = uuid.uuid4()
    services.register(run_id, project, {"name": "a"})
    run = Run.objects.get()
    assert run.recipe_name == run.config_digest == ""
    services.register(run_id, project, {"name": "a", "recipe": {"recipe": "MXFP8"}, "config": {"lr": 1}})
    run = Run.objects.get()
    assert run.recipe_name == "MXFP8" and run.config_digest == config_digest({"lr": 1})
    other, _ = services.register(uuid.uuid4(), project, {"name": "b", "config": {"lr": 1.0, "seed": 4}})
    assert other.config_digest == run.config_digest


def test_the_parent_stays(project: Project) -> None:
    run_id, parent = uuid.uuid4(), str(uuid.uuid4())
    services.register(run_id, project, {"name": "a"})
    services.register(run_id, project, {"name": "a", "parent": parent, "relation": "reference"})
    services.register(run_id, project, {"name": "a", "parent": "another", "relation": "resumed"})
    services.register(run_id, project, {"name": "a"})
    run = Run.objects.get()
    assert (run.parent, run.relation) == (parent, "reference")


def test_the_latest_process_names_the_baseline(project: Project) -> None:
    run_id, now = uuid.uuid4(), timezone.now()

    def register(baseline: str, minutes: int) -> Run:
        began = now + timedelta(minutes=minutes)
        fields = {"name": "a", "baseline": baseline, "created_at": began}
        services.register(run_id, project, fields)
        return Run.objects.get()

    assert register("", 0).baseline == ""
    assert register("bf16", 1).baseline == "bf16"
    assert register("bf16-b", 3).baseline == "bf16-b"
    # A late message of the earlier process, and a process that names none.
    assert register("bf16", 1).baseline == "bf16-b"
    assert register("", 4).baseline == "bf16-b"


def test_a_chosen_baseline_stays(project: Project) -> None:
    run, _ = services.register(uuid.uuid4(), project, {"name": "a", "baseline": "bf16"})
    Choice.objects.create(run=run, field="baseline", value="chosen")
    Run.objects.update(baseline="chosen")
    services.register(run.id, project, {"name": "a", "baseline": "bf16-b", "created_at": timezone.now()})
    run = Run.objects.get()
    assert (run.baseline, run.agent_baseline) == ("chosen", "bf16-b")


def test_a_run_of_another_project_is_not_registered(run: Run) -> None:
    other = Project.objects.create(slug="other", name="Other")
    with pytest.raises(services.RunConflictError):
        services.register(run.id, other, {"name": "mine"})
    assert Run.objects.get().project.slug == "default"


def test_a_heartbeat_ends_silence(run: Run) -> None:
    assert services.mark_silent() == 0
    Run.objects.update(heartbeat_at=timezone.now() - services.SILENT_AFTER - timedelta(seconds=1))
    assert services.mark_silent() == 1
    assert Run.objects.get().state == RunState.SILENT
    assert services.mark_silent() == 0
    run.refresh_from_db()
    assert services.heartbeat(run, uuid.uuid4(), dropped=0, errors=0) == RunState.RUNNING
    tasks.mark_silent()
    assert Run.objects.get().state == RunState.RUNNING


def test_a_worker_whose_clock_is_wrong_silences_no_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    later = timezone.now() + timedelta(hours=3)
    monkeypatch.setattr("django.utils.timezone.now", lambda: later)
    assert services.mark_silent() == 0
    assert Run.objects.get().state == RunState.RUNNING


@pytest.mark.parametrize("state", [RunState.FINISHED, RunState.FAILED])
def test_an_ended_run_does_not_become_silent(run: Run, state: RunState) -> None:
    Run.objects.update(state=state, heartbeat_at=timezone.now() - timedelta(days=1))
    assert services.mark_silent() == 0
    assert Run.objects.get().state == state


def test_losses_are_summed_over_writers_and_never_shrink(run: Run) -> None:
    first, second = services.writer_of(run, uuid.uuid4()), services.writer_of(run, uuid.uuid4())
    services.count_losses(run, first, dropped=5, errors=1)
    services.count_losses(run, second, dropped=2, errors=0)
    services.count_losses(run, first, dropped=3, errors=7)
    services.count_losses(run, second, dropped=2)
    stored = Run.objects.get()
    assert (stored.rows_dropped, stored.agent_errors) == (7, 7)


def test_the_last_writer_ends_a_run(run: Run) -> None:
    first, second = services.writer_of(run, uuid.uuid4()), services.writer_of(run, uuid.uuid4())
    end(run, first, rows=3)
    assert Run.objects.get().state == RunState.RUNNING
    end(run, second, rows=4)
    stored = Run.objects.get()
    assert (stored.state, stored.rows_sent, stored.points_sent) == (RunState.FINISHED, 7, 4)
    assert stored.finished_at is not None


def test_a_dead_writer_does_not_keep_a_run_open(run: Run) -> None:
    dead, alive = services.writer_of(run, uuid.uuid4()), services.writer_of(run, uuid.uuid4())
    Writer.objects.filter(pk=dead.pk).update(seen_at=timezone.now() - timedelta(minutes=5))
    end(run, alive)
    assert Run.objects.get().state == RunState.FINISHED


def test_one_failure_fails_the_run(run: Run) -> None:
    first, second = services.writer_of(run, uuid.uuid4()), services.writer_of(run, uuid.uuid4())
    end(run, first, failed=True)
    assert Run.objects.get().state == RunState.FAILED
    end(run, second)
    stored = Run.objects.get()
    assert (stored.state, stored.error) == (RunState.FAILED, "boom")


def writer(run: Run, attempt: int = 0, rank: int = 0) -> Writer:
    """A writer that has sent an empty catalogue."""
    name = uuid.uuid4()
    catalogue.extend(run, name, 0, [], rank=rank, hostname="node", attempt=attempt)
    return services.writer_of(run, name)


def test_a_later_attempt_reopens_an_ended_run(run: Run) -> None:
    assert services.last_attempt(run) is None
    end(run, writer(run), failed=True)
    assert Run.objects.get().state == RunState.FAILED
    later = [writer(run, 1, rank) for rank in range(2)]
    stored = Run.objects.get()
    assert (stored.state, stored.error, stored.finished_at) == (RunState.RUNNING, "", None)
    assert services.last_attempt(run) == 1
    for rank in later:
        end(run, rank)
    assert Run.objects.get().state == RunState.FINISHED
    # A rank that arrives late does not reopen the ended attempt.
    writer(run, 1, 2)
    assert Run.objects.get().state == RunState.FINISHED


def test_a_late_message_of_an_earlier_attempt_changes_only_its_writer(run: Run) -> None:
    dead, alive = writer(run), writer(run, 1)
    end(run, dead, failed=True)
    assert Run.objects.get().state == RunState.RUNNING
    end(run, alive)
    stored = Run.objects.get()
    assert (stored.state, stored.rows_sent) == (RunState.FINISHED, 2)
    dead.refresh_from_db()
    assert dead.failed and dead.error == "boom" and dead.finished_at is not None


@pytest.mark.parametrize(
    ("after_start", "expected"), [(3, 3), (-60, 0), (10**6, 300)], ids=["late data", "wrong clock", "future"]
)
@pytest.mark.parametrize("failed", [False, True])
def test_a_run_lasts_until_its_training_ended(
    run: Run, after_start: int, expected: int, failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ending = run.created_at, writer(run)
    monkeypatch.setattr(timezone, "now", lambda: began + timedelta(minutes=5))
    given = began + timedelta(seconds=after_start)
    services.finish(run, ending, failed=failed, error="x", rows_sent=1, points_sent=1, finished_at=given)
    stored = Run.objects.get()
    assert stored.finished_at == began + timedelta(seconds=expected)
    ending.refresh_from_db()
    assert (ending.finished_at, ending.seen_at) == (stored.finished_at, began + timedelta(minutes=5))


def test_keeps_the_error_of_the_first_failure(run: Run) -> None:
    first, second = writer(run), writer(run, rank=1)
    services.finish(run, first, failed=True, error="no memory", rows_sent=0, points_sent=0)
    services.finish(run, second, failed=True, error="terminated", rows_sent=0, points_sent=0)
    assert Run.objects.get().error == "no memory"


def test_a_child_that_ends_does_not_end_the_run(run: Run) -> None:
    services.finish(run, writer(run), failed=True, error="x", rows_sent=1, points_sent=1, ends_run=False)
    stored = Run.objects.get()
    assert (stored.state, stored.rows_sent) == (RunState.RUNNING, 1)


def test_a_finished_run_does_not_fall_silent_for_a_rank_that_was_killed(run: Run) -> None:
    first, killed = writer(run), writer(run, rank=1)
    end(run, first)
    assert Run.objects.get().state == RunState.RUNNING
    long_ago = timezone.now() - services.SILENT_AFTER - timedelta(seconds=1)
    Run.objects.update(heartbeat_at=long_ago)
    assert services.mark_silent() == 1 and Run.objects.get().state == RunState.FINISHED
    # The spool of the killed rank is sent later.
    end(run, killed, failed=True)
    assert Run.objects.get().state == RunState.FAILED


def test_writers_are_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "MAX_WRITERS", 2)
    known = [services.writer_of(run, uuid.uuid4()) for _ in range(2)]
    with pytest.raises(services.TooManyWritersError):
        services.writer_of(run, uuid.uuid4())
    assert services.writer_of(run, known[0].uuid) == known[0]


def test_collects_versions_that_differ_between_processes(project: Project) -> None:
    run_id = uuid.uuid4()
    for torch in ("2.8", "2.8", "2.9", "2.8"):
        environment = {"torch": torch, "hostname": torch, "cuda": "12.6"}
        services.register(run_id, project, {"name": "a", "environment": environment})
    stored = Run.objects.get(pk=run_id).environment
    assert stored["torch"] == "2.8" and stored["mixed_versions"] == {"torch": ["2.8", "2.9"]}


def test_what_a_later_attempt_knows_at_its_end_replaces_what_was_known(project: Project) -> None:
    run_id = uuid.uuid4()
    for environment in ({"advice": {"steps": 1}, "torch": "2.9"}, {"advice": {"steps": 2}}, {"torch": "2.9"}):
        services.register(run_id, project, {"name": "a", "environment": environment})
    assert Run.objects.get(pk=run_id).environment == {"advice": {"steps": 2}, "torch": "2.9"}


def test_a_default_baseline_is_for_fp8_runs_that_name_none(project: Project) -> None:
    project.default_baseline = "bf16"
    project.save()

    def baseline(**fields: Any) -> str:
        return services.register(uuid.uuid4(), project, {"name": "r", **fields})[0].baseline

    assert baseline(precision="fp8") == "bf16"
    assert baseline(precision="fp8", baseline="other") == "other"
    assert baseline(precision="fp8", group="bf16") == ""
    assert baseline(precision="bf16") == ""
    # The precision of an attached run is known once its model is watched.
    run, _ = services.register(uuid.uuid4(), project, {"name": "r", "precision": "unknown"})
    assert run.baseline == ""
    run, _ = services.register(run.id, project, {"precision": "fp8", "recipe": {"recipe": "CurrentScaling"}})
    run.refresh_from_db()
    assert run.baseline == "bf16"


def test_a_precision_that_the_first_step_tells_is_stored_once(project: Project) -> None:
    run, _ = services.register(uuid.uuid4(), project, {"name": "r", "precision": "unknown"})
    for sent, stored in (("unknown", "unknown"), ("bf16", "bf16"), ("fp32", "bf16"), ("unknown", "bf16")):
        services.register(run.id, project, {"name": "r", "precision": sent})
        run.refresh_from_db()
        assert run.precision == stored
