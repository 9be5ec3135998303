"""Pages of the list of runs that begin after a run instead of after a number of runs.

To skip rows, PostgreSQL would have to read and sort them. A page that begins after a run also stays where it
is when new runs arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db.models import F, Q, QuerySet, Subquery
from django.db.models.expressions import Combinable
from django.db.models.lookups import Exact, GreaterThan, LessThan

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.runs.models import Run


@dataclass(frozen=True)
class Order:
    """An order of runs by `value`; runs without one are last, and equal ones in the order of their start."""

    value: Combinable
    descending: bool
    # The start, which every run has: its index is the order.
    is_start: bool = False

    def sort(self, runs: QuerySet[Run], *, backwards: bool = False) -> QuerySet[Run]:
        """The runs in this order, or in the reverse one."""
        first = F("created_at") if self.is_start else self.value
        down = self.descending is not backwards
        # The index of the start sorts no nulls last.
        nulls = {} if self.is_start else {"nulls_first" if backwards else "nulls_last": True}
        by = first.desc(**nulls) if down else first.asc(**nulls)  # type: ignore[attr-defined]
        return runs.order_by(by, *(("created_at", "-id") if backwards else ("-created_at", "id")))

    def beyond(
        self, runs: QuerySet[Run], project: Project, run_id: UUID, *, backwards: bool = False
    ) -> QuerySet[Run] | None:
        """Those of the runs that come after a run of the project, or before it. None without that run."""
        pivot = Run.objects.filter(project=project, pk=run_id).alias(order_value=self._value)
        row = pivot.annotate(is_last=Q(order_value__isnull=True)).values_list("created_at", "is_last").first()
        if row is None:
            return None
        created, is_last = row
        ties = _started(created, run_id, backwards=backwards)
        if self.is_start:
            return runs.filter(self._started_beyond(created, run_id, backwards=backwards))
        keyed = runs.alias(order_value=self._value)
        if is_last:
            same = Q(order_value__isnull=True) & ties
            return keyed.filter(Q(order_value__isnull=False) | same if backwards else same)
        value: Any = Subquery(pivot.annotate(pivot_value=F("order_value")).values("pivot_value")[:1])
        further = LessThan if self.descending is not backwards else GreaterThan
        beyond = Q(further(F("order_value"), value)) | (Q(Exact(F("order_value"), value)) & ties)
        return keyed.filter(beyond if backwards else beyond | Q(order_value__isnull=True))

    @property
    def _value(self) -> Combinable:
        return F("created_at") if self.is_start else self.value

    def _started_beyond(self, created: Any, run_id: UUID, *, backwards: bool) -> Q:
        down = self.descending is not backwards
        further = Q(created_at__lt=created) if down else Q(created_at__gt=created)
        same = Q(created_at=created) & (Q(id__lt=run_id) if backwards else Q(id__gt=run_id))
        # Implied by the rest: the condition with which PostgreSQL reads a part of the index.
        bound = Q(created_at__lte=created) if down else Q(created_at__gte=created)
        return bound & (further | same)


def _started(created: Any, run_id: UUID, *, backwards: bool) -> Q:
    """Among runs with equal values: those after a run, or before it."""
    if backwards:
        return Q(created_at__gt=created) | Q(created_at=created, id__lt=run_id)
    return Q(created_at__lt=created) | Q(created_at=created, id__gt=run_id)


@dataclass(frozen=True)
class RunPage:
    """One page of the list: its runs, its number from 1, and the number of pages."""

    runs: list[Run]
    number: int
    count: int

    @property
    def has_previous(self) -> bool:
        """Return whether there is a page before this one."""
        return self.number > 1

    @property
    def has_next(self) -> bool:
        """Return whether there is a page after this one."""
        return self.number < self.count
