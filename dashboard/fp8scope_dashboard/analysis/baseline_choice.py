"""A person chooses the baseline or the group of runs, in place of the agent's, and can undo it.

The comparisons of the runs are computed at once by the jobs that `run_changed` starts.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

from django.db import transaction
from django.utils import timezone

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.models import Comparison, EvaluationComparison
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Choice, Run

# Runs that one choice may change.
MAX_RUNS = 1_000
# Characters of a group's name.
MAX_GROUP = 128
# Choices that are kept of a run; older ones are deleted.
MAX_CHOICES = 50


class ChoiceError(ValueError):
    """The choice is not possible; the message says why."""


def choose_baseline(run: Run, value: str, *, user: User, suggested: bool = False) -> list[Run]:
    """Compare a run, and the runs that differ from it only in their seed, with another group or run.

    `value` is the name of a group, the id of a run, or empty for none. Returns the changed runs.

    Raises:
        ChoiceError: there is no such group or run in the project, or it is the run's own.
    """
    if (
        value
        and not Run.objects.filter(comparison_runs.arm_named([value]), project_id=run.project_id).exists()
    ):
        raise ChoiceError(f"No group or run of this project is “{value[:128]}”. Select one of the list.")
    if value in (run.group, str(run.id)) and value:
        raise ChoiceError("A run cannot be its own baseline. Select another group or run.")
    return _choose(_arm(run), Choice.Field.BASELINE, value, user, suggested)


def choose_group(runs: Sequence[Run], name: str, *, user: User) -> list[Run]:
    """Make runs without a group the seeds of one group. Returns the changed runs.

    Raises:
        ChoiceError: the name is empty or too long, or a run is in a group already.
    """
    if not 1 <= len(name) <= MAX_GROUP:
        raise ChoiceError("The name of a group has 1 to 128 characters.")
    if grouped := next((run for run in runs if run.group), None):
        raise ChoiceError(f"“{grouped.name}” already is in the group “{grouped.group}”.")
    return _choose(runs, Choice.Field.GROUP, name, user, suggested=True)


def current_choice(run: Run, field: str) -> Choice | None:
    """The choice that counts for a run; None if it has the agent's value."""
    return current_choices(run).get(field)


def current_choices(run: Run) -> dict[str, Choice]:
    """The choices that count for a run, by field; a field without one has the agent's value."""
    choices = Choice.objects.filter(run=run, undone_at=None).select_related("chosen_by")
    return {choice.field: choice for choice in choices.order_by("field", "-id").distinct("field")}


@transaction.atomic
def undo(run: Run, field: str, *, user: User) -> list[Run]:
    """Undo the latest choice of a run, for all runs that it was made for. Returns the changed runs.

    The choice before it counts again, else the agent's value.

    Raises:
        ChoiceError: there is nothing to undo.
    """
    latest = current_choice(run, field)
    if latest is None:
        raise ChoiceError("There is nothing to undo: it is what the training script has set.")
    choices = Choice.objects.filter(act=latest.act, field=field, undone_at=None, run__deleted_at=None)
    runs = _locked(choices.values_list("run_id", flat=True))
    choices.update(undone_by=user, undone_at=timezone.now())
    for member in runs:
        before = current_choice(member, field)
        agents = member.agent_baseline if field == Choice.Field.BASELINE else ""
        _set(member, field, agents if before is None else before.value)
    return runs


@transaction.atomic
def _choose(runs: Sequence[Run], field: str, value: str, user: User, suggested: bool) -> list[Run]:
    act = uuid.uuid4()
    locked = _locked(run.pk for run in runs)
    Choice.objects.bulk_create(
        Choice(act=act, run=run, field=field, value=value, suggested=suggested, chosen_by=user)
        for run in locked
    )
    for run in locked:
        _set(run, field, value)
        newest = Choice.objects.filter(run=run, field=field).order_by("-id").values("pk")[:MAX_CHOICES]
        Choice.objects.filter(run=run, field=field).exclude(pk__in=newest).delete()
    return locked


def _locked(ids: Iterable[uuid.UUID]) -> list[Run]:
    """The runs, locked in the order of their ids, so that two choices at once do not deadlock."""
    return list(Run.objects.select_for_update(no_key=True).filter(pk__in=list(ids)).order_by("pk"))


def _arm(run: Run) -> list[Run]:
    """A run and the others of its group with the same baseline."""
    if not run.group:
        return [run]
    arm = Run.objects.filter(project_id=run.project_id, group=run.group, baseline=run.baseline)
    return [run, *arm.exclude(pk=run.pk).order_by("-created_at", "id")[: MAX_RUNS - 1]]


def _set(run: Run, field: str, value: str) -> None:
    """Set the value that counts. Comparisons with another baseline are deleted."""
    if getattr(run, field) == value:
        return
    Run.objects.filter(pk=run.pk).update(**{field: value})
    setattr(run, field, value)
    if field == Choice.Field.BASELINE:
        Comparison.objects.filter(run=run).delete()
        EvaluationComparison.objects.filter(run=run).delete()
    run_changed(run.id, run.project_id, "state")
