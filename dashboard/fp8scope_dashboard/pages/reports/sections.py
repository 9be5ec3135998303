"""The sections of a frozen report: what the pages show when the report is made.

A section is a JSON object with `kind` and `title`:

    summary    `runs`: [{"name", "slot", "label", "badge", "sentences"}]
    verdicts   of many runs, `rows`: [{"name", "slot", "label", "badge", "delta", "interval", "share"}]
    figure     `svg`, in the light theme; `svg_dark` if it contains a picture; `summary` (for screen readers);
               `note`
    forest     `rows`: forest.ForestRow
    alerts     `rows`: [{"kind", "run", "severity", "state", "onset", "message"}]
    settings   `rows`: [[name, value], ...] and `names`: the runs' names, one for each value
    runs       settings of many runs, `rows`: [[run, value, ...], ...] and `names`: of the values;
               `differences`: [[entry, [[value, number of runs], ...]], ...], `more`: entries that are left
               out
    text       `markdown`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from django.http import QueryDict

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.pages.badges import ALERT_STATES, SEVERITIES, Badge
from fp8scope_dashboard.pages.charts.answers import AnyChart, Chart, EmptyChart
from fp8scope_dashboard.pages.charts.arms import Arms, precision_label
from fp8scope_dashboard.pages.charts.svg import svg_of
from fp8scope_dashboard.pages.charts.theme import theme_named
from fp8scope_dashboard.pages.compare.figures import compare_figure
from fp8scope_dashboard.pages.configuration_differences import EntryRow, differences, flat, repeated
from fp8scope_dashboard.pages.formatting import difference
from fp8scope_dashboard.pages.run.facts import recipe_in_words, run_facts, steps_in_words
from fp8scope_dashboard.pages.run.figures.views import run_figure
from fp8scope_dashboard.pages.run.summary import ShownVerdict, baseline_groups, verdict_of
from fp8scope_dashboard.pages.scores.forest import forest_rows, latest_comparisons
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.text.run_summary import sentences

MAX_ALERTS: Final = 100
# Of more judged runs, each has a line of a table instead of a paragraph.
MAX_PARAGRAPHS: Final = 6
# As many columns fit a page of paper. Of more runs, each has a line.
MAX_COLUMNS: Final = 4
MAX_SETTINGS: Final = 60
MAX_VALUES: Final = 8
VALUE_LENGTH: Final = 120
# Of a chart, in pixels.
WIDTH: Final = 900
Section = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ReportChoice:
    """A person's choices for a report.

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
        """The run of the heat map and the tensor."""
        return subject_of(self.runs)


def subject_of(runs: Sequence[Run]) -> Run:
    """The newest run with statistics of tensors, one that is not BF16 first; `runs` are oldest first."""
    return max(
        enumerate(runs), key=lambda run: (bool(run[1].statistics), run[1].precision != "bf16", run[0])
    )[1]


def sections_of(project: Project, choice: ReportChoice) -> list[Section]:
    """The chosen sections in the order of PARTS, the person's own text first."""
    made: list[Section] = []
    if choice.text.strip():
        made.append({"kind": "text", "title": "", "markdown": choice.text.strip()})
    for name, part in PARTS.items():
        if name in choice.parts:
            made.append(part.make(project, choice))
    return made


def _summary(project: Project, choice: ReportChoice) -> Section:
    arms, groups = Arms(project), baseline_groups(project.pk)
    # A baseline is part of the other runs' sentences.
    judged = [run for run in choice.runs if run.baseline] or list(choice.runs)
    named = [
        (run, {"name": run.name, "slot": arms.of(run).slot, "label": arms.of(run).label}) for run in judged
    ]
    if len(judged) > MAX_PARAGRAPHS:
        rows = [{**names, **_verdict(verdict_of(run, groups))} for run, names in named]
        return {"kind": "verdicts", "title": "Verdicts", "rows": rows}
    runs = [
        {**names, "badge": _badge(verdict_of(run, groups).badge), "sentences": sentences(run_facts(run))}
        for run, names in named
    ]
    return {"kind": "summary", "title": "Verdict" if len(runs) == 1 else "Verdicts", "runs": runs}


def _verdict(verdict: ShownVerdict) -> dict[str, Any]:
    def signed(value: float) -> str:
        return difference(value, verdict.unit, signed=True)

    return {
        "badge": _badge(verdict.badge),
        # Each row is a run: its own difference, and that of its group where the verdict is on several runs.
        "delta": "" if verdict.own is None else signed(verdict.own),
        "group": f"group: {signed(verdict.delta)}"
        if verdict.is_of_group and verdict.delta is not None
        else "",
        "interval": " to ".join(map(signed, verdict.interval or ())),
        "share": verdict.share,
    }


def _loss(project: Project, choice: ReportChoice) -> Section:
    if len(choice.runs) == 1:
        return _run_figure(choice, "loss", "Loss", {})
    return _compare_figure(project, choice, "loss", "Loss")


def _delta(project: Project, choice: ReportChoice) -> Section:
    return _compare_figure(project, choice, "delta", "Difference to BF16")


def _heatmap(project: Project, choice: ReportChoice) -> Section:
    query = {"statistic": choice.statistic}
    return _run_figure(choice, "heatmap", "Tensors", query)


def _tensor(project: Project, choice: ReportChoice) -> Section:
    title = f"Tensor {choice.tensor}" if choice.tensor else "Tensor"
    return _run_figure(choice, "tensor", title, {"tensor": choice.tensor})


def _evaluations(project: Project, choice: ReportChoice) -> Section:
    comparisons = latest_comparisons(project, [run.pk for run in choice.runs])
    rows = [asdict(row) for row in forest_rows(project, comparisons, Arms(project))]
    return {"kind": "forest", "title": "Evaluations", "rows": rows}


def _alerts(project: Project, choice: ReportChoice) -> Section:
    alerts = Alert.objects.filter(run__in=[run.pk for run in choice.runs]).select_related("run")
    rows = [
        {
            "kind": alert.get_kind_display(),
            "run": alert.run.name,
            "severity": _badge(SEVERITIES[alert.severity]),
            "state": _badge(ALERT_STATES[alert.state]),
            "onset": alert.onset_in_words,
            "message": alert.message,
        }
        for alert in alerts.order_by("onset_step", "id")[:MAX_ALERTS]
    ]
    return {"kind": "alerts", "title": "Alerts", "rows": rows}


def _settings(project: Project, choice: ReportChoice) -> Section:
    """Precision, recipe and length of each run, and the entries of the configuration that differ."""
    runs = choice.runs
    facts = [
        ("Precision", [precision_label(run.precision) for run in runs]),
        ("Recipe", [recipe_in_words(run.recipe) or "–" for run in runs]),
        ("Seed", ["–" if run.seed is None else str(run.seed) for run in runs]),
        ("Steps", [steps_in_words(run) for run in runs]),
        ("State", [run.get_state_display() for run in runs]),
        ("Started", [run.created_at.strftime("%Y-%m-%d %H:%M UTC") for run in runs]),
    ]
    entries = {run.pk: dict(flat(run.config)) for run in runs}
    entries_shown = repeated(runs, entries, ("name", "precision", "seed"))
    own = [
        (run.name, {key: value for key, value in entries[run.pk].items() if key not in entries_shown})
        for run in runs
    ]
    compared = differences(own, everything=len(runs) == 1)
    settings, more = compared.rows[:MAX_SETTINGS], max(0, compared.total - MAX_SETTINGS)
    if len(runs) > 1:
        more = max(0, compared.differing - MAX_SETTINGS)
    title = "Settings" if len(runs) == 1 else "Settings, and differences of the configuration"
    if len(runs) <= MAX_COLUMNS:
        rows = [[name, *values] for name, values in facts]
        rows += [[entry.key, *(_cut(value.text) for value in entry.values)] for entry in settings]
        names = [run.name for run in runs]
        return {"kind": "settings", "title": title, "names": names, "rows": rows, "more": more}
    by_run = zip(*(values for _, values in facts), strict=True)
    return {
        "kind": "runs",
        "title": title,
        "names": [name for name, _ in facts],
        "rows": [[run.name, *values] for run, values in zip(runs, by_run, strict=True)],
        "differences": [[entry.key, _values(entry)] for entry in settings],
        "more": more,
    }


def _values(entry: EntryRow) -> list[list[str | int]]:
    """The distinct values of an entry, the most common first, each with the number of its runs."""
    shown: list[list[str | int]] = [
        [_cut(shared.value.text), len(shared.runs)] for shared in entry.distinct[:MAX_VALUES]
    ]
    if rest := entry.distinct[MAX_VALUES:]:
        shown.append([f"{len(rest):,} other values", sum(len(shared.runs) for shared in rest)])
    return shown


def _cut(text: str | None) -> str:
    return "–" if text is None else text if len(text) <= VALUE_LENGTH else f"{text[:VALUE_LENGTH]}…"


def _run_figure(choice: ReportChoice, name: str, title: str, query: Mapping[str, str]) -> Section:
    run = choice.subject
    note = run.name if len(choice.runs) > 1 else ""

    def draw(asked: QueryDict) -> AnyChart:
        return run_figure(run.project, asked, run.pk, name)

    return _frozen(draw, {**query, **_range(choice)}, title, note)


def _compare_figure(project: Project, choice: ReportChoice, name: str, title: str) -> Section:
    runs = [str(run.pk) for run in choice.runs]

    def draw(asked: QueryDict) -> AnyChart:
        return compare_figure(project, asked, name)

    return _frozen(draw, {"runs": runs, **_range(choice)}, title, "")


def _range(choice: ReportChoice) -> dict[str, str]:
    return {name: text for name, text in (("first", choice.first), ("last", choice.last)) if text}


def _frozen(
    draw: Callable[[QueryDict], AnyChart], query: Mapping[str, str | list[str]], title: str, note: str
) -> Section:
    """A figure as its page has it, drawn as SVG."""
    chart = draw(_query(query))
    section: Section = {"kind": "figure", "title": title, "note": note, "svg": ""}
    if isinstance(chart, EmptyChart):
        return section | {"summary": chart.reason}
    svg = svg_of(chart.figure, theme_named("light"), width=WIDTH) or ""
    section |= {"svg": svg, "summary": chart.summary}
    # The colours of lines and words are those of the reader's theme; a picture is drawn for each.
    if "<image" in svg:
        dark = draw(_query({**query, "theme": "dark"}))
        if isinstance(dark, Chart):
            section["svg_dark"] = svg_of(dark.figure, theme_named("dark"), width=WIDTH) or ""
    return section


def _query(values: Mapping[str, str | list[str]]) -> QueryDict:
    query = QueryDict(mutable=True)
    for key, value in values.items():
        query.setlist(key, value if isinstance(value, list) else [value])
    return query


def _badge(badge: Badge) -> dict[str, str]:
    return {"label": badge.label, "tone": badge.tone, "icon": badge.icon}


@dataclass(frozen=True)
class OfferedSection:
    """A section that a person can choose."""

    label: str
    make: Callable[[Project, ReportChoice], Section]
    by_default: bool = True


PARTS: Final[Mapping[str, OfferedSection]] = {
    "summary": OfferedSection("Verdict and summary", _summary),
    "loss": OfferedSection("Loss with the baseline", _loss),
    "delta": OfferedSection("Difference to BF16", _delta),
    "evaluations": OfferedSection("Evaluations", _evaluations),
    "heatmap": OfferedSection("Heat map of the tensors", _heatmap),
    "tensor": OfferedSection("One tensor", _tensor, by_default=False),
    "alerts": OfferedSection("Alerts", _alerts),
    "settings": OfferedSection("Settings of the runs", _settings),
}
