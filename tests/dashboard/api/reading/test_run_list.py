"""The list of runs over HTTP has the runs, the order and the verdicts of its page."""

from __future__ import annotations

from typing import Any

import pytest
from dashboard.helpers.reading import Reader
from dashboard.helpers.recording import make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor
from django.http import QueryDict
from django.utils import timezone

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.pages.run.summary import baseline_groups, verdict_of
from fp8scope_dashboard.pages.runs.listing import Listing, ListState


def pages_of(reader: Reader, limit: int, **query: Any) -> list[dict[str, Any]]:
    """All pages one after the other."""
    runs, after = [], None
    while True:
        answer = reader.json("/runs", limit=limit, **query, **({"after": after} if after else {}))
        runs += answer["runs"]
        after = answer["next"]
        if after is None:
            return runs


def test_it_works(reader: Reader, seeded: Seeded) -> None:
    listed = {run["name"]: run for run in reader.json("/runs")["runs"]}
    assert listed[seeded.faulty.name]["verdict"]["verdict"] == "worse"
    assert listed[seeded.faulty.name]["loss"] == "NaN" and listed[seeded.faulty.name]["open_alerts"] > 0
    assert listed[seeded.healthy.name]["url"].endswith(f"/runs/{seeded.healthy.pk}/")
    assert listed[seeded.baselines[0].name]["verdict"]["label"] == "Baseline"


def test_the_verdicts_are_those_of_the_page(reader: Reader, seeded: Seeded, viewer: Visitor) -> None:
    for run in reader.json("/runs")["runs"]:
        stored = viewer.project.runs.get(pk=run["id"])
        shown = verdict_of(stored, baseline_groups(viewer.project.pk))
        verdict = run["verdict"]
        assert (verdict["label"], verdict["delta"], verdict["own"]) == (
            shown.badge.label,
            shown.delta,
            shown.own,
        )
        assert verdict["interval"] == (None if shown.interval is None else list(shown.interval))


@pytest.mark.parametrize("sort", ["-created", "created", "name", "-loss", "seed", "config.lr", "-duration"])
def test_pages_have_the_order_of_the_list(reader: Reader, viewer: Visitor, sort: str) -> None:
    for i in range(11):
        scalars = {} if i % 4 == 0 else {"loss": (i * 7) % 5}
        make_run(viewer.project, f"run {i % 3}", seed=i % 2, last_scalars=scalars, config={"lr": (i * 3) % 4})
    address = QueryDict(mutable=True)
    address.update({"sort": sort})
    expected = Listing(viewer.project, ListState.of(address)).page().runs
    for limit in (1, 4, 100):
        assert [run["id"] for run in pages_of(reader, limit, sort=sort)] == [str(run.pk) for run in expected]


def test_the_search_is_that_of_the_page(reader: Reader, viewer: Visitor) -> None:
    make_run(viewer.project, "small", config={"lr": 1e-4}, state="failed")
    make_run(viewer.project, "large", config={"lr": 1e-2}, state="failed")
    make_run(viewer.project, "other", config={"lr": 1e-2}, state="finished")
    answer = reader.json("/runs", q="state:failed lr>1e-3")
    assert [run["name"] for run in answer["runs"]] == ["large"] and answer["total"] == 1
    answer = reader.json("/runs", q="colour:red")
    assert answer["total"] == 3 and "no field" in answer["problems"][0]


def test_a_name_is_matched_as_a_whole(reader: Reader, viewer: Visitor) -> None:
    for name in ("gpt", "gpt 2", "GPT"):
        make_run(viewer.project, name)
    assert [run["name"] for run in reader.json("/runs", name="gpt")["runs"]] == ["gpt"]
    assert reader.json("/runs", name="gp")["total"] == reader.json("/runs", name="a\0b")["total"] == 0


def test_a_page_after_a_run_that_is_gone_is_refused(reader: Reader, viewer: Visitor) -> None:
    run = make_run(viewer.project, "gone")
    gone = run.pk
    run.delete()
    assert "Begin again" in reader.refused("/runs", after=gone)["hint"]
    foreign = make_run(create_project("elsewhere", "Elsewhere"), "foreign")
    assert reader.refused("/runs", after=foreign.pk)["code"] == "unknown_name"


def test_an_unknown_order_is_refused(reader: Reader, viewer: Visitor) -> None:
    for sort in ("colour", "--created", "", "config.", "spark"):
        assert "cannot be sorted" in reader.refused("/runs", sort=sort)["message"]


def test_other_projects_and_archived_runs_are_left_out(reader: Reader, viewer: Visitor) -> None:
    make_run(create_project("elsewhere", "Elsewhere"), "foreign")
    make_run(viewer.project, "old", archived_at=timezone.now())
    assert reader.json("/runs")["total"] == 0
    assert reader.json("/runs", q="archived:all")["runs"][0]["archived_at"] is not None


def test_a_run_has_its_starts_and_its_environment(reader: Reader, viewer: Visitor) -> None:
    run = make_run(viewer.project, "run", environment={"python": "3.11"}, seed=3, total_steps=9)
    for attempt, rank, steps in ((0, 0, (0, 7)), (0, 1, (0, 6)), (1, 0, (4, 9))):
        run.writers.create(
            uuid=f"00000000-0000-0000-0000-0000000000{attempt}{rank}",
            attempt=attempt,
            rank=rank,
            hostname=f"node{rank}",
            first_step=steps[0],
            last_step=steps[1],
        )
    answer = reader.json(f"/runs/{run.pk}")
    assert (answer["seed"], answer["total_steps"], answer["last_attempt"]) == (3, 9, 1)
    shown = [
        (start["processes"], start["hosts"], start["first_step"], start["last_step"])
        for start in answer["attempts"]
    ]
    assert shown == [(2, ["node0", "node1"], 0, 7), (1, ["node0"], 4, 9)]
    assert reader.json(f"/runs/{run.pk}/environment") == {"python": "3.11"}
