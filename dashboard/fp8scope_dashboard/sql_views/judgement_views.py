"""The views of alerts, verdicts and scores."""

from __future__ import annotations

from typing import Final

from django.db.models import TextChoices

from fp8scope_dashboard.alerts.models import RuleKind
from fp8scope_dashboard.sql_views.view import View, ViewColumn, columns_of, joined_runs, run_columns


def _labels(choices: type[TextChoices], column: str) -> str:
    cases = " ".join(f"WHEN '{value}' THEN '{label}'" for value, label in choices.choices)
    return f"CASE {column} {cases} ELSE {column} END"


ALERTS: Final = View(
    "alerts",
    "Alerts.",
    [
        ViewColumn("alert_id", "alert.id", "Id of the alert."),
        *run_columns("alert"),
        ViewColumn("kind", "alert.kind", "Kind of its rule, such as loss_spike."),
        ViewColumn(
            "title",
            f"coalesce(nullif(alert.rule_name, ''), {_labels(RuleKind, 'alert.kind')})",
            "Name of its rule.",
        ),
        *columns_of(
            "alert",
            severity="warning or critical.",
            state="open, acknowledged, muted or resolved.",
            onset_step="First step of the problem.",
            step="Step at which it was detected.",
            value="Observed value, in the unit of what the rule reads.",
            threshold="Limit of the rule, in the same unit.",
            message="What happened, in a sentence.",
            opened_at="When it was opened.",
            acknowledged_at="When somebody acknowledged it; null: nobody has.",
            resolved_at="When it ended; null: it has not.",
            resolved_step="Step at which it ended.",
        ),
    ],
    joined_runs("alerts_event AS alert"),
)

VERDICTS: Final = View(
    "verdicts",
    "The latest comparison of a run's loss with its BF16 baseline. Of a group of seeds it is the group's.",
    [
        *run_columns("comparison"),
        ViewColumn("baseline", "comparison.baseline", "Group or run that it was compared with."),
        ViewColumn(
            "verdict",
            "comparison.verdict",
            "equivalent, worse, better, cannot_tell; pending or incomplete: good, but not of the whole run.",
        ),
        ViewColumn(
            "measured", "coalesce(result.measured, comparison.verdict)", "Verdict on the judged part."
        ),
        ViewColumn("final", "coalesce(result.final, false)", "Whether the whole planned run was judged."),
        ViewColumn("unit", "coalesce(result.unit, 'relative')", "Unit of the differences: relative or nats."),
        ViewColumn("delta", "result.delta", "Difference of the losses, in this unit; above 0 is worse."),
        ViewColumn("delta_low", "(result.interval->>0)::float8", "Lower end of its interval."),
        ViewColumn("delta_high", "(result.interval->>1)::float8", "Upper end of its interval."),
        ViewColumn("tolerance", "result.tolerance", "Largest difference that counts as none."),
        ViewColumn("margin", "result.margin", "Margin that was chosen."),
        ViewColumn("smallest_detectable", "result.smallest_detectable", "Difference that would be found."),
        ViewColumn(
            "own_difference",
            "CASE WHEN result.own IS NOT NULL THEN comparison.own_difference"
            " WHEN result.k_run = 1 THEN result.delta END",
            "Difference of this run alone; null: its loss is not finite.",
        ),
        ViewColumn("loss", "result.loss", "Mean loss in the judged window."),
        ViewColumn("baseline_loss", "result.baseline_loss", "The same of the baseline."),
        ViewColumn(
            "judged_share", "(result.coverage->>'share')::float8", "Judged part of the plan (0 to 1)."
        ),
        ViewColumn("to_step", "comparison.to_step", "Last step of the run when it was compared."),
        ViewColumn("computed_at", "comparison.computed_at", "When it was compared."),
    ],
    joined_runs("analysis_comparison AS comparison")
    + "\nCROSS JOIN LATERAL jsonb_to_record(comparison.result) AS result(measured text, final boolean,"
    " unit text, delta float8, interval jsonb, tolerance float8, margin float8, smallest_detectable float8,"
    " own jsonb, k_run int, loss float8, baseline_loss float8, coverage jsonb)",
)

EVALUATIONS: Final = View(
    "evaluations",
    "The scores of evaluations, as the runs have sent them.",
    [
        *run_columns("evaluation"),
        *columns_of(
            "evaluation",
            step="Step of the checkpoint.",
            name="Task.",
            metric="Metric, such as accuracy.",
            kind="proportion (items are 0 or 1) or mean.",
            higher_is_better="Whether larger scores are better.",
        ),
        ViewColumn("items", "cardinality(evaluation.items)", "Number of items."),
        ViewColumn(
            "score",
            "(SELECT avg(item) FROM unnest(evaluation.items) AS listed(item))",
            "Mean of the items; of a proportion, from 0 to 1.",
        ),
        ViewColumn("precision", "evaluation.precision", "Of the forward pass; null: not known."),
        ViewColumn("created_at", "evaluation.created_at", "When it was stored."),
    ],
    joined_runs("analysis_evaluation AS evaluation") + "\nWHERE evaluation.matrix IS NULL",
)

SCORE_VERDICTS: Final = View(
    "score_verdicts",
    "The comparisons of a run's scores with those of its baseline, at each step.",
    [
        *run_columns("comparison"),
        ViewColumn("name", "comparison.name", "Task."),
        ViewColumn("metric", "comparison.metric", "Metric."),
        ViewColumn("step", "comparison.step", "Step of the checkpoint."),
        ViewColumn("verdict", "comparison.verdict", "As in verdicts."),
        ViewColumn(
            "measured", "coalesce(result.measured, comparison.verdict)", "Verdict on this score alone."
        ),
        ViewColumn("own_score", "result.score", "Score of this run, in the unit of the score."),
        ViewColumn("baseline_score", "result.baseline_score", "Score of the baseline."),
        ViewColumn("difference", "result.difference", "Difference of the two arms."),
        ViewColumn(
            "difference_low", "(result.difference_interval->>0)::float8", "Lower end of its interval."
        ),
        ViewColumn(
            "difference_high", "(result.difference_interval->>1)::float8", "Upper end of its interval."
        ),
        ViewColumn("margin", "result.margin", "Largest difference that counts as none."),
        ViewColumn("items", "result.n", "Number of items that all runs have."),
        ViewColumn("computed_at", "comparison.computed_at", "When it was compared."),
    ],
    joined_runs("analysis_evaluationcomparison AS comparison")
    + "\nCROSS JOIN LATERAL jsonb_to_record(comparison.result) AS result(measured text, score float8,"
    " baseline_score float8, difference float8, difference_interval jsonb, margin float8, n bigint)",
)
