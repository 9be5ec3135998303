"""The list of runs that an address describes: search, order, columns, groups and page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final
from urllib.parse import urlencode
from uuid import UUID

from django.core.paginator import Paginator
from django.db.models import Count, F, Q, QuerySet
from django.http import QueryDict
from django.utils.text import capfirst

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages.address_values import uuid_in
from fp8scope_dashboard.pages.charts.arms import precision_label
from fp8scope_dashboard.pages.runs.columns import DEFAULT, RunColumn, column_named, columns_named
from fp8scope_dashboard.pages.runs.paging import Order, RunPage
from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.runs.search import Query, read, search, vocabulary_of
from fp8scope_dashboard.runs.search.json_paths import PathValue
from fp8scope_dashboard.runs.search.language import term_text

RUNS_A_PAGE: Final = 50
# Never shown in a row, and possibly large.
NOT_SHOWN: Final = ("config", "environment", "summary", "error")
MAX_OPEN: Final = 8
# Facets: fields with few values, one click each.
FACETS: Final[Mapping[str, str]] = {"precision": "Precision", "state": "State", "recipe": "Recipe"}
_FACET_COLUMNS: Final = {"precision": "precision", "state": "state", "recipe": "recipe_name"}
MAX_FACET_VALUES: Final = 6
# What runs can be grouped by, besides entries of the configuration and the recipe.
GROUPS: Final[Mapping[str, str]] = {
    "group": "Seed group",
    "precision": "Precision",
    "recipe": "Recipe",
    "state": "State",
    "baseline": "Baseline",
}
GROUP_ORDERS: Final = ("name", "count", "loss", "created")


@dataclass(frozen=True, kw_only=True)
class ListState:
    """The choices of the list's address. `columns` is empty for the default columns."""

    search: str = ""
    sort: str = "-created"
    by: str = ""
    open: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    page: str = ""
    # The page begins after a run, or ends before one.
    after: str = ""
    before: str = ""

    @classmethod
    def of(cls, query: QueryDict) -> ListState:
        """Read an address; what is not known there is left out."""
        text = query.get("q", "").replace("\0", "").strip()
        # Earlier versions had the state in a field of its own.
        state = query.get("state", "")
        if state in RunState.values:
            text = f"{text} state:{state}".strip()
        by = query.get("by", "")
        sort = query.get("sort", "")
        return cls(
            search=text,
            sort=sort if _is_order(sort, by) else "-created",
            by=by if is_group(by) else "",
            open=tuple(query.getlist("open")[:MAX_OPEN]),
            columns=tuple(column.key for column in columns_named(query.getlist("col"))),
            page=query.get("page", ""),
            after=_id_in(query, "after"),
            before=_id_in(query, "before"),
        )

    @property
    def shown(self) -> list[RunColumn]:
        """The columns beside the name."""
        return columns_named(self.columns or DEFAULT)

    def fields(self) -> list[tuple[str, str]]:
        """The fields of the address, without defaults."""
        single = (
            ("q", self.search, ""),
            ("by", self.by, ""),
            ("sort", self.sort, "-created"),
            ("page", self.page, ""),
            ("after", self.after, ""),
            ("before", self.before, ""),
        )
        return [
            *((name, value) for name, value, default in single if value != default),
            *(("open", term) for term in self.open),
            *(("col", key) for key in self.columns),
        ]

    def query(self) -> str:
        """The query of the address; empty for the default list."""
        return urlencode(self.fields())

    @property
    def fields_of_search(self) -> list[tuple[str, str]]:
        """Return what a form keeps that changes the search."""
        return self.first_page(search="", open=()).fields()

    @property
    def fields_of_columns(self) -> list[tuple[str, str]]:
        """Return what a form keeps that changes the columns."""
        return self.first_page(columns=()).fields()

    @property
    def fields_of_groups(self) -> list[tuple[str, str]]:
        """Return what a form keeps that changes the grouping."""
        return self.first_page(by="", open=(), sort="-created").fields()

    def address(self, **changes: Any) -> str:
        """The link to the same list with changes; on its first page unless `page` is one of them."""
        return f"?{self.first_page(**changes).query()}"

    def first_page(self, **changes: Any) -> ListState:
        """The same list with changes; on its first page unless `page` is one of them."""
        return replace(self, **{"page": "", "after": "", "before": "", **changes})

    def sorted_by(self, key: str) -> str:
        """The link that sorts by a column: the other way if the list is sorted by it already."""
        # The largest and the latest first, but the lowest loss; names from A to Z, the worst verdict first.
        column = column_named(key)
        is_number = key == "count" or (column is not None and column.is_number)
        first = f"-{key}" if is_number and key != "loss" else key
        second = key if first.startswith("-") else f"-{key}"
        return self.address(sort=second if self.sort == first else first)

    def direction(self, key: str) -> str:
        """The value of aria-sort for a column."""
        if self.sort.lstrip("-") != key:
            return "none"
        return "descending" if self.sort.startswith("-") else "ascending"


def _id_in(query: QueryDict, name: str) -> str:
    """The id of a run in an address; empty for other texts."""
    run_id = uuid_in(query.get(name, ""))
    return "" if run_id is None else str(run_id)


def is_group(by: str) -> bool:
    """Return whether runs can be grouped by this."""
    column = column_named(by)
    return by in GROUPS or (column is not None and column.source in ("config", "recipe"))


def _is_order(sort: str, by: str) -> bool:
    key = sort.removeprefix("-")
    if is_group(by):
        return key in GROUP_ORDERS
    column = column_named(key)
    return column is not None and column.order is not None


@dataclass(frozen=True)
class FacetValue:
    """One value of a facet: how many runs have it, and the link that adds or removes it."""

    value: str
    label: str
    count: int
    active: bool
    address: str


@dataclass(frozen=True)
class Facet:
    """A field with its most common values."""

    field: str
    label: str
    values: list[FacetValue]


def _facet_label(field: str, value: str) -> str:
    if field == "precision":
        return precision_label(value)
    return capfirst(value) if field == "state" else value


class Listing:
    """The runs that match an address."""

    def __init__(self, project: Project, state: ListState) -> None:
        self.project = project
        self.state = state
        self.vocabulary = vocabulary_of(project)
        self.query: Query = read(state.search, self.vocabulary)
        self.runs: QuerySet[Run] = search(Run.objects.filter(project=project), self.query)

    @cached_property
    def _everything(self) -> list[tuple[tuple[str, ...], bool, int]]:
        """The number of all runs by the values of all facets, and by whether they are archived."""
        columns = list(_FACET_COLUMNS.values())
        runs = Run.objects.filter(project=self.project).annotate(is_archived=Q(archived_at__isnull=False))
        rows = runs.order_by().values_list(*columns, "is_archived").annotate(runs=Count("*"))
        return [(tuple(values), is_archived, count) for *values, is_archived, count in rows]

    @property
    def total(self) -> int:
        """The number of runs of the project."""
        return sum(count for _, _, count in self._everything)

    @property
    def archived(self) -> int:
        """The number of archived runs of the project."""
        return sum(count for _, is_archived, count in self._everything if is_archived)

    @cached_property
    def _counts(self) -> list[tuple[tuple[str, ...], int]]:
        """The number of runs by the values of all facets: one pass over the runs instead of one for each."""
        if not self.query.terms:
            return [(values, count) for values, is_archived, count in self._everything if not is_archived]
        return self._counted(self.runs, tuple(FACETS))

    @property
    def matching(self) -> int:
        """The number of runs that match."""
        return sum(count for _, count in self._counts)

    def page(self) -> RunPage:
        """One page of runs in the order of the address."""
        paginator = Paginator(self._order.sort(self.runs), RUNS_A_PAGE)
        # Known already; the paginator would count them once more.
        paginator.__dict__["count"] = self.matching
        shown = paginator.get_page(self.state.page or None)
        runs = self._beside_a_run() if shown.number > 1 else None
        if runs is None:
            first = (shown.number - 1) * RUNS_A_PAGE
            runs = self._rows(self._order.sort(self.runs)[first : first + RUNS_A_PAGE])
        return RunPage(runs, shown.number, paginator.num_pages)

    def _beside_a_run(self) -> list[Run] | None:
        """The runs of a page that begins after a run, or ends before one. None if the address has none."""
        backwards = bool(self.state.before)
        run_id = uuid_in(self.state.before or self.state.after)
        if run_id is None:
            return None
        runs = self._order.beyond(self.runs, self.project, run_id, backwards=backwards)
        if runs is None:
            return None
        return self._rows(self._order.sort(runs, backwards=backwards)[:RUNS_A_PAGE])

    def part(self, most: int, *, after: UUID | None = None, offset: int = 0) -> list[Run] | None:
        """At most `most` runs in the order of the address, from the first one or the one after a run.

        None if the project has no run `after`. `offset` runs are left out before them.
        """
        runs: QuerySet[Run] | None = self.runs
        if after is not None:
            runs = self._order.beyond(self.runs, self.project, after)
        return None if runs is None else self._rows(self._order.sort(runs)[offset : offset + most])

    def first_rows(self, runs: QuerySet[Run], most: int) -> list[Run]:
        """The first of some runs with what a row shows, in the order of the address.

        Runs without a value are last.
        """
        return self._rows(self._order.sort(runs)[:most])

    def _rows(self, chosen: QuerySet[Run]) -> list[Run]:
        """The chosen runs of a page, with what a row shows.

        PostgreSQL sorts narrow rows, and reads the wide ones and their comparisons only of the page.
        """
        runs = Run.objects.filter(pk__in=chosen.values("pk"))
        return list(self._order.sort(with_entries(runs, self.state.shown)))

    @property
    def _order(self) -> Order:
        key = self.state.sort.removeprefix("-")
        column = column_named(key)
        value = column.order if column is not None and column.order is not None else F("created_at")
        return Order(value, self.state.sort.startswith("-"), is_start=key == "created")

    def facets(self) -> list[Facet]:
        """The facets. The counts of each are those without its own terms."""
        return [facet for field, label in FACETS.items() if (facet := self._facet(field, label)) is not None]

    def _facet(self, field: str, label: str) -> Facet | None:
        chosen = {
            term.value.lower() for term in self.query.of(field) if term.operator == ":" and not term.negated
        }
        others = self.query.without(field)
        values = []
        for value, count in self._values(field)[:MAX_FACET_VALUES]:
            active = value.lower() in chosen
            remaining = "" if active else term_text(field, value)
            address = self.state.address(search=f"{others.text} {remaining}".strip())
            values.append(FacetValue(value, _facet_label(field, value), count, active, address))
        # A facet with one value has nothing to choose.
        return Facet(field, label, values) if len(values) > 1 or chosen else None

    def _values(self, field: str) -> list[tuple[str, int]]:
        """The values of a facet with their counts, the most common first, without the empty one."""
        if self.query.of(field):
            runs = search(Run.objects.filter(project=self.project), self.query.without(field))
            counted = [(values[0], count) for values, count in self._counted(runs, (field,))]
        else:
            position = list(FACETS).index(field)
            totals: Counter[str] = Counter()
            for values, count in self._counts:
                totals[values[position]] += count
            counted = list(totals.items())
        return sorted(
            ((value, count) for value, count in counted if value), key=lambda item: (-item[1], item[0])
        )

    def _counted(self, runs: QuerySet[Run], fields: tuple[str, ...]) -> list[tuple[tuple[str, ...], int]]:
        columns = [_FACET_COLUMNS[field] for field in fields]
        rows = runs.order_by().values_list(*columns).annotate(runs=Count("*"))
        return [(row[:-1], row[-1]) for row in rows]


def with_entries(runs: QuerySet[Run], columns: Sequence[RunColumn]) -> QuerySet[Run]:
    """Runs annotated with the entries of the columns."""
    return runs.select_related("comparison").defer(*NOT_SHOWN).annotate(**entry_values(columns))


def entry_values(columns: Sequence[RunColumn]) -> dict[str, PathValue]:
    """The expressions that `entries_of` reads: `entry_I_J` is column I's value at its path J."""
    return {
        f"entry_{i}_{j}": PathValue(column.source, path)
        for i, column in enumerate(columns)
        if column.source not in ("", "scalar")
        for j, path in enumerate(column.paths)
    }


def entries_of(read: Mapping[str, Any], columns: Sequence[RunColumn]) -> dict[str, Any]:
    """The values of the JSON entries of a run, by key of the column. `read`: its `entry_values`."""
    values: dict[str, Any] = {}
    for i, column in enumerate(columns):
        if column.source in ("", "scalar"):
            continue
        value = None
        for j in range(len(column.paths)):
            value = read.get(f"entry_{i}_{j}")
            if value is not None:
                break
        values[column.key] = value
    return values


def group_label(by: str) -> str:
    """Return what the list is grouped by, for people."""
    return GROUPS.get(by) or by.partition(".")[2]
