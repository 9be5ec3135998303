"""The margin of one comparison, in place of the project's."""

from __future__ import annotations

import math
from typing import Final

from django.db import transaction

from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Run

SMALLEST, LARGEST = 1e-6, 1.0
MAX_NATS: Final = 100.0
# Jobs compare the first runs at once; the sweeps find the others.
MAX_ANNOUNCED: Final = 50


class MarginError(ValueError):
    """The margin cannot be used; the message says why."""


@transaction.atomic
def choose_margin(run: Run, margin: float | None, *, in_nats: bool = False) -> int:
    """Judge a run and its seeds by this margin; by the project's if it is None. Returns the number of runs.

    Args:
        margin: difference of the loss that counts as none: relative, or `in_nats`, the unit of the loss.

    Raises:
        MarginError: the run is compared with nothing, or the margin is not between SMALLEST and LARGEST (of
            nats, MAX_NATS).
    """
    if not run.baseline:
        raise MarginError("The run has no baseline, so it has no verdict with a margin.")
    largest = MAX_NATS if in_nats else LARGEST
    if margin is not None and not (math.isfinite(margin) and SMALLEST <= margin <= largest):
        relative = f"{100 * SMALLEST:g} and {100 * LARGEST:g} %"
        bounds = f"{SMALLEST:g} and {MAX_NATS:g} nats" if in_nats else relative
        raise MarginError(f"A margin is between {bounds}.")
    same = Run.objects.filter(project_id=run.project_id, pk=run.pk)
    if run.group:
        # Seeds of one comparison share a verdict, so they share its margin.
        same = Run.objects.filter(project_id=run.project_id, group=run.group, baseline=run.baseline)
    chosen = {"margin": None if in_nats else margin, "margin_nats": margin if in_nats else None}
    changed = same.update(**chosen)
    for run_id in same.values_list("pk", flat=True)[:MAX_ANNOUNCED]:
        run_changed(run_id, run.project_id, "state")
    run.margin, run.margin_nats = chosen["margin"], chosen["margin_nats"]
    return changed
