"""The lock of the evaluation of a run: that of the row of its run-wide state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from uuid import UUID

from fp8scope_dashboard.alerts.models import RUN_WIDE
from fp8scope_dashboard.db import replica, sql

# A statement for each run: one for several would be spread over nodes, and could not lock there.
_LOCK: Final = """
    SELECT run_id FROM alerts_detectorstate WHERE run_id = %(run)s AND writer = %(writer)s FOR UPDATE
"""


def lock_states(run_ids: Iterable[UUID], *, waits: bool) -> set[UUID]:
    """Lock the run-wide states of runs until the transaction ends; returns the runs whose state is locked.

    Runs without a state are left out and, without `waits`, those that are locked. Locks in the order of ids.
    """
    statement = _LOCK if waits else f"{_LOCK} SKIP LOCKED"
    asked = [{"run": run_id, "writer": RUN_WIDE} for run_id in sorted(run_ids)]
    return {run_id for rows in sql.fetch_each(statement, asked, replica.PRIMARY) for (run_id,) in rows}
