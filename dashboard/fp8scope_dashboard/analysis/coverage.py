"""How much of the planned run a verdict judges, and whether a good verdict may be called final.

"Nothing wrong" is final only when the run and a run of its baseline finished as planned, and the verdict
rests on all of the planned run. Pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from fp8scope_dashboard.text.verdicts import count

# 'finished' is a run that did all it had planned; 'finished_early' ended by itself before that; 'failed'
# includes runs whose process was killed and reported so later; 'silent' is killed or cut off.
Standing = Literal["running", "finished", "finished_early", "failed", "silent"]
Unit = Literal["steps", "tokens"]
# Where `planned` comes from: what the run said, or the longest run that is compared.
Plan = Literal["total_steps", "longest_run", "unknown"]

# Verdicts that find nothing wrong. Only these need all of the run: a difference that was measured stays one.
GOOD: Final = frozenset({"equivalent", "within", "inside"})
# What a good verdict becomes while something still goes on, and where part of the run is missing for good.
PENDING: Final = "pending"
INCOMPLETE: Final = "incomplete"
# Arms on different batch sizes rarely end at the same token; this part of the plan may be missing.
SLACK: Final = 0.01


def standing_of(state: str, reached: int | None, planned: int | None, gap: float = 1.0) -> Standing:
    """How a run stands.

    Args:
        state: a runs.models.RunState.
        reached: the last stored step of its latest attempt; None for no step.
        planned: total_steps; None or 0 where unknown.
        gap: steps between two logged rows: the last row of a full run may lie that far before the end (one
            step for a script that counts from 0).
    """
    if state != "finished":
        return "failed" if state == "failed" else "silent" if state == "silent" else "running"
    is_short = bool(planned) and (reached is None or reached + gap < (planned or 0))
    return "finished_early" if is_short else "finished"


@dataclass(frozen=True)
class BaselineArm:
    """The baseline runs that a verdict rests on.

    Attributes:
        standings: of those that were used.
        reached: the furthest step of any of them.
        left_out: runs of the group that were not used: too short, or a loss that is not finite.
    """

    standings: tuple[Standing, ...] = ()
    reached: int | None = None
    left_out: int = 0

    @property
    def standing(self) -> Standing | None:
        """One run that finished as planned is enough; None where no run was used."""
        best_first: tuple[Standing, ...] = ("finished", "running", "finished_early", "failed", "silent")
        return next((standing for standing in best_first if standing in self.standings), None)


@dataclass(frozen=True)
class Coverage:
    """How much of the planned run a verdict judges.

    Attributes:
        standing: of the run.
        judged: the place up to which the verdict judges, in `unit`; None when nothing was judged.
        planned: the run's planned length in `unit`; None where unknown.
        gap: distance between two compared places at the end, in `unit`.
        reached: the last stored step of the run's latest attempt.
        cadence: steps between two of the run's own losses at the end.
        waits: whether more of the run can be judged once something that still goes on has ended.
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

    @property
    def complete(self) -> bool:
        """Whether the verdict rests on all of the planned run."""
        if self.judged is None or not self.planned:
            return False
        return self.judged + max(self.gap, SLACK * self.planned) >= self.planned

    @property
    def share(self) -> float | None:
        """Part of the planned run that is judged, 0 to 1; None where no plan is known."""
        if not self.planned:
            return None
        return 1.0 if self.complete else min(1.0, max(0.0, (self.judged or 0.0) / self.planned))

    def as_dict(self) -> dict[str, Any]:
        """JSON types only."""
        arm = {**asdict(self.baseline), "standings": list(self.baseline.standings)}
        return {**asdict(self), "baseline": arm, "share": self.share, "complete": self.complete}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Coverage:
        """What `as_dict` gave; keys of a newer version are passed over."""
        arm = stored.get("baseline") or {}
        fields = {name: stored[name] for name in cls.__dataclass_fields__ if name in stored}
        fields["baseline"] = BaselineArm(
            tuple(arm.get("standings", ())), arm.get("reached"), int(arm.get("left_out", 0))
        )
        return cls(**fields)


@dataclass(frozen=True)
class Judgement:
    """A verdict, what it covers, and why it is not final.

    Attributes:
        verdict: what may be shown: `measured`, or PENDING or INCOMPLETE in place of a good one.
        measured: what the statistics say of what is there.
        reason: why the verdict does not stand for the whole run; empty when it is final.
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
    """What may be said of a run of which the statistics say `measured`."""
    waits, reason = _obstacle(coverage)
    verdict = measured
    if reason and measured in GOOD:
        verdict = PENDING if waits else INCOMPLETE
    return Judgement(verdict, measured, reason, coverage)


def is_dead(standing: Standing | None) -> bool:
    """Whether a run ended without doing all it had planned, or is thought to have."""
    return standing in ("failed", "silent", "finished_early")


def _obstacle(coverage: Coverage) -> tuple[bool, str]:
    """Whether it will go away by itself, and what it is; no text when the verdict is final."""
    if is_dead(coverage.standing):
        return False, _dead(coverage)
    if coverage.standing == "running":
        return True, "The run is still going on."
    arm = coverage.baseline.standing
    if arm is None:
        return coverage.waits, "No baseline run could be used."
    if is_dead(arm):
        return False, _dead_baseline(coverage.baseline)
    if arm == "running":
        return True, "The baseline is still going on."
    if not coverage.complete:
        more = "The rest is still to come." if coverage.waits else "The runs have no more in common."
        return coverage.waits, f"{_up_to(coverage)} {more}"
    return False, ""


def _dead(coverage: Coverage) -> str:
    place = "before its first step" if coverage.reached is None else f"at step {coverage.reached}"
    if coverage.reached is not None and coverage.plan == "total_steps":
        place += f" of {coverage.planned:.0f} planned"
    return {
        "failed": f"The run failed {place}.",
        "silent": f"The run went silent {place}: it was killed, or cannot reach this server.",
    }.get(coverage.standing, f"The run finished early, {place}.")


def _dead_baseline(arm: BaselineArm) -> str:
    words = {"finished_early": "finished early", "failed": "failed", "silent": "went silent"}
    listed = ", ".join(f"{number} {words[one]}" for one, number in Counter(arm.standings).items())
    furthest = "" if arm.reached is None else f", the furthest at step {arm.reached}"
    return f"No baseline run finished as planned: {listed}{furthest}."


def _up_to(coverage: Coverage) -> str:
    if coverage.judged is None:
        return "Nothing of the run is judged yet."
    judged = f"step {coverage.judged:.0f}" if coverage.unit == "steps" else f"{coverage.judged:.0f} tokens"
    return f"The verdict covers the run up to {judged} only."


def percent_of(coverage: Coverage) -> str:
    """`12 %`, rounded down, so that only all of it is 100 %; empty where no plan is known."""
    if coverage.share is None:
        return ""
    whole = int(100.0 * coverage.share + 1e-9)
    return "< 1 %" if whole == 0 and coverage.share > 0 else f"{whole} %"


def in_short(coverage: Coverage) -> str:
    """`12 % of the planned run`, where there is little room."""
    if coverage.judged is None:
        return ""
    if not (share := percent_of(coverage)):
        return "plan unknown"
    return f"{share} of the {'planned' if coverage.plan == 'total_steps' else 'longest'} run"


def in_full(coverage: Coverage) -> str:
    """A sentence: what the verdict judges, of how much."""
    if coverage.judged is None:
        return ""
    unit = coverage.unit
    judged = f"step {coverage.judged:.0f}" if unit == "steps" else f"{coverage.judged:.0f} tokens"
    if not coverage.planned:
        return f"Judged up to {judged}; how long the run will be is unknown."
    share = percent_of(coverage)
    if coverage.plan == "total_steps":
        text = f"Judged up to {judged} of {coverage.planned:.0f} planned: {share} of the planned run."
    else:
        text = (
            f"Judged up to {judged}; the run's plan is unknown, the longest run compared has "
            f"{coverage.planned:.0f} {unit}: {share} of that."
        )
    if coverage.baseline.left_out:
        text += f" {count(coverage.baseline.left_out, 'baseline run')} could not be used."
    return text


def cadence(steps: Sequence[int]) -> float:
    """Usual distance between the last of ascending steps (at most 20 of them); 1 for fewer than two."""
    last = sorted(int(step) for step in steps[-20:])
    gaps = sorted(after - before for before, after in zip(last, last[1:], strict=False))
    return float(max(1, gaps[len(gaps) // 2])) if gaps else 1.0
