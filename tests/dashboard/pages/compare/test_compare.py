"""BF16 and FP8 side by side."""

from __future__ import annotations

import json
import re
import uuid
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor, html, trace_values
from django.utils import timezone
from django.utils.html import escape

from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.pages.charts.arms import FP8_SLOTS, Arms
from fp8scope_dashboard.pages.charts.theme import THEMES
from fp8scope_dashboard.pages.compare import runs as compared_runs
from fp8scope_dashboard.pages.compare.figures import MAX_POINTS
from fp8scope_dashboard.pages.compare.runs import FEW_RUNS, MAX_CHOSEN
from fp8scope_dashboard.pages.compare.views import MAX_CARDS, MAX_OFFERED, MAX_OWN, Card
from fp8scope_dashboard.pages.formatting import written
from fp8scope_dashboard.pages.run.summary import verdict_of
from fp8scope_dashboard.runs.models import Run


def figure(visitor: Visitor, name: str, runs: list[Any]) -> dict[str, Any]:
    query = {"runs": [str(run.id) for run in runs]}
    return dict(visitor.client.get(visitor.address(f"compare/figures/{name}.json"), query).json())


def test_it_works(admin: Visitor, seeded: Seeded) -> None:
    page = html(admin, "compare/")
    assert len(re.findall(r'name="runs" value="[^"]+" checked>', page)) == 5
    assert escape(written(seeded.healthy.comparison.result["explanation"])) in page
    assert "Worse than BF16" in page


def test_a_member_changes_the_margin_where_it_is_shown(
    admin: Visitor, viewer: Visitor, seeded: Seeded
) -> None:
    shown = f"compare/?runs={seeded.healthy.id}&runs={seeded.baselines[0].id}"
    form = html(admin, shown).partition(f"runs/{seeded.healthy.id}/margin")[2].partition("</form>")[0]
    address = admin.address(shown)
    assert "Margin of this comparison" in form and f'value="{escape(address)}"' in form
    answer = admin.client.post(
        admin.address(f"runs/{seeded.healthy.id}/margin"), {"margin": "1.5", "next": address}
    )
    assert answer["Location"] == address
    assert "Margin ±1.5" in html(admin, shown)
    assert "Margin of this comparison" not in html(viewer, shown)


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
    assert "Nothing to compare yet" in html(admin, "compare/")
    make_run(admin.project, "alone", precision="fp8")
    assert "none of the selected runs has a baseline" in html(admin, "compare/")


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


def test_deltas_over_steps_and_over_tokens_have_no_common_axis(admin: Visitor, seeded: Seeded) -> None:
    comparison = seeded.faulty.comparison
    comparison.result["curve"]["x_name"] = "steps"
    comparison.save()
    answer = figure(admin, "delta", [seeded.healthy, seeded.faulty])
    names = {trace["name"] for trace in answer["figure"]["data"]}
    assert "gpt fp8 delayed" in names and "gpt fp8 frozen scale" not in names
    title = answer["figure"]["layout"]["xaxis"]["title"]["text"]
    assert title == "tokens (1 run without tokens: not shown)"


def test_an_arm_keeps_its_colour(admin: Visitor, seeded: Seeded) -> None:
    together = json.dumps(figure(admin, "loss", [seeded.healthy, seeded.faulty]))
    alone = json.dumps(figure(admin, "loss", [seeded.faulty]))
    first, second = (THEMES["light"].arms[slot] for slot in FP8_SLOTS[:2])
    assert first in together and second in together
    assert second in alone and first not in alone, "the colour of the second FP8 group"


def test_limits_the_number_of_selected_runs(admin: Visitor) -> None:
    runs = [make_run(admin.project, f"run {i}") for i in range(MAX_CHOSEN + 3)]
    page = html(admin, "compare/?" + "&".join(f"runs={run.id}" for run in runs))
    assert len(re.findall(r'name="runs" value="[^"]+" checked>', page)) == MAX_CHOSEN


def test_a_search_selects_the_runs(admin: Visitor, seeded: Seeded) -> None:
    page = html(admin, "compare/?q=precision:bf16")
    assert len(re.findall(r'name="runs" value="[^"]+" checked>', page)) == 3
    assert "<code>precision:bf16</code>" in page and "Worse than BF16" not in page
    drawn = admin.client.get(admin.address("compare/figures/loss.json"), {"q": "precision:bf16"}).json()
    assert "3 seeds" in json.dumps(drawn, ensure_ascii=False) and "fp8" not in drawn["summary"]


def test_a_search_without_a_match_says_so(admin: Visitor, seeded: Seeded) -> None:
    page = html(admin, "compare/?q=nothing")
    assert "No run matches “nothing”" in page and "checked>" not in page.split('id="compared"')[0]
    assert "There is no field" in html(admin, "compare/?q=colour:red")


def test_says_how_many_of_a_search_are_compared(admin: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared_runs, "MAX_CHOSEN", 3)
    for i in range(5):
        make_run(admin.project, f"run {i}")
    page = html(admin, "compare/?q=run")
    assert "5 runs match: the newest 3 are compared." in page
    assert re.findall(r'name="runs" value="[^"]+" checked><span>(run \d)', page) == [
        "run 2",
        "run 3",
        "run 4",
    ]


def test_the_chooser_searches_all_runs(admin: Visitor, seeded: Seeded) -> None:
    old = make_run(admin.project, "an old run", created_at=timezone.now() - timedelta(days=400), tags=["old"])
    for i in range(MAX_OFFERED + 1):
        make_run(admin.project, f"filler {i}")
    chosen = f"runs={seeded.healthy.id}"
    assert str(old.id) not in html(admin, f"compare/?{chosen}")
    part = html(admin, f"compare/find?{chosen}&find=tag:old", **{"HX-Target": "choices"})
    assert part.strip().startswith('<div id="choices"')
    assert f'value="{old.id}">' in part and f'value="{seeded.healthy.id}" checked>' in part
    assert "1 found" in part and "filler" not in part
    part = html(admin, "compare/find?find=precision:bf16")
    assert "Compare all 3" in part and "compare/?q=precision%3Abf16" in part
    assert "There is no field “bad”" in html(admin, "compare/find?find=bad:x").replace("&quot;", '"')


def test_archived_runs_are_not_suggested(admin: Visitor, seeded: Seeded) -> None:
    Run.objects.filter(pk=seeded.faulty.pk).update(archived_at=timezone.now())
    assert seeded.faulty.name not in html(admin, "compare/")
    assert seeded.faulty.name in html(admin, f"compare/?runs={seeded.faulty.id}"), "but can be compared"


def test_shows_what_differs_in_the_configurations(admin: Visitor) -> None:
    a = make_run(admin.project, "a", config={"model": {"depth": 12}, "lr": 1e-3, "text": "x" * 200})
    b = make_run(admin.project, "b", config={"model": {"depth": 24}, "lr": 1e-3, "text": "<i>" * 70})
    query = f"runs={a.id}&runs={b.id}"
    page = html(admin, f"compare/?{query}").replace("<wbr>", "")
    assert "config.model.depth" in page and "config.lr" not in page and "<i>" not in page
    assert "2 of 4 entries differ" in page and "folded" in page
    own = f"/p/research/compare/configuration?{query}".replace("&", "&amp;")
    assert f'href="{own}&amp;everything=1"' in page
    part = html(
        admin, f"compare/configuration?{query}&everything=1", **{"HX-Target": "configuration"}
    ).replace("<wbr>", "")
    assert part.strip().startswith("<section") and "config.lr" in part and "Only differences" in part
    assert f'hx-get="{own}"' in part
    assert "<html" in html(admin, f"compare/configuration?{query}")
    assert "Select a second run" in html(admin, f"compare/?runs={a.id}")


def test_many_verdicts_take_a_line_each(admin: Visitor) -> None:
    for i in range(MAX_CARDS + 1):
        run = make_run(admin.project, f"fp8 {i}", precision="fp8", baseline="bf16")
        costs = {"throughput": {"ratio": 1.31}, "memory": {"ratio": 0.8}, "tokens_cost": {"delta": 0.018}}
        Comparison.objects.create(
            run=run, baseline="bf16", to_step=1, verdict="cannot_tell",
            result={"delta": 0.001, "tolerance": 0.0025, "interval": [-0.01, 0.01], "quantities": costs},
        )  # fmt: skip
    page = html(admin, "compare/?q=fp8")
    assert (
        'class="verdicts"' in page
        and page.count("1.31\u202f× the speed · 0.80\u202f× the memory") == MAX_CARDS + 1
    )
    assert "1.80\u202f% more tokens" in page


def test_a_line_of_costs_says_what_the_headline_does_not(admin: Visitor) -> None:
    run = make_run(admin.project, "fp8", precision="fp8", baseline="bf16")
    arm, verdict = Arms(admin.project).of(run), verdict_of(run, set())

    def is_shown(costs: str, **quantities: Any) -> bool:
        return Card(
            run=run, arm=arm, verdict=verdict, result={"quantities": quantities}, costs=costs
        ).shows_costs

    assert is_shown("1.31 the speed") and not is_shown("")
    assert not is_shown("1.31 the speed", headline="FP8 is faster.")
    assert not is_shown("0.8 the memory", headline="FP8 takes 20 % less memory.", memory={"ratio": 0.8})
    assert not Card(run=run, arm=arm, verdict=verdict, result={}, costs="").shows_costs


def test_the_seeds_of_a_group_share_a_card_with_their_own_differences(admin: Visitor) -> None:
    make_run(admin.project, "bf16", precision="bf16", group="bf16")
    for seed, (group, delta) in enumerate(
        [("a", 0.01), ("a", 0.01), ("a", 0.02), ("b", 0.01), ("", 0.01), ("", 0.01)]
    ):
        run = make_run(admin.project, f"fp8-{seed}", precision="fp8", group=group, baseline="bf16", seed=seed)
        Comparison.objects.create(
            run=run,
            baseline="bf16",
            to_step=9,
            verdict="worse",
            own_difference=delta,
            result={"delta": delta, "explanation": "It is.", "own": {"difference": delta}},
        )
    page = html(admin, "compare/?q=fp8")
    cards = page[page.index('id="verdicts"') :].split('<section class="card stack">')[1:]
    shared = [card for card in cards if "own-differences" in card]
    assert len(cards) == 4 and len(shared) == 1
    assert [name in shared[0] for name in ("fp8-0", "fp8-1", "fp8-2", "fp8-3")] == [True, True, True, False]
    assert shared[0].index("fp8-2") < shared[0].index("fp8-0"), "the largest difference is first"
    assert "+2.00" in shared[0]


def test_many_lines_have_fewer_points(admin: Visitor) -> None:
    for i in range(FEW_RUNS + 1):
        Recorder(run=make_run(admin.project, f"run {i}")).rows(
            range(3_000), {"loss": np.arange(3_000.0)[::-1]}, rows_per_batch=1_000
        )
    answer = admin.client.get(admin.address("compare/figures/loss.json"), {"q": "run"}).json()
    traces = [trace for trace in answer["figure"]["data"] if len(trace_values(trace.get("x", []))) > 1]
    assert len(traces) == FEW_RUNS + 1 and "and 1 more" in answer["summary"]
    assert all(len(trace_values(trace["y"])) <= MAX_POINTS // (FEW_RUNS + 1) for trace in traces)


def test_draws_the_differences_of_tensors(admin: Visitor, seeded: Seeded) -> None:
    query: dict[str, Any] = {"runs": [str(seeded.healthy.id), str(seeded.faulty.id)]}
    address = admin.address("compare/figures/tensors.json")
    answer = admin.client.get(address, query).json()
    assert answer["summary"].startswith("gpt fp8 frozen scale against gpt fp8 delayed: blocks.")
    assert (
        1 <= len(answer["figure"]["layout"]["meta"]["names"]) <= 48
        and "of 48 tensors differ" in answer["summary"]
    )
    query |= {"a": str(seeded.faulty.id), "b": str(seeded.healthy.id), "statistic": "amax"}
    assert (
        "gpt fp8 delayed against gpt fp8 frozen scale" in admin.client.get(address, query).json()["summary"]
    )
    assert "empty" in admin.client.get(address, {"runs": str(seeded.healthy.id)}).json()
    page = html(admin, f"compare/?runs={seeded.healthy.id}&runs={seeded.faulty.id}")
    assert 'name="statistic"' in page and "compare-tensors" in page


def many_groups(admin: Visitor, groups: int, seeds: int = 1) -> list[Run]:
    """FP8 groups with some steps each, and a precision that the project has no colour for."""
    runs = []
    for number in range(groups):
        for seed in range(seeds):
            precision = "fp16" if number < 2 else "fp8"
            name, group = f"run {number} {seed}", f"g{number}"
            run = make_run(admin.project, name, precision=precision, group=group, seed=seed)
            Recorder(run=run).rows(np.arange(5), {"loss": 3.0 - 0.1 * np.arange(5)})
            runs.append(run)
    return runs


def copy_comparison(seeded: Seeded, run: Run) -> None:
    """Give the run the comparison of the healthy one."""
    comparison = Comparison.objects.get(run=seeded.healthy)
    comparison.pk = run.pk
    comparison.run = run
    comparison._state.adding = True
    comparison.save()


def test_twelve_groups_have_colours_of_their_own(admin: Visitor) -> None:
    runs = many_groups(admin, 12)
    data = figure(admin, "loss", runs)["figure"]["data"]
    legend = [trace for trace in data if trace.get("showlegend") is not False]
    assert len({trace["line"]["color"] for trace in legend}) == 12
    ours = figure(admin, "loss", runs[-1:])["figure"]["data"]
    alone = next(trace["line"]["color"] for trace in ours if trace.get("showlegend") is not False)
    assert alone == legend[-1]["line"]["color"], "a group keeps the colour that it has in the project"


def test_the_legend_takes_nothing_from_the_chart(admin: Visitor) -> None:
    def plotted(layout: dict[str, Any]) -> float:
        return float(layout["height"] - layout["margin"]["t"] - layout["margin"]["b"])

    runs = many_groups(admin, 12)
    few, many = (figure(admin, "loss", chosen)["figure"]["layout"] for chosen in (runs[:2], runs))
    assert plotted(many) >= plotted(few) and many["height"] > few["height"]


def test_only_few_curves_show_their_bands(admin: Visitor, seeded: Seeded) -> None:
    def bands(runs: list[Run]) -> tuple[list[bool], str]:
        drawn = figure(admin, "delta", runs)["figure"]
        shown = [trace["visible"] for trace in drawn["data"] if trace.get("meta") == "band"]
        return shown, drawn["layout"]["hovermode"]

    assert bands([seeded.healthy, seeded.faulty]) == ([True, True], "x unified")
    copies = []
    for number in range(4):
        run = make_run(admin.project, f"copy {number}", precision="fp8", group=f"c{number}", baseline="bf16")
        copy_comparison(seeded, run)
        copies.append(run)
    assert bands(copies) == ([False] * 4, "closest")


def test_own_differences_of_many_runs_are_folded(admin: Visitor, seeded: Seeded) -> None:
    runs = []
    for number in range(MAX_OWN + 1):
        run = make_run(
            admin.project, f"seed {number}", precision="fp8", group="many", baseline="bf16", seed=number
        )
        copy_comparison(seeded, run)
        runs.append(run)
    page = html(admin, "compare/?" + "&".join(f"runs={run.id}" for run in runs))
    assert f"{MAX_OWN + 1} runs: own differences from" in page
    page = html(admin, "compare/?" + "&".join(f"runs={run.id}" for run in runs[:3]))
    assert "own differences from" not in page
