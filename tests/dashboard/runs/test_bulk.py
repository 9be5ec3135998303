"""Tag, archive and delete several runs at once, and undo it."""

from __future__ import annotations

from datetime import timedelta

import pytest
from dashboard.helpers.recording import Recorder, make_run
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.runs import bulk, services
from fp8scope_dashboard.runs.models import BulkAction, DeletedRun, Run
from fp8scope_dashboard.telemetry import deletion, tasks
from fp8scope_dashboard.telemetry.models import Chunk

Kind = BulkAction.Kind
pytestmark = pytest.mark.django_db


@pytest.fixture
def user() -> User:
    return User.objects.create_user("ada")


def tags_of(project: Project) -> dict[str, list[str]]:
    return {run.name: run.tags for run in Run.objects.filter(project=project)}


def test_it_works(project: Project, user: User) -> None:
    make_run(project, "a", tags=["x"])
    make_run(project, "b")
    action = bulk.change(project, Run.objects.all(), Kind.TAG, user, " prod ")
    assert action is not None and len(action.runs) == 2
    assert tags_of(project) == {"a": ["x", "prod"], "b": ["prod"]}
    assert bulk.undo(action, user) == 2
    assert tags_of(project) == {"a": ["x"], "b": []}


def test_undo_leaves_what_the_action_has_not_changed(project: Project, user: User) -> None:
    make_run(project, "had it", tags=["prod"])
    make_run(project, "new")
    action = bulk.change(project, Run.objects.all(), Kind.TAG, user, "prod")
    assert action is not None and len(action.runs) == 1
    bulk.undo(action, user)
    assert tags_of(project) == {"had it": ["prod"], "new": []}
    removed = bulk.change(project, Run.objects.all(), Kind.UNTAG, user, "prod")
    assert removed is not None and tags_of(project)["had it"] == []
    bulk.undo(removed, user)
    assert tags_of(project) == {"had it": ["prod"], "new": []}


def test_nothing_to_change_is_no_action(project: Project, user: User) -> None:
    make_run(project, "a", tags=["x"])
    assert bulk.change(project, Run.objects.all(), Kind.TAG, user, "x") is None
    assert bulk.change(project, Run.objects.all(), Kind.UNARCHIVE, user) is None
    assert not BulkAction.objects.exists()


@pytest.mark.parametrize("tag", ["", "  ", "x" * 65, "a\0b"])
def test_refuses_a_tag_that_cannot_be_stored(project: Project, user: User, tag: str) -> None:
    make_run(project, "a")
    with pytest.raises(bulk.BulkError, match="1 to 64 characters"):
        bulk.change(project, Run.objects.all(), Kind.TAG, user, tag)


def test_a_run_with_the_most_tags_gets_no_more(project: Project, user: User) -> None:
    make_run(project, "full", tags=[f"t{i}" for i in range(bulk.MAX_TAGS)])
    assert bulk.change(project, Run.objects.all(), Kind.TAG, user, "more") is None


def test_refuses_more_runs_than_an_action_stores(
    project: Project, user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "MAX_RUNS", 2)
    for i in range(3):
        make_run(project, f"run {i}")
    with pytest.raises(bulk.BulkError, match="At most 2 runs"):
        bulk.change(project, Run.objects.all(), Kind.DELETE, user)
    assert Run.objects.count() == 3


def test_changes_only_runs_of_the_project(project: Project, user: User) -> None:
    other = Project.objects.create(slug="other", name="Other")
    make_run(project, "own")
    make_run(other, "foreign")
    bulk.change(project, Run.objects.all(), Kind.DELETE, user)
    assert [run.name for run in Run.objects.all()] == ["foreign"]


def test_archives(project: Project, user: User) -> None:
    make_run(project, "a")
    action = bulk.change(project, Run.objects.all(), Kind.ARCHIVE, user)
    assert action is not None and Run.objects.get().archived_at is not None
    bulk.undo(action, user)
    assert Run.objects.get().archived_at is None


def test_a_deletion_can_be_undone_without_a_loss(project: Project, user: User) -> None:
    run = make_run(project, "a")
    Recorder(run=run).rows(range(40), {"loss": [1.0] * 40})
    action = bulk.change(project, Run.objects.all(), Kind.DELETE, user)
    assert action is not None and not Run.objects.exists()
    # The sweep and a job for this run leave the data alone.
    assert deletion.unfinished() == [] and deletion.delete_run(run.pk) == 0
    assert services.is_undoable(run.pk, project)
    assert Chunk.objects.filter(run=run).count() == 2
    assert bulk.undo(action, user) == 1
    assert Run.objects.get().pk == run.pk and not DeletedRun.objects.exists()
    assert not services.is_undoable(run.pk, project)
    registered, is_new = services.register(run.pk, project, {"name": "a"})
    assert registered.pk == run.pk and not is_new


def test_after_the_delay_the_data_is_deleted(project: Project, user: User) -> None:
    run = make_run(project, "a")
    Recorder(run=run).rows(range(40), {"loss": [1.0] * 40})
    action = bulk.change(project, Run.objects.all(), Kind.DELETE, user)
    assert action is not None
    Run.with_deleted.update(erase_at=timezone.now())
    assert [each.pk for each in deletion.unfinished()] == [run.pk]
    tasks.delete_run(str(run.pk))
    assert not Run.with_deleted.exists() and not Chunk.objects.exists()
    assert DeletedRun.objects.get().run_id == run.pk
    assert bulk.undo(action, user) == 0, "there is nothing left to restore"


def test_a_deletion_that_has_begun_cannot_be_undone(
    project: Project, user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(project, "a")
    action = bulk.change(project, Run.objects.all(), Kind.DELETE, user)
    assert action is not None
    Run.with_deleted.update(erase_at=timezone.now())

    def stopped(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(deletion, "_delete_some", stopped)
    with pytest.raises(KeyboardInterrupt):
        deletion.delete_run(run.pk)
    assert bulk.undo(action, user) == 0 and not Run.objects.exists()


def test_undoes_once_and_not_too_late(project: Project, user: User) -> None:
    make_run(project, "a")
    action = bulk.change(project, Run.objects.all(), Kind.ARCHIVE, user)
    assert action is not None and bulk.undoable(project, user) == [action]
    BulkAction.objects.update(done_at=timezone.now() - bulk.UNDO_FOR - timedelta(seconds=1))
    assert bulk.undoable(project, user) == []
    with pytest.raises(bulk.BulkError, match="10 minutes"):
        bulk.undo(action, user)
    BulkAction.objects.update(done_at=timezone.now())
    bulk.undo(action, user)
    with pytest.raises(bulk.BulkError, match="already"):
        bulk.undo(action, user)


def test_administrators_can_undo_every_deletion_and_others_only_their_own_changes(
    project: Project, user: User
) -> None:
    other = User.objects.create_user("eve")
    make_run(project, "a")
    archived = bulk.change(project, Run.objects.all(), Kind.ARCHIVE, user)
    deleted = bulk.change(project, Run.objects.all(), Kind.DELETE, user)
    assert bulk.undoable(project, user) == [deleted, archived]
    assert bulk.undoable(project, other) == []
    assert bulk.undoable(project, other, everybody=True) == [deleted]


def test_only_own_runs_are_deleted_and_restored_if_asked_to(project: Project, user: User) -> None:
    own, foreign, nobodys = (make_run(project, name) for name in ("own", "foreign", "nobody's"))
    Run.objects.filter(pk=own.pk).update(owner=user)
    Run.objects.filter(pk=foreign.pk).update(owner=User.objects.create_user("eve"))
    with pytest.raises(
        bulk.BulkError, match=f"2 of these runs belong to other people.*owner:{user.username}"
    ):
        bulk.change(project, Run.objects.all(), Kind.DELETE, user, only_own=True)
    assert Run.objects.count() == 3 and not BulkAction.objects.exists()
    with pytest.raises(bulk.BulkError, match="1 of these runs belongs"):
        bulk.change(project, Run.objects.filter(pk=nobodys.pk), Kind.DELETE, user, only_own=True)
    done = bulk.change(project, Run.objects.filter(pk=own.pk), Kind.DELETE, user, only_own=True)
    assert done is not None and set(Run.objects.all()) == {foreign, nobodys}
    assert bulk.undo(done, user, only_own=True) == 1
    everything = bulk.change(project, Run.objects.all(), Kind.DELETE, user)
    assert everything is not None
    with pytest.raises(bulk.BulkError, match="2 of these runs"):
        bulk.undo(everything, user, only_own=True)
    everything.refresh_from_db()
    assert everything.undone_at is None and bulk.undo(everything, user) == 3


def test_forgets_old_actions(project: Project, user: User) -> None:
    make_run(project, "a")
    bulk.change(project, Run.objects.all(), Kind.ARCHIVE, user)
    BulkAction.objects.update(done_at=timezone.now() - bulk.KEPT_FOR - timedelta(days=1))
    bulk.change(project, Run.objects.all(), Kind.UNARCHIVE, user)
    assert [action.kind for action in BulkAction.objects.all()] == ["unarchive"]
