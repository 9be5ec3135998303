"""The tabs of a run's page: what each needs, and their addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.http import QueryDict
from django.urls import reverse
from django.utils.safestring import SafeString, mark_safe

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.control.models import Report, ReportKind
from fp8scope_dashboard.pages.charts.series import step_of
from fp8scope_dashboard.pages.configuration_differences import Differences, differences, flat, lasting
from fp8scope_dashboard.pages.media.content import sheet_of
from fp8scope_dashboard.pages.panels.content import charts_context
from fp8scope_dashboard.pages.run.advice import advice_context
from fp8scope_dashboard.pages.run.anatomy.card import anatomy_of
from fp8scope_dashboard.pages.run.console import console_context
from fp8scope_dashboard.pages.run.controls import content as run_controls
from fp8scope_dashboard.pages.run.efficiency import hours_figures, recent_figures
from fp8scope_dashboard.pages.run.onset_facts import last_line
from fp8scope_dashboard.pages.run.ranks import ranks_of
from fp8scope_dashboard.pages.run.related import offered_groups, offered_runs, related_runs_of
from fp8scope_dashboard.pages.run.step_times import step_times_of
from fp8scope_dashboard.pages.run.summary import HOW_TO_SET_BASELINE, summarise
from fp8scope_dashboard.pages.run.traces import traces_of
from fp8scope_dashboard.pages.run.training_state import training_state_of
from fp8scope_dashboard.pages.tensors.query import tensors_context
from fp8scope_dashboard.runs.models import Artefact, Note, Run, RunState, StepNote, Writer
from fp8scope_dashboard.text.markdown import MAX_CHARACTERS, to_html

TENSOR_NAME_LENGTH: Final = 512
# Processes whose errors are shown.
MAX_ERRORS: Final = 32
SECONDARY: Final = ("tokens_per_second", "step_seconds", "mfu", "memory_peak")
MAX_ENTRIES: Final = 2_000
# Steps on each side of a note that its link shows.
STEPS_AROUND: Final = 50
# What is kept in the addresses of the tabs.
KEPT: Final = ("steps", "tensor", "view")


@dataclass(frozen=True)
class Tab:
    """One tab: its label, its template, and what the template needs."""

    label: str
    template: str
    context: Callable[[Run, QueryDict, User], dict[str, Any]]


@dataclass(frozen=True)
class TabLink:
    """A tab in the list of tabs, or in that of its group."""

    name: str
    label: str
    address: str
    is_current: bool


@dataclass(frozen=True)
class Links:
    """The list of tabs, and the tabs of the current one's group; empty if it is in none."""

    tabs: list[TabLink]
    parts: list[TabLink]


def tab_named(name: str) -> str:
    """The name, if there is such a tab, else the first."""
    return name if name in TABS else "overview"


def links_of(run: Run, current: str, query: QueryDict) -> Links:
    """The list of tabs. Their addresses keep the range of steps and the tensor."""
    single = {name: _link(run, name, current, query) for name in (*TABS, DATA)}
    grouped = {name: label for label, names in GROUPS.items() for name in names}
    parts = next((names for names in GROUPS.values() if current in names), ())
    tabs = [link for name, link in single.items() if name not in grouped]
    # A group leads to its first tab, or stays where it is.
    for label, names in GROUPS.items():
        first = single[current if current in names else names[0]]
        tabs.append(TabLink(first.name, label, first.address, current in names))
    return Links(tabs, [single[name] for name in parts])


def _link(run: Run, name: str, current: str, query: QueryDict) -> TabLink:
    ids = [run.project.slug, run.pk]
    if name == DATA:
        return TabLink(name, "Data", reverse("run_data", args=ids), name == current)
    parameters = QueryDict(mutable=True)
    if name != "overview":
        parameters["tab"] = name
    for field in KEPT:
        if value := query.get(field, ""):
            parameters[field] = value[:TENSOR_NAME_LENGTH]
    page = reverse("run", args=ids)
    address = f"{page}?{parameters.urlencode(safe='.')}" if parameters else page
    return TabLink(name, TABS[name].label, address, name == current)


def range_of(query: QueryDict) -> dict[str, Any]:
    """The range of steps in an address, `steps=240..260`; None where it says nothing or nonsense."""
    first, dots, last = query.get("steps", "").partition("..")
    ends = step_of(first), step_of(last)
    is_range = bool(dots) and None not in ends
    return {"first": ends[0] if is_range else None, "last": ends[1] if is_range else None}


def typed_range(run: Run, query: QueryDict) -> str:
    """The address of the page with the range that a form sent as `first` and `last`; empty if it sent none.

    An empty field is the begin or the end of the run.
    """
    first, last = step_of(query.get("first")), step_of(query.get("last"))
    changed = query.copy()
    for field in ("first", "last"):
        changed.pop(field, None)
    if first is None and last is None:
        changed.pop("steps", None)
    else:
        changed["steps"] = f"{first or 0}..{run.last_step or 0 if last is None else last}"
    page = reverse("run", args=[run.project.slug, run.pk])
    return f"{page}?{changed.urlencode(safe='.')}" if changed else page


def _overview(run: Run, query: QueryDict, user: User) -> dict[str, Any]:
    others = [name for name in sorted(run.last_scalars) if name not in ("loss", "tokens", "grad_norm")]
    return {
        "is_live": run.state == RunState.RUNNING,
        "summary": summarise(run),
        "related": related_runs_of(run),
        "groups": offered_groups(run),
        "others": offered_runs(run),
        "more_scalars": others,
        "modules": run_controls.modules_of(run),
        "ranks": ranks_of(run),
        **range_of(query),
        **tensors_context(run, query),
        **run_controls.steering(run),
        **run_controls.findings(run),
    }


def _tensors(run: Run, query: QueryDict, user: User) -> dict[str, Any]:
    return {**range_of(query), **tensors_context(run, query)}


def _efficiency(run: Run, query: QueryDict, user: User) -> dict[str, Any]:
    names = [name for name in run.last_scalars if name not in ("loss", "tokens")]
    names.sort(key=lambda name: (SECONDARY.index(name) if name in SECONDARY else len(SECONDARY), name))
    return {
        "efficiency": [*recent_figures(run), *hours_figures(run)],
        "anatomy": anatomy_of(run),
        "stored": training_state_of(run),
        "step_times": step_times_of(run),
        "traces": traces_of(run),
        "scalars": names,
        **range_of(query),
        **advice_context(run),
    }


def _ranks(run: Run, query: QueryDict, user: User) -> dict[str, Any]:
    return {"ranks": ranks_of(run)}


def compared_run(run: Run) -> Run | None:
    """The baseline run whose configuration is shown beside the run's: of the same seed, else the newest."""
    baselines = comparison_runs.baseline_runs(run)
    same = [baseline for baseline in baselines if baseline.seed is not None and baseline.seed == run.seed]
    chosen = same or baselines
    return chosen[-1] if chosen else None


def _configuration(run: Run, query: QueryDict, user: User) -> dict[str, Any]:
    other = compared_run(run)
    compared = _compared(run, other, _settings)
    return {"other": other, "compared": compared, "how_to": HOW_TO_SET_BASELINE}


def _media(run: Run, query: QueryDict, user: User) -> dict[str, Any]:
    other = compared_run(run)
    return {"sheet": sheet_of([run] if other is None else [other, run], query)}


def _environment(run: Run, query: QueryDict, user: User) -> dict[str, Any]:
    other = compared_run(run)
    compared = _compared(run, other, lambda tab: lasting(tab.environment) if other else tab.environment)
    return {"other": other, "compared": compared}


def _compared(run: Run, other: Run | None, entries: Callable[[Run], Mapping[str, Any]]) -> Differences:
    runs = [run] if other is None else [run, other]
    flattened = [(option.name, dict(flat(entries(option)))) for option in runs]
    return differences(flattened, everything=True, most=MAX_ENTRIES)


def _settings(run: Run) -> dict[str, Any]:
    return {**run.config, **_named("recipe", run.recipe), "precision": run.precision}


def _named(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value} if value else {}


def _process_of(writer: Writer) -> str:
    start = f", start {writer.attempt + 1}" if writer.attempt else ""
    return f"Rank {writer.rank}{start}" + (f" on {writer.hostname}" if writer.hostname else "")


def _console(run: Run, query: QueryDict, user: User) -> dict[str, Any]:
    failed = Writer.objects.filter(run=run, failed=True).exclude(error="").order_by("attempt", "rank")
    return {
        "errors": [
            {"writer": writer, "process": _process_of(writer), "last_line": last_line(writer.error)}
            for writer in failed[:MAX_ERRORS]
        ],
        "own_error": last_line(run.error),
        **console_context(run, query),
    }


def note_html(text: str) -> SafeString:
    """A note as HTML. Its headings come below those of the page."""
    # Only elements of the parser are in the result.
    return mark_safe(to_html(text, first_heading=3))


@dataclass(frozen=True, kw_only=True)
class ShownStepNote:
    """A note at a step in the list of them. `address` shows the steps around it."""

    pk: int
    anchor: str
    step: int
    text: str
    author: str
    written_at: datetime
    address: str


def step_notes_context(run: Run) -> dict[str, Any]:
    """Return what the list of notes at steps needs."""
    notes = StepNote.objects.filter(run=run).select_related("written_by")
    page = reverse("run", args=[run.project.slug, run.pk])
    return {
        "step_notes": [
            ShownStepNote(
                pk=note.pk,
                anchor=note.anchor,
                step=note.step,
                text=note.text,
                author="a former user" if note.written_by is None else note.written_by.username,
                written_at=note.written_at,
                address=f"{page}?steps={max(0, note.step - STEPS_AROUND)}..{note.step + STEPS_AROUND}",
            )
            for note in notes
        ],
        "step_notes_remark": "None yet. Members add one with a click on a step of a chart, which marks it.",
    }


def notes_context(run: Run) -> dict[str, Any]:
    """Return what the tab of notes needs."""
    note = Note.objects.filter(run=run).select_related("edited_by").first()
    return {
        "note": note,
        "note_html": note_html(note.text) if note is not None else "",
        "most_characters": MAX_CHARACTERS,
        **step_notes_context(run),
        "artefacts": Artefact.objects.filter(run=run).select_related("added_by"),
        "marks": Report.objects.filter(run=run, kind=ReportKind.ANNOTATION).order_by("-step", "-id")[:50],
    }


def _notes(run: Run, query: QueryDict, user: User) -> dict[str, Any]:
    return notes_context(run)


TABS: Final[dict[str, Tab]] = {
    "overview": Tab("Overview", "pages/run/_overview.html", _overview),
    "charts": Tab("Charts", "pages/panels/_charts.html", charts_context),
    "tensors": Tab("Tensors", "pages/run/_tensors.html", _tensors),
    "media": Tab("Media", "pages/media/_media.html", _media),
    "efficiency": Tab("Efficiency", "pages/run/_efficiency.html", _efficiency),
    "ranks": Tab("Ranks", "pages/run/_ranks.html", _ranks),
    "configuration": Tab("Configuration", "pages/run/_configuration.html", _configuration),
    "environment": Tab("Environment", "pages/run/_environment.html", _environment),
    "console": Tab("Console", "pages/run/_console.html", _console),
    "notes": Tab("Notes", "pages/run/_notes.html", _notes),
}
"""By the name in the address (`?tab=`). The page of data is a page of its own."""
DATA: Final = "data"
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "System": ("efficiency", "ranks", "console", "environment"),
    "Details": ("configuration", "notes", DATA),
}
"""The tabs that share one entry of the list. A second list below it has those of the current entry."""
