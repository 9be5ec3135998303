"""The section for a model card: the numbers of the run's page, and nothing that was not measured."""

from __future__ import annotations

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.seeding import seed_project

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages.formatting import difference
from fp8scope_dashboard.pages.run.model_card import model_card
from fp8scope_dashboard.pages.run.summary import verdict_of
from fp8scope_dashboard.runs.models import Run, Tensor

pytestmark = pytest.mark.django_db


def row(card: str, title: str) -> str:
    (line,) = [line for line in card.splitlines() if line.startswith(f"| {title} |")]
    return line


def test_it_works(project: Project) -> None:
    run = Run.objects.select_related("comparison", "project").get(pk=seed_project(project, 150).healthy.pk)
    card, verdict = model_card(run, "https://fp8.example"), verdict_of(run, set())
    assert verdict.delta is not None and verdict.interval is not None
    text = row(card, "Difference of the loss")
    for value in (verdict.delta, *verdict.interval):
        assert difference(value, verdict.unit, signed=True) in text
    assert "95 % interval" in text and verdict.badge.label in row(card, "Against BF16")
    assert "1 run against 3 baseline runs" in row(card, "Runs") and "e4m3" in row(card, "Formats")
    assert f"(https://fp8.example/p/default/runs/{run.pk}/)" in card


def test_what_was_not_measured_is_left_out(project: Project) -> None:
    run = make_run(project, "a|b *c*\n## d", precision="fp8", recipe={"recipe": "X|Y"})
    Tensor.objects.create(run=run, index=0, name="a.input", module="a", role="input", format="e4m3")
    card = model_card(run, "")
    assert "not judged" in row(card, "Against BF16") and "It was not compared with a BF16 run." in card
    assert r"X\|Y" in row(card, "Recipe") and r"a\|b \*c\*" in card
    assert [line for line in card.splitlines() if line.startswith("#")] == ["## Training precision"]
    for title in ("Difference", "Hours", "GPU hours", "Hardware", "Margin"):
        assert f"| {title}" not in card
