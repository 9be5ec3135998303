"""The ways to a project's first run: three ways, and the notice when one has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from django.utils import timezone

from fp8scope_dashboard.runs.models import Run

# The list says that runs have arrived while there are so few of them, and for so long.
MAX_FIRST_RUNS: Final = 3
ANNOUNCED_FOR: Final = timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class FirstRunWay:
    """One way to send a run. `name` is part of the ids of its elements."""

    name: str
    title: str
    text: str
    lines: str
    note: str


WAYS: Final = (
    FirstRunWay(
        name="fp8",
        title="Two lines, in FP8",
        text="The script converts its linear layers to FP8, and is compared with a BF16 run.",
        lines="""import fp8scope

fp8scope.convert(model, fp8scope.DelayedScaling())
run = fp8scope.attach(model, optimizer, name="gpt fp8", baseline="bf16")""",
        note="Put convert before the optimizer is made, and attach after it. It finds the rest.",
    ),
    FirstRunWay(
        name="bf16",
        title="The BF16 baseline",
        text="The same script, data and order of batches without convert: what FP8 is compared with.",
        lines="""import fp8scope

run = fp8scope.attach(model, optimizer, name="gpt bf16", group="bf16", seed=1)""",
        note="Three seeds measure how much BF16 runs differ from each other.",
    ),
    FirstRunWay(
        name="run",
        title="Without a change of the script",
        text="The command finds the model, the optimizer and the loss.",
        lines="""fp8scope run --group bf16 train.py
fp8scope run --convert delayed --baseline bf16 train.py""",
        note="It finds steps by the first optimizer that steps.",
    ),
)


@dataclass(frozen=True)
class Arrival:
    """The notice of a first run: what has arrived, and the run that it leads to."""

    text: str
    run: Run


def arrival_of(total: int, runs: Sequence[Run]) -> Arrival | None:
    """The notice for the newest of a project's first runs; None if they are not new, or more than a few."""
    if not runs or total > MAX_FIRST_RUNS:
        return None
    newest = max(runs, key=lambda run: run.created_at)
    if newest.created_at < timezone.now() - ANNOUNCED_FOR:
        return None
    if newest.last_step is None:
        return Arrival(f"“{newest.name}” has registered. It waits for its first row.", newest)
    return Arrival(f"The first rows of “{newest.name}” have arrived.", newest)
