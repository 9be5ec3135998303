"""Early signs in stored runs: the alert shows the statistic that rose. Existing projects get the rules."""

from __future__ import annotations

import math
from importlib import import_module

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from django.apps import apps

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.kinds.early_signs import EARLY_SIGNS
from fp8scope_dashboard.alerts.models import Alert, AlertState, Rule
from fp8scope_dashboard.alerts.services import evaluate

pytestmark = pytest.mark.django_db
EVERY, SAMPLES, ONSET = 5, 80, 50
NAMES = ["blocks.0.mlp.up.input", "blocks.1.mlp.up.input"]


def sampled(level: float, factor: float) -> np.ndarray:
    """A statistic of sampled steps; that of the second tensor is `factor` as high for ten samples."""
    values = np.full((SAMPLES * EVERY, len(NAMES)), math.nan)
    noise = np.exp(np.random.default_rng(0).normal(0.0, 0.05, (SAMPLES, len(NAMES))))
    values[::EVERY] = level * noise
    values[ONSET * EVERY : (ONSET + 10) * EVERY, 1] *= factor
    return values


@pytest.mark.parametrize("rows_per_batch", [7, 1000])
def test_it_works(project: Project, rows_per_batch: int) -> None:
    run = make_run(project)
    steps = np.arange(1, SAMPLES * EVERY + 1)
    statistics = {
        "kurtosis": sampled(8.0, 10.0),
        "sq_error": sampled(1e-3, 8.0),
        "sq_signal": sampled(1.0, 1.0),
    }
    recorder = Recorder(run=run, tensors=NAMES)
    recorder.rows(steps, {"loss": np.full(len(steps), 2.0)}, statistics, rows_per_batch=rows_per_batch)
    evaluate(run.id)
    # Both rules see the same tensor at the same step, so they are one alert.
    (event,) = Alert.objects.filter(run=run)
    onset = ONSET * EVERY + 1
    assert (event.kind, event.onset_step, event.step) == ("noise_growth", onset, onset + 2 * EVERY)
    assert event.state == AlertState.RESOLVED
    assert f"{NAMES[1]} " in event.message and f"since step {onset - EVERY + 1}–{onset}" in event.message
    series = event.evidence["series"][0]
    assert series["name"] == f"{NAMES[1]} noise_to_signal"
    assert max(series["values"]) > 5 * min(series["values"])
    (further,) = event.evidence["further"]
    assert (further["kind"], further["onset_step"]) == ("kurtosis_growth", onset)
    assert (
        f"{NAMES[1]} " in further["message"]
        and f"since step {onset - EVERY + 1}–{onset}" in further["message"]
    )


def test_existing_projects_get_the_rules(project: Project) -> None:
    names = [kind.name for kind in EARLY_SIGNS]
    Rule.objects.filter(kind__in=names[1:]).delete()
    kept = Rule.objects.get(kind=names[0])
    Rule.objects.filter(pk=kept.pk).update(enabled=False)
    migration = import_module("fp8scope_dashboard.alerts.migrations.0009_early_signs")
    migration.add_rules(apps, None)
    found = {rule.kind: rule for rule in Rule.objects.filter(project=project, kind__in=names)}
    # Nothing that people have set is changed.
    assert set(found) == set(names) and not found[names[0]].enabled
    for kind in EARLY_SIGNS[1:]:
        assert (found[kind.name].enabled, found[kind.name].severity) == (kind.enabled, kind.severity)
