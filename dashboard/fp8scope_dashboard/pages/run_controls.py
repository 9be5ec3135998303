"""What a run's page shows of commands and reports: what may be asked and what came of it, what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8scope_dashboard.analysis.coverage import is_dead
from fp8scope_dashboard.analysis.judging import standing_now
from fp8scope_dashboard.control.commands import HOW_TO_ALLOW, accepted_kinds, giver_of, state_of
from fp8scope_dashboard.control.models import Command, CommandKind, CommandResult, Report, ReportKind
from fp8scope_dashboard.pages.figures.curves import Mark
from fp8scope_dashboard.pages.verdicts import COMMAND_STATES, DEAD_WINDOW, WINDOW_VERDICTS, Badge
from fp8scope_dashboard.runs.models import Run, RunState, Tensor

COMMANDS_SHOWN = 12
WINDOWS_SHOWN = 50
BISECTIONS_SHOWN = 20
MODULES_PROPOSED = 2_000
PRODUCTS_LISTED = 10
MOST_MARKS = 100


@dataclass(frozen=True)
class Asked:
    """A command and what became of it."""

    command: Command
    badge: Badge
    what: str
    by: str
    results: Sequence[CommandResult]

    @property
    def message(self) -> str:
        """What the processes said: once, where they all said the same."""
        said = list(dict.fromkeys(result.message for result in self.results if result.message))
        return said[0] if len(said) == 1 else " · ".join(said[:3])

    @property
    def step(self) -> int | None:
        steps = [result.step for result in self.results if result.step is not None]
        return max(steps) if steps else None


@dataclass(frozen=True)
class Window:
    """A reference window."""

    report: Report
    badge: Badge
    delta: float
    noise: float

    @property
    def last_step(self) -> int:
        return self.report.step + len(self.report.document["fp8"]) - 1


@dataclass(frozen=True)
class Product:
    """One line of a bisection's ranking."""

    rank: int
    layer: str
    product: str
    error: float
    cosine: float


@dataclass(frozen=True)
class Ranking:
    """A bisection."""

    report: Report
    products: Sequence[Product]
    total_error: float
    total_cosine: float

    @property
    def more(self) -> int:
        return int(self.report.document["measured"]) - len(self.products)


def steering(run: Run) -> dict[str, Any]:
    """For the card of commands."""
    accepted = accepted_kinds(run)
    commands = list(
        Command.objects.filter(run=run)
        .select_related("given_by", "event")
        .prefetch_related("results")[:COMMANDS_SHOWN]
    )
    return {
        "is_steerable": run.state in (RunState.RUNNING, RunState.SILENT),
        "accepted": accepted,
        "how_to_allow": HOW_TO_ALLOW,
        "asked": [_asked(command) for command in commands],
    }


def modules_of(run: Run) -> list[str]:
    """The layers that a form proposes, in the model's order."""
    found = (
        Tensor.objects.filter(run=run).exclude(module="").order_by("index").values_list("module", flat=True)
    )
    return list(dict.fromkeys(found[: 3 * MODULES_PROPOSED]))[:MODULES_PROPOSED]


def findings(run: Run) -> dict[str, Any]:
    """For the cards of reference windows and bisections."""
    windows = Report.objects.filter(run=run, kind=ReportKind.REFERENCE).order_by("-step", "-id")
    rankings = Report.objects.filter(run=run, kind=ReportKind.BISECT).order_by("-id")
    ended_badly = is_dead(standing_now(run))
    return {
        "windows": [_window(report, ended_badly) for report in windows[:WINDOWS_SHOWN]],
        "windows_dead": ended_badly,
        "window_count": windows.count(),
        "windows_over": windows.filter(document__verdict="over").count(),
        "rankings": [ranking_of(report, PRODUCTS_LISTED) for report in rankings[:BISECTIONS_SHOWN]],
    }


def ranking_of(report: Report, most: int) -> Ranking:
    """The first products of a bisection."""
    document: Mapping[str, Any] = report.document
    products = [
        Product(rank, one["layer"], one["product"], float(one["relative_error"]), float(one["cosine"]))
        for rank, one in enumerate(document["products"][:most], 1)
    ]
    return Ranking(report, products, float(document["total_error"]), float(document["total_cosine"]))


def annotation_marks(run: Run) -> list[Mark]:
    """What was done to the run, for its loss."""
    reports = Report.objects.filter(run=run, kind=ReportKind.ANNOTATION).order_by("-step", "-id")[:MOST_MARKS]
    return [Mark(float(report.step), _described(report), label=report.document["name"]) for report in reports]


def _described(report: Report) -> str:
    document = report.document
    return f"step {report.step}: {document['text']}" + (
        f" ({document['why']})" if document.get("why") else ""
    )


def _asked(command: Command) -> Asked:
    results = list(command.results.all())
    return Asked(
        command, COMMAND_STATES[state_of(command, results)], _what(command), giver_of(command), results
    )


def _what(command: Command) -> str:
    if command.kind == CommandKind.FALLBACK:
        patterns = command.arguments["patterns"]
        more = f" and {len(patterns) - 2} more" if len(patterns) > 2 else ""
        return f"{', '.join(patterns[:2])}{more} to {command.arguments['precision'].upper()}"
    if command.kind == CommandKind.PAUSE:
        return f"Pause for {command.arguments['seconds']} s at most"
    return str(command.get_kind_display())


def _window(report: Report, ended_badly: bool) -> Window:
    document = report.document
    badge = WINDOW_VERDICTS[document["verdict"]]
    if ended_badly and badge.tone == "good":
        badge = DEAD_WINDOW
    return Window(report, badge, float(document["delta"]), float(document["noise"]))
