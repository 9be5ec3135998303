"""Step (a): is it FP8 at all? Compares the trouble of the run with that of its BF16 arm. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fp8scope_dashboard.diagnosis.curves import Trouble, troubles, window_of
from fp8scope_dashboard.diagnosis.findings import EvidenceLink, Finding
from fp8scope_dashboard.diagnosis.tensors import Int64s
from fp8scope_dashboard.statistics.arrays import Floats

# Two troubles are the same if they begin within 2 % of the run, or 3 steps.
SAME_SHARE: Final = 0.02
SAME_STEPS: Final = 3
# A spike that recovers is shared, too, if BF16 has one of at least half its size at another step: the spikes
# of an unstable training come at random.
SAME_SIZE: Final = 0.5
# The last fifth of the common steps decides whether the loss is worse at the end: by 1 %, and by four
# standard errors, where one is doubled because neighbouring steps are correlated.
LAST_SHARE: Final = 0.2
WORSE: Final = 0.01
ERRORS: Final = 4.0
CORRELATED: Final = 2.0
# A learning rate that rises by this factor within LR_STEPS before a jump explains the jump.
RATE_RISES: Final = 1.5
RATE_STEPS: Final = 5
# A learning rate may be too high without a rise. Weights then grow, which hides how large their updates are:
# updates are taken relative to the first weights. In benchmarks/learning_rate.py, trainings end within 3.5 %
# of the best loss up to .0128, and at least 5.5 % above it from .021 on. The limit is the geometric mean.
LARGE_UPDATE: Final = 0.016
# And the loss does not fall faster, to the last fifth from a tenth to a quarter of the run, than the median
# of 93 public curves (`benchmarks/learning_rate.py --curves`).
USUAL_FALL: Final = 0.834
MIN_POINTS: Final = 40
# Growth that is worth saying.
GROWN: Final = 1.5
# Steps between the onsets that this step and an alert name for one rise.
NEAR: Final = 100
# A jump in the first steps is the training settling, not its data.
SETTLING: Final = 10
# A jump of so few steps is a hard batch, after which the loss goes on as before.
FEW_STEPS: Final = 10


@dataclass(frozen=True, kw_only=True)
class RunLoss:
    """A run's loss: steps int64[n], losses float64[n].

    Attributes:
        rates: the learning rate at these steps.
        update: median ratio of update to weight after the first tenth of the run.
        growth: ratio of the weights' amax at the end to that at the beginning, which three quarters of the
            weights exceed. Some weights may begin at zero.
        told: the onsets that alerts of the run have told of its loss.
    """

    name: str
    steps: Int64s
    losses: Floats
    seed: int | None = None
    rates: Floats | None = None
    run: str = ""
    update: float | None = None
    growth: float | None = None
    told: tuple[int, ...] = ()


@dataclass(frozen=True)
class JudgedWindow:
    """A reference window of the agent: the same batches in BF16 from the same state."""

    first: int
    last: int
    verdict: str


@dataclass(frozen=True)
class ReferenceFinding:
    """The knowledge of this step.

    Attributes:
        lasting: BF16 is in lasting trouble too, so that nothing of FP8 can be said.
        own: trouble of the run that BF16 does not show.
        is_worse: whether the run ends worse than BF16.
    """

    finding: Finding
    lasting: bool = False
    own: tuple[Trouble, ...] = ()
    is_worse: bool = False


@dataclass(frozen=True)
class _Matched:
    trouble: Trouble
    theirs: Trouble
    arm: RunLoss


def compare_trouble(
    run: RunLoss,
    baselines: Sequence[RunLoss],
    windows: Sequence[JudgedWindow] = (),
    resumes: Sequence[int] = (),
) -> ReferenceFinding:
    """Match the troubles of a run with those of its BF16 runs.

    A trouble is shared if the BF16 run with the same seed shows it, or half of the BF16 runs do: it begins
    at about the same step, or BF16 is in trouble to its end as well.
    """
    ours = [_as_told(trouble, run.told) for trouble in troubles(run.steps, run.losses)]
    arms = [(arm, troubles(arm.steps, arm.losses)) for arm in baselines if len(arm.steps)]
    worse = is_worse(run, [arm for arm, _ in arms])
    if not arms:
        return _alone(run, ours, windows, resumes)
    shared = [match for trouble in ours if (match := _match(trouble, run, arms)) is not None]
    own = tuple(trouble for trouble in ours if trouble not in [match.trouble for match in shared])
    links = (EvidenceLink("compare", "Both arms"),)
    # Two such trainings drift apart by several per cent, whatever their precision. So a loss that ends higher
    # is no evidence against FP8; trouble of its own is.
    if not shared and not (own and worse) and _is_driven_too_hard(run):
        hard = [arm for arm, _ in arms if _is_driven_too_hard(arm)]
        if hard and (2 * len(hard) >= len(arms) or run.seed in [arm.seed for arm in hard]):
            return ReferenceFinding(_too_hard(run, hard[0], links), True)
    if not ours:
        sentence = f"The run's loss has no spike and no rise (compared with {_arms(len(arms))})."
        return ReferenceFinding(
            Finding(step="reference", outcome="clear", sentence=sentence, links=links), is_worse=worse
        )
    if not shared:
        sentence = (
            f"The trouble is the FP8 run's alone: {describe(ours[0])} (compared with {_arms(len(arms))})."
        )
        onset = ours[0].onset
        return ReferenceFinding(
            Finding(step="reference", outcome="clear", sentence=sentence, onset=onset, links=links),
            False,
            own,
            worse,
        )
    lasting = any(match.trouble.lasts and match.theirs.lasts for match in shared)
    if own and not lasting:
        first = own[0]
        onset = shared[0].trouble.onset
        sentence = f"BF16 shows the trouble at step {onset:,} too, but not this: {describe(first)}."
        return ReferenceFinding(
            Finding(step="reference", outcome="clear", sentence=sentence, onset=first.onset, links=links),
            False,
            own,
            worse,
        )
    return ReferenceFinding(_not_fp8(run, shared, links), lasting, () if lasting else own, worse)


def falls_slowly(curve: RunLoss) -> bool:
    """Return whether the loss falls no faster than usual after the first quarter of the run.

    See USUAL_FALL.
    """
    finite = curve.losses[np.isfinite(curve.losses)]
    if len(finite) < MIN_POINTS:
        return False
    early = float(finite[len(finite) // 10 : len(finite) // 4].mean())
    late = float(finite[-int(LAST_SHARE * len(finite)) :].mean())
    return late > USUAL_FALL * early


def update_of_first_weights(curve: RunLoss) -> float | None:
    """Ratio of an update to the weights before they grew; None if it is not recorded."""
    return None if curve.update is None else curve.update * max(1.0, curve.growth or 1.0)


def _is_driven_too_hard(curve: RunLoss) -> bool:
    update = update_of_first_weights(curve)
    return update is not None and update >= LARGE_UPDATE and falls_slowly(curve)


def _too_hard(run: RunLoss, arm: RunLoss, links: tuple[EvidenceLink, ...]) -> Finding:
    update = update_of_first_weights(arm) or 0.0
    grown = f", which grow {arm.growth:.1f}-fold" if arm.growth is not None and arm.growth >= GROWN else ""
    sentence = (
        f"Not FP8: in the BF16 run {arm.name}, as in the FP8 run, each update is {100.0 * update:.1f} % of "
        f"the first weights{grown}, so that the learning rate is too high."
    )
    return Finding(
        step="reference",
        outcome="not_fp8",
        sentence=sentence,
        cause="learning_rate",
        onset=int(run.steps[0]),
        tensors=(),
        suggestion="Lower the learning rate, or warm up for longer, in both arms.",
        links=(*links, EvidenceLink("run", arm.name, {"run": arm.run})),
    )


def is_worse(run: RunLoss, baselines: Sequence[RunLoss]) -> bool:
    """Return whether the loss is clearly above BF16's over the last common steps."""
    if not baselines:
        return False
    steps = run.steps
    for arm in baselines:
        steps = np.intersect1d(steps, arm.steps)
    steps = steps[-max(5, int(LAST_SHARE * len(steps))) :]
    if len(steps) < 5:
        return False
    ours = run.losses[np.searchsorted(run.steps, steps)]
    theirs = np.mean([arm.losses[np.searchsorted(arm.steps, steps)] for arm in baselines], axis=0)
    if not np.isfinite(theirs).all():
        return False
    if not np.isfinite(ours).all():
        return True
    difference = ours - theirs
    error = CORRELATED * float(difference.std(ddof=1)) / np.sqrt(len(steps))
    mean = float(difference.mean())
    return mean > WORSE * abs(float(theirs.mean())) and mean > ERRORS * error


def _as_told(trouble: Trouble, told: Sequence[int]) -> Trouble:
    """A rise with the onset that an alert has told of it, so that both name one step.

    Where a rise begins is an estimate, and the alert made it with the rows that it had. Other troubles begin
    in one step, which is certain.
    """
    last = np.inf if trouble.until is None else trouble.until
    near = [onset for onset in told if abs(onset - trouble.onset) <= NEAR and onset <= last]
    if trouble.kind != "rise" or not near:
        return trouble
    onset = min(near, key=lambda step: abs(step - trouble.onset))
    return replace(trouble, onset=onset, left_noise=trouble.certain_from)


def _match(trouble: Trouble, run: RunLoss, arms: Sequence[tuple[RunLoss, list[Trouble]]]) -> _Matched | None:
    """The trouble of a BF16 run that is the same; None if BF16 does not show it."""
    near = max(SAME_STEPS, int(SAME_SHARE * (run.steps[-1] - run.steps[0])))
    matches: list[tuple[RunLoss, Trouble]] = []
    for arm, theirs in arms:
        same = [
            candidate
            for candidate in theirs
            if abs(candidate.onset - trouble.onset) <= near
            or (candidate.lasts and (trouble.lasts or candidate.onset <= trouble.onset + near))
            or _overlap(candidate, trouble)
            or (not trouble.lasts and candidate.size >= SAME_SIZE * trouble.size)
        ]
        if same:
            # The nearest in time; of equals, the first.
            matches.append((arm, min(same, key=lambda match: abs(match.onset - trouble.onset))))
    same_seed = [match for match in matches if run.seed is not None and match[0].seed == run.seed]
    if not same_seed and 2 * len(matches) < len(arms):
        return None
    if not matches:
        return None
    arm, theirs_too = (same_seed or matches)[0]
    return _Matched(trouble, theirs_too, arm)


def _overlap(first: Trouble, other: Trouble) -> bool:
    """Return whether two troubles that are no jumps overlap."""
    if "jump" in (first.kind, other.kind):
        return False
    ends = [np.inf if trouble.until is None else trouble.until for trouble in (first, other)]
    return first.onset <= ends[1] and other.onset <= ends[0]


def _not_fp8(run: RunLoss, shared: Sequence[_Matched], links: tuple[EvidenceLink, ...]) -> Finding:
    first = shared[0]
    if _is_data(run, first):
        sentence = (
            f"Not FP8: the BF16 run {first.arm.name} jumps at the same step {first.trouble.onset:,}, in one "
            "step, "
            "and the learning rate does not, so that the data of this step are at fault."
        )
        cause, suggestion = "data", _advice_on_data(first.trouble, run)
    else:
        sentence = (
            f"Not FP8: the BF16 run {first.arm.name} shows the same ({describe(first.theirs)}; FP8: "
            f"{describe(first.trouble)}), so that the training itself is unstable: the learning rate is "
            "too high."
        )
        cause, suggestion = "learning_rate", "Lower the learning rate, or warm up for longer, in both arms."
    return Finding(
        step="reference",
        outcome="not_fp8",
        sentence=sentence,
        cause=cause,
        onset=first.trouble.onset,
        tensors=(),
        suggestion=suggestion,
        links=(*links, EvidenceLink("run", first.arm.name, {"run": first.arm.run})),
    )


def _advice_on_data(trouble: Trouble, run: RunLoss) -> str:
    """Return what to do about data. Skipping helps only where a few steps are hit, and those do harm."""
    last = int(run.steps[-1]) if trouble.until is None else trouble.until
    steps = last - trouble.onset + 1
    if trouble.lasts:
        return (
            f"Look at what changes in the data from step {trouble.onset:,} on: sources, mixture, order, "
            "tokenizer. It lasts to the end, so that no batch can be skipped."
        )
    if steps <= FEW_STEPS:
        return (
            f"Look at the batches of the steps {trouble.onset:,} to {last:,}. The loss recovers by itself, "
            "so that there is nothing to skip unless it comes again."
        )
    return (
        f"Look at the batches from step {trouble.onset:,} on: the loss needs {steps:,} steps to recover. If "
        "these batches are faulty, take them out of the data of both arms."
    )


def _is_data(run: RunLoss, match: _Matched) -> bool:
    """Return whether both arms jump in the same step, and the learning rate does not rise before it."""
    ours, theirs = match.trouble, match.theirs
    if ours.kind == "rise" or theirs.kind == "rise" or abs(ours.onset - theirs.onset) > 1:
        return False
    if ours.onset - int(run.steps[0]) < SETTLING:
        return False
    return not _rate_rises(run, ours.onset)


def _rate_rises(run: RunLoss, onset: int) -> bool:
    if run.rates is None:
        return False
    before = run.rates[(run.steps < onset - RATE_STEPS) & (run.steps >= onset - 3 * RATE_STEPS)]
    here = run.rates[(run.steps >= onset - RATE_STEPS) & (run.steps <= onset)]
    if not len(before) or not len(here) or not np.isfinite(before).any():
        return False
    return bool(np.nanmax(here) > RATE_RISES * np.nanmax(before))


def _alone(
    run: RunLoss, ours: list[Trouble], windows: Sequence[JudgedWindow], resumes: Sequence[int]
) -> ReferenceFinding:
    """Without BF16 runs: reference windows, and resumes."""
    if ours and windows:
        covering = [
            w for w in windows if any(w.first <= (t.until or w.last) and w.last >= t.onset for t in ours)
        ]
        if covering and all(window.verdict == "within" for window in covering):
            sentence = (
                f"Not FP8: in the reference window of the steps {covering[0].first:,} to "
                f"{covering[0].last:,} BF16 computes the same losses from the same state, while the run is "
                f"in trouble ({describe(ours[0])})."
            )
            finding = Finding(
                step="reference", outcome="not_fp8", sentence=sentence, cause="training", onset=ours[0].onset,
                tensors=(), suggestion="Look for the cause in the data, the learning rate and the model.",
                links=(EvidenceLink("reports", "Reference windows"),),
            )  # fmt: skip
            return ReferenceFinding(finding, True, (), False)
    near = window_of(len(run.steps))
    again = [step for step in resumes for trouble in ours if 0 <= trouble.onset - step <= near]
    note = f" It begins at the resume at step {again[0]:,}." if again else ""
    trouble = f"The run is in trouble: {describe(ours[0])}.{note} " if ours else ""
    sentence = f"{trouble}There is no BF16 run to compare with: set the run's baseline."
    onset = ours[0].onset if ours else None
    return ReferenceFinding(
        Finding(step="reference", outcome="unknown", sentence=sentence, onset=onset),
        False,
        tuple(ours),
        bool(ours),
    )


def _arms(number: int) -> str:
    return "1 BF16 run" if number == 1 else f"{number} BF16 runs"


def describe(trouble: Trouble) -> str:
    """A trouble of a loss in words."""
    if trouble.kind == "not_finite":
        return f"loss not finite from step {trouble.onset:,}"
    until = "to the end" if trouble.until is None else f"to step {trouble.until:,}"
    verb = "jumps" if trouble.kind == "jump" else "rises"
    return f"loss {verb} by {100.0 * trouble.size:.0f} % at step {trouble.onset:,}, {until}"
