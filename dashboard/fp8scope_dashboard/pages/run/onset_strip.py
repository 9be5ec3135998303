"""The onset strip of a run: what happened in it, in the order in which it began. Pure functions of facts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from fp8scope_dashboard.pages.formatting import count, written
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.onsets import steps_in_words

Tone = Literal["danger", "warning", "neutral"]

# Onsets in the strip; further ones are folded.
MAX_SHOWN: Final = 12
MAX_FOLDED: Final = 100
# Onsets with the same words that become one, if there are too many.
MIN_ALIKE: Final = 3
# A zoom shows a twentieth of the run on each side of an onset, but no fewer steps than this.
ZOOM_SHARE: Final = 0.05
MIN_ZOOM: Final = 25
# The comparison looks at windows: within so many steps it names the onset of the alert less exactly.
NEAR: Final = 100
# Steps between the result of a command and the mark that the training process sets for it.
SAME_CHANGE: Final = 1

# Of onsets in the same step, those of tensors come before those of the loss, and what was done comes last.
TENSOR, START, LOSS, FINDING, CHANGE, END = range(6)
_RANKS: Final[dict[Tone, int]] = {"danger": 0, "warning": 1, "neutral": 2}

# What the tensors of an alert do. `{}` are the tensors.
_TENSORS_DO: Final = {
    "tensor_not_finite": "NaN or Inf in {}",
    "saturation_rate": "{} overflow",
    "saturation_rise": "{} overflow more than before",
    "underflow_rate": "{} underflow",
    "underflow_rise": "{} underflow more than before",
    "scale_frozen": "scale of {} freezes",
    "scale_stale": "scale of {} is stale",
    "scale_jump": "scale of {} jumps",
    "scale_disagreement": "scale of {} differs between ranks",
    "amax_growth": "amax of {} grows",
}
_LOSS_DOES: Final = {
    "loss_not_finite": "loss is not finite",
    "loss_spike": "loss spikes",
    "loss_divergence": "loss diverges",
    "above_baseline": "loss leaves BF16",
    "grad_norm": "gradient norm leaves its range",
    "throughput_drop": "throughput drops",
    "data_wait": "steps wait for data",
    "memory_creep": "memory creeps up",
    "rank_behind": "a rank falls behind",
}
# The end of the run says the same.
_ENDS: Final = frozenset({"run_silent", "run_failed", "run_finished"})


@dataclass(frozen=True, kw_only=True)
class AlertFact:
    """An alert. Its evidence names `tensors` of all `tensors_over`; `name` says what its rule reports."""

    kind: str
    onset: int
    severity: str
    message: str
    address: str
    name: str = ""
    tensors: tuple[str, ...] = ()
    tensors_over: int = 0
    # The last step before the onset at which its first tensor was observed.
    after: int | None = None
    is_resolved: bool = False


@dataclass(frozen=True, kw_only=True)
class DiagnosisFact:
    """The decisive finding of the diagnosis."""

    cause: str
    outcome: str
    onset: int
    sentence: str
    address: str
    after: int | None = None


@dataclass(frozen=True)
class DepartureFact:
    """The step from which the comparison's interval stays outside the tolerance."""

    step: int
    is_above: bool
    detail: str
    address: str


@dataclass(frozen=True, kw_only=True)
class ChangeFact:
    """A change to the run at a step: a mark of the training process, or the result of a command."""

    step: int
    kind: str
    text: str
    detail: str = ""
    address: str = ""
    is_bad: bool = False


@dataclass(frozen=True)
class StartFact:
    """A later start of the training, at `first`. `before`: the last step of the earlier starts."""

    number: int
    first: int
    before: int | None


@dataclass(frozen=True, kw_only=True)
class StripFacts:
    """The stored facts about a run.

    Attributes:
        last_step: the last stored step; None before the first.
        nonfinite_step: the first step whose loss is NaN or infinite.
        ending: how the run ended badly, in words; empty if it did not.
    """

    last_step: int | None = None
    alerts: Sequence[AlertFact] = ()
    diagnosis: DiagnosisFact | None = None
    departure: DepartureFact | None = None
    nonfinite_step: int | None = None
    changes: Sequence[ChangeFact] = ()
    starts: Sequence[StartFact] = ()
    ending: str = ""
    ending_detail: str = ""


@dataclass(frozen=True, kw_only=True)
class StripOnset:
    """One thing that happened.

    Attributes:
        step: the first step at which it was seen.
        title: a few words; `detail`: a sentence.
        address: of its evidence; `label` names what is there.
        after: the last step before it that was looked at; see `text.onsets`.
        zoom: the first and last step to show it in.
        until: the last onset of several that are one here.
    """

    step: int
    title: str
    tone: Tone
    order: int
    detail: str = ""
    address: str = ""
    label: str = ""
    after: int | None = None
    until: int | None = None
    zoom: tuple[int, int] = (0, 0)

    @property
    def steps(self) -> str:
        """The step as people write it: 240; 231–240 or `11 or before` if it is not known exactly."""
        if self.until is not None and self.until > self.step:
            return f"{count(self.begin)}–{count(self.until)}"
        return written(steps_in_words(self.step, self.after))

    @property
    def begin(self) -> int:
        """The first step at which it may have begun, as far as the run was looked at."""
        return self.step if self.after is None or self.after < 0 else min(self.after + 1, self.step)


@dataclass(frozen=True)
class Strip:
    """The onsets that are shown, those that are folded, and how many more there are."""

    shown: Sequence[StripOnset] = field(default_factory=list)
    folded: Sequence[StripOnset] = field(default_factory=list)
    more: int = 0
    # A sentence for a run in which nothing happened.
    calm: str = ""


def strip_of(facts: StripFacts) -> Strip:
    """The strip of a run: at most MAX_SHOWN onsets by step, the most serious if there are more."""
    onsets = sorted(
        [
            *_of_alerts(facts),
            *_of_loss(facts),
            *_of_diagnosis(facts),
            *_of_changes(facts),
            *_of_starts(facts),
        ],
        key=lambda onset: (onset.step, onset.order),
    )
    onsets += _of_end(facts)
    if not onsets:
        return Strip(calm=_calm(facts))
    if len(onsets) > MAX_SHOWN:
        onsets = _joined(onsets)
    onsets = [replace(onset, zoom=zoom_around(onset, facts.last_step)) for onset in onsets]
    by_rank = sorted(range(len(onsets)), key=lambda i: (_RANKS[onsets[i].tone], i))
    chosen = set(by_rank[:MAX_SHOWN])
    shown = [onset for i, onset in enumerate(onsets) if i in chosen]
    rest = [onset for i, onset in enumerate(onsets) if i not in chosen]
    return Strip(shown, rest[:MAX_FOLDED], max(0, len(rest) - MAX_FOLDED))


def zoom_around(onset: StripOnset, last_step: int | None) -> tuple[int, int]:
    """The steps to show an onset in."""
    end = onset.step if onset.until is None else onset.until
    return steps_around(onset.begin, end, last_step)


def steps_around(first: int, last: int, last_step: int | None) -> tuple[int, int]:
    """The steps first..last of a run with some before and after them."""
    room = max(MIN_ZOOM, round(ZOOM_SHARE * (last_step or 0)))
    return max(0, first - room), last + room


def departure_of(steps: Floats, low: Floats, high: Floats, tolerance: float) -> tuple[int, bool] | None:
    """The first step of the last stretch of looks in which the interval lies outside of the tolerance.

    Args:
        steps: float64[J], increasing, the last step of each look; low, high: float64[J], its interval.

    Returns:
        The step, and whether the interval lies above; None if it is not outside at the last look.
    """
    if not len(steps):
        return None
    above, below = low > tolerance, high < -tolerance
    for outside, is_above in ((above, True), (below, False)):
        if outside[-1]:
            inside = np.flatnonzero(~outside)
            begin = int(inside[-1]) + 1 if len(inside) else 0
            return int(steps[begin]), is_above
    return None


def _of_alerts(facts: StripFacts) -> list[StripOnset]:
    return [_of_alert(alert) for alert in facts.alerts if alert.kind not in _ENDS]


def _of_alert(alert: AlertFact) -> StripOnset:
    if alert.kind in _TENSORS_DO:
        title, order = _TENSORS_DO[alert.kind].format(_tensors(alert)), TENSOR
        if alert.tensors_over <= 1:
            title = _singular(title)
    else:
        title, order = _LOSS_DOES.get(alert.kind, alert.name), LOSS
        if alert.kind not in _LOSS_DOES and alert.tensors:
            title, order = f"{title}: {_tensors(alert)}", TENSOR
    tone: Tone = "danger" if alert.severity == "critical" else "warning"
    detail = alert.message + (" Resolved since." if alert.is_resolved else "")
    return StripOnset(
        step=alert.onset,
        title=title,
        tone=tone,
        order=order,
        detail=detail,
        address=alert.address,
        label="Alert",
        after=alert.after,
    )


def _tensors(alert: AlertFact) -> str:
    """The tensors of an alert in few words: `grad_output of 12 layers`, `14 tensors`, or the name of one."""
    if alert.tensors_over <= 1:
        return alert.tensors[0] if alert.tensors else "a tensor"
    roles = {name.rpartition(".")[2] for name in alert.tensors}
    # Only if all are named is the role of all known.
    if len(roles) == 1 and len(alert.tensors) >= alert.tensors_over:
        return f"{roles.pop()} of {count(alert.tensors_over)} layers"
    return f"{count(alert.tensors_over)} tensors"


def _singular(title: str) -> str:
    for plural, singular in ((" overflow", " overflows"), (" underflow", " underflows")):
        if plural in title:
            return title.replace(plural, singular, 1)
    return title


def _of_loss(facts: StripFacts) -> list[StripOnset]:
    onsets = []
    departure, step = facts.departure, facts.nonfinite_step
    earlier = [alert.onset for alert in facts.alerts if alert.kind == "above_baseline"]
    # The alert says it more exactly: the comparison looks at windows, and only now and then.
    if departure is not None and not any(onset <= departure.step + NEAR for onset in earlier):
        title = "loss leaves BF16" if departure.is_above else "loss falls below BF16"
        tone: Tone = "danger" if departure.is_above else "neutral"
        onsets.append(
            StripOnset(
                step=departure.step,
                title=title,
                tone=tone,
                order=LOSS,
                detail=departure.detail,
                address=departure.address,
                label="Comparison",
            )
        )
    onsets_of_losses = [alert.onset for alert in facts.alerts if alert.kind == "loss_not_finite"]
    if step is not None and not any(onset <= step for onset in onsets_of_losses):
        onsets.append(
            StripOnset(
                step=step,
                title="loss is not finite",
                tone="danger",
                order=LOSS,
                detail="The first NaN or infinite loss.",
            )
        )
    return onsets


def _of_diagnosis(facts: StripFacts) -> list[StripOnset]:
    finding = facts.diagnosis
    if finding is None:
        return []
    tone: Tone = "danger" if finding.outcome == "cause" else "warning"
    title = f"diagnosis: {finding.cause[:1].lower()}{finding.cause[1:]}"
    return [
        StripOnset(
            step=finding.onset,
            title=title,
            tone=tone,
            order=FINDING,
            detail=finding.sentence,
            address=finding.address,
            label="Diagnosis",
            after=finding.after,
        )
    ]


def _of_changes(facts: StripFacts) -> list[StripOnset]:
    marked = [change.step for change in facts.changes if change.kind == "mark"]
    onsets = []
    for change in facts.changes:
        # A fallback that was ordered is marked by the training process as well.
        if change.kind == "fallback" and any(abs(step - change.step) <= SAME_CHANGE for step in marked):
            continue
        tone: Tone = "warning" if change.is_bad else "neutral"
        onsets.append(
            StripOnset(
                step=change.step,
                title=change.text,
                tone=tone,
                order=CHANGE,
                detail=change.detail,
                address=change.address,
                label="Details",
            )
        )
    return onsets


def _of_starts(facts: StripFacts) -> list[StripOnset]:
    onsets = []
    for start in facts.starts:
        if start.before is not None and start.first <= start.before:
            title = f"goes back from step {count(start.before)}"
            detail = f"Start {start.number} replaces what was stored from step {count(start.first)} on."
        else:
            title, detail = "resumes", f"Start {start.number} goes on from here."
        onsets.append(StripOnset(step=start.first, title=title, tone="neutral", order=START, detail=detail))
    return onsets


def _of_end(facts: StripFacts) -> list[StripOnset]:
    if not facts.ending or facts.last_step is None:
        return []
    return [
        StripOnset(
            step=facts.last_step, title=facts.ending, tone="danger", order=END, detail=facts.ending_detail
        )
    ]


def _joined(onsets: Sequence[StripOnset]) -> list[StripOnset]:
    """Onsets with the same words as one, at the first of them."""
    alike: dict[tuple[str, str], list[StripOnset]] = defaultdict(list)
    for onset in onsets:
        alike[onset.title, onset.tone].append(onset)
    joined: list[StripOnset] = []
    for same in alike.values():
        if len(same) < MIN_ALIKE:
            joined += same
            continue
        first, last = same[0], same[-1]
        detail = f"{len(same)} times in the steps {count(first.step)} to {count(last.step)}."
        title = f"{first.title}, {len(same)} times"
        joined.append(replace(first, title=title, detail=detail, until=last.step))
    return sorted(joined, key=lambda onset: (onset.step, onset.order))


def _calm(facts: StripFacts) -> str:
    if facts.last_step is None:
        return "No steps yet. What happens in the run appears here."
    return (
        f"Nothing stands out up to step {count(facts.last_step)}: no alert, no loss that is not finite, "
        "no restart and no change of precision."
    )
