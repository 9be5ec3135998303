"""The five runs of the demo in their order."""

from __future__ import annotations

from dataclasses import dataclass

STEPS = 600
MIN_STEPS, MAX_STEPS = 100, 20_000
FAULT_AFTER = 0.4
"""The fault starts after this fraction of the faulty run's steps."""

BASELINE = "bf16"
HEALTHY = "fp8"
FAULTY = "fp8 stale scales"


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """One run. Runs of a `group` differ only in their seed."""

    name: str
    group: str
    precision: str
    seed: int
    steps: int
    fault_at: int | None = None

    def arguments(self) -> list[str]:
        """The command line of `python -m fp8scope.demo.train`."""
        options = {
            "--name": self.name,
            "--group": self.group,
            "--baseline": "" if self.group == BASELINE else BASELINE,
            "--precision": self.precision,
            "--seed": str(self.seed),
            "--steps": str(self.steps),
        }
        if self.fault_at is not None:
            options["--fault-at"] = str(self.fault_at)
        return [word for name, value in options.items() for word in (name, value)]


def five_runs(steps: int = STEPS) -> list[RunPlan]:
    """Three BF16 seeds, then FP8, then FP8 with the fault.

    Both FP8 runs have the initial weights of the first seed, and all runs see the same batches in the same
    order, so only the precision differs. The baseline runs come first, because the others are compared with
    them.
    """
    seeds = [
        RunPlan(name=f"bf16 seed {seed}", group=BASELINE, precision="bf16", seed=seed, steps=steps)
        for seed in (1, 2, 3)
    ]
    fault_at = round(steps * FAULT_AFTER)
    return [
        *seeds,
        RunPlan(name="fp8 delayed scaling", group=HEALTHY, precision="fp8", seed=1, steps=steps),
        RunPlan(
            name="fp8 stale scales", group=FAULTY, precision="fp8", seed=1, steps=steps, fault_at=fault_at
        ),
    ]
