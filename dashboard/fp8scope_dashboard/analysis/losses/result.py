"""The result of a comparison of losses."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from fp8scope_dashboard.analysis.losses.alignment import Axis, Pairing
from fp8scope_dashboard.analysis.losses.arms import Verdict

# Raise it with every change that can give another result for the same curves.
METHOD_VERSION: Final = 6


@dataclass(frozen=True, kw_only=True)
class Basis:
    """The runs and the range that a comparison uses.

    Attributes:
        end: the last compared point, on `aligned_on`; `gap` is the usual distance between points there.
        step: the first run's step at that point; `step_gap` is the usual distance between its last steps.
        runs: indices of the runs that took part, in the sequence given to `compare_losses`.
        baselines: indices of the baseline runs that took part.
    """

    end: float
    gap: float
    step: int
    step_gap: float
    runs: tuple[int, ...]
    baselines: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Onset:
    """The step at which the run has left its baseline, by the test that the alert `above_baseline` is too.

    Attributes:
        since: the onset, as far as it can be told; decided: the point at which it was decided. Both on
            `aligned_on`.
        since_step, decided_step: the judged run's steps there.
        points: compared points of the window that shows it.
    """

    since: float
    decided: float
    since_step: int
    decided_step: int
    points: int


@dataclass(frozen=True, kw_only=True)
class LossComparison:
    """The verdict on a run's loss and the data that a page needs to show it.

    Attributes:
        unit: 'relative' (fractions of the baseline's loss), or 'nats' where that loss is near 0. It is that
            of margin, tolerance, delta, the intervals, the spread, smallest_detectable and curve.
        delta: difference in the window; None if a run diverged or there is too little data.
        interval: one run in an arm: anytime-valid interval of this pair's delta; several: over seeds.
        noise_interval: within-pair noise of delta in the window (HAC), without the price of looking;
            bootstrap_interval: the same by the stationary bootstrap.
        margin_nats: the margin in the unit of the loss, where it was chosen so; `margin` is that in `unit`.
        tolerance: the largest delta that counts as no difference: the margin, or the spread of the seeds.
        judged_margin: of 'equivalent', the margin within which the two surely are, that its badge names: the
            margin, or twice the margin where the evidence suffices for that only. None of other verdicts.
        smallest_detectable: the difference that would be found with 80 % probability.
        needs: what would decide, if the verdict is 'cannot_tell': {"steps", "seeds"}, each a number or None.
        moving: of 'cannot_tell', that the difference moves, so that no number of steps is known: {"since",
            "change"}, a point on `aligned_on` and the change of delta since then. None if it does not.
        wanders: of 'cannot_tell', that the interval of a pair is wholly outside the tolerance, but seeds that
            wander lastingly, as far as these do, may differ by as much.
        window: first and last point of the window, on `aligned_on`.
        onset: where the run has left its baseline, if a harm that has begun decides; then `window`, `delta`
            and `interval` are of the stretch since then, and the interval is by the noise before it.
        curve: {"x", "delta", "low", "high"}: the confidence sequence, at most CURVE_POINTS values each;
            "x_name" names x.
        baseline_losses: the baseline runs' mean losses in the window, without odd seeds.
        basis: the runs and the range that were compared; None with too little data.
    """

    verdict: Verdict
    explanation: str
    method: str = ""
    method_version: int = METHOD_VERSION
    unit: str = "relative"
    margin: float = 0.0
    margin_nats: float | None = None
    tolerance: float | None = None
    judged_margin: float | None = None
    delta: float | None = None
    interval: tuple[float, float] | None = None
    noise_interval: tuple[float, float] | None = None
    bootstrap_interval: tuple[float, float] | None = None
    p_value: float | None = None
    seed_spread: dict[str, Any] | None = None
    smallest_detectable: float | None = None
    needs: dict[str, int | None] | None = None
    moving: dict[str, float] | None = None
    wanders: bool = False
    warnings: tuple[str, ...] = ()
    k_run: int = 0
    k_baseline: int = 0
    aligned_on: Axis = "steps"
    paired: Pairing = "no"
    window: tuple[float, float] | None = None
    onset: Onset | None = None
    loss: float | None = None
    baseline_loss: float | None = None
    baseline_losses: tuple[float, ...] = ()
    curve: dict[str, Any] = field(default_factory=dict)
    basis: Basis | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields but the basis, as JSON types; every number is finite.

        Dictionaries are not copied, because the curve has thousands of values.
        """
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "basis"}
        values["onset"] = None if self.onset is None else asdict(self.onset)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
