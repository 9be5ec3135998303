"""Diagnose runs, store the results, and know which runs to diagnose."""

from __future__ import annotations

import time
from typing import Final
from uuid import UUID

from django.db.models import Q
from django.utils import timezone

from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.onset_search import told_onsets
from fp8scope_dashboard.analysis.progress import ReportStage, progress
from fp8scope_dashboard.analysis.tensor_onsets import default_limit
from fp8scope_dashboard.diagnosis import (
    baseline_health,
    evaluation,
    loss_code,
    product,
    reading,
    reference,
    software,
    weights,
)
from fp8scope_dashboard.diagnosis.conclusion import Conclusion, StepFindings, conclude
from fp8scope_dashboard.diagnosis.findings import Finding
from fp8scope_dashboard.diagnosis.models import Diagnosis
from fp8scope_dashboard.diagnosis.precedence import RunTrouble, may_explain
from fp8scope_dashboard.diagnosis.scaling import step as scaling
from fp8scope_dashboard.diagnosis.scaling.training import Training
from fp8scope_dashboard.diagnosis.tensors import TensorSeries
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Run, RunState

# Verdicts on a loss or score that call for a diagnosis.
# And one that may come from the baseline's own trouble.
IN_TROUBLE: Final = ("worse", "better")
# Outcomes that name a cause.
SUSPECTS: Final = ("cause", "suspect", "not_fp8")
# Runs that one sweep starts.
MAX_SWEPT: Final = 32


def diagnose(run_id: UUID, *, again: bool = False) -> Diagnosis | None:
    """Diagnose a run, unless its stored diagnosis has the same inputs. None if there is no such run.

    Repeated and concurrent calls do no harm: each computes from the stored data.
    """
    run = Run.objects.select_related("project", "comparison", "diagnosis").filter(pk=run_id).first()
    if run is None:
        return None
    inputs = reading.inputs_of(run)
    stored: Diagnosis | None = getattr(run, "diagnosis", None)
    if stored is not None and stored.inputs == inputs and not again:
        return stored
    began = time.perf_counter()
    with progress(
        run.id, "diagnosis", expected_seconds=stored.seconds if stored is not None else 0.0
    ) as report:
        conclusion = conclude_run(run, report)
    diagnosis, _ = Diagnosis.objects.update_or_create(
        run=run,
        defaults={
            "outcome": conclusion.outcome,
            "cause": conclusion.cause,
            "sentence": conclusion.sentence[:1000],
            "result": conclusion.as_dict(),
            "inputs": inputs,
            "seconds": time.perf_counter() - began,
            "diagnosed_at": timezone.now(),
        },
    )
    run_changed(run.id, run.project_id, "comparison", run.last_step)
    return diagnosis


def suspected_cause(run_id: UUID, onset: int) -> Diagnosis | None:
    """The diagnosis of a run if it names a possible cause of what began at step `onset`; else None.

    What began later, or was so from the first steps on, is none: a healthy run has it too.
    """
    stored = Diagnosis.objects.filter(run=run_id, outcome__in=SUSPECTS).first()
    if stored is None:
        return None
    decided_by, began = stored.result.get("decided_by"), stored.result.get("onset")
    for finding in stored.result.get("findings", []):
        if finding["step"] == decided_by and finding.get("earliest") is not None:
            began = finding["earliest"]
    return stored if may_explain(stored.cause, began, onset, 0) else None


def conclude_run(run: Run, report: ReportStage) -> Conclusion:
    """Make all steps of the diagnosis, and conclude."""
    report("Comparing the losses", 0.0)
    baselines = reading.baselines_of(run)
    resumes = reading.resumes_of(run)
    curve = reading.curve_of(run)
    health = baseline_health.examine(curve, [reading.curve_of(baseline) for baseline in baselines])
    shared = reference.compare_trouble(curve, health.usable, reading.windows_of(run), resumes)
    scores = reading.scores_of([run], run)
    trouble = RunTrouble(
        int(curve.steps[0]) if len(curve.steps) else 0,
        shared.own,
        shared.is_worse
        or any(score.verdict == "worse" for score in scores)
        or getattr(getattr(run, "comparison", None), "verdict", "") == "worse",
    )
    report("Reading the tensors", 0.2)
    rows, beside = _rows(run, baselines, shared, resumes)
    report("Concluding", 0.9)
    return conclude(
        StepFindings(
            baseline=health.finding,
            reference=shared,
            software=software.examine(reading.environments_of(run), run.recipe),
            optimizer=weights.examine(rows, beside, reading.moments_of(run), trouble),
            scaling=_scaling(run, baselines, rows, beside, shared),
            product=product.examine(reading.ranking_of(run)),
            evaluation=evaluation.examine(
                scores,
                reading.scores_of(baselines) if baselines else [],
                run.precision,
                training_is_worse=shared.is_worse or bool(shared.own),
            ),
            loss_code=loss_code.examine(shared.own, rows),
            trouble=trouble,
        )
    )


def _rows(
    run: Run, baselines: list[Run], shared: reference.ReferenceFinding, resumes: list[int]
) -> tuple[TensorSeries | None, TensorSeries | None]:
    """The tensors of the run around its trouble, and those of its BF16 run in the same steps."""
    tensors = reading.tensors_of(run)
    onset = shared.own[0].onset if shared.own else None
    around = [step for step in (onset, *resumes) if step is not None]
    between = reading.steps_to_read(run, len(tensors), around)
    rows = reading.tensor_rows(run, tensors, between) if between else None
    beside = None
    if rows is not None and baselines and between:
        beside = reading.tensor_rows(baselines[0], reading.tensors_of(baselines[0]), between)
    return rows, beside


def _scaling(
    run: Run,
    baselines: list[Run],
    rows: TensorSeries | None,
    beside: TensorSeries | None,
    shared: reference.ReferenceFinding,
) -> Finding:
    if rows is None:
        return Finding(
            step="scaling", outcome="unknown", sentence="The run has no FP8 tensor telemetry to look at."
        )
    norms = reading.gradient_norms(run, baselines[0] if baselines else None)
    onset = shared.own[0].onset if shared.own else None
    training = Training(
        norm_bits=norms.bits,
        norm_steps=norms.steps,
        is_worse=shared.is_worse,
        trouble_at=onset,
        last_step=reading.last_step_of(run),
        grown=told_onsets(run, "amax", default_limit("amax")),
    )
    return scaling.examine(rows, run.recipe, beside, training)


def undiagnosed_runs() -> list[UUID]:
    """FP8 runs in trouble without a diagnosis of their present data, the latest first.

    In trouble: the verdict is worse, an alert is open, or the run failed. Others are diagnosed when somebody
    opens the page.
    """
    projects = comparison_runs.active_projects()
    runs = (
        Run.objects.select_related("comparison", "diagnosis")
        .filter(project__in=projects, precision="fp8")
        # The events of the alerts' app, which is above this one.
        .filter(Q(comparison__verdict__in=IN_TROUBLE) | Q(state=RunState.FAILED) | Q(alerts__state="open"))
        .order_by("-heartbeat_at")
        .distinct()
    )
    stale = []
    for run in runs[: 8 * MAX_SWEPT]:
        stored = getattr(run, "diagnosis", None)
        if stored is None or stored.inputs != reading.inputs_of(run):
            stale.append(run.id)
    return stale[:MAX_SWEPT]
