"""The rows of a page of the list of runs; what all of them need is read once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from uuid import UUID

from django.db.models import Count
from django.urls import reverse
from django.utils import timezone
from django.utils.safestring import SafeString

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.models import Alert, AlertState
from fp8scope_dashboard.analysis.verdict_coverage import standing_now
from fp8scope_dashboard.pages.badges import state_badge
from fp8scope_dashboard.pages.formatting import aligned, aligned_differences
from fp8scope_dashboard.pages.run.summary import ShownVerdict, verdict_of
from fp8scope_dashboard.pages.runs.cells import RowContent, row_html
from fp8scope_dashboard.pages.runs.columns import RunColumn, entry_text
from fp8scope_dashboard.pages.runs.listing import entries_of
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.text.numbers import NON_FINITE


class RenderedRows:
    """The rows of the runs of a page, as HTML by run id."""

    def __init__(
        self, project: Project, runs: Iterable[Run], columns: list[RunColumn], *, may_change: bool = False
    ) -> None:
        shown = list(runs)
        opened = open_alerts_by_run(shown)
        baselines = baselines_among(project, {run.group for run in shown if run.group})
        verdicts = {run.pk: verdict_of(run, baselines) for run in shown}
        texts = _texts(shown, verdicts, columns)
        base, now = reverse("project", args=[project.slug]), timezone.now()
        self._rows: dict[UUID, SafeString] = {}
        for run in shown:
            extra = entries_of(vars(run), columns)
            content = RowContent(
                run=run,
                state=state_badge(standing_now(run)),
                verdict=verdicts[run.pk],
                open_alerts=opened.get(run.pk, 0),
                base=base,
                now=now,
                texts={key: column[run.pk] for key, column in texts.items()},
                entries={key: entry_text(value) for key, value in extra.items()},
                shows_difference=any(column.key == "difference" for column in columns),
                may_change=may_change,
            )
            self._rows[run.pk] = row_html(content, columns)

    def of(self, runs: Iterable[Run]) -> list[SafeString]:
        """The rows of some of the runs."""
        return [self._rows[run.pk] for run in runs]


def open_alerts_by_run(runs: Sequence[Run]) -> Mapping[UUID, int]:
    """The number of open alerts of each run that has any."""
    opened = Alert.objects.filter(run__in=runs, state=AlertState.OPEN).order_by()
    return dict(opened.values_list("run_id").annotate(Count("id")))


def baselines_among(project: Project, groups: Collection[str]) -> set[str]:
    """Those of the groups that are the baseline of a run of the project."""
    named = Run.objects.filter(project=project, baseline__in=groups).order_by()
    return set(named.values_list("baseline", flat=True).distinct()) if groups else set()


def _texts(
    runs: Sequence[Run], verdicts: Mapping[UUID, ShownVerdict], columns: Iterable[RunColumn]
) -> dict[str, dict[UUID, str]]:
    """The texts of the columns with measured numbers, by key and run: equal digits in a column."""
    texts = {}
    for column in columns:
        if column.key == "difference":
            values = [(verdicts[run.pk].own, verdicts[run.pk].unit) for run in runs]
            shown = aligned_differences(values)
        elif column.key == "loss" or column.source == "scalar":
            name = column.entry or "loss"
            shown = aligned([last_value(run, name) for run in runs])
        else:
            continue
        texts[column.key] = dict(zip((run.pk for run in runs), shown, strict=True))
    return texts


def last_value(run: Run, name: str) -> float | None:
    """The latest value of a scalar of the run; None if it has none."""
    value: float | str | None = (run.last_scalars or {}).get(name)
    return NON_FINITE.get(value) if isinstance(value, str) else value
