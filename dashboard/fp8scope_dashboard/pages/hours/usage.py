"""The hours of a project's runs, and those lost to crashes and divergences: one query for any number of runs.

The time of a process is from its start to its end, or to its last sign of life. Steps that were lost become
hours by the pace of their run: its hours over the steps that its attempts have trained.

- A divergence lasts from the onset of an alert to the step at which it was resolved, or to the end.
- After a crash the steps from where the next attempt began are trained again. A run that failed or fell
  silent, and that no other run resumed, loses what follows its last artefact with a step; without one, its
  last attempt.

Steps after a divergence do not count as lost to a crash, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from django.db import connection

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.runs.models import Run

MAX_RUNS: Final = 200
"""Runs with the most hours, which other figures of the page are measured from."""
MAX_LOSERS: Final = 10
# Ranges end one step after their last, which must be a number that PostgreSQL has.
LAST_STEP: Final = 2**63 - 2

HOURS_OF_RUNS: Final = """
runs AS MATERIALIZED (
    SELECT id, project_id, name, precision, state, created_at, last_step,
        CASE WHEN environment->>'world_size' ~ '^[0-9]{1,6}$'
            THEN (environment->>'world_size')::int ELSE 1 END AS ranks,
        CASE WHEN environment->>'gpu_count' ~ '^[0-9]{1,6}$'
            THEN (environment->>'gpu_count')::int ELSE 0 END AS gpus
    FROM runs_run
    WHERE deleted_at IS NULL AND {chosen}
), attempts AS MATERIALIZED (
    SELECT run_id, attempt, min(writers.first_step) AS first,
        least(max(writers.last_step), {last}) AS last,
        greatest(1.0, max(ranks)::float8 / count(*)) * coalesce(sum(greatest(0.0, extract(epoch FROM
            CASE WHEN finished_at IS NOT NULL THEN finished_at WHEN NOT imported THEN seen_at END
            - CASE WHEN attempt = 0 THEN least(runs.created_at, writers.created_at)
                ELSE writers.created_at END
        ))), 0.0)::float8 AS seconds
    FROM runs_writer AS writers JOIN runs ON runs.id = run_id
    GROUP BY run_id, attempt
), trained AS MATERIALIZED (
    SELECT *, lead(first) OVER attempt_order AS next_first,
        row_number() OVER (PARTITION BY run_id ORDER BY attempt DESC) = 1 AS is_latest
    FROM attempts WHERE first IS NOT NULL
    WINDOW attempt_order AS (PARTITION BY run_id ORDER BY attempt)
), resumed AS (
    SELECT parents.id AS run_id, min(trained.first) AS first
    FROM runs AS parents
    JOIN runs_run AS children ON children.project_id = parents.project_id AND children.deleted_at IS NULL
        AND children.parent = parents.id::text AND children.relation = 'resumed'
    JOIN trained ON trained.run_id = children.id
    WHERE parents.state IN ('failed', 'silent')
    GROUP BY parents.id
), saved AS (
    SELECT artefacts.run_id, least(max(step), {last}) + 1 AS next
    FROM runs_artefact AS artefacts JOIN runs ON runs.id = artefacts.run_id
    WHERE step IS NOT NULL AND runs.state IN ('failed', 'silent')
    GROUP BY artefacts.run_id
), ended AS (
    SELECT trained.run_id, last,
        greatest(trained.first, coalesce(resumed.first, saved.next, trained.first)) AS lost_from,
        resumed.first IS NULL AND saved.next IS NULL AS is_guess
    FROM trained JOIN runs ON runs.id = trained.run_id
    LEFT JOIN resumed ON resumed.run_id = trained.run_id
    LEFT JOIN saved ON saved.run_id = trained.run_id
    WHERE is_latest AND runs.state IN ('failed', 'silent')
), crashes AS (
    SELECT run_id, range_agg(int8range(from_step, to_step, '[]')) AS steps, bool_or(is_guess) AS is_guess
    FROM (
        SELECT run_id, next_first AS from_step, last AS to_step, false AS is_guess
        FROM trained WHERE next_first <= last
        UNION ALL SELECT run_id, lost_from, last, is_guess FROM ended WHERE lost_from <= last
    ) AS lost GROUP BY run_id
), divergences AS (
    SELECT alerts.run_id, range_agg(int8range(least(onset_step, {last}), least({last},
        greatest(onset_step, coalesce(resolved_step, runs.last_step, onset_step))), '[]')) AS steps
    FROM alerts_event AS alerts JOIN runs ON runs.id = alerts.run_id
    WHERE kind IN ('loss_not_finite', 'loss_divergence')
        OR (kind = 'above_baseline' AND severity = 'critical')
    GROUP BY alerts.run_id
), totals AS (
    SELECT run_id, sum(seconds) AS seconds FROM attempts GROUP BY run_id
), whole AS (
    SELECT run_id, min(first) AS first, max(last) AS last, sum(last::numeric - first + 1) AS steps
    FROM trained GROUP BY run_id
), used AS MATERIALIZED (
    SELECT runs.id, project_id, name, precision, gpus > 0 AS has_gpu, coalesce(seconds, 0.0) AS seconds,
        coalesce(crashes.is_guess, false) AS is_guess,
        least(1.0, (SELECT coalesce(sum(upper(part)::numeric - lower(part)), 0) FROM unnest(
            divergences.steps * int8multirange(int8range(first, last, '[]'))
            ) AS part) / whole.steps)::float8 AS diverged,
        least(1.0, (SELECT coalesce(sum(upper(part)::numeric - lower(part)), 0) FROM unnest(
            crashes.steps - coalesce(divergences.steps, '{}'::int8multirange)
            ) AS part) / whole.steps)::float8 AS crashed
    FROM runs
    LEFT JOIN totals ON totals.run_id = runs.id
    LEFT JOIN whole ON whole.run_id = runs.id
    LEFT JOIN crashes ON crashes.run_id = runs.id
    LEFT JOIN divergences ON divergences.run_id = runs.id
), lost AS MATERIALIZED (
    SELECT id, project_id, name, precision, has_gpu, seconds, is_guess,
        seconds * coalesce(diverged, 0.0) AS diverged,
        seconds * least(coalesce(crashed, 0.0), 1.0 - coalesce(diverged, 0.0)) AS crashed
    FROM used
)
"""
"""The tables of a WITH clause. `lost` has a row for each run: its seconds, and those that it lost."""


def hours_of_runs(chosen: str) -> str:
    """The tables `HOURS_OF_RUNS` for the runs that meet the SQL condition `chosen` on `runs_run`."""
    return HOURS_OF_RUNS.replace("{chosen}", chosen).replace("{last}", str(LAST_STEP))


COLUMNS: Final = "id, name, precision, seconds, diverged, crashed, is_guess"
QUERY: Final = f"""
WITH {hours_of_runs("project_id = %(project)s AND (%(run)s::uuid IS NULL OR id = %(run)s)")}
SELECT
    (SELECT json_agg(row_to_json(one)) FROM (
        SELECT precision, count(*) AS runs, sum(seconds) AS seconds, sum(diverged) AS diverged,
            sum(crashed) AS crashed, count(*) FILTER (WHERE is_guess AND crashed > 0) AS guesses,
            coalesce(sum(seconds) FILTER (WHERE NOT has_gpu), 0) AS without_gpu,
            count(*) FILTER (WHERE seconds = 0) AS untimed
        FROM lost GROUP BY precision ORDER BY sum(seconds) DESC
    ) AS one),
    (SELECT json_agg(row_to_json(one)) FROM (
        SELECT {COLUMNS} FROM lost WHERE seconds > 0 ORDER BY seconds DESC, id LIMIT %(runs)s
    ) AS one),
    (SELECT json_agg(row_to_json(one)) FROM (
        SELECT {COLUMNS} FROM lost WHERE diverged + crashed > 0
        ORDER BY diverged + crashed DESC, id LIMIT %(losers)s
    ) AS one)
"""


@dataclass(frozen=True, kw_only=True)
class PrecisionUsage:
    """The runs of one precision: seconds of all processes together.

    Attributes:
        guesses: runs that lost their whole last attempt, because no checkpoint is known.
        without_gpu: seconds of runs whose environment has no GPU.
        untimed: runs without a time.
    """

    precision: str
    runs: int
    seconds: float
    diverged: float
    crashed: float
    guesses: int
    without_gpu: float
    untimed: int


@dataclass(frozen=True, kw_only=True)
class RunUsage:
    """One run: seconds of all of its processes, and of these what it lost."""

    id: UUID
    name: str
    precision: str
    seconds: float
    diverged: float
    crashed: float
    is_guess: bool

    @property
    def lost(self) -> float:
        return self.diverged + self.crashed


@dataclass(frozen=True)
class Usage:
    """The hours of a project: by precision, of the largest runs, and of those that lost the most."""

    precisions: Sequence[PrecisionUsage]
    largest: Sequence[RunUsage]
    losers: Sequence[RunUsage]


def usage_of(project: Project) -> Usage:
    """Add up the hours of all runs of a project, archived ones included."""
    precisions, largest, losers = _queried(project.pk, None)
    return Usage(
        [PrecisionUsage(**row) for row in precisions],
        [_run(row) for row in largest],
        [_run(row) for row in losers],
    )


def usage_of_run(run: Run) -> RunUsage | None:
    """The hours of one run; None if none of its processes has told a time."""
    _, largest, _ = _queried(run.project_id, run.pk)
    return _run(largest[0]) if largest else None


def gpus_of(run: Run) -> int:
    """The GPUs of a machine of the run; 0 if it has none, or has not told."""
    number = run.environment.get("gpu_count")
    return number if isinstance(number, int) else 0


def _queried(project: int, run: UUID | None) -> list[list[Mapping[str, Any]]]:
    values = {"project": project, "run": run, "runs": MAX_RUNS, "losers": MAX_LOSERS}
    with connection.cursor() as cursor:
        cursor.execute(QUERY, values)
        return [rows or [] for rows in cursor.fetchone()]


def _run(row: Mapping[str, Any]) -> RunUsage:
    return RunUsage(**{**row, "id": UUID(row["id"])})
