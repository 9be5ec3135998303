"""The form of a panel: its fields, with the choices of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from django.http import QueryDict

from fp8scope_dashboard.db.regular_expressions import MAX_LENGTH as MAX_PATTERN
from fp8scope_dashboard.pages.panels.formulas import MAX_LENGTH
from fp8scope_dashboard.pages.panels.panel import MAX_METRICS, MAX_TITLE, USUAL_STRENGTH, Panel
from fp8scope_dashboard.runs.models import Run, SavedView
from fp8scope_dashboard.telemetry import queries

AXES: Final = {"step": "Steps", "tokens": "Tokens", "time": "Minutes since the start", "wall": "Time of day"}
SMOOTHINGS: Final = {
    "auto": "As the other charts",
    "none": "None",
    "exponential": "Exponential average",
    "window": "Mean of a window",
}
HEIGHTS: Final = {"small": "Low", "medium": "Medium", "large": "High"}
WIDTHS: Final = {"1": "One column", "2": "Two columns", "3": "Three columns"}
# Scalars with a box; a regular expression or a formula names others.
MAX_LISTED: Final = 1_000


@dataclass(frozen=True)
class Option:
    """An entry of a list of choices."""

    value: str
    label: str
    is_chosen: bool


@dataclass(frozen=True, kw_only=True)
class SelectField:
    """A list of choices of the form."""

    name: str
    label: str
    options: list[Option]


def form_context(
    run: Run, panel: Panel, view: SavedView | None, problem: str = "", typed: QueryDict | None = None
) -> dict[str, Any]:
    """Return what the form needs.

    Args:
        problem: what is wrong with what was sent.
        typed: the numbers that were sent, which may be none.
    """
    logged = queries.scalar_names(run.id)
    missing = [name for name in panel.metrics if name not in logged]
    chosen = [name for name in panel.metrics if name in logged]
    others = [name for name in logged if name not in chosen]
    listed = (*chosen, *missing, *others)[:MAX_LISTED]
    return {
        "run": run,
        "panel": panel,
        "view": view,
        "problem": problem,
        "is_new": not panel.id,
        "boxes": [Option(name, name, name in panel.metrics) for name in listed],
        "max_metrics": MAX_METRICS,
        "max_formula": MAX_LENGTH,
        "max_title": MAX_TITLE,
        "fields": [
            _field("x", "Horizontal axis", AXES, panel.x),
            _field("smoothing", "Smoothing", SMOOTHINGS, panel.smoothing),
            _field("width", "Width", WIDTHS, str(panel.width)),
            _field("height", "Height", HEIGHTS, panel.height),
        ],
        "max_pattern": MAX_PATTERN,
        **_numbers(panel, typed),
    }


def _numbers(panel: Panel, typed: QueryDict | None) -> dict[str, str]:
    if typed is not None:
        return {name: typed.get(name, "")[:40] for name in ("strength", "low", "high")}
    return {
        "strength": f"{panel.strength:g}" if panel.smoothing in USUAL_STRENGTH else "",
        "low": "" if panel.low is None else f"{panel.low:g}",
        "high": "" if panel.high is None else f"{panel.high:g}",
    }


def _field(name: str, label: str, choices: dict[str, str], chosen: str) -> SelectField:
    options = [Option(value, text, value == chosen) for value, text in choices.items()]
    return SelectField(name=name, label=label, options=options)
