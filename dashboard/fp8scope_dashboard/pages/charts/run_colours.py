"""The colour of a run: one of twelve, the same on every page, unless a member chooses another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from fp8scope_dashboard.pages.charts.arms import Arm, Arms
from fp8scope_dashboard.pages.charts.theme import RUN_SLOTS, Slot
from fp8scope_dashboard.runs.models import Run

NAMES: Final = (
    "Blue",
    "Orange",
    "Purple",
    "Ochre",
    "Teal",
    "Pink",
    "Indigo",
    "Green",
    "Brown",
    "Cyan",
    "Crimson",
    "Violet",
)
"""The names of the colours of `RUN_SLOTS`, for people who do not see them."""


def colour_number(run: Run) -> int:
    """The number of a run's colour, from 1: the chosen one, else one that follows from its id."""
    chosen = run.colour
    return chosen if chosen is not None and 1 <= chosen <= len(RUN_SLOTS) else run.id.int % len(RUN_SLOTS) + 1


def colour_slot(run: Run) -> Slot:
    """The slot of a run's colour in the themes of figures."""
    return RUN_SLOTS[colour_number(run) - 1]


class RunArms(Arms):
    """Runs that are arms of their own, each in its colour. Equal names have the start of the id."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._names = Counter(run.name for run in runs)

    def of(self, run: Run) -> Arm:
        """The arm of a run."""
        name = f"{run.name} ({str(run.pk)[:8]})" if self._names[run.name] > 1 else run.name
        return Arm(name, colour_slot(run), "")
