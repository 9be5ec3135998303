"""Suggested baselines and seed groups, from equal configurations."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.suggestions import (
    Candidate,
    suggest,
    suggest_group,
    suggested_baseline,
    suggested_group,
)
from fp8scope_dashboard.runs import services
from fp8scope_dashboard.runs.models import Run

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FP8 = Candidate(
    id="fp8", name="fp8 small", created_at=NOW, digest="d", precision="fp8", recipe="delayed", seed=0
)


def bf16(name: str, **fields: Any) -> Candidate:
    return Candidate(
        id=name,
        name=name,
        created_at=fields.pop("created_at", NOW),
        digest=fields.pop("digest", "d"),
        precision="bf16",
        **fields,
    )


def test_it_works() -> None:
    suggestion = suggest(FP8, [bf16("a"), bf16("other", digest="e"), FP8])
    assert suggestion is not None
    assert (suggestion.value, suggestion.label, suggestion.precision, suggestion.runs) == (
        "a",
        "a",
        "bf16",
        1,
    )


@pytest.mark.parametrize(
    "change",
    [{"baseline": "x"}, {"precision": "bf16"}, {"precision": "unknown"}, {"digest": ""}, {"total_steps": 5}],
)
def test_nothing_is_suggested_for(change: dict[str, Any]) -> None:
    others = [bf16("a", digest=change.get("digest", "d"), total_steps=10)]
    assert suggest(replace(FP8, **change), others) is None


def test_the_best_arm_is_suggested() -> None:
    day = timedelta(days=1)
    fp16 = replace(bf16("fp16", finished=True), precision="fp16")
    assert suggest(FP8, [fp16, bf16("a")]).value == "a"  # type: ignore[union-attr]
    assert suggest(FP8, [fp16]).value == "fp16"  # type: ignore[union-attr]
    seeds = [bf16(f"g{seed}", group="g") for seed in range(2)]
    assert suggest(FP8, [bf16("new", created_at=NOW + day), *seeds]).value == "g"  # type: ignore[union-attr]
    finished = bf16("done", finished=True)
    assert suggest(FP8, [finished, *seeds]).value == "done"  # type: ignore[union-attr]
    newer = [bf16("old"), bf16("new", created_at=NOW + day)]
    assert suggest(FP8, newer).value == "new"  # type: ignore[union-attr]


def test_the_own_group_is_no_baseline() -> None:
    assert suggest(replace(FP8, group="g"), [bf16("a", group="g")]) is None


def test_seeds_are_a_group() -> None:
    run = bf16("run-seed1", seed=1)
    others = [bf16("run-seed2", seed=2), bf16("run-seed3", seed=3), bf16("again", seed=1), bf16("unknown")]
    group = suggest_group(run, [*others, FP8, bf16("b", seed=4, baseline="x")])
    assert group is not None and group.name == "run" and group.ids == ("run-seed1", "run-seed2", "run-seed3")
    taken = suggest_group(run, others, {"run", "run-2"})
    assert taken is not None and taken.name == "run-3"
    existing = suggest_group(run, [bf16("x", seed=7, group="bf16"), *others])
    assert existing is not None and (existing.name, existing.ids, existing.members) == (
        "bf16",
        ("run-seed1",),
        1,
    )
    assert suggest_group(replace(run, group="g"), others) is None
    assert suggest_group(replace(run, seed=None), others) is None
    assert suggest_group(run, [bf16("again", seed=1)]) is None


def register(project: Project, name: str, **fields: Any) -> Run:
    config = {"lr": 1e-3, "width": 256, "precision": fields.get("precision")}
    return services.register(uuid.uuid4(), project, {"name": name, "config": config, **fields})[0]


def test_stored_runs_are_suggested(project: Project) -> None:
    fp8 = register(project, "fp8", precision="fp8", seed=0)
    assert suggested_baseline(fp8) is None and suggested_group(fp8) is None
    alone = register(project, "bf16-small", precision="bf16", seed=0)
    register(Project.objects.create(slug="other", name="Other"), "elsewhere", precision="bf16", group="g")
    suggestion = suggested_baseline(fp8)
    assert suggestion is not None and (suggestion.value, suggestion.label) == (str(alone.id), "bf16-small")
    # A suggestion is never used by itself.
    assert Run.objects.get(pk=fp8.pk).baseline == ""


def test_a_new_group_has_a_new_name(project: Project) -> None:
    register(project, "other", group="run", precision="fp8")
    runs = [register(project, f"run-{seed}", seed=seed, precision="bf16") for seed in range(2)]
    group = suggested_group(runs[0])
    assert group is not None and group.name == "run-2" and set(group.ids) == {str(run.id) for run in runs}


def test_a_reference_window_is_not_suggested(project: Project) -> None:
    fp8 = register(project, "fp8", precision="fp8", seed=0)
    parent = str(fp8.id)
    window = register(project, "window", precision="bf16", seed=0, parent=parent, relation="reference")
    assert window.config_digest == fp8.config_digest
    assert suggested_baseline(fp8) is None and suggested_group(fp8) is None
    # A resumed run is a whole run.
    resumed = register(project, "resumed", precision="bf16", seed=0, parent=parent, relation="resumed")
    suggestion = suggested_baseline(fp8)
    assert suggestion is not None and suggestion.value == str(resumed.id)
