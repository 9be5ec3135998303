"""The views of projects, runs, their values and their hours."""

from __future__ import annotations

from typing import Final

from fp8scope_dashboard.pages.hours.usage import hours_of_runs
from fp8scope_dashboard.sql_views.view import (
    SCHEMA,
    View,
    ViewColumn,
    columns_of,
    joined_runs,
    run_columns,
)

# The owner of the tables and superusers read every project, so that an administrator needs no such login.
MAY_READ: Final = """
WHERE EXISTS (
    SELECT FROM sql_views_sqlreader AS reader
    WHERE reader.role = session_user AND (reader.project_id IS NULL OR reader.project_id = project.id)
) OR pg_has_role(
    session_user, (SELECT relowner FROM pg_class WHERE oid = 'accounts_project'::regclass), 'MEMBER'
)"""

PROJECTS: Final = View(
    "projects",
    "The projects that this login may read.",
    [
        ViewColumn("project_id", "project.id", "Id of the project."),
        ViewColumn("project", "project.slug", "Its short name, as in its address."),
        *columns_of(
            "project",
            name="Its name.",
            margin="Relative difference of the loss within which FP8 and BF16 are equivalent (fraction).",
            gpu_hour_price="Price of a GPU hour, in the currency of the project; null: not given.",
            created_at="When it was made.",
            archived_at="When it was archived; null: it is not.",
        ),
    ],
    f"FROM accounts_project AS project{MAY_READ}",
)

RUNS: Final = View(
    "runs",
    "Runs, without deleted ones.",
    [
        ViewColumn("run_id", "run.id", "Id of the run."),
        ViewColumn("project_id", "run.project_id", "Id of its project."),
        ViewColumn("project", "project.project", "Short name of its project."),
        *columns_of(
            "run",
            name="Name.",
            state="running, finished, failed or silent (no sign of life).",
            precision="fp8, bf16, fp16, fp32 or unknown.",
            recipe_name="Name of its FP8 recipe; empty: none.",
        ),
        ViewColumn("run_group", 'run."group"', "Group of runs that differ only in the seed; empty: none."),
        *columns_of(
            "run",
            baseline="Group or run that it is compared with; empty: none.",
            parent="Id of the run that it went on from; empty: none.",
            seed="Seed.",
            tags="Tags (array).",
            total_steps="Planned steps; null: not known.",
            last_step="Last stored step; null: none.",
        ),
        ViewColumn("loss", "(run.last_scalars->>'loss')::float8", "Latest loss, as logged."),
        ViewColumn(
            "duration_seconds",
            "extract(epoch FROM coalesce(run.finished_at, CASE WHEN run.state = 'running' THEN now()"
            " ELSE run.heartbeat_at END) - run.created_at)::float8",
            "Time from its start to its end, or until now (seconds).",
        ),
        *columns_of(
            "run",
            created_at="When it began.",
            heartbeat_at="Last sign of life.",
            finished_at="When it ended; null: it has not, or did not say so.",
            archived_at="When it was archived; null: it is not.",
            rows_stored="Stored rows, of all processes.",
            rows_dropped="Rows that the agent dropped.",
        ),
    ],
    f"FROM runs_run AS run\nJOIN {SCHEMA}.projects AS project ON project.project_id = run.project_id\n"
    "WHERE run.deleted_at IS NULL",
)

LATEST_VALUES: Final = View(
    "latest_values",
    "The latest value of each scalar of a run.",
    [
        ViewColumn("run_id", "run.id", "Id of the run."),
        ViewColumn("project_id", "run.project_id", "Id of its project."),
        ViewColumn("name", "latest.key", "Name of the scalar, such as loss or tokens_per_second."),
        ViewColumn("value", "latest.value::float8", "Its latest value, in the scalar's unit."),
        ViewColumn("last_step", "run.last_step", "Last stored step of the run."),
    ],
    f"FROM runs_run AS run\nJOIN {SCHEMA}.projects AS project ON project.project_id = run.project_id\n"
    "CROSS JOIN LATERAL jsonb_each_text(run.last_scalars) AS latest\nWHERE run.deleted_at IS NULL",
)

SCALAR_HISTORY: Final = View(
    "scalar_history",
    "The points that the chart of a scalar has: every stored step, or up to 1,000 of a longer run.",
    [
        *run_columns("history"),
        ViewColumn("name", "history.name", "Name of the scalar."),
        ViewColumn("step", "point.step", "Step."),
        ViewColumn("time", "point.time", "When the step ended, by the training's clock; null: not sent."),
        ViewColumn("value", "point.value", "Value, in the scalar's unit; may be NaN or infinite."),
        ViewColumn(
            "thinned",
            "history.thinned",
            "Whether steps are missing. Spikes are kept, so take means from scalar_means instead.",
        ),
    ],
    joined_runs("sql_views_scalarhistory AS history")
    + "\nCROSS JOIN LATERAL unnest(history.steps, history.times, history.values) AS point(step, time, value)",
)

SCALAR_MEANS: Final = View(
    "scalar_means",
    "Means of a scalar over buckets of steps, from all of its stored values.",
    [
        *run_columns("history"),
        ViewColumn("name", "history.name", "Name of the scalar."),
        ViewColumn(
            "first_step", "bucket.last_step / history.stride * history.stride", "First step of the bucket."
        ),
        ViewColumn("last_step", "bucket.last_step", "Its last step; of the last bucket, the run's."),
        ViewColumn("mean", "bucket.mean", "Mean of the values; NaN if one of them is."),
        ViewColumn("last", "bucket.last", "Last value that is not NaN."),
        ViewColumn("values", "bucket.count", "Number of values that are not NaN."),
    ],
    joined_runs("sql_views_scalarhistory AS history")
    + "\nCROSS JOIN LATERAL unnest(history.ends, history.means, history.lasts, history.counts)"
    " AS bucket(last_step, mean, last, count)",
)

GPU_HOURS: Final = View(
    "gpu_hours",
    "The hours of each run's processes, and those that it lost, as the page of the project's hours has them.",
    [
        ViewColumn("run_id", "lost.id", "Id of the run."),
        ViewColumn("project_id", "lost.project_id", "Id of its project."),
        ViewColumn("precision", "lost.precision", "fp8, bf16, fp16, fp32 or unknown."),
        ViewColumn("hours", "lost.seconds / 3600.0", "Hours of all processes together (GPU hours)."),
        ViewColumn(
            "has_gpu", "lost.has_gpu", "Whether the run has named a GPU; else these are process hours."
        ),
        ViewColumn("diverged_hours", "lost.diverged / 3600.0", "Hours lost to divergences."),
        ViewColumn("crashed_hours", "lost.crashed / 3600.0", "Hours lost to crashes."),
        ViewColumn(
            "is_guess", "lost.is_guess", "Whether no checkpoint is known, so that a crash lost the start."
        ),
        ViewColumn(
            "cost",
            "lost.seconds / 3600.0 * project.gpu_hour_price",
            "In the project's currency; null: no price.",
        ),
    ],
    f"FROM lost\nJOIN {SCHEMA}.projects AS project ON project.project_id = lost.project_id",
    before=f"WITH {hours_of_runs(f'project_id IN (SELECT project_id FROM {SCHEMA}.projects)')}",
)
