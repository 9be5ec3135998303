"""The sections of a frozen report: what the pages' own addresses answer when the report is made.

A section is a JSON object with `kind` and `title`:

    summary    `runs`: [{"name", "slot", "label", "badge", "sentences"}]
    figure     `svg`, `summary` (for screen readers), `note`
    forest     `rows`: forest.ForestRow
    alerts     `rows`: [{"kind", "run", "severity", "state", "onset", "message"}]
    settings   `rows`: [[name, value], ...] and `names`: the runs' names, one for each value
    text       `markdown`
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from django.http import HttpRequest, QueryDict
from django.urls import resolve, reverse

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.models import Event
from fp8scope_dashboard.pages.comparison_groups import Arms, precision_label
from fp8scope_dashboard.pages.figures.svg import svg_of
from fp8scope_dashboard.pages.figures.theme import theme_named
from fp8scope_dashboard.pages.forest import forest_rows, latest_comparisons
from fp8scope_dashboard.pages.run_facts import recipe_in_words, run_facts
from fp8scope_dashboard.pages.summary import baseline_groups, verdict_of
from fp8scope_dashboard.pages.verdicts import EVENT_STATES, SEVERITIES, Badge
from fp8scope_dashboard.pages.views.figure_answers import EmptyAnswer, FigureAnswer
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.text.run_summary import sentences

MOST_ALERTS: Final = 100
# Of a chart, in pixels.
WIDTH: Final = 900
Section = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """What a person chose for a report.

    Attributes:
        runs: oldest first; the first FP8 run is the subject of the heat map and the tensor.
        parts: names of PARTS.
        statistic: of the heat map; tensor: a name; first, last: steps as text, empty for all.
    """

    runs: Sequence[Run]
    parts: Sequence[str]
    statistic: str
    tensor: str
    first: str
    last: str
    text: str

    @property
    def subject(self) -> Run:
        """The newest run that is not BF16; without one the newest."""
        return next((run for run in reversed(self.runs) if run.precision != "bf16"), self.runs[-1])


def sections_of(request: HttpRequest, project: Project, choice: Choice) -> list[Section]:
    """The chosen sections in the order of PARTS, the person's own text first."""
    made: list[Section] = []
    if choice.text.strip():
        made.append({"kind": "text", "title": "", "markdown": choice.text.strip()})
    for name, part in PARTS.items():
        if name in choice.parts:
            made.append(part.make(request, project, choice))
    return made


def _summary(request: HttpRequest, project: Project, choice: Choice) -> Section:
    arms, groups = Arms(project), baseline_groups(project.pk)
    # A baseline is part of the other runs' sentences.
    judged = [run for run in choice.runs if run.baseline] or list(choice.runs)
    return {
        "kind": "summary",
        "title": "Verdict",
        "runs": [
            {
                "name": run.name,
                "slot": arms.of(run).slot,
                "label": arms.of(run).label,
                "badge": _badge(verdict_of(run, groups).badge),
                "sentences": sentences(run_facts(run)),
            }
            for run in judged
        ],
    }


def _loss(request: HttpRequest, project: Project, choice: Choice) -> Section:
    if len(choice.runs) == 1:
        return _run_figure(request, choice, "loss", "Loss", {})
    return _compare_figure(request, project, choice, "loss", "Loss")


def _delta(request: HttpRequest, project: Project, choice: Choice) -> Section:
    return _compare_figure(request, project, choice, "delta", "Difference to BF16")


def _heatmap(request: HttpRequest, project: Project, choice: Choice) -> Section:
    query = {"statistic": choice.statistic or "overflow_rate"}
    return _run_figure(request, choice, "heatmap", "Tensors", query)


def _tensor(request: HttpRequest, project: Project, choice: Choice) -> Section:
    title = f"Tensor {choice.tensor}" if choice.tensor else "Tensor"
    return _run_figure(request, choice, "tensor", title, {"tensor": choice.tensor})


def _evaluations(request: HttpRequest, project: Project, choice: Choice) -> Section:
    comparisons = latest_comparisons(project, [run.pk for run in choice.runs])
    rows = [asdict(row) for row in forest_rows(project, comparisons, Arms(project))]
    return {"kind": "forest", "title": "Evaluations", "rows": rows}


def _alerts(request: HttpRequest, project: Project, choice: Choice) -> Section:
    events = Event.objects.filter(run__in=[run.pk for run in choice.runs]).select_related("run")
    rows = [
        {
            "kind": event.get_kind_display(),
            "run": event.run.name,
            "severity": _badge(SEVERITIES[event.severity]),
            "state": _badge(EVENT_STATES[event.state]),
            "onset": event.onset_step,
            "message": event.message,
        }
        for event in events.order_by("onset_step", "id")[:MOST_ALERTS]
    ]
    return {"kind": "alerts", "title": "Alerts", "rows": rows}


def _settings(request: HttpRequest, project: Project, choice: Choice) -> Section:
    """Precision, recipe and length of each run, and the entries of the configuration that differ."""
    runs = choice.runs
    rows = [
        ["Precision", *(precision_label(run.precision) for run in runs)],
        ["Recipe", *(recipe_in_words(run.recipe) or "–" for run in runs)],
        ["Seed", *("–" if run.seed is None else str(run.seed) for run in runs)],
        ["Steps", *(_steps(run) for run in runs)],
        ["State", *(run.get_state_display() for run in runs)],
        ["Started", *(run.created_at.strftime("%Y-%m-%d %H:%M UTC") for run in runs)],
    ]
    configs = [_flat(run.config) for run in runs]
    names = sorted({name for config in configs for name in config})
    for name in names:
        values = [config.get(name, "–") for config in configs]
        if len(set(values)) > 1 or len(runs) == 1:
            rows.append([name, *values])
    return {
        "kind": "settings",
        "title": "Settings" if len(runs) == 1 else "Settings, and differences of the configuration",
        "names": [run.name for run in runs],
        "rows": rows[:MOST_SETTINGS],
    }


MOST_SETTINGS: Final = 60
VALUE_LENGTH: Final = 120


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The entries of a configuration by dotted name, as text."""
    entries: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            entries |= _flat(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            entries[f"{prefix}{name}"] = text[:VALUE_LENGTH]
    return entries


def _steps(run: Run) -> str:
    reached = "–" if run.last_step is None else f"{run.last_step:,}"
    return f"{reached} of {run.total_steps:,}" if run.total_steps else reached


def _run_figure(
    request: HttpRequest, choice: Choice, name: str, title: str, query: Mapping[str, str]
) -> Section:
    run = choice.subject
    address = reverse("figure", args=[run.project.slug, run.pk, name])
    note = run.name if len(choice.runs) > 1 else ""
    return _frozen(request, address, {**query, **_range(choice)}, title, note)


def _compare_figure(request: HttpRequest, project: Project, choice: Choice, name: str, title: str) -> Section:
    address = reverse("compare_figure", args=[project.slug, name])
    runs = [str(run.pk) for run in choice.runs]
    return _frozen(request, address, {"runs": runs, **_range(choice)}, title, "")


def _range(choice: Choice) -> dict[str, str]:
    return {name: text for name, text in (("first", choice.first), ("last", choice.last)) if text}


def _frozen(
    request: HttpRequest, address: str, query: Mapping[str, str | list[str]], title: str, note: str
) -> Section:
    """A figure as its page's address answers it to the same person, drawn as SVG."""
    inner = copy.copy(request)
    inner.method = "GET"
    inner.path = inner.path_info = address
    inner.META = {key: value for key, value in request.META.items() if key != "HTTP_ACCEPT_ENCODING"}
    asked = QueryDict(mutable=True)
    for key, value in query.items():
        asked.setlist(key, value if isinstance(value, list) else [value])
    inner.GET = asked  # type: ignore[assignment]
    match = resolve(address)
    answer = match.func(inner, *match.args, **match.kwargs)
    section: Section = {"kind": "figure", "title": title, "note": note, "svg": ""}
    if isinstance(answer, EmptyAnswer):
        return section | {"summary": answer.reason}
    assert isinstance(answer, FigureAnswer), "the addresses of figures answer figures"
    svg = svg_of(answer.figure, theme_named("light"), width=WIDTH)
    return section | {"svg": svg or "", "summary": answer.summary}


def _badge(badge: Badge) -> dict[str, str]:
    return {"label": badge.label, "tone": badge.tone, "icon": badge.icon}


@dataclass(frozen=True)
class Part:
    """A section that a person can choose."""

    label: str
    make: Callable[[HttpRequest, Project, Choice], Section]
    by_default: bool = True


PARTS: Final[Mapping[str, Part]] = {
    "summary": Part("Verdict and summary", _summary),
    "loss": Part("Loss with the baseline", _loss),
    "delta": Part("Difference to BF16", _delta),
    "evaluations": Part("Evaluations", _evaluations),
    "heatmap": Part("Heat map of the tensors", _heatmap),
    "tensor": Part("One tensor", _tensor, by_default=False),
    "alerts": Part("Alerts", _alerts),
    "settings": Part("Settings of the runs", _settings),
}
