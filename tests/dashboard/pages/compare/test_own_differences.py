"""A run's own difference on every page, beside the verdict of its seed group, of which one run broke down."""

from __future__ import annotations

import re

import pytest
from dashboard.helpers.seed_groups import a_group_with_a_bad_seed
from dashboard.helpers.token_clients import client_with_token
from dashboard.helpers.visitors import Visitor

from fp8scope_dashboard.analysis.services import refresh
from fp8scope_dashboard.runs.models import Run


@pytest.fixture
def group(admin: Visitor) -> list[Run]:
    """Five runs at the baseline's loss but for the fourth."""
    runs = a_group_with_a_bad_seed(admin.project, seeds=5, bad=3)
    for run in runs:
        refresh(run.id)
    return runs


def html(visitor: Visitor, path: str) -> str:
    answer = visitor.client.get(visitor.address(path))
    assert answer.status_code == 200
    return re.sub(r"<wbr>|\s+", " ", answer.content.decode())


def test_it_works(admin: Visitor, group: list[Run]) -> None:
    """The list: sorted by own differences, and each verdict cell names the run that left."""
    page = html(admin, "?sort=-difference")
    rows = {run.name: page.split(f'id="row-{run.id}"')[1].split("</tr>")[0] for run in group}
    assert "+39.4" in rows["fp8 3"] and "left its group" in rows["fp8 3"]
    assert "<strong>+39.4" not in rows["fp8 0"] and "fp8 3 left: +39.4" in rows["fp8 0"]
    assert all("group of 5: +7.9" in row for row in rows.values())
    assert page.index(f"row-{group[3].id}") < page.index(f"row-{group[4].id}")
    least = html(admin, "?sort=difference")
    assert least.index(f"row-{group[3].id}") > least.index(f"row-{group[4].id}")


def test_the_page_of_a_run(admin: Visitor, group: list[Run]) -> None:
    bad, healthy = (html(admin, f"runs/{run.id}/") for run in (group[3], group[0]))
    assert "Verdict on the group fp8, 5 runs" in bad and "Verdict on the group fp8, 5 runs" in healthy
    assert re.search(r"This run: <strong>\+39\.4", bad) and not re.search(r"This run: <strong>\+39", healthy)
    assert "fp8 3 left its group" in healthy


def test_compare_has_one_card_for_the_group(admin: Visitor, group: list[Run]) -> None:
    page = html(admin, "compare/?q=fp8")
    cards = page[page.index('id="verdicts"') :].split('<section class="card stack">')[1:]
    assert len(cards) == 1 and all(run.name in cards[0] for run in group)
    assert cards[0].index(">fp8 3<") < cards[0].index(">fp8 0<"), "the one that left is first"
    figure = admin.client.get(admin.address("compare/figures/delta.json"), {"q": "fp8"}).json()
    assert figure["summary"].count(";") == 0, "one curve for the group"


def test_compare_of_one_run_of_a_group_has_its_own_difference(admin: Visitor, group: list[Run]) -> None:
    """Beside a verdict on runs that are not chosen."""
    page = html(admin, f"compare/?runs={group[3].id}")
    rows = page.partition('class="stacked own-differences')[2].partition("</tbody>")[0].split("<tr>")[2:]
    assert len(rows) == 1 and ">fp8 3<" in rows[0] and "+39.4" in rows[0] and "left its group" in rows[0]


def test_evaluations_have_one_row_for_a_task_and_group(admin: Visitor, group: list[Run]) -> None:
    page = html(admin, "evaluations/")
    forest = page.split('id="forest"')[1].split("</section>")[0]
    assert forest.count("forest__task") == 2 and forest.count("forest__members") == 2
    assert forest.count("fp8 3 left its group") == 2 and "fp8 (5 runs)" in forest
    assert page.split('id="overall"')[1].split("</section>")[0].count("badge--") == 1


def test_the_api_has_both(admin: Visitor, group: list[Run]) -> None:
    answer = client_with_token(admin.project).get(f"/api/v1/runs/{group[3].id}").json()
    comparison = answer["comparison"]
    assert comparison["own"]["difference"] == pytest.approx(0.394, abs=0.002)
    assert comparison["own"]["left"] and comparison["delta"] == pytest.approx(0.079, abs=0.002)
    assert [member["left"] for member in comparison["group"]["runs"]].count(True) == 1
    score = next(each for each in answer["evaluations"] if each["name"] == "gsm8k")
    assert score["own"]["difference"] < -0.4 < score["difference"]
