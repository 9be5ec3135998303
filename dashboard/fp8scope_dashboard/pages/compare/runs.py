"""The runs that the compare page shows: those in the address, those that a search finds, or a suggestion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from django.db.models import Q, QuerySet
from django.http import QueryDict

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.pages.address_values import uuids_in
from fp8scope_dashboard.pages.request_reads import reads_of
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.runs.search import read, search, vocabulary_of

# The most runs of one comparison. Each is read and drawn, and the address lists them.
MAX_CHOSEN: Final = 200
# Without a choice, so few that each line can be told apart.
MAX_SUGGESTED: Final = 12
# Beyond this many runs, lines are thin and not smoothed, and each has fewer points.
FEW_RUNS: Final = 12
# Runs that can be chosen for the map of tensors.
MAX_PAIRS: Final = 60
# Of a run, these are read where they are shown.
LARGE_COLUMNS: Final = ("config", "environment", "summary", "error")


@dataclass(frozen=True)
class ComparedRuns:
    """The compared runs, oldest first.

    Attributes:
        runs: at most MAX_CHOSEN.
        total: how many were asked for; more than `runs` beyond that bound.
        search: the search that finds them; empty if they are listed one by one.
        problems: what of the search was not understood.
        is_suggestion: nobody chose them.
    """

    runs: list[Run]
    total: int
    search: str = ""
    problems: tuple[str, ...] = ()
    is_suggestion: bool = False

    @property
    def query(self) -> QueryDict:
        """The address of this choice."""
        query = QueryDict(mutable=True)
        if self.search:
            query["q"] = self.search
        else:
            query.setlist("runs", [str(run.id) for run in self.runs])
        return query


def chosen_runs(project: Project, query: QueryDict, *, compared: bool = True) -> ComparedRuns:
    """The runs in the address, with their comparisons if `compared`; ids of other projects are ignored.

    A request reads them once.
    """
    every = _all(project) if compared else Run.objects.filter(project=project)
    if "q" in query:
        asked = read(query.get("q", ""), vocabulary_of(project))
        matching = search(every, asked)
        newest = _newest(project, matching, MAX_CHOSEN)
        return ComparedRuns(newest, matching.count(), asked.text, asked.problems)
    ids = uuids_in(query.getlist("runs"), 2 * MAX_CHOSEN)
    compared_runs: dict[UUID, Run] = reads_of(project, "compared runs")
    if 0 < len(ids) <= MAX_CHOSEN and compared_runs.keys() >= set(ids):
        runs = sorted({compared_runs[run_id] for run_id in ids}, key=lambda run: (run.created_at, run.id))
        return ComparedRuns(runs, len(runs))
    listed = every.filter(pk__in=ids)
    runs = list(listed.defer(*LARGE_COLUMNS).order_by("created_at", "id")[:MAX_CHOSEN])
    _note_read(project, runs, compared=compared)
    # Only a choice that is cut off has more.
    return ComparedRuns(runs, listed.count() if len(runs) == MAX_CHOSEN else len(runs))


def _note_read(project: Project, runs: Sequence[Run], *, compared: bool = True) -> None:
    for run in runs:
        run.project = project
    if compared:
        reads_of(project, "compared runs").update((run.pk, run) for run in runs)


def suggested_runs(project: Project) -> ComparedRuns:
    """The newest run with a verdict, the runs with the same baseline, and that baseline."""
    runs = _all(project).filter(archived_at=None)
    newest = (
        Comparison.objects.filter(run__project=project, run__deleted_at=None, run__archived_at=None)
        .order_by("-run__created_at")
        .first()
    )
    if newest is not None:
        runs = runs.filter(comparison_runs.arm_named([newest.baseline]) | Q(baseline=newest.baseline))
    listed = _newest(project, runs, MAX_SUGGESTED)
    _note_read(project, listed)
    return ComparedRuns(listed, len(listed), is_suggestion=True)


def _all(project: Project) -> QuerySet[Run]:
    return Run.objects.filter(project=project).select_related("comparison")


def _newest(project: Project, runs: QuerySet[Run], most: int) -> list[Run]:
    """The newest runs, oldest first."""
    newest = list(runs.defer(*LARGE_COLUMNS).order_by("-created_at", "id")[:most])
    _note_read(project, newest, compared=False)
    return sorted(newest, key=lambda run: (run.created_at, run.id))


def runs_with_tensors(runs: Sequence[Run]) -> list[Run]:
    """The runs that have statistics of tensors, the newest MAX_PAIRS."""
    return [run for run in runs if run.statistics][-MAX_PAIRS:]


def tensor_pair(runs: Sequence[Run], query: QueryDict) -> tuple[Run, Run] | None:
    """The runs `a` and `b` of the address; by default the newest run and another of its precision."""
    if len(runs) < 2:
        return None
    by_id = {str(run.id): run for run in runs}
    b = by_id.get(query.get("b", ""), runs[-1])
    others = sorted((run for run in runs if run != b), key=lambda run: run.precision != b.precision)
    a = by_id.get(query.get("a", ""), others[0])
    return (others[0], b) if a == b else (a, b)


def result_of(run: Run) -> dict[str, Any]:
    """The stored comparison of a run; empty without one."""
    comparison = getattr(run, "comparison", None)
    return dict(comparison.result) if comparison is not None else {}
