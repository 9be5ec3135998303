"""The card of related runs: baseline, seed group, parents and children, and the search for runs."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from dashboard.helpers.visitors import Visitor, run_html

from fp8scope_dashboard.analysis.baseline_choice import choose_baseline
from fp8scope_dashboard.runs import services
from fp8scope_dashboard.runs.models import Choice, Run


def register(visitor: Visitor, name: str, **fields: Any) -> Run:
    config = {"config": {"lr": 1e-3, "precision": fields.get("precision", "")}}
    return services.register(uuid.uuid4(), visitor.project, {"name": name, **config, **fields})[0]


def post(visitor: Visitor, run: Run, rest: str, **fields: str) -> str:
    answer = visitor.client.post(visitor.address(f"runs/{run.id}/related/{rest}"), fields, follow=True)
    return answer.content.decode()


def test_a_suggestion_is_accepted_and_undone(admin: Visitor, member: Visitor) -> None:
    register(admin, "bf16-small", precision="bf16", group="bf16")
    run = register(admin, "fp8", precision="fp8")
    shown = run_html(member, run)
    assert "Suggested baseline: <strong>bf16</strong>" in shown and "Compare with it" in shown
    assert Run.objects.get(pk=run.pk).baseline == ""
    answer = post(member, run, "baseline", baseline="bf16", suggested="1")
    assert "1 run is compared with “bf16” from now on." in answer
    assert "chosen by mia" in answer and "as suggested" in answer and "Suggested baseline" not in answer
    answer = post(member, run, "baseline/undo")
    assert "Undone for 1 run." in answer and "chosen by" not in answer
    assert Run.objects.get(pk=run.pk).baseline == "" and Choice.objects.get().chosen_by == member.user


def test_the_scripts_baseline_is_named_beside_the_choice(admin: Visitor) -> None:
    for group in ("a", "b"):
        register(admin, group, group=group)
    run = register(admin, "fp8", baseline="a")
    assert "set by the training script" in run_html(admin, run)
    choose_baseline(run, "b", user=admin.user)
    services.register(run.id, admin.project, {"name": "fp8", "baseline": "c"})
    assert "The training script names “c”" in run_html(admin, run, "related")


def test_a_single_run_is_shown_by_its_name(admin: Visitor) -> None:
    alone, run = register(admin, "the only bf16"), register(admin, "fp8")
    answer = post(admin, run, "baseline", baseline=str(alone.id))
    assert "compared with “the only bf16”" in answer
    assert "<strong>the only bf16</strong>" in run_html(admin, run, "related")
    assert "The comparison with “the only bf16” starts" in run_html(admin, run)


@pytest.mark.parametrize(("rest", "message"), [("baseline", "No group or run"), ("group", "no suggestion")])
def test_impossible_choices_say_why(admin: Visitor, rest: str, message: str) -> None:
    run = register(admin, "fp8")
    assert message in post(admin, run, rest, baseline="nowhere")


def test_a_seed_group_is_accepted(admin: Visitor) -> None:
    runs = [register(admin, f"bf16-{seed}", seed=seed, precision="bf16") for seed in range(3)]
    assert "Suggested seed group: <strong>bf16</strong> (3 runs with the same" in run_html(admin, runs[0])
    assert "3 runs are in the group “bf16” from now on." in post(admin, runs[0], "group")
    shown = run_html(admin, runs[1], "related")
    assert "bf16-0" in shown and "bf16-2" in shown and "chosen by ada" in shown
    assert "Undone for 3 runs." in post(admin, runs[2], "group/undo")
    assert set(Run.objects.values_list("group", flat=True)) == {""}


def test_lineage_is_linked_both_ways(admin: Visitor) -> None:
    first = register(admin, "the first")
    second = register(admin, "the second", parent=str(first.id), relation="resumed")
    window = register(admin, "the window", parent=str(second.id), relation="reference")
    lost = register(admin, "lost", parent="gone <b>")
    assert "Resumed by" in run_html(admin, first, "related") and f"runs/{second.id}/" in run_html(
        admin, first, "related"
    )
    shown = run_html(admin, second)
    assert "Resumed from" in shown and f"runs/{first.id}/" in shown and f"runs/{window.id}/" in shown
    assert "Reference window of" in run_html(admin, window)
    assert "gone &lt;b&gt;" in run_html(admin, lost) and "no run of this project has this id" in run_html(
        admin, lost
    )


def test_viewers_change_nothing(admin: Visitor, viewer: Visitor, stranger: Visitor) -> None:
    run = register(admin, "fp8")
    assert "Change baseline" not in run_html(viewer, run)
    for rest in ("baseline", "group", "baseline/undo", "group/undo"):
        address = admin.address(f"runs/{run.id}/related/{rest}")
        assert viewer.client.post(address).status_code == 403
        assert stranger.client.post(address).status_code == 404
        assert admin.client.get(address).status_code == 405


def test_the_list_is_searched_by_fields(admin: Visitor) -> None:
    register(admin, "first run", precision="fp8", recipe={"recipe": "DelayedScaling", "margin": 2})
    register(admin, "second run", precision="bf16", tags=["nightly"])

    def listed(query: str) -> str:
        return admin.client.get(admin.address(), {"q": query}).content.decode()

    assert "first run" in listed("precision:fp8 recipe:delayed margin:2")
    assert "second run" not in listed("precision:fp8 recipe:delayed margin:2")
    assert "No run matches" in listed("margin:3") and "DelayedScaling" in listed("first")
    assert "second run" in listed("tag:nightly") and "There is no field “color”" in listed("color:red")
