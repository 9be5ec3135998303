"""The share of the planned run that a verdict covers, and whether a good verdict is final.

A good verdict is final only if the run and a run of its baseline finished as planned, and the verdict covers
all of the planned run. Pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from fp8scope_dashboard.text.numbers import count

# 'finished': the run did all planned steps; 'finished_early': it ended regularly before that; 'failed':
# includes processes that were killed and reported it later; 'silent': killed or without a connection.
Standing = Literal["running", "finished", "finished_early", "failed", "silent"]
Unit = Literal["steps", "tokens"]
# Where `planned` comes from: the run's own total_steps, or the longest run that is compared.
Plan = Literal["total_steps", "longest_run", "unknown"]

# Good verdicts. Only these need all of the run: a measured difference remains one.
GOOD: Final = frozenset({"equivalent", "better"})
# A good verdict becomes PENDING while a run continues, and INCOMPLETE if part of the run will never come.
PENDING: Final = "pending"
INCOMPLETE: Final = "incomplete"
# Runs with different batch sizes rarely end at the same token: this share of the plan may be missing.
SLACK: Final = 0.01
# Of a verdict in short, missing steps are named from this percentage on.
SHOWN_MISSING: Final = 0.5
# A gap between two logged steps is a hole if it is so many times as long as those beside it.
HOLE: Final = 5


def standing_of(state: str, reached: int | None, planned: int | None, gap: float = 1.0) -> Standing:
    """The standing of a run.

    Args:
        state: a runs.models.RunState.
        reached: the last stored step of its latest attempt; None if it has none.
        planned: total_steps; None or 0 if unknown.
        gap: steps between two logged rows. The last row of a complete run may be that far from the end (one
            step for a script that counts from 0).
    """
    if state != "finished":
        return "failed" if state == "failed" else "silent" if state == "silent" else "running"
    is_short = bool(planned) and (reached is None or reached + gap < (planned or 0))
    return "finished_early" if is_short else "finished"


@dataclass(frozen=True)
class BaselineArm:
    """The baseline runs that a verdict uses.

    Attributes:
        standings: of the runs that were used.
        reached: the furthest step of any of them.
        left_out: runs of the group that were not used: too short, or with a loss that is not finite.
        missing: steps that are missing of the run that lacks the most.
    """

    standings: tuple[Standing, ...] = ()
    reached: int | None = None
    left_out: int = 0
    missing: int = 0

    @property
    def standing(self) -> Standing | None:
        """The best standing: one run that finished as planned is enough. None if no run was used."""
        best_first: tuple[Standing, ...] = ("finished", "running", "finished_early", "failed", "silent")
        return next((standing for standing in best_first if standing in self.standings), None)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The share of the planned run that a verdict covers.

    Attributes:
        standing: of the run.
        judged: the end of the judged range, in `unit`; None if nothing was judged.
        planned: the run's planned length in `unit`; None if unknown.
        gap: distance between two compared points at the end, in `unit`.
        reached: the last stored step of the run's latest attempt.
        cadence: steps between two of the run's losses at the end.
        waits: whether more of the run can be judged later, because a run that it depends on continues.
        missing: of `logged` steps that the run went through while it logged, those that no verdict can judge,
            because the agent dropped them or the server never received them.
    """

    standing: Standing
    judged: float | None = None
    planned: float | None = None
    unit: Unit = "steps"
    plan: Plan = "unknown"
    gap: float = 1.0
    reached: int | None = None
    cadence: float = 1.0
    waits: bool = False
    baseline: BaselineArm = BaselineArm()
    missing: int = 0
    logged: int = 0

    @property
    def complete(self) -> bool:
        """Return whether the verdict covers all of the planned run."""
        if self.judged is None or not self.planned:
            return False
        return self.judged + max(self.gap, SLACK * self.planned) >= self.planned

    @property
    def share(self) -> float | None:
        """Judged share of the planned run, 0 to 1; None if the plan is unknown."""
        if not self.planned:
            return None
        return 1.0 if self.complete else min(1.0, max(0.0, (self.judged or 0.0) / self.planned))

    def as_dict(self) -> dict[str, Any]:
        """The fields, `share` and `complete` as JSON types."""
        arm = {**asdict(self.baseline), "standings": list(self.baseline.standings)}
        return {**asdict(self), "baseline": arm, "share": self.share, "complete": self.complete}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Coverage:
        """Read the result of `as_dict`; ignores keys of a newer version."""
        arm = stored.get("baseline") or {}
        fields = {name: stored[name] for name in cls.__dataclass_fields__ if name in stored}
        fields["baseline"] = BaselineArm(
            tuple(arm.get("standings", ())),
            arm.get("reached"),
            int(arm.get("left_out", 0)),
            int(arm.get("missing", 0)),
        )
        return cls(**fields)


@dataclass(frozen=True)
class Judgement:
    """A verdict, what it covers, and why it is not final.

    Attributes:
        verdict: the verdict to show: `measured`, or PENDING or INCOMPLETE instead of a good one.
        measured: the verdict of the statistics on the stored data.
        reason: why the verdict does not hold for the whole run; empty if it is final.
    """

    verdict: str
    measured: str
    reason: str
    coverage: Coverage

    @property
    def final(self) -> bool:
        return not self.reason

    def as_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "verdict": self.verdict,
            "measured": self.measured,
            "final": self.final,
            "reason": self.reason,
            "coverage": self.coverage.as_dict(),
        }


def conclude(measured: str, coverage: Coverage) -> Judgement:
    """The judgement on a run from the verdict of the statistics and what it covers."""
    waits, reason = _reason_not_final(coverage)
    verdict = measured
    if reason and measured in GOOD:
        verdict = PENDING if waits else INCOMPLETE
    return Judgement(verdict, measured, reason, coverage)


def is_dead(standing: Standing | None) -> bool:
    """Return whether a run ended, or seems to have ended, before its planned end."""
    return standing in ("failed", "silent", "finished_early")


def _reason_not_final(coverage: Coverage) -> tuple[bool, str]:
    """Return why a verdict is not final ('' if it is), and whether that can change without a new run."""
    if is_dead(coverage.standing):
        return False, _dead(coverage)
    if coverage.standing == "running":
        return True, "The run has not finished yet."
    arm = coverage.baseline.standing
    if arm is None:
        return coverage.waits, "No part of the run has been compared with a baseline yet."
    if is_dead(arm):
        return False, _dead_baseline(coverage.baseline)
    if arm == "running":
        return True, "The baseline has not finished yet."
    if not coverage.complete:
        rest = "The rest will follow." if coverage.waits else "The runs have no further steps in common."
        return coverage.waits, f"{_up_to(coverage)} {rest}"
    return False, ""


def _dead(coverage: Coverage) -> str:
    when = "before its first step" if coverage.reached is None else f"at step {coverage.reached:,.0f}"
    if coverage.reached is not None and coverage.plan == "total_steps":
        when += f" of {coverage.planned:,.0f} planned"
    return {
        "failed": f"The run failed {when}.",
        "silent": f"The run went silent {when}: it was killed, or cannot reach this server.",
    }.get(coverage.standing, f"The run finished early, {when}.")


def _dead_baseline(arm: BaselineArm) -> str:
    words = {"finished_early": "finished early", "failed": "failed", "silent": "went silent"}
    listed = ", ".join(f"{number} {words[standing]}" for standing, number in Counter(arm.standings).items())
    furthest = "" if arm.reached is None else f", the furthest at step {arm.reached:,.0f}"
    return f"No baseline run finished as planned: {listed}{furthest}."


def _up_to(coverage: Coverage) -> str:
    if coverage.judged is None:
        return "No part of the run has been judged yet."
    return f"The verdict covers the run up to {_end_of(coverage.judged, coverage.unit)} only."


def _end_of(judged: float, unit: Unit) -> str:
    return f"step {judged:,.0f}" if unit == "steps" else f"{judged:,.0f} tokens"


def percent_of(coverage: Coverage) -> str:
    """`12 %`, rounded down so that only a complete run is at 100 %; empty if the plan is unknown."""
    if coverage.share is None:
        return ""
    whole = int(100.0 * coverage.share + 1e-9)
    return "< 1 %" if whole == 0 and coverage.share > 0 else f"{whole} %"


def in_short(coverage: Coverage) -> str:
    """The judged share in a few words: `12 % of the planned run`."""
    if coverage.judged is None:
        return ""
    if not (share := percent_of(coverage)):
        return "plan unknown"
    text = f"{share} of the {'planned' if coverage.plan == 'total_steps' else 'longest'} run"
    lacking = 100.0 * coverage.missing / max(coverage.logged, 1)
    return f"{text}, {lacking:.0f} % of its steps missing" if lacking >= SHOWN_MISSING else text


def in_full(coverage: Coverage) -> str:
    """The judged share as a sentence."""
    if coverage.judged is None:
        return ""
    unit = coverage.unit
    judged = _end_of(coverage.judged, unit)
    if not coverage.planned:
        return f"Judged up to {judged}; how long the run will be is unknown."
    share = percent_of(coverage)
    if coverage.plan == "total_steps":
        text = f"Judged up to {judged} of {coverage.planned:,.0f} planned: {share} of the planned run."
    else:
        text = (
            f"Judged up to {judged}; the run's plan is unknown, the longest run compared has "
            f"{coverage.planned:,.0f} {unit}: {share} of that."
        )
    if coverage.missing:
        text += (
            f" {coverage.missing:,} of its {count(coverage.logged, 'step')} are missing: dropped, or never "
            "received."
        )
    if coverage.baseline.missing:
        text += f" Of a baseline run {count(coverage.baseline.missing, 'step')} are missing."
    if coverage.baseline.left_out:
        text += f" {count(coverage.baseline.left_out, 'baseline run')} could not be used."
    return text


def missing_steps(steps: Sequence[int], dropped: int) -> tuple[int, int]:
    """The steps of a run that are missing, and all that it went through while it logged.

    Args:
        steps: ascending, with a loss.
        dropped: counted by the agent. Other steps are missing in gaps that are HOLE times as long as those on
            both sides: a script that logs at uneven steps has no holes.
    """
    if len(steps) < 2:
        return 0, 0
    gaps = [after - before for before, after in zip(steps, steps[1:], strict=False)]
    beside = [max(pair) for pair in zip([gaps[0], *gaps[:-1]], [*gaps[1:], gaps[-1]], strict=True)]
    holes = sum(gap - usual for gap, usual in zip(gaps, beside, strict=True) if gap > HOLE * usual)
    logged = int(steps[-1] - steps[0]) + 1
    return min(max(int(holes), dropped), logged), logged


def cadence(steps: Sequence[int]) -> float:
    """Median distance between the last of ascending steps (at most 20 of them); 1 for fewer than two."""
    last = sorted(int(step) for step in steps[-20:])
    gaps = sorted(after - before for before, after in zip(last, last[1:], strict=False))
    return float(max(1, gaps[len(gaps) // 2])) if gaps else 1.0
