"""Order, columns, groups, facets and suggestions of the list of runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from dashboard.helpers.many_runs import fill_project
from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor, get_json
from django.http import QueryDict
from django.utils.html import escape

from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.pages.runs.columns import MAX_COLUMNS, column_named
from fp8scope_dashboard.pages.runs.listing import ListState
from fp8scope_dashboard.runs.models import Run


def html(visitor: Visitor, **query: Any) -> str:
    answer = visitor.client.get(visitor.address(), query)
    assert answer.status_code == 200
    return answer.content.decode()


def names(page: str) -> list[str]:
    return re.findall(r'class="runs__name"[^>]*>([^<]+)<', page)


def order(visitor: Visitor, sort: str, **query: Any) -> list[str]:
    return names(html(visitor, sort=sort, **query))


@pytest.fixture
def runs(admin: Visitor) -> dict[str, Run]:
    made = {}
    for name, loss, rate, group in (("a", 2.0, 1e-3, "g1"), ("b", 2.2, 1e-4, "g1"), ("c", "NaN", None, "")):
        made[name] = make_run(
            admin.project,
            name,
            last_scalars={"loss": loss, "grad_norm": 0.5},
            group=group,
            precision="bf16" if name == "a" else "fp8",
            config={} if rate is None else {"optim": {"lr": rate}},
        )
    return made


def test_it_works(admin: Visitor, runs: dict[str, Run]) -> None:
    page = html(admin)
    assert names(page) == ["c", "b", "a"], "the newest first"
    assert page.count('aria-sort="descending"') == 1 and "3 runs" in page


@pytest.mark.parametrize(
    ("sort", "wanted"),
    [
        ("name", "abc"), ("-name", "cba"), ("loss", "abc"), ("-loss", "bac"), ("created", "abc"),
        ("config.optim.lr", "bac"), ("-config.optim.lr", "abc"), ("verdict", "bca"), ("-seed", "cba"),
        ("spark", "cba"), ("nonsense", "cba"), ("config.", "cba"), ("scalar.grad_norm", "cba"),
    ],
)  # fmt: skip
def test_sorts_by_any_column(admin: Visitor, runs: dict[str, Run], sort: str, wanted: str) -> None:
    Comparison.objects.create(run=runs["b"], baseline="g1", to_step=1, verdict="worse", result={})
    assert "".join(order(admin, sort)) == wanted


def test_a_second_click_reverses_the_order(admin: Visitor, runs: dict[str, Run]) -> None:
    page = html(admin, sort="loss", q="precision:fp8")
    assert 'aria-sort="ascending"><a href="?q=precision%3Afp8&amp;sort=-loss">Last loss' in page
    assert "sort=name" in page


def test_shows_chosen_columns(admin: Visitor, runs: dict[str, Run]) -> None:
    page = html(admin, col=["precision", "config.optim.lr", "scalar.grad_norm", "evil<", "precision"])
    heads = re.findall(r'<th scope="col"[^>]*><a[^>]*>([^<]+)</a>', page)
    assert heads == ["Run", "Precision", "optim.lr", "Gradient norm"]
    row = page.split("runs__name")[2]
    assert "0.0001" in row and "0.5" in row
    assert 'value="config.optim.lr" checked' in page and "Default columns" in page


def test_bounds_the_columns(admin: Visitor, runs: dict[str, Run]) -> None:
    state = ListState.of(QueryDict("&".join(f"col=config.k{i}" for i in range(40))))
    assert len(state.columns) == MAX_COLUMNS
    assert column_named("config." + "x" * 300) is None and column_named("config.\0") is None
    html(admin, col=list(state.columns), sort="config.k3")


def test_groups_with_mean_and_spread(admin: Visitor, runs: dict[str, Run]) -> None:
    Alert.objects.create(run=runs["a"], kind="loss_spike", severity="warning", step=1, onset_step=1)
    Comparison.objects.create(run=runs["a"], baseline="x", to_step=1, verdict="equivalent", result={})
    Comparison.objects.create(run=runs["b"], baseline="x", to_step=1, verdict="worse", result={})
    page = html(admin, by="group")
    assert names(page) == [], "groups are closed"
    first, second = page.split('class="group__head"')[1:]
    if "g1" in second:
        first, second = second, first
    assert "2 runs" in first and "<strong>2.10 ± 0.14</strong>" in first and "Worse than BF16" in first
    assert "1 alert<" in first and "compare/?q=group%3Ag1" in first
    assert "none" in second and "no finite loss" in second
    Run.objects.filter(pk=runs["b"].pk).update(group="g" * 81)
    page = html(admin, by="group")
    assert f"</span> {'g' * 79}…</a>" in page and ">none</span></a>" in page
    page = html(admin, by="precision")
    assert "</span> BF16</a>" in page and "</span> FP8</a>" in page


def test_an_open_group_shows_its_runs(admin: Visitor, runs: dict[str, Run]) -> None:
    assert set(names(html(admin, by="group", open="group:g1"))) == {"a", "b"}
    assert names(html(admin, by="group", open='group:""')) == ["c"]
    assert names(html(admin, by="config.optim.lr", open="-config.optim.lr:*")) == ["c"]
    assert names(html(admin, by="config.optim.lr", open="config.optim.lr:0.001")) == ["a"]


@pytest.mark.parametrize(
    "by", ["group", "precision", "recipe", "state", "baseline", "config.optim.lr", "recipe.margin"]
)
def test_the_link_of_a_group_lists_its_runs(admin: Visitor, runs: dict[str, Run], by: str) -> None:
    page = html(admin, by=by, q="-name:zzz")
    groups = re.findall(r'<a href="(\?q=[^"]+)">(\d+) runs?</a>', page)
    assert groups and sum(int(count) for _, count in groups) == 3
    for address, count in groups:
        assert len(names(html(admin, **QueryDict(address[1:].replace("&amp;", "&")).dict()))) == int(count)


def test_groups_can_be_sorted(admin: Visitor, runs: dict[str, Run]) -> None:
    for sort in ("name", "-count", "loss", "-created", "grad_norm"):
        assert html(admin, by="group", sort=sort).count('class="group__head"') == 2


def test_facets_add_and_remove_a_term(admin: Visitor, runs: dict[str, Run]) -> None:
    page = html(admin, q="loss<3")
    assert 'href="?q=loss%3C3+precision%3Afp8"' in page
    page = html(admin, q="loss<3 precision:fp8")
    (chip,) = re.findall(r'<a class="chip" href="([^"]+)" aria-current="true">', page)
    assert chip == "?q=loss%3C3"
    assert "BF16 <small>1</small>" in page, "the count without the facet's own terms"
    Run.objects.filter(pk=runs["a"].pk).update(state="failed", recipe_name="delayed <x>")
    Run.objects.filter(pk=runs["b"].pk).update(recipe_name="mxfp8")
    page = html(admin)
    assert "Running <small>2</small>" in page and "Failed <small>1</small>" in page
    assert "delayed &lt;x&gt; <small>1</small>" in page


def test_problems_are_shown_and_escaped(admin: Visitor, runs: dict[str, Run]) -> None:
    page = html(admin, q="<b>:1 color:red")
    assert escape("There is no field “color”.") in page and "<b>" not in page


def test_the_state_field_of_earlier_versions_works(admin: Visitor, runs: dict[str, Run]) -> None:
    Run.objects.filter(pk=runs["a"].pk).update(state="failed")
    assert names(html(admin, state="failed")) == ["a"]


def test_state_and_address_are_the_same(admin: Visitor) -> None:
    text = "q=precision%3Afp8+%22a+b%22&by=group&sort=-loss&page=3&open=group%3Ax&col=loss&col=config.a%26b"
    state = ListState.of(QueryDict(text))
    assert state.query() == text and ListState.of(QueryDict(state.query())) == state
    assert ListState.of(QueryDict("")).query() == ""


def test_suggests_fields_and_values(viewer: Visitor, runs: dict[str, Run]) -> None:
    def labels(text: str, **query: str) -> list[str]:
        answer = get_json(viewer, "find/suggestions.json", q=text, **query)
        return [entry["label"] for entry in answer["suggestions"]]

    assert labels("prec") == ["precision:"]
    assert labels("gpt precision:") == ["precision:fp8", "precision:bf16"]
    assert labels("-precision:b") == ["-precision:bf16"]
    assert labels("precision:fp8") == [], "nothing to add"
    assert labels("grad") == ["scalar.grad_norm"] and labels("optim") == ["config.optim.lr"]
    assert labels("group:") == ["group:g1"] and labels("state:f") == ["state:finished", "state:failed"]
    assert labels("") == labels("zzzz") == labels("loss<2.5") == []
    assert labels("grad", **{"for": "column"}) == ["scalar.grad_norm"]
    assert labels("gpt -fai") == ["-state:failed"]
    (entry,) = get_json(viewer, "find/suggestions.json", q="gpt prec")["suggestions"]
    assert entry["text"] == "gpt precision:"


def test_values_with_spaces_are_quoted(viewer: Visitor) -> None:
    make_run(viewer.project, "r", tags=["two words"])
    (entry,) = get_json(viewer, "find/suggestions.json", q='tag:"two')["suggestions"]
    assert entry["text"] == 'tag:"two words" '


def test_many_runs_are_paged_sorted_and_grouped(admin: Visitor) -> None:
    fill_project(admin.project, 120)
    page = html(admin, sort="loss")
    assert len(names(page)) == 50 and "Page 1 of 3" in page and "120 runs" in page
    assert len(names(html(admin, sort="loss", page="3"))) == 20
    assert "Compare all 25" in html(admin, q="precision:bf16")
    grouped = html(admin, by="group")
    assert grouped.count('class="group__head"') == 24
