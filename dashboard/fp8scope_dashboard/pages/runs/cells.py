"""The cells of the list of runs, prepared as HTML: a page has hundreds, too many for the template engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Final

from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

from fp8scope_dashboard.pages.badges import Badge, badge_html, icon_html
from fp8scope_dashboard.pages.charts.arms import precision_label
from fp8scope_dashboard.pages.charts.run_colours import NAMES, colour_number
from fp8scope_dashboard.pages.formatting import NOTHING, ago, compact, count, difference, span
from fp8scope_dashboard.pages.run.summary import ShownVerdict
from fp8scope_dashboard.pages.runs.columns import RunColumn
from fp8scope_dashboard.runs.models import Run, RunState

MAX_TAGS: Final = 4
# Characters of a name that is not cut in the middle, and of the end that a longer one keeps.
WHOLE_NAME: Final = 44
END_OF_NAME: Final = 18
EMPTY: Final = mark_safe("")


@dataclass(frozen=True, kw_only=True)
class RowContent:
    """The values of the cells of a run.

    Attributes:
        base: the address of the project's pages.
        texts: the values of columns with numbers, by key, with the digits of the whole column.
        entries: the values of JSON entries, by key of the column.
        may_change: the user may change the run's colour.
    """

    run: Run
    state: Badge
    verdict: ShownVerdict
    open_alerts: int
    base: str
    now: datetime
    texts: Mapping[str, str] = field(default_factory=dict)
    entries: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    shows_difference: bool = False
    may_change: bool = False

    @cached_property
    def pk(self) -> SafeString:
        """The run's id, which needs no escaping: each cell has it several times."""
        return mark_safe(str(self.run.pk))

    @property
    def address(self) -> str:
        """The address of the run's page."""
        return f"{self.base}runs/{self.pk}/"

    @property
    def spark(self) -> str:
        """The address of the picture of the loss."""
        return f"{self.address}loss.svg?rows={self.run.rows_stored}&slot=run-{colour_number(self.run)}"


def pick_cell(row: RowContent) -> SafeString:
    """The box that selects a run, and the eye that shows it in the chart."""
    return format_html(
        '<td class="runs__pick"><input type="checkbox" form="bulk" name="runs" value="{}" id="pick-{}" '
        'aria-label="Select {}" data-holds><button type="button" class="eye" id="eye-{}" data-eye="{}" '
        'aria-pressed="false" aria-label="{} in the chart" title="Show in the chart" hidden>{}</button></td>',
        *(*[row.pk] * 2, row.run.name, *[row.pk] * 2, row.run.name, icon_html("eye")),
    )


def name_cell(row: RowContent) -> SafeString:
    """The colour, the name, and what kind of run it is."""
    run = row.run
    return format_html(
        '<td class="runs__cell-name"><div class="runs__line">{}<a class="runs__name" id="open-{}" href="{}" '
        'title="{}"{}>{}</a><span class="runs__sub small muted" title="{}">{}</span></div></td>',
        *(_dot(row), row.pk, row.address, run.name, _label(run.name), _name(run.name)),
        *(", ".join(_facts(run)), _kind(run)),
    )


def _label(name: str) -> SafeString:
    """Return what a reader says of a name in two parts."""
    return format_html(' aria-label="{}"', name) if len(name) > WHOLE_NAME else EMPTY


def _name(name: str) -> SafeString | str:
    """A name that is cut where the column is too narrow; a long one in the middle.

    Names of a sweep begin alike, and their ends tell them apart.
    """
    if len(name) <= WHOLE_NAME:
        return name
    return format_html(
        '<span class="cut"><span class="cut__begin">{}</span><span class="cut__end">{}</span></span>',
        name[:-END_OF_NAME],
        name[-END_OF_NAME:],
    )


def _dot(row: RowContent) -> SafeString:
    number = colour_number(row.run)
    if not row.may_change:
        return format_html('<span class="run-dot run-colour--{}" data-run-dot="{}"></span>', number, row.pk)
    label = f"Colour of {row.run.name}: {NAMES[number - 1].lower()}. Change."
    return format_html(
        '<button type="button" class="run-colour" id="colour-{}" data-colour-of="{}" data-colour="{}" '
        'aria-label="{}" title="Colour">'
        '<span class="run-dot run-colour--{}" data-run-dot="{}"></span></button>',
        *(row.pk, row.pk, row.run.colour or "", label, number, row.pk),
    )


def _facts(run: Run) -> list[str]:
    seed = "" if run.seed is None else f"seed {run.seed}"
    return [text for text in (precision_label(run.precision), run.recipe_name, run.group, seed) if text]


def _kind(run: Run) -> SafeString:
    parts = [format_html_join("", "<span>{}</span>", ((text,) for text in _facts(run)))]
    if run.archived_at:
        parts.append(mark_safe('<span class="badge">Archived</span>'))
    tags = run.tags or []
    parts.append(format_html_join("", '<span class="tag">{}</span>', ((tag,) for tag in tags[:MAX_TAGS])))
    if len(tags) > MAX_TAGS:
        more = tags[MAX_TAGS:]
        parts.append(format_html('<span title="{}">+{}</span>', ", ".join(more), len(more)))
    return mark_safe("".join(parts))


def _state(row: RowContent, column: RunColumn) -> SafeString:
    return format_html('<td class="runs__cell-state">{}</td>', badge_html(row.state))


def _verdict(row: RowContent, column: RunColumn) -> SafeString:
    verdict, parts = row.verdict, [badge_html(row.verdict.badge)]
    if verdict.is_of_group:
        if verdict.delta is not None:
            text = f"group of {verdict.runs}: {_difference(verdict.delta, verdict)}"
            parts.append(format_html('<small class="muted" title="{}">{}</small>', text, text))
        for member in verdict.left:
            value = member["difference"]
            text = f"{member['name']} left" + ("" if value is None else f": {_difference(value, verdict)}")
            parts.append(format_html('<small class="runs__left" title="{}">{}</small>', text, text))
    elif verdict.delta is not None and not row.shows_difference:
        parts.append(format_html("<strong>{}</strong>", _difference(verdict.delta, verdict)))
    if verdict.share:
        share = verdict.share
        parts.append(format_html('<small class="muted" title="{}">{}</small>', share, share))
    if row.open_alerts:
        alerts = Badge(f"{row.open_alerts} alert{'' if row.open_alerts == 1 else 's'}", "danger", "alert")
        address = f"{row.base}alerts/?run={row.pk}"
        parts.append(format_html('<a class="runs__alerts" href="{}">{}</a>', address, badge_html(alerts)))
    content = mark_safe("".join(parts))
    return format_html('<td class="runs__cell-verdict"><span class="row">{}</span></td>', content)


def _difference(value: float, verdict: ShownVerdict) -> str:
    return difference(value, verdict.unit, signed=True)


def _own(row: RowContent, column: RunColumn) -> SafeString:
    text: SafeString | str = NOTHING
    if row.verdict.own is not None:
        text = format_html("<strong>{}</strong>", row.texts[column.key])
        if row.verdict.own_left:
            text = format_html('{} <span class="badge badge--warning">left its group</span>', text)
    elif row.verdict.own_left:
        text = mark_safe('<span class="badge badge--danger">not finite</span>')
    return _number(text, column)


def _spark(row: RowContent, column: RunColumn) -> SafeString:
    return format_html(
        '<td class="runs__cell-spark"><img id="spark-{}" hx-preserve="true" src="{}" width="132" height="32" '
        'loading="lazy" alt="Loss curve of {}"></td>',
        *(row.pk, row.spark, row.run.name),
    )


def _loss(row: RowContent, column: RunColumn) -> SafeString:
    return format_html('<td class="num runs__cell-wide">{}</td>', row.texts[column.key])


def _step(row: RowContent, column: RunColumn) -> SafeString:
    run = row.run
    if run.last_step is None:
        text = f"no steps{' yet' if run.state == RunState.RUNNING else ''}"
        return format_html('<td class="num runs__cell-numbers"><span class="muted">{}</span></td>', text)
    plan, bar = EMPTY, EMPTY
    if run.total_steps:
        plan = format_html('<span class="muted"> / {}</span>', count(run.total_steps))
        if run.state == RunState.RUNNING:
            share = min(100.0, 100.0 * run.last_step / run.total_steps)
            bar = format_html(
                '<progress class="bar runs__progress" max="100" value="{}" aria-hidden="true"></progress>',
                f"{share:.1f}",
            )
    return format_html(
        '<td class="num runs__cell-numbers"><span class="runs__label">step </span>{}{}{}</td>',
        *(count(run.last_step), plan, bar),
    )


def _points(row: RowContent, column: RunColumn) -> SafeString:
    lost = EMPTY
    if row.run.rows_dropped:
        lost = format_html(
            ' <span class="badge badge--warning" title="Steps that the agent dropped">{} dropped</span>',
            compact(row.run.rows_dropped),
        )
    return format_html('<td class="num runs__cell-wide">{}{}</td>', compact(row.run.points_stored), lost)


def _created(row: RowContent, column: RunColumn) -> SafeString:
    moment = _moment(row.run.created_at, row.now)
    return format_html('<td class="num small muted runs__cell-wide">{}</td>', moment)


def _ended(row: RowContent, column: RunColumn) -> SafeString:
    ended = row.run.finished_at
    return _number(_moment(ended, row.now) if ended else NOTHING, column, "small muted ")


def _moment(moment: datetime, now: datetime) -> SafeString:
    local = timezone.localtime(moment)
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        *(local.isoformat(), f"{local:%Y-%m-%d %H:%M:%S %Z}", ago(moment, now)),
    )


def _duration(row: RowContent, column: RunColumn) -> SafeString:
    end = row.run.finished_at or row.run.heartbeat_at
    return _number(span((end - row.run.created_at).total_seconds()), column)


def _number(text: SafeString | str, column: RunColumn, more: str = "") -> SafeString:
    # On narrow screens, where cells have lines of their own, empty ones are left out.
    empty = "runs__empty " if text == NOTHING else ""
    return format_html(
        '<td class="num {}{}runs__cell-own" data-label="{}">{}</td>', *(more, empty, column.title, text)
    )


def _text_of(read: Callable[[Run], str]) -> Callable[[RowContent, RunColumn], SafeString]:
    """The cell of a text of the run."""

    def cell(row: RowContent, column: RunColumn) -> SafeString:
        text = read(row.run) or NOTHING
        return format_html(
            '<td class="runs__cell-own" data-label="{}" title="{}"><span class="runs__text">{}</span></td>',
            *(column.title, text, text),
        )

    return cell


_BUILT_IN: Final[Mapping[str, Callable[[RowContent, RunColumn], SafeString]]] = {
    "state": _state,
    "verdict": _verdict,
    "difference": _own,
    "spark": _spark,
    "loss": _loss,
    "step": _step,
    "points": _points,
    "created": _created,
    "ended": _ended,
    "duration": _duration,
    "precision": _text_of(lambda run: precision_label(run.precision)),
    "recipe": _text_of(lambda run: run.recipe_name),
    "group": _text_of(lambda run: run.group),
    "baseline": _text_of(lambda run: run.baseline),
    "seed": lambda row, column: _number(NOTHING if row.run.seed is None else str(row.run.seed), column),
    "planned": lambda row, column: _number(count(row.run.total_steps), column),
}


def cell_html(row: RowContent, column: RunColumn) -> SafeString:
    """The cell of a column."""
    if column.key in _BUILT_IN:
        return _BUILT_IN[column.key](row, column)
    if column.is_number:
        return _number(row.texts[column.key], column)
    text, title = row.entries[column.key]
    return format_html(
        '<td class="runs__cell-own" data-label="{}" title="{}"><span class="runs__text">{}</span></td>',
        *(column.title, title, text),
    )


def row_html(row: RowContent, columns: list[RunColumn]) -> SafeString:
    """The row of a run."""
    spark = ""
    if any(column.key == "spark" for column in columns):
        spark = format_html(' data-spark="{}"', row.spark)
    cells = "".join([pick_cell(row), name_cell(row), *(cell_html(row, column) for column in columns)])
    return mark_safe(f'<tr id="row-{row.pk}"{spark}>{cells}</tr>')
