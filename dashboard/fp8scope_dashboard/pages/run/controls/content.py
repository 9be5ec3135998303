"""The commands, reference windows and bisections of a run, prepared for its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Count, Q

from fp8scope_dashboard.analysis.coverage import is_dead
from fp8scope_dashboard.analysis.verdict_coverage import standing_now
from fp8scope_dashboard.control.commands import HOW_TO_ALLOW, accepted_kinds, giver_of, state_of
from fp8scope_dashboard.control.models import Command, CommandKind, CommandResult, Report, ReportKind
from fp8scope_dashboard.pages.badges import COMMAND_STATES, DEAD_WINDOW, WINDOW_VERDICTS, Badge
from fp8scope_dashboard.runs.models import Run, RunState, Tensor

COMMANDS_SHOWN = 12
WINDOWS_SHOWN = 50
BISECTIONS_SHOWN = 20
INCIDENTS_SHOWN = 20
MODULES_PROPOSED = 2_000
PRODUCTS_LISTED = 10


@dataclass(frozen=True)
class CommandEntry:
    """A command with its state and its results."""

    command: Command
    badge: Badge
    description: str
    giver: str
    results: Sequence[CommandResult]

    @property
    def message(self) -> str:
        """The processes' messages without repetitions."""
        return " · ".join(list(dict.fromkeys(filter(None, (result.message for result in self.results))))[:3])

    @property
    def step(self) -> int | None:
        steps = [result.step for result in self.results if result.step is not None]
        return max(steps) if steps else None


@dataclass(frozen=True)
class ShownWindow:
    """A reference window with the badge of its verdict."""

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
    name: str
    error: float
    cosine: float


@dataclass(frozen=True)
class ShownBisection:
    """A bisection: its worst products, and the error with all products in FP8."""

    report: Report
    products: Sequence[Product]
    total_error: float
    total_cosine: float


def steering(run: Run) -> dict[str, Any]:
    """The context of the card of commands."""
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
        "entries": [command_entry(command) for command in commands],
    }


def modules_of(run: Run) -> list[str]:
    """The layers that the form suggests, in the order of the model."""
    tensors = Tensor.objects.filter(run=run).exclude(module="").order_by("index")
    modules = tensors.values_list("module", flat=True)
    return list(dict.fromkeys(modules[: 3 * MODULES_PROPOSED]))[:MODULES_PROPOSED]


def findings(run: Run) -> dict[str, Any]:
    """The context of the cards of incidents, reference windows and bisections."""
    of_kind = {kind: Q(kind=kind) for kind in (ReportKind.REFERENCE, ReportKind.BISECT)}
    of_kind[ReportKind.ANNOTATION] = Q(kind=ReportKind.ANNOTATION, document__has_key="incident")
    over = of_kind[ReportKind.REFERENCE] & Q(document__verdict="over")
    reports = Report.objects.filter(run=run)
    counts = reports.order_by().aggregate(
        over=Count("id", filter=over),
        **{kind: Count("id", filter=chosen) for kind, chosen in of_kind.items()},
    )

    def newest(kind: ReportKind, most: int, *order: str) -> list[Report]:
        # Most runs have no report of most kinds.
        return list(reports.filter(of_kind[kind]).order_by(*order)[:most]) if counts[kind] else []

    ended_badly = is_dead(standing_now(run))
    windows = newest(ReportKind.REFERENCE, WINDOWS_SHOWN, "-step", "-id")
    incidents = newest(ReportKind.ANNOTATION, INCIDENTS_SHOWN, "-id")
    rankings = newest(ReportKind.BISECT, BISECTIONS_SHOWN, "-id")
    return {
        "windows": [_window(report, ended_badly) for report in windows],
        "windows_dead": ended_badly,
        "window_count": counts[ReportKind.REFERENCE],
        "windows_over": counts["over"],
        "incidents": [report.document["incident"] for report in incidents],
        "rankings": [ranking_of(report, PRODUCTS_LISTED) for report in rankings],
    }


def ranking_of(report: Report, most: int) -> ShownBisection:
    """The `most` worst products of a bisection."""
    document: Mapping[str, Any] = report.document
    products = [
        Product(rank, row["layer"], row["product"], float(row["relative_error"]), float(row["cosine"]))
        for rank, row in enumerate(document["products"][:most], 1)
    ]
    return ShownBisection(report, products, float(document["total_error"]), float(document["total_cosine"]))


def command_entry(command: Command) -> CommandEntry:
    """A command, prepared for a page."""
    results = list(command.results.all())
    badge = COMMAND_STATES[state_of(command, results)]
    return CommandEntry(command, badge, _describe_command(command), giver_of(command), results)


def _describe_command(command: Command) -> str:
    if command.kind == CommandKind.FALLBACK:
        patterns = command.arguments["patterns"]
        more = f" and {len(patterns) - 2} more" if len(patterns) > 2 else ""
        return f"{', '.join(patterns[:2])}{more} to {command.arguments['precision'].upper()}"
    if command.kind == CommandKind.PAUSE:
        return f"Pause for at most {command.arguments['seconds']} s"
    return str(command.get_kind_display())


def _window(report: Report, ended_badly: bool) -> ShownWindow:
    document = report.document
    badge = WINDOW_VERDICTS[document["verdict"]]
    if ended_badly and badge.tone == "good":
        badge = DEAD_WINDOW
    return ShownWindow(report, badge, float(document["delta"]), float(document["noise"]))
