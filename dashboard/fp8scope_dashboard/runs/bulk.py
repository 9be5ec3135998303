"""Change several runs at once: tag, archive and delete, and undo it.

Deleting hides the runs at once. Their data is deleted after UNDO_FOR, by `telemetry.deletion`; until then the
deletion can be undone, and agents that still send are asked to wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from django.db import transaction
from django.db.models import F, Func, QuerySet, Value
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import BulkAction, Run

Kind = BulkAction.Kind

UNDO_FOR: Final = timedelta(minutes=10)
MAX_RUNS: Final = 20_000
MAX_TAGS: Final = 100
TAG_LENGTH: Final = 64
# Older actions cannot be undone and are forgotten.
KEPT_FOR: Final = timedelta(days=30)
# Jobs compare the runs again after a deletion; the sweeps find the others.
MAX_ANNOUNCED: Final = 50


class BulkError(ValueError):
    """The change cannot be made; the message says why."""


@transaction.atomic
def change(
    project: Project, runs: QuerySet[Run], kind: Kind, user: User, tag: str = "", *, only_own: bool = False
) -> BulkAction | None:
    """Change the runs that are not in the wanted state already. Returns None if there are none.

    Args:
        only_own: refuse runs that are not the user's.

    Raises:
        BulkError: the tag is invalid, there are more than MAX_RUNS runs, or, with `only_own`, some are of
            other people.
    """
    tag = _checked_tag(tag) if kind in (Kind.TAG, Kind.UNTAG) else ""
    chosen = Run.objects.filter(project=project, pk__in=runs.order_by().values("pk"))
    ids = list(_changing(chosen, kind, tag).order_by("pk").values_list("pk", flat=True)[: MAX_RUNS + 1])
    if len(ids) > MAX_RUNS:
        raise BulkError(f"At most {MAX_RUNS:,} runs can be changed at once: narrow the search.")
    if not ids:
        return None
    if only_own:
        _check_owner(Run.objects.filter(pk__in=ids), user)
    now = timezone.now()
    Run.objects.filter(pk__in=ids).update(**_update(kind, tag))
    BulkAction.objects.filter(project=project, done_at__lt=now - KEPT_FOR).delete()
    action = BulkAction.objects.create(
        project=project, kind=kind, tag=tag, runs=ids, done_by=user, done_at=now
    )
    _announce(project, ids, kind)
    return action


@transaction.atomic
def undo(action: BulkAction, user: User, *, only_own: bool = False) -> int:
    """Undo an action. Returns the number of runs that are as before.

    Args:
        only_own: do not restore deleted runs that are not the user's.

    Raises:
        BulkError: it is undone already, or too old, or, with `only_own`, runs are of other people.
    """
    locked = BulkAction.objects.select_for_update().get(pk=action.pk)
    if locked.undone_at is not None:
        raise BulkError("This was undone already.")
    if locked.done_at < timezone.now() - UNDO_FOR:
        raise BulkError(f"This can be undone for {UNDO_FOR.seconds // 60} minutes only, which are over.")
    opposite = {
        Kind.TAG: Kind.UNTAG,
        Kind.UNTAG: Kind.TAG,
        Kind.ARCHIVE: Kind.UNARCHIVE,
        Kind.UNARCHIVE: Kind.ARCHIVE,
    }
    if locked.kind == Kind.DELETE:
        if only_own:
            _check_owner(Run.with_deleted.filter(pk__in=locked.runs), user)
        hidden = Run.with_deleted.filter(pk__in=locked.runs, erase_at__gt=timezone.now())
        count = hidden.update(deleted_at=None, erase_at=None)
    else:
        kind = opposite[Kind(locked.kind)]
        runs = _changing(Run.objects.filter(pk__in=locked.runs), kind, locked.tag)
        count = runs.update(**_update(kind, locked.tag))
    BulkAction.objects.filter(pk=locked.pk).update(undone_at=timezone.now(), undone_by=user)
    _announce(locked.project, locked.runs, Kind(locked.kind))
    return count


def undoable(project: Project, user: User, *, everybody: bool = False) -> list[BulkAction]:
    """The user's actions that can be undone still, the newest first; with `everybody`, all deletions too."""
    recent = BulkAction.objects.filter(
        project=project, undone_at=None, done_at__gt=timezone.now() - UNDO_FOR
    ).select_related("done_by")
    return [
        action
        for action in recent[:10]
        if action.done_by == user or (everybody and action.kind == Kind.DELETE)
    ]


def _check_owner(runs: QuerySet[Run], user: User) -> None:
    of_others = runs.exclude(owner=user).count()
    if of_others:
        verb = "belongs" if of_others == 1 else "belong"
        raise BulkError(
            f"{of_others:,} of these runs {verb} to other people, whose runs only administrators of the "
            f"project delete and restore. The search owner:{user.username} finds your own."
        )


def _changing(runs: QuerySet[Run], kind: Kind, tag: str) -> QuerySet[Run]:
    """The runs that are not in the wanted state already, and that can be."""
    if kind == Kind.TAG:
        room = runs.annotate(tag_count=Func(F("tags"), function="cardinality")).filter(tag_count__lt=MAX_TAGS)
        return room.exclude(tags__contains=[tag])
    if kind == Kind.UNTAG:
        return runs.filter(tags__contains=[tag])
    if kind == Kind.DELETE:
        return runs
    return runs.filter(archived_at__isnull=kind == Kind.ARCHIVE)


def _update(kind: Kind, tag: str) -> dict[str, Any]:
    now = timezone.now()
    if kind in (Kind.TAG, Kind.UNTAG):
        function = "array_append" if kind == Kind.TAG else "array_remove"
        return {"tags": Func(F("tags"), Value(tag), function=function)}
    if kind == Kind.DELETE:
        return {"deleted_at": now, "erase_at": now + UNDO_FOR}
    return {"archived_at": now if kind == Kind.ARCHIVE else None}


def _checked_tag(tag: str) -> str:
    tag = tag.strip()
    if not tag or len(tag) > TAG_LENGTH or "\0" in tag:
        raise BulkError(f"Write a tag of 1 to {TAG_LENGTH} characters.")
    return tag


def _announce(project: Project, ids: Iterable[UUID], kind: Kind) -> None:
    """Refresh open pages. A deletion also changes what other runs are compared with."""
    most = MAX_ANNOUNCED if kind == Kind.DELETE else 1
    for run_id in list(ids)[:most]:
        run_changed(run_id, project.pk, "state")
