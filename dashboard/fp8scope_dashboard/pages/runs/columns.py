"""The columns of the list of runs: built-in ones, logged scalars, and entries of the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

from django.db.models import Case, Expression, F, IntegerField, Value, When
from django.db.models.functions import Coalesce, Lower

from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.formatting import NOTHING
from fp8scope_dashboard.runs.search.fields import duration_expression, text_of
from fp8scope_dashboard.runs.search.json_paths import PathValue, entry_paths, finite_scalar

# Columns beside the name; more do not fit on any screen.
MAX_COLUMNS: Final = 16
KEY_LENGTH: Final = 200
# Characters of a value in a cell; the whole value is its tooltip.
CELL_LENGTH: Final = 40

# The worst first: people sort by verdict to find trouble.
VERDICT_ORDER: Final = ("worse", "incomplete", "cannot_tell", "pending", "better", "equivalent")

Source = Literal["", "scalar", "config", "recipe", "summary", "environment"]


@dataclass(frozen=True, kw_only=True)
class RunColumn:
    """One column. `key` names it in addresses; `order` is what sorts the list, None if nothing does."""

    key: str
    title: str
    order: Expression | F | None = None
    is_number: bool = False
    source: Source = ""
    entry: str = ""

    @cached_property
    def paths(self) -> list[str]:
        """Return where the entry of a JSON column may be. Each row of a list asks for it."""
        return entry_paths(self.entry)


def verdict_rank() -> Case:
    """The rank of a run's stored verdict, the worst first; runs without one are last."""
    ranks = [When(comparison__verdict=name, then=Value(rank)) for rank, name in enumerate(VERDICT_ORDER)]
    return Case(*ranks, default=Value(None), output_field=IntegerField())


BUILT_IN: Final[Mapping[str, RunColumn]] = {
    column.key: column
    for column in (
        RunColumn(key="name", title="Run", order=Lower("name")),
        RunColumn(key="state", title="State", order=F("state")),
        RunColumn(key="verdict", title="FP8 against BF16", order=verdict_rank()),
        RunColumn(
            key="difference", title="Own difference", order=F("comparison__own_difference"), is_number=True
        ),
        RunColumn(key="spark", title="Loss"),
        RunColumn(key="loss", title="Last loss", order=finite_scalar("loss"), is_number=True),
        RunColumn(key="step", title="Step", order=F("last_step"), is_number=True),
        RunColumn(key="points", title="Points", order=F("points_stored"), is_number=True),
        RunColumn(key="created", title="Started", order=F("created_at"), is_number=True),
        RunColumn(key="ended", title="Ended", order=F("finished_at"), is_number=True),
        RunColumn(key="duration", title="Duration", order=duration_expression(), is_number=True),
        RunColumn(key="precision", title="Precision", order=F("precision")),
        RunColumn(key="recipe", title="Recipe", order=F("recipe_name")),
        RunColumn(key="group", title="Seed group", order=F("group")),
        RunColumn(key="baseline", title="Baseline", order=F("baseline")),
        RunColumn(key="seed", title="Seed", order=F("seed"), is_number=True),
        RunColumn(key="planned", title="Planned steps", order=F("total_steps"), is_number=True),
    )
}
DEFAULT: Final = ("state", "verdict", "difference", "spark", "loss", "step", "points", "created")
SOURCES: Final = ("scalar", "config", "recipe", "summary", "environment")


def column_named(key: str) -> RunColumn | None:
    """The column of a key: a built-in one, or scalar.NAME, config.NAME and so on; None for other texts."""
    if key in BUILT_IN:
        return BUILT_IN[key]
    source, _, entry = key.partition(".")
    if source not in SOURCES or not entry or len(key) > KEY_LENGTH or "\0" in key:
        return None
    if source == "scalar":
        title = glossary.title(entry)
        return RunColumn(
            key=key, title=title, order=finite_scalar(entry), is_number=True, source="scalar", entry=entry
        )
    values = [PathValue(source, path) for path in entry_paths(entry)]
    order = values[0] if len(values) == 1 else Coalesce(*values)
    return RunColumn(key=key, title=entry, order=order, source=source, entry=entry)  # type: ignore[arg-type]


def columns_named(keys: Sequence[str]) -> list[RunColumn]:
    """The columns of an address in order; unknown and repeated ones are left out."""
    wanted = [key for key in dict.fromkeys(keys) if key != "name"]
    columns = [column for key in wanted if (column := column_named(key)) is not None]
    return columns[:MAX_COLUMNS]


def entry_text(value: Any) -> tuple[str, str]:
    """An entry of a configuration as a short text, and as the text of its tooltip.

    Settings are shown as they were written: 0.0003, 1e-05.
    """
    if value is None:
        return NOTHING, ""
    text = text_of(value)
    return text if len(text) <= CELL_LENGTH else f"{text[: CELL_LENGTH - 1]}…", text[:500]
