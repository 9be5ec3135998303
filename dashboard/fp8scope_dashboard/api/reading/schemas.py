"""The answers of the reading API, as in the OpenAPI document. docs/api.md describes their fields."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from ninja import Schema
from pydantic import Field

from fp8scope_dashboard.wire.schemas import RunSummary


class MemberOut(Schema):
    """A run of a judged seed group with its own difference; null where its loss is not finite."""

    run: str
    name: str
    seed: int | None = None
    difference: float | None = None
    left: bool = False


class VerdictOut(Schema):
    """The verdict on a run's loss, as its page shows it.

    `verdict` is equivalent, worse, better, cannot_tell, pending or incomplete, and empty without a
    comparison; `measured` is that of the statistics on what is stored. Numbers are in `unit`: relative, or
    nats.
    `not_judged` says what the verdict does not cover.
    """

    verdict: str
    measured: str
    label: str
    explanation: str
    final: bool
    unit: str
    delta: float | None = None
    interval: tuple[float, float] | None = None
    tolerance: float | None = None
    margin: float | None = None
    smallest_detectable: float | None = None
    own: float | None = None
    left: bool = False
    baseline: str
    baseline_runs: int
    members: list[MemberOut] = []
    coverage: str
    not_judged: list[str] = []
    warnings: list[str] = []


class ListedRun(RunSummary):
    """A row of the list of runs. `loss` is its latest, null if there is none; see GET /runs/{run}."""

    recipe_name: str
    total_steps: int | None
    loss: float | str | None = Field(description="Latest value; NaN and infinities are strings.")
    heartbeat_at: datetime
    finished_at: datetime | None
    archived_at: datetime | None
    verdict: VerdictOut
    open_alerts: int
    url: str


class RunsOut(Schema):
    """A page of the list. `next` is the value of `after` for the following page, null on the last one."""

    runs: list[ListedRun]
    total: int
    problems: list[str]
    next: UUID | None = None


class RunRef(Schema):
    """A run that another answer names."""

    id: UUID
    name: str
    url: str


class ScalarOut(Schema):
    """A logged scalar with its latest value; `title` is what the pages call it."""

    name: str
    title: str
    last: float | str | None


class ScalarsOut(Schema):
    """The scalars of a run, and the range of its stored steps."""

    first_step: int | None
    last_step: int | None
    scalars: list[ScalarOut]


class HistogramOut(Schema):
    """The elements of a tensor in one step: `counts[i]` have floor(log2 |x|) = min_exponent + i."""

    step: int
    zeros: float
    nonfinite: float
    counts: list[float]


class HistogramsOut(Schema):
    tensor: str
    min_exponent: int
    histograms: list[HistogramOut]


class TensorOut(Schema):
    """A tensor of the catalogue. `index` is its row in heat maps."""

    index: int
    name: str
    module: str
    role: str
    format: str
    shape: list[int]
    numel: int


class TensorsOut(Schema):
    total: int
    statistics: list[str]
    roles: list[str]
    tensors: list[TensorOut]


class RankedTensorOut(Schema):
    """A tensor of the ranking. It left its range between `earliest` and `onset`; both null if it did not.

    `now` is the largest value of the last steps, `ever` that of the run, `before` and `after` the medians of
    its beginning and its end; `change` is log2 of their ratio.
    """

    index: int
    name: str
    onset: int | None
    earliest: int | None
    now: float | None
    ever: float | None
    before: float | None
    after: float | None
    change: float | None


class RankingOut(Schema):
    """`out_of_range` tensors have an onset; `still` are left out, because their rate was 0 in every step."""

    statistic: str
    limit: float
    total: int
    out_of_range: int
    still: int
    tensors: list[RankedTensorOut]


class ScoreOut(Schema):
    """One evaluation of the run: its score with the interval over its items."""

    name: str
    metric: str
    step: int
    kind: str
    higher_is_better: bool
    score: float | None
    interval: tuple[float, float] | None
    items: int
    precision: str | None


class JudgedScoreOut(Schema):
    """A score against the baseline's: the mean of the run's seed group, and the verdict on the difference."""

    name: str
    metric: str
    step: int
    higher_is_better: bool
    verdict: str
    measured: str
    label: str
    explanation: str
    score: float | None
    baseline_score: float | None
    difference: float | None
    interval: tuple[float, float] | None
    margin: float | None
    smallest_detectable: float | None
    items: int
    members: list[MemberOut]
    not_judged: list[str]
    warnings: list[str]


class EvaluationsOut(Schema):
    scores: list[ScoreOut]
    comparisons: list[JudgedScoreOut]


class RunAlertOut(Schema):
    """An alert as the page of alerts lists it. It began between `earliest_step` and `onset_step`."""

    id: int
    run: RunRef
    kind: str
    title: str
    severity: str
    state: str
    step: int
    onset_step: int
    earliest_step: int
    value: float | None
    threshold: float | None
    message: str
    tensors: list[str]
    opened_at: datetime
    resolved_at: datetime | None
    acknowledged_at: datetime | None
    acknowledged_by: str
    url: str


class AlertEntryOut(Schema):
    """Entry of an alert's history; `by` is empty for what the server did itself."""

    kind: str
    at: datetime
    by: str
    text: str


class AlertOut(RunAlertOut):
    """An alert with its evidence: the numbers that its detector saw; their names depend on `kind`."""

    evidence: dict[str, Any]
    history: list[AlertEntryOut]


class AlertsOut(Schema):
    """A page of alerts, newest first. `next` is the value of `after` for the following page."""

    alerts: list[RunAlertOut]
    total: int
    next: int | None = None


class OnsetOut(Schema):
    """One thing that happened in a run. It began between `earliest` and `step`; `until` is its last onset."""

    step: int
    earliest: int
    until: int | None
    title: str
    detail: str
    tone: str


class CardOut(Schema):
    markdown: str


class CourseOut(Schema):
    """The course of a run, by step; `more` onsets are left out, `calm` says that nothing happened."""

    onsets: list[OnsetOut]
    more: int
    calm: str


class RankOut(Schema):
    """A rank of the latest attempt; `lag` is in steps behind the rank with the most."""

    rank: int
    hostname: str
    last_step: int | None
    lag: int
    state: str
    error: str
    seen_at: datetime


class DisagreementOut(Schema):
    """Tensors whose scale differs between ranks at `step`; `deviating` ranks differ from a majority."""

    step: int
    tensors: int
    names: list[str]
    compared: int
    deviating: list[int]
    factor: str


class RanksOut(Schema):
    """The first ranks of a run, of `total`."""

    total: int
    ranks: list[RankOut]
    disagreement: DisagreementOut | None


class EntryOut(Schema):
    """An entry of the configurations that differs: as text, null where a run has none."""

    key: str
    a: str | None
    b: str | None


class PairOut(Schema):
    """Two runs. `judged` is the one whose verdict this is, null if neither is compared with the other.

    `reason` says why there is no verdict, and how to get one.
    """

    a: RunRef
    b: RunRef
    judged: RunRef | None
    verdict: VerdictOut | None
    reason: str
    costs: str
    quantities: dict[str, Any]
    evaluations: list[JudgedScoreOut]
    configuration: list[EntryOut]


class EfficiencyFigureOut(Schema):
    """A figure beside the chart of step times: as the page writes it, and its number in SI units or bytes."""

    name: str
    title: str
    value: str
    amount: float | None


class EfficiencyOut(Schema):
    """The phases of a step, as shares of its time over the last steps, and the use of the machine."""

    phases: dict[str, float]
    figures: list[EfficiencyFigureOut]


class FigureNames(Schema):
    """The figures of a run; docs/api.md has their parameters."""

    figures: list[str]
