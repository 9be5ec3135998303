"""Groups of runs: by seed group, another field, or an entry of the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.core.paginator import Page, Paginator
from django.db.models import (
    Aggregate,
    Avg,
    CharField,
    Count,
    F,
    Func,
    Max,
    Min,
    Q,
    StdDev,
    Value,
)
from django.db.models.functions import Cast, Coalesce
from django.utils.text import Truncator

from fp8scope_dashboard.pages.badges import NO_BASELINE, NOT_ALL_JUDGED, SO_FAR, VERDICTS, Badge
from fp8scope_dashboard.pages.charts.arms import precision_label
from fp8scope_dashboard.pages.runs.columns import VERDICT_ORDER, column_named, verdict_rank
from fp8scope_dashboard.pages.runs.listing import Listing
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.runs.search.json_paths import PathValue, finite_scalar
from fp8scope_dashboard.runs.search.language import quoted

GROUPS_A_PAGE: Final = 50
# Rows of an open group; the rest is a link.
MEMBERS: Final = 50
# Characters of the label of a group.
MAX_LABEL: Final = 80
_COLUMNS: Final = {
    "group": "group",
    "precision": "precision",
    "recipe": "recipe_name",
    "state": "state",
    "baseline": "baseline",
}
_BADGES: Final = {
    "incomplete": NOT_ALL_JUDGED,
    "pending": SO_FAR["equivalent"],
    **VERDICTS,
}


class _AsText(Func):
    """A JSON value as text, without the quotes of strings."""

    template = "(%(expressions)s #>> '{}')"
    output_field = CharField()


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """The runs with one value.

    Attributes:
        value: None for runs without one; `label` is what the page shows of it.
        count, finite: the number of runs, and of those whose last loss is finite.
        loss, spread: the mean of their last losses, and its standard deviation between runs.
        worst: the badge of the worst verdict.
        search: the search that finds these runs.
        address: the link to the list of these runs; `open_address` opens or closes the group.
        members: the runs, if the group is open.
    """

    value: str | None
    label: str
    count: int
    finite: int
    loss: float | None
    spread: float | None
    lowest: float | None
    highest: float | None
    worst: Badge
    alerts: int
    newest: datetime
    search: str
    address: str
    open_address: str
    members: list[Run] | None = None

    @property
    def is_open(self) -> bool:
        return self.members is not None

    @property
    def more(self) -> int:
        """The number of runs that an open group does not show."""
        return self.count - len(self.members or ())


def groups_page(listing: Listing) -> tuple[list[RunGroup], Page[Any]]:
    """One page of groups with their statistics.

    All runs are read for the order of the groups, and only those of the page for their other statistics.
    """
    state = listing.state
    keyed = listing.runs.annotate(group_key=_key(state.by))
    grouped = keyed.order_by().values("group_key")
    statistics = _statistics()
    key = state.sort.removeprefix("-")
    name = {"name": "group_key", "created": "newest"}.get(key, key)
    ordered = grouped.annotate(**{name: statistics[name]}) if name in statistics else grouped.distinct()
    order = F(name)
    by = order.desc(nulls_last=True) if state.sort.startswith("-") else order.asc(nulls_last=True)
    paginator = Paginator(ordered.order_by(by, "group_key"), GROUPS_A_PAGE)
    paginator.__dict__["count"] = grouped.distinct().count()
    page = paginator.get_page(state.page or None)
    keys = [row["group_key"] for row in page]
    read = _of_groups(grouped, state.by, keys).annotate(**statistics)
    rows = {row["group_key"]: row for row in read}
    alerts = _alerts(keyed, state.by, keys)
    # A group may have lost its runs since.
    return [_group(listing, keyed, rows[key], alerts) for key in keys if key in rows], page


def _statistics() -> dict[str, Aggregate]:
    """The statistics of a group, by the name of the field of `RunGroup`."""
    return {
        "count": Count("pk"),
        "finite": Count(finite_scalar("loss")),
        "loss": Avg(finite_scalar("loss")),
        "spread": StdDev(finite_scalar("loss"), sample=True),
        "lowest": Min(finite_scalar("loss")),
        "highest": Max(finite_scalar("loss")),
        "worst": Min(verdict_rank()),
        "newest": Max("created_at"),
    }


def _of_groups(runs: Any, by: str, keys: Sequence[str | None]) -> Any:
    """The runs with one of the keys, of which None is that of runs without a value."""
    if by in _COLUMNS:
        # The column has an index.
        return runs.filter(**{f"{_COLUMNS[by]}__in": ["" if key is None else key for key in keys]})
    chosen = Q(group_key__in=[key for key in keys if key is not None])
    return runs.filter(chosen | Q(group_key__isnull=True) if None in keys else chosen)


def worst_badge(rank: int | None) -> Badge:
    """The badge of the worst verdict of some runs, from `columns.verdict_rank`."""
    return NO_BASELINE if rank is None else _BADGES[VERDICT_ORDER[rank]]


def _key(by: str) -> Any:
    """The value that runs are grouped by: NULL without one."""
    if by in _COLUMNS:
        return Func(F(_COLUMNS[by]), Value(""), function="NULLIF", output_field=CharField())
    column = column_named(by)
    assert column is not None, by
    values = [PathValue(column.source, path) for path in column.paths]
    return Cast(_AsText(values[0] if len(values) == 1 else Coalesce(*values)), CharField())


def _alerts(keyed: Any, by: str, keys: Sequence[str | None]) -> dict[str | None, int]:
    """Open alerts by group."""
    troubled = _of_groups(keyed.filter(alerts__state="open").order_by(), by, keys)
    return dict(troubled.values_list("group_key").annotate(Count("alerts")))


def _group(listing: Listing, keyed: Any, row: Mapping[str, Any], alerts: dict[str | None, int]) -> RunGroup:
    state, value = listing.state, row["group_key"]
    term = _term(state.by, value)
    # The term of a group is what the address lists as open.
    is_open = term in state.open
    others = tuple(name for name in state.open if name != term)
    members = None
    if is_open:
        same = keyed.filter(group_key__isnull=True) if value is None else keyed.filter(group_key=value)
        members = listing.first_rows(same, MEMBERS)
    # Terms of one field are alternatives: the group's own replaces them.
    text = f"{listing.query.without(state.by).text} {term}".strip()
    return RunGroup(
        value=value,
        label=_label(state.by, value or ""),
        count=row["count"],
        finite=row["finite"],
        loss=row["loss"],
        spread=row["spread"],
        lowest=row["lowest"],
        highest=row["highest"],
        worst=worst_badge(row["worst"]),
        alerts=alerts.get(value, 0),
        newest=row["newest"],
        search=text,
        address=state.address(search=text, by="", open=(), sort="-created"),
        open_address=state.address(open=others if is_open else (*others, term), page=state.page),
        members=members,
    )


def _label(by: str, value: str) -> str:
    return precision_label(value) if by == "precision" else Truncator(value).chars(MAX_LABEL)


def _term(by: str, value: str | None) -> str:
    """The search term that finds the runs of a group."""
    if by in _COLUMNS:
        return f"{by}:{quoted(value)}" if value else f'{by}:""'
    return f"-{by}:*" if value is None else f"{by}:{quoted(value)}"
