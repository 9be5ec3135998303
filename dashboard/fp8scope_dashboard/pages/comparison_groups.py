"""Arms of a comparison: which runs belong together, their names, and the colour they keep on every page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.db.models import Min

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages.figures.theme import Slot
from fp8scope_dashboard.runs.models import Run

FP8_SLOTS: tuple[Slot, ...] = ("fp8-1", "fp8-2", "fp8-3")
# Groups that are looked at for a colour; the colours of later ones repeat anyway.
MOST_GROUPS = 1_000

PRECISIONS = {"bf16": "BF16", "fp8": "FP8", "fp16": "FP16", "fp32": "FP32"}


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in their seed."""

    label: str
    slot: Slot
    group: str


class Arms:
    """The arms of one project."""

    def __init__(self, project: Project) -> None:
        fp8 = Run.objects.filter(project=project, precision="fp8").order_by()
        groups = fp8.values_list("group").annotate(first=Min("created_at")).order_by("first", "group")
        self._places = {group: i for i, (group, _) in enumerate(groups[:MOST_GROUPS])}

    def of(self, run: Run) -> Arm:
        """The arm that a run belongs to."""
        precision = precision_label(run.precision)
        if not run.group:
            return Arm(run.name, self._slot(run), "")
        # 'bf16' as the group of a BF16 run says the same twice.
        same = run.group.casefold() == precision.casefold()
        return Arm(precision if same else f"{precision} · {run.group}", self._slot(run), run.group)

    def _slot(self, run: Run) -> Slot:
        if run.precision == "bf16":
            return "bf16"
        if run.precision == "fp8":
            return FP8_SLOTS[self._places.get(run.group, 0) % len(FP8_SLOTS)]
        return "other"


def precision_label(precision: str) -> str:
    """A precision as people write it."""
    return PRECISIONS.get(precision.lower(), precision)


def arm_labels(arms: Arms, runs: Iterable[Run]) -> dict[str, str]:
    """For the legend: run id -> the arm's name, with the number of its runs where these are several."""
    listed = [(run, arms.of(run)) for run in runs]
    sizes: dict[str, int] = {}
    for _, arm in listed:
        sizes[arm.label] = sizes.get(arm.label, 0) + 1
    return {
        str(run.id): f"{arm.label} ({sizes[arm.label]} seeds)" if sizes[arm.label] > 1 else arm.label
        for run, arm in listed
    }
