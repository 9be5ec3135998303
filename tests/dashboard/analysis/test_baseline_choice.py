"""A person chooses a baseline or a group, and undoes it."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.analysis import baseline_choice, comparison_runs
from fp8scope_dashboard.analysis.baseline_choice import ChoiceError, choose_baseline, choose_group, undo
from fp8scope_dashboard.analysis.loss_comparisons import compare
from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.runs import services
from fp8scope_dashboard.runs.models import Choice, Run

pytestmark = pytest.mark.django_db


@pytest.fixture
def ada() -> User:
    return User.objects.create_user("ada")


def register(project: Project, name: str, **fields: Any) -> Run:
    return services.register(uuid.uuid4(), project, {"name": name, **fields})[0]


def baselines(*runs: Run) -> list[str]:
    return [Run.objects.get(pk=run.pk).baseline for run in runs]


def test_it_works(project: Project, ada: User) -> None:
    bf16, run = register(project, "bf16", group="bf16"), register(project, "fp8", precision="fp8")
    steps = np.arange(1, 101)
    for each in (bf16, run):
        Recorder(run=each).rows(steps, {"loss": 2.0 + 3.0 * np.exp(-steps / 40.0)})
    assert compare(run.id) is None
    assert choose_baseline(run, "bf16", user=ada) == [run]
    assert comparison_runs.uncompared_runs() == [run.id], "the jobs compare it at once"
    assert compare(run.id) is not None
    choice = baseline_choice.current_choice(run, "baseline")
    assert choice is not None and (choice.chosen_by, choice.value, choice.suggested) == (ada, "bf16", False)
    undo(run, "baseline", user=ada)
    assert baselines(run) == [""] and not Comparison.objects.exists()
    undone = Choice.objects.get()
    assert undone.undone_by == ada and undone.undone_at is not None
    with pytest.raises(ChoiceError, match="nothing to undo"):
        undo(run, "baseline", user=ada)


def test_undo_returns_to_the_choice_before_and_then_to_the_agents(project: Project, ada: User) -> None:
    for name in ("a", "b", "c"):
        register(project, name, group=name)
    run = register(project, "fp8", baseline="a")
    for name in ("b", ""):
        choose_baseline(Run.objects.get(pk=run.pk), name, user=ada)
    assert baselines(run) == [""]
    undo(run, "baseline", user=ada)
    assert baselines(run) == ["b"]
    # The script names another one meanwhile.
    services.register(run.id, project, {"name": "fp8", "baseline": "c"})
    assert baselines(run) == ["b"]
    undo(run, "baseline", user=ada)
    assert baselines(run) == ["c"]


def test_seeds_are_chosen_for_and_undone_together(project: Project, ada: User) -> None:
    register(project, "bf16", group="bf16")
    seeds = [register(project, f"fp8 {seed}", group="fp8", seed=seed) for seed in range(3)]
    other = register(project, "fp8 x", group="fp8", baseline="elsewhere")
    assert {run.pk for run in choose_baseline(seeds[0], "bf16", user=ada)} == {run.pk for run in seeds}
    assert baselines(*seeds, other) == ["bf16"] * 3 + ["elsewhere"]
    undo(seeds[1], "baseline", user=ada)
    assert baselines(*seeds, other) == [""] * 3 + ["elsewhere"]


@pytest.mark.parametrize("value", ["nowhere", "fp8", "itself", "run of another project", "x" * 200])
def test_impossible_baselines(project: Project, ada: User, value: str) -> None:
    run = register(project, "fp8", group="fp8")
    elsewhere = register(Project.objects.create(slug="other", name="Other"), "bf16", group="nowhere")
    ids = {"itself": str(run.id), "run of another project": str(elsewhere.id)}
    with pytest.raises(ChoiceError):
        choose_baseline(run, ids.get(value, value), user=ada)
    assert baselines(run) == [""] and not Choice.objects.exists()


def test_one_run_as_baseline(project: Project, ada: User) -> None:
    alone, run = register(project, "bf16"), register(project, "fp8")
    choose_baseline(run, str(alone.id), user=ada, suggested=True)
    run = Run.objects.get(pk=run.pk)
    assert comparison_runs.baseline_runs(run) == [alone] and comparison_runs.baseline_label(run) == "bf16"


def test_a_group_is_made_and_undone(project: Project, ada: User) -> None:
    runs = [register(project, f"bf16 {seed}", seed=seed) for seed in range(2)]
    choose_group(runs, "bf16", user=ada)
    assert set(Run.objects.values_list("group", flat=True)) == {"bf16"}
    grouped = list(Run.objects.all())
    with pytest.raises(ChoiceError, match="already is in the group"):
        choose_group(grouped, "b", user=ada)
    undo(grouped[0], "group", user=ada)
    assert set(Run.objects.values_list("group", flat=True)) == {""}
    with pytest.raises(ChoiceError, match="1 to 128"):
        choose_group(list(Run.objects.all()), "", user=ada)


def test_the_history_is_bounded(project: Project, ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline_choice, "MAX_CHOICES", 3)
    register(project, "bf16", group="bf16")
    run = register(project, "fp8")
    for value in ("bf16", "", "bf16", "", "bf16"):
        choose_baseline(Run.objects.get(pk=run.pk), value, user=ada)
    assert Choice.objects.count() == 3 and baselines(run) == ["bf16"]


def test_parents_and_children(project: Project) -> None:
    first = register(project, "first")
    second = register(project, "second", parent=str(first.id), relation="resumed")
    third = register(project, "third", parent=str(second.id), relation="reference")
    # A cycle, a run that is its own parent, and one that is unknown.
    services.register(first.id, project, {"name": "first", "parent": str(third.id)})
    itself = register(project, "itself")
    services.register(itself.id, project, {"name": "itself", "parent": str(itself.id)})
    lost = register(project, "lost", parent="wandb run x1")
    first, itself = Run.objects.get(pk=first.pk), Run.objects.get(pk=itself.pk)
    assert comparison_runs.parent_of(second) == first and comparison_runs.parent_of(first) == third
    assert comparison_runs.children_of(first) == [second] and comparison_runs.children_of(third) == [first]
    assert comparison_runs.parent_of(itself) is None and comparison_runs.children_of(itself) == []
    assert comparison_runs.parent_of(lost) is None and lost.parent == "wandb run x1"
