"""From conditions of many tensors to few alarms: tensors that leave their range together have one cause."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors.arrays import pack, unpack
from fp8scope_dashboard.alerts.detectors.base import NAMED, SAME_CAUSE, ConditionChange, State
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.text.onsets import steps_in_words

Bools = NDArray[np.bool_]
Int64s = NDArray[np.int64]
Parameters = Mapping[str, float]

# In rows. An agent within its overhead budget observes plain tensors at least this often.
LONGEST_GAP = 100
# The observations without a condition that cancel one with it; see `tensor_alarm`.
CANCEL = 12
# Fewer observations than this are no intermittent condition.
MIN_SCORE = 5
# An alarm ends after this many times its longest pause, but at most this many times `recover`.
PAUSES, MAX_PAUSES = 2, 10
# Causes that are open at once; tensors of further ones join the latest.
MAX_GROUPS = 16
# Layers that the evidence names.
MAX_LAYERS = 256
LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.)")


@dataclass(frozen=True, kw_only=True)
class Wording:
    """The words of a message.

    Attributes:
        singular, plural: what the tensors do: 'overflows', 'overflow'.
        amount: the value of the worst tensor, with its name: '5 % of blocks.1.input'.
        limit: what the value is compared with: 'above the limit of 0.1 %'.
        threshold: the limit as a number, if the evidence shows the same quantity.
        unit: the name of the value in the evidence: 'rate', or 'octaves' for powers of two.
    """

    singular: str
    plural: str
    amount: Callable[[float, str], str]
    limit: str
    threshold: float | None = None
    unit: str = "rate"


@dataclass(frozen=True, kw_only=True)
class ConditionRows:
    """Rows of a condition.

    Attributes:
        steps: int64[R], ascending.
        over: bool[R, n], whether the condition holds.
        seen: bool[R, n], whether the tensor was observed; false wherever `over` is undecided.
        values: float64[R, n], used where `over` holds.
        gains: int64[R, n], of an intermittent condition: how much an observation adds to the score, at most
            CANCEL, in units of 1 / CANCEL. None: CANCEL.
        began, before: int64[R, n], of a condition that is known only after it has lasted: its first step, and
            the last observation before that, negative if there is none. None: it begins in its own row.
        observed: bool[R, n], whether the tensor was observed, judged or not; None: `seen`.
    """

    steps: Int64s
    over: Bools
    seen: Bools
    values: Floats
    gains: Int64s | None = None
    began: Int64s | None = None
    before: Int64s | None = None
    observed: Bools | None = None


def tensor_alarm(
    state: State,
    rows: ConditionRows,
    names: Sequence[str],
    parameters: Parameters,
    wording: Wording,
    *,
    intermittent: bool = False,
) -> tuple[State, list[ConditionChange]]:
    """Open when the condition of a tensor holds in `points` consecutive observations.

    With `intermittent` also when a score reaches `points` (at least MIN_SCORE): an observation with the
    condition adds 1, or its `gains`, and one without takes off 1 / CANCEL, down to 0. This is the CUSUM of
    Reynolds and Stoumbos (1999) for a share: a condition that holds more often than in one of CANCEL + 1
    observations is found, and a rarer one hardly ever.

    Tensors whose onsets are at most SAME_CAUSE steps from those of an open alarm belong to it: a finding with
    `update` completes it. Other tensors open another alarm. A tensor leaves its alarm after `recover` rows
    without the condition, or PAUSES times its longest pause so far. Rows in which it is not observed do not
    count, up to LONGEST_GAP of them. An alarm closes with its last tensor.

    Args:
        names: n names; later calls may add columns but not move them.
        parameters: `points`, in observations; `recover`, in rows.
    """
    needed = max(int(parameters["points"]), MIN_SCORE) * CANCEL if intermittent else 0
    board = _Board.restored(state, len(names))
    last_seen = unpack(state.get("last_seen"), len(names), np.int64(-1))
    board.born = _first_observed(rows, unpack(state.get("born"), len(names), np.int64(-1)))
    findings: list[ConditionChange] = []
    any_over: Bools = np.asarray(rows.over.any(axis=1))
    for i, step in enumerate(rows.steps.tolist()):
        if not (any_over[i] or board.is_busy):
            continue
        board.count(rows, i, step, last_seen)
        if needed:
            board.score(rows, i, step, last_seen, needed)
        findings += board.open_or_join(step, names, parameters, wording, needed)
        findings += board.let_go(rows.over[i], rows.seen[i], step, parameters)
    if len(rows.steps):
        last_seen = _seen_before(rows, len(rows.steps), np.ones(len(names), bool), last_seen)
    return {**board.as_state(), "last_seen": pack(last_seen), "born": pack(board.born)}, findings


@dataclass(kw_only=True)
class _Board:
    """The state of every tensor: int64[n] each, and float64[n] of `peaks`.

    Attributes:
        counts: consecutive observations with the condition.
        onsets: the first step of them; `after`: the last step before that at which it was observed.
        group: the onset of the alarm that the tensor belongs to; -1: none.
        calm: rows without the condition; gaps: rows without an observation.
        pause: the largest `calm` so far, of tensors with an alarm or a score.
        scores: of an intermittent condition, in units of 1 / CANCEL; `since` and `since_after` are to them
            what `onsets` and `after` are to `counts`.
        last_onset: of each open alarm, by its onset.
        first: of each open alarm, its first tensor, which may have recovered, with its `onsets` and `after`.
        born: the first observation, in which nothing may have been judged.
    """

    counts: Int64s
    onsets: Int64s
    after: Int64s
    group: Int64s
    calm: Int64s
    gaps: Int64s
    pause: Int64s
    scores: Int64s
    since: Int64s
    since_after: Int64s
    peaks: Floats
    last_onset: dict[int, int]
    first: dict[int, tuple[int, int, int]]
    born: Int64s

    @classmethod
    def restored(cls, state: State, n: int) -> _Board:
        a, b, c, d, e, f, g, h, i = np.zeros((9, n), np.int64)
        board = cls(
            counts=a,
            onsets=b,
            after=c,
            group=np.full(n, -1),
            calm=d,
            gaps=e,
            pause=f,
            scores=g,
            since=h,
            since_after=i,
            peaks=np.zeros(n),
            last_onset={},
            first={},
            born=np.full(n, -1),
        )
        for key, values in state.get("tensors", {}).items():
            # States of earlier versions lack the columns from `pause` to `since_after`.
            for column, value in zip(board._columns, values[:-1], strict=False):
                column[int(key)] = value
            board.peaks[int(key)] = values[-1]
        board.last_onset.update({int(onset): last for onset, last in state.get("groups", {}).items()})
        for onset, (tensor, began, after) in state.get("first_tensors", {}).items():
            board.first[int(onset)] = (tensor, began, after)
        return board

    @property
    def _columns(self) -> list[Int64s]:
        alarm = [self.counts, self.onsets, self.after, self.group, self.calm, self.gaps]
        return [*alarm, self.pause, self.scores, self.since, self.since_after]

    def as_state(self) -> State:
        active = np.flatnonzero((self.counts > 0) | (self.scores > 0) | (self.group >= 0)).tolist()
        columns = self._columns
        tensors = {str(i): [*(int(column[i]) for column in columns), float(self.peaks[i])] for i in active}
        return {
            "tensors": tensors,
            "groups": {str(onset): last for onset, last in self.last_onset.items()},
            "first_tensors": {str(onset): list(first) for onset, first in self.first.items()},
            "open": bool(self.last_onset),
        }

    @property
    def is_busy(self) -> bool:
        return bool(self.last_onset) or bool(self.counts.any()) or bool(self.scores.any())

    def count(self, rows: ConditionRows, i: int, step: int, last_seen: Int64s) -> None:
        over, seen = rows.over[i], rows.seen[i]
        self.counts[seen & ~over] = 0
        new = over & (self.counts == 0)
        # A tensor of an open alarm keeps its onset when its condition pauses.
        new &= self.group < 0
        if new.any():
            self.onsets[new] = step if rows.began is None else rows.began[i, new]
            before = _seen_before(rows, i, new, last_seen) if rows.before is None else rows.before[i, new]
            self.after[new] = np.where(before < 0, self.born[new] - 1, before)
            self.peaks[new & (self.scores == 0)] = 0.0
        self.counts[over] += 1
        self.peaks[over] = np.maximum(self.peaks[over], rows.values[i][over])

    def score(self, rows: ConditionRows, i: int, step: int, last_seen: Int64s, needed: int) -> None:
        """Update the scores. One that reaches `needed` makes its onset that of the tensor."""
        over, outside = rows.over[i], self.group < 0
        quiet = rows.seen[i] & ~over
        begins = over & outside & (self.scores == 0)
        if begins.any():
            self.since[begins] = step
            before = _seen_before(rows, i, begins, last_seen)
            self.since_after[begins] = np.where(before < 0, self.born[begins] - 1, before)
            self.calm[begins] = self.pause[begins] = 0
        self.calm[quiet & outside & (self.scores > 0)] += 1
        again = over & outside
        self.pause[again] = np.maximum(self.pause[again], self.calm[again])
        self.calm[again] = 0
        gains = CANCEL if rows.gains is None else rows.gains[i]
        self.scores = np.clip(self.scores + gains * over - quiet, 0, needed)

    def open_or_join(
        self, step: int, names: Sequence[str], parameters: Parameters, wording: Wording, needed: int
    ) -> list[ConditionChange]:
        in_a_row = self.counts >= parameters["points"]
        # A tensor that is about to be sure by observations in a row has the onset of those.
        broken = 2 * self.counts <= parameters["points"]
        often = broken & ~in_a_row & (self.scores >= needed) if needed else np.zeros_like(in_a_row)
        sure = (in_a_row | often) & (self.group < 0)
        if not sure.any():
            return []
        self.onsets[sure & often] = self.since[sure & often]
        self.after[sure & often] = self.since_after[sure & often]
        changed: dict[int, bool] = {}
        for i in np.flatnonzero(sure)[np.argsort(self.onsets[sure], kind="stable")].tolist():
            if self.group[i] >= 0:
                continue
            group = self._group_of(int(self.onsets[i]))
            if group is None:
                group = self._free_onset(int(self.onsets[i]))
                changed[group] = True
                self.last_onset[group] = group
            self._add(i, group)
            changed.setdefault(group, False)
        return [self._finding(group, new, step, names, wording) for group, new in changed.items()]

    def _add(self, i: int, group: int) -> None:
        """Add a tensor, and all that began about the same time, even if they are not sure yet."""
        near = (self.counts > 0) & (self.group < 0) & (np.abs(self.onsets - self.onsets[i]) <= SAME_CAUSE)
        self.group[near] = group
        self.calm[near] = 0
        self.gaps[near] = 0
        self.last_onset[group] = max(self.last_onset[group], int(self.onsets[near].max()))

    def _group_of(self, onset: int) -> int | None:
        near = [
            group
            for group, last in self.last_onset.items()
            if group - SAME_CAUSE <= onset <= last + SAME_CAUSE
        ]
        if not near and len(self.last_onset) >= MAX_GROUPS:
            near = [max(self.last_onset)]
        return max(near, default=None)

    def _free_onset(self, onset: int) -> int:
        while onset in self.last_onset:
            onset += 1
        return onset

    def let_go(self, over: Bools, seen: Bools, step: int, parameters: Parameters) -> list[ConditionChange]:
        """Take the tensors that have recovered out of their alarms, and close those that have none left."""
        if not self.last_onset:
            return []
        member = self.group >= 0
        unseen = member & ~seen & (self.counts > 0)
        self.gaps[unseen] += 1
        self.gaps[~unseen] = 0
        waits = (self.gaps > 0) & (self.gaps <= LONGEST_GAP)
        back = over & member
        self.pause[back] = np.maximum(self.pause[back], self.calm[back])
        self.calm[back] = 0
        self.calm[member & ~over & ~waits] += 1
        recover = int(parameters["recover"])
        leaving = member & (self.calm >= np.clip(PAUSES * self.pause, recover, MAX_PAUSES * recover))
        if not leaving.any():
            return []
        # The old counts of tensors that are no longer observed must not open it again.
        self.counts[leaving] = self.scores[leaving] = self.pause[leaving] = 0
        self.group[leaving] = -1
        open_groups = set(np.unique(self.group).tolist())
        closed = [group for group in self.last_onset if group not in open_groups]
        for group in closed:
            del self.last_onset[group]
            self.first.pop(group, None)
        return [ConditionChange(opened=False, onset_step=group, step=step) for group in closed]

    def _first_of(self, group: int, members: Int64s) -> tuple[int, int, int]:
        """The first tensor of an alarm, its onset, and the last step before that at which it was observed."""
        i = int(members[np.argmin(self.onsets[members])])
        now = (i, int(self.onsets[i]), int(self.after[i]))
        first = min(self.first.get(group, now), now, key=lambda tensor: tensor[1])
        self.first[group] = first
        return first

    def _finding(
        self, group: int, new: bool, step: int, names: Sequence[str], wording: Wording
    ) -> ConditionChange:
        members = np.flatnonzero(self.group == group)
        worst = members[np.argsort(-self.peaks[members], kind="stable")]
        first, onset, after = self._first_of(group, members)
        tensors = [
            {
                "name": names[i],
                wording.unit: float(self.peaks[i]),
                "onset_step": int(self.onsets[i]),
                "after_step": int(self.after[i]),
            }
            for i in worst[:NAMED].tolist()
        ]
        peak, name = float(self.peaks[worst[0]]), names[int(worst[0])]
        since = f"step {steps_in_words(onset, after)}"
        if len(members) == 1:
            message = (
                f"{name} {wording.singular} since {since}: {wording.amount(peak, name)}, {wording.limit}."
            )
        else:
            where = layers_in(names[i] for i in members.tolist())
            message = (
                f"{len(members)} tensors{where} {wording.plural}, first {names[first]} at {since}; "
                f"the worst: {wording.amount(peak, name)}, {wording.limit}."
            )
        evidence: dict[str, Any] = {
            "tensors": tensors,
            "tensors_over": len(members),
            "layers": _layers(names[i] for i in members.tolist())[:MAX_LAYERS],
            "last_onset": self.last_onset[group],
            # The worst tensors, which are named above, may not have the first one.
            "first": {"name": names[first], "onset_step": onset, "after_step": after},
        }
        return ConditionChange(
            opened=True,
            onset_step=group,
            step=step,
            value=peak,
            threshold=wording.threshold,
            message=message,
            evidence=evidence,
            update=not new,
        )


def _seen_before(rows: ConditionRows, i: int, columns: Bools, last_seen: Int64s) -> Int64s:
    """The last step before row i at which each column was observed; -1: never. int64[columns.sum()].

    `last_seen`, int64[n], is the same for the first row.
    """
    earlier = rows.seen[:i, columns]
    if not len(earlier):
        return last_seen[columns]
    last = len(earlier) - 1 - np.argmax(earlier[::-1], axis=0)
    return np.where(earlier.any(axis=0), rows.steps[last], last_seen[columns])


def _first_observed(rows: ConditionRows, born: Int64s) -> Int64s:
    """The first observation of each column, int64[n]; `born` are those of earlier rows, -1: none."""
    observed = rows.seen if rows.observed is None else rows.observed
    if not len(rows.steps) or not (born < 0).any():
        return born
    first = rows.steps[np.argmax(observed, axis=0)]
    return np.where((born < 0) & observed.any(axis=0), first, born)


def _layers(names: Iterable[str]) -> list[int]:
    """The first number in each name, ascending; empty if a name has none."""
    matches = [LAYER.search(name) for name in names]
    numbers = {int(match.group(1)) for match in matches if match is not None}
    return [] if None in matches else sorted(numbers)


def layers_in(names: Iterable[str]) -> str:
    """' in layers 20-24', from the first number in each name; empty if a name has none.

    Where the layers are in several parts of the model, these are named: ' in layers encoder.3, decoder.0-2'.
    """
    parts: dict[str, list[str]] = {}
    for name in names:
        number = LAYER.search(name)
        if number is None:
            return ""
        parts.setdefault(name[: number.start(1)], []).append(name)
    layers = {part: _layers(members) for part, members in parts.items()}
    spans = [
        f"{part if len(parts) > 1 else ''}{span}"
        for part, numbers in layers.items()
        for span in _spans(numbers)
    ]
    if not spans:
        return ""
    word = "layers" if sum(map(len, layers.values())) > 1 else "layer"
    return f" in {word} {', '.join(spans[:6])}{' and others' if len(spans) > 6 else ''}"


def _spans(ordered: Sequence[int]) -> list[str]:
    """Ascending numbers with neighbours joined: `0`, `20-24`."""
    numbers = set(ordered)
    starts = [n for n in ordered if n - 1 not in numbers]
    ends = [n for n in ordered if n + 1 not in numbers]
    return [f"{a}-{b}" if b > a else str(a) for a, b in zip(starts, ends, strict=True)]
