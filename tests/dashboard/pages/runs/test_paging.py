"""Pages of the list that begin after a run: the same runs in the same order as pages by number."""

from __future__ import annotations

import re
from uuid import uuid4

import pytest
from dashboard.helpers.many_runs import fill_project
from dashboard.helpers.visitors import Visitor, html
from django.db import connection
from django.test.utils import CaptureQueriesContext

from fp8scope_dashboard.pages.runs.listing import RUNS_A_PAGE
from fp8scope_dashboard.runs.models import Run

RUNS = 3 * RUNS_A_PAGE + 20
SORTS = [
    "-created",
    "created",
    "name",
    "-name",
    "loss",
    "-loss",
    "verdict",
    "-verdict",
    "difference",
    "-seed",
]
SORTS += ["config.lr", "-config.model.name", "-scalar.grad_norm", "duration", "recipe", "-ended"]


@pytest.fixture
def many(admin: Visitor) -> Visitor:
    fill_project(admin.project, RUNS, entries=10)
    return admin


def names(page: str) -> list[str]:
    return re.findall(r'class="runs__name"[^>]*>([^<]+)<', page)


def link(page: str, rel: str) -> str:
    match = re.search(rf'href="(\?[^"]*)" rel="{rel}"', page)
    return match[1].replace("&amp;", "&") if match else ""


def test_it_works(many: Visitor) -> None:
    page = html(many)
    following = link(page, "next")
    assert "page=2" in following and "after=" in following
    second = html(many, following)
    assert names(second) == names(html(many, "?page=2")) != names(page)
    assert "Page 2 of 4" in second


@pytest.mark.parametrize("sort", SORTS)
def test_all_orders_forwards_and_backwards(many: Visitor, sort: str) -> None:
    by_number = [names(html(many, f"?sort={sort}&page={number}")) for number in range(1, 5)]
    address, walked, back = f"?sort={sort}", [], []
    for _ in range(4):
        page = html(many, address)
        walked.append(names(page))
        address = link(page, "next")
    assert walked == by_number and not address
    address = link(page, "prev")
    for _ in range(3):
        page = html(many, address)
        back.append(names(page))
        address = link(page, "prev")
    assert back == by_number[2::-1] and not address


def test_a_page_stays_where_it_is_when_runs_arrive(many: Visitor) -> None:
    following = link(html(many), "next")
    before = names(html(many, following))
    Run.objects.create(project=many.project, name="new")
    assert names(html(many, following)) == before


def test_a_run_that_is_gone_leaves_the_number_of_the_page(many: Visitor, stranger: Visitor) -> None:
    by_number = names(html(many, "?page=2"))
    foreign = Run.objects.create(project=stranger.project, name="foreign")
    for run_id in (uuid4(), foreign.pk, "nonsense"):
        assert names(html(many, f"?page=2&after={run_id}")) == by_number


def test_a_page_after_a_run_skips_no_rows(many: Visitor) -> None:
    following = link(html(many), "next")
    with CaptureQueriesContext(connection) as queries:
        html(many, following)
    assert not [query["sql"] for query in queries if "OFFSET" in query["sql"]]


def test_other_changes_begin_on_the_first_page(many: Visitor) -> None:
    page = html(many, link(html(many), "next"))
    assert 'href="?sort=name"' in page
    assert 'name="after"' not in page and 'name="page"' not in page
