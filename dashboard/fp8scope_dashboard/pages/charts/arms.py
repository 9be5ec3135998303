"""Arms of a comparison: runs that differ only in their seed, with a label and a colour."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from django.db.models import Min

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages.charts.theme import PALETTE, Slot
from fp8scope_dashboard.pages.request_reads import reads_of
from fp8scope_dashboard.runs.models import Run

FP8_SLOTS: tuple[Slot, ...] = PALETTE[1:]
# The most groups, and runs without a group, with an assigned colour.
MAX_GROUPS = 1_000

PRECISIONS = {"bf16": "BF16", "fp8": "FP8", "fp16": "FP16", "fp32": "FP32"}


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in their seed. `slot`: their colour on every page."""

    label: str
    slot: Slot
    group: str


class ArmReader(Protocol):
    """A source of the arm of a run, and so the colour that it has in a chart."""

    def of(self, run: Run) -> Arm: ...


class Arms:
    """The arms of a project."""

    def __init__(self, project: Project) -> None:
        fp8 = Run.objects.filter(project=project, precision="fp8").order_by()
        groups = fp8.exclude(group="").values_list("group").annotate(first=Min("created_at"))
        alone = fp8.filter(group="").order_by("created_at").values_list("pk", "created_at")
        begun = [(first, group) for group, first in groups.order_by("first", "group")[:MAX_GROUPS]]
        begun += [(created, str(pk)) for pk, created in alone[:MAX_GROUPS]]
        self._ranks = {key: i for i, (_, key) in enumerate(sorted(begun))}

    def of(self, run: Run) -> Arm:
        """The arm that a run belongs to."""
        precision = precision_label(run.precision)
        if not run.group:
            return Arm(run.name, self._slot(run), "")
        # For a BF16 run in the group 'bf16' the label would repeat the precision.
        same = run.group.casefold() == precision.casefold()
        return Arm(precision if same else f"{precision} · {run.group}", self._slot(run), run.group)

    def _slot(self, run: Run) -> Slot:
        if run.precision == "bf16":
            return "bf16"
        if run.precision == "fp8":
            return FP8_SLOTS[self._ranks.get(run.group or str(run.pk), 0) % len(FP8_SLOTS)]
        return "other"


def arms_of(project: Project) -> Arms:
    """The arms of a project, which a request reads once."""
    read: dict[None, Arms] = reads_of(project, "arms")
    if None not in read:
        read[None] = Arms(project)
    return read[None]


class ComparedArms:
    """The arms of compared runs, told apart: twelve of them have colours of their own.

    An arm keeps the colour that it has in the project, unless an earlier one of the comparison has the same.
    """

    def __init__(self, arms: Arms, runs: Iterable[Run]) -> None:
        self._arms = arms
        self._slots: dict[str, Slot] = {}
        for run in runs:
            if (key := _key(run)) not in self._slots:
                self._slots[key] = self._free(arms.of(run).slot)

    def _free(self, wanted: Slot) -> Slot:
        """The slot, or if it is taken the first free one; with more arms than colours, it is shared."""
        taken = set(self._slots.values())
        return (
            wanted if wanted not in taken else next((slot for slot in PALETTE if slot not in taken), wanted)
        )

    def of(self, run: Run) -> Arm:
        """The arm that a run belongs to."""
        arm = self._arms.of(run)
        return replace(arm, slot=self._slots.get(_key(run), arm.slot))


def _key(run: Run) -> str:
    return f"{run.precision}/{run.group}" if run.group else str(run.pk)


def precision_label(precision: str) -> str:
    """A precision's usual spelling."""
    return PRECISIONS.get(precision.lower(), precision)


def arm_labels(arms: ArmReader, runs: Iterable[Run]) -> dict[str, str]:
    """Legend labels by run id: the arm's label, with the number of runs if there are several."""
    listed = [(run, arms.of(run)) for run in runs]
    sizes: dict[str, int] = {}
    for _, arm in listed:
        sizes[arm.label] = sizes.get(arm.label, 0) + 1
    return {
        str(run.id): f"{arm.label} ({sizes[arm.label]} seeds)" if sizes[arm.label] > 1 else arm.label
        for run, arm in listed
    }
