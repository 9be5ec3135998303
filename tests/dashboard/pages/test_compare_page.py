"""BF16 and FP8 side by side."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

from dashboard.helpers.recording import make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor
from django.utils.html import escape

from fp8scope_dashboard.pages.views.compare import MOST_CHOSEN


def html(visitor: Visitor, rest: str = "compare/", **headers: str) -> str:
    answer = visitor.client.get(visitor.address(rest), headers=headers)
    assert answer.status_code == 200
    return answer.content.decode()


def figure(visitor: Visitor, name: str, runs: list[Any]) -> dict[str, Any]:
    query = {"runs": [str(run.id) for run in runs]}
    return dict(visitor.client.get(visitor.address(f"compare/figures/{name}.json"), query).json())


def test_it_works(admin: Visitor, seeded: Seeded) -> None:
    page = html(admin)
    assert len(re.findall(r'name="runs" value="[^"]+" checked>', page)) == 5
    assert escape(seeded.healthy.comparison.result["explanation"]) in page
    assert "Worse than BF16" in page


def test_the_address_selects_the_runs(admin: Visitor, seeded: Seeded) -> None:
    page = html(admin, f"compare/?runs={seeded.healthy.id}&runs={seeded.baselines[0].id}")
    assert f'value="{seeded.healthy.id}" checked' in page
    assert f'value="{seeded.faulty.id}">' in page
    assert "Worse than BF16" not in page


def test_ignores_invalid_and_foreign_runs_in_the_address(
    admin: Visitor, stranger: Visitor, seeded: Seeded
) -> None:
    foreign = make_run(stranger.project, "not yours")
    page = html(admin, f"compare/?runs=x&runs={uuid.uuid4()}&runs={foreign.id}&runs={seeded.healthy.id}")
    assert "not yours" not in page and f'value="{seeded.healthy.id}" checked' in page


def test_a_change_of_the_selection_gets_only_the_comparison(admin: Visitor, seeded: Seeded) -> None:
    part = html(admin, f"compare/?runs={seeded.healthy.id}", **{"HX-Target": "compared"})
    assert part.strip().startswith('<div id="compared"') and "chooser" not in part


def test_empty_states(admin: Visitor) -> None:
    assert "Nothing to compare yet" in html(admin)
    make_run(admin.project, "alone", precision="fp8")
    assert "none of the selected runs has a baseline" in html(admin)


def test_draws_losses_by_arm(admin: Visitor, seeded: Seeded) -> None:
    answer = figure(admin, "loss", [*seeded.baselines, seeded.healthy, seeded.faulty])
    shown = [trace["name"] for trace in answer["figure"]["data"] if trace.get("showlegend") is not False]
    assert shown == ["BF16 (3 seeds)", "FP8 · fp8-delayed", "FP8 · fp8-frozen-scale"]
    assert "empty" in figure(admin, "loss", [])


def test_draws_deltas_with_their_tolerance(admin: Visitor, seeded: Seeded) -> None:
    answer = figure(admin, "delta", [*seeded.baselines, seeded.healthy, seeded.faulty])
    names = {trace["name"] for trace in answer["figure"]["data"]}
    assert {"gpt fp8 delayed", "gpt fp8 frozen scale"} <= names
    tolerance = seeded.healthy.comparison.result["tolerance"]
    assert {tolerance, -tolerance} <= {shape.get("y0") for shape in answer["figure"]["layout"]["shapes"]}
    assert "empty" in figure(admin, "delta", seeded.baselines)


def test_an_arm_keeps_its_colour(admin: Visitor, seeded: Seeded) -> None:
    together = json.dumps(figure(admin, "loss", [seeded.healthy, seeded.faulty]))
    alone = json.dumps(figure(admin, "loss", [seeded.faulty]))
    assert "142,47,134" in together and "142,47,134" in alone, "the colour of the second FP8 group"
    assert "201,80,10" in together and "201,80,10" not in alone


def test_limits_the_number_of_selected_runs(admin: Visitor) -> None:
    runs = [make_run(admin.project, f"run {i}") for i in range(MOST_CHOSEN + 3)]
    page = html(admin, "compare/?" + "&".join(f"runs={run.id}" for run in runs))
    assert len(re.findall(r'name="runs" value="[^"]+" checked>', page)) == MOST_CHOSEN
