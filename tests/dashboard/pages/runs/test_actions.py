"""Selecting runs of the list, what is done with them, and saved views."""

from __future__ import annotations

import re
import uuid
from typing import Any

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor, html

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages import saved_views as common_views
from fp8scope_dashboard.pages.compare.runs import MAX_CHOSEN
from fp8scope_dashboard.pages.runs import saved_views
from fp8scope_dashboard.pages.runs.actions import MAX_LISTED
from fp8scope_dashboard.runs.models import BulkAction, Run, SavedView


def post(visitor: Visitor, rest: str, **fields: Any) -> str:
    answer = visitor.client.post(visitor.address(rest), fields, follow=True)
    assert answer.status_code == 200
    return answer.content.decode()


@pytest.fixture
def runs(admin: Visitor) -> list[Run]:
    return [make_run(admin.project, f"run {i}", precision="fp8" if i else "bf16") for i in range(4)]


def test_it_works(member: Visitor, runs: list[Run]) -> None:
    chosen = [str(run.pk) for run in runs[:2]]
    page = post(member, "find/change", action="tag", tag="prod", runs=chosen)
    assert "Tagged 2 runs “prod”." in page
    assert [run.tags for run in Run.objects.order_by("name")] == [["prod"], ["prod"], [], []]
    assert 'class="tag">prod' in page


def test_deletes_and_undoes(admin: Visitor, runs: list[Run]) -> None:
    page = post(admin, "find/change", action="delete", runs=[str(runs[0].pk)])
    assert "Deleted 1 run." in page and Run.objects.count() == 3
    (undo,) = re.findall(r'action="/p/research/(find/changes/[0-9a-f-]+/undo)"', page)
    page = post(admin, undo)
    assert "Undone for 1 run." in page and Run.objects.count() == 4
    assert "find/changes/" not in page
    assert "undone already" in post(admin, undo)


def test_a_viewer_sees_no_undo(member: Visitor, viewer: Visitor, runs: list[Run]) -> None:
    post(member, "find/change", action="archive", runs=[str(runs[0].pk)])
    page = html(viewer)
    assert "find/changes/" not in page and "Archive</button>" not in page and ">Compare</button>" in page


def test_all_that_match_are_those_of_the_search(member: Visitor, runs: list[Run]) -> None:
    post(member, "find/change", action="archive", all="1", q="precision:fp8")
    assert Run.objects.exclude(archived_at=None).count() == 3
    page = html(member)
    assert "3 archived" in page and "run 0" in page and "run 1" not in page
    assert "run 1" in html(member, "?q=archived:yes")
    post(member, "find/change", action="unarchive", all="1", q="archived:yes")
    assert not Run.objects.exclude(archived_at=None).exists()


def test_a_search_with_a_problem_selects_nothing(member: Visitor, runs: list[Run]) -> None:
    page = post(member, "find/change", action="delete", all="1", q="precisoin:fp8", matching="4")
    assert "Nothing was changed. There is no field “precisoin”." in page and Run.objects.count() == 4


def test_deletes_all_that_match_only_if_they_are_those_of_the_page(admin: Visitor, runs: list[Run]) -> None:
    page = post(admin, "find/change", action="delete", all="1", q="precision:fp8", matching="2")
    assert "other runs match the search now" in page and Run.objects.count() == 4
    post(admin, "find/change", action="delete", all="1", q="precision:fp8", matching="3")
    assert [run.name for run in Run.objects.all()] == ["run 0"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "Choose what to do"),
        ({"action": "explode", "runs": "x"}, "Choose what to do"),
        ({"action": "archive"}, "Select runs first"),
        ({"action": "archive", "runs": "not-an-id"}, "Select runs first"),
        ({"action": "tag", "all": "1"}, "1 to 64 characters"),
        ({"action": "untag", "all": "1", "tag": "nobody"}, "Nothing was changed"),
    ],
)
def test_says_what_is_missing(
    member: Visitor, runs: list[Run], fields: dict[str, str], sentence: str
) -> None:
    assert sentence in post(member, "find/change", **fields)
    assert not BulkAction.objects.exists()


def test_bounds_the_runs_of_a_form(member: Visitor) -> None:
    ids = [str(uuid.uuid4()) for _ in range(MAX_LISTED + 1)]
    assert f"More than {MAX_LISTED} runs" in post(member, "find/change", action="archive", runs=ids)


def test_ignores_runs_of_another_project(member: Visitor, stranger: Visitor) -> None:
    foreign = make_run(stranger.project, "foreign")
    page = post(member, "find/change", action="delete", runs=[str(foreign.pk)])
    assert "Nothing was changed" in page and Run.objects.filter(pk=foreign.pk).exists()


def test_returns_to_the_list_but_to_no_other_address(member: Visitor, runs: list[Run]) -> None:
    fields = {"action": "archive", "runs": [str(runs[0].pk)]}
    for target in ("/p/research/?q=x&sort=loss", "//evil.test/", "/p/other/", "/p/research/\\evil"):
        answer = member.client.post(member.address("find/change"), {**fields, "next": target})
        wanted = target if target.endswith("sort=loss") else "/p/research/"
        assert answer["Location"] == wanted


def test_compares_the_selected_runs(viewer: Visitor, runs: list[Run]) -> None:
    ids = [str(run.pk) for run in runs[1:3]]
    answer = viewer.client.post(viewer.address("find/compare"), {"runs": ids})
    assert answer["Location"] == f"/p/research/compare/?runs={ids[0]}&runs={ids[1]}"
    answer = viewer.client.post(viewer.address("find/compare"), {"all": "1", "q": "precision:fp8 loss<2"})
    assert answer["Location"] == "/p/research/compare/?q=precision%3Afp8+loss%3C2"
    assert "Select runs first" in post(viewer, "find/compare")


def test_says_if_not_all_selected_runs_are_compared(admin: Visitor) -> None:
    names = (f"run {i}" for i in range(MAX_CHOSEN + 1))
    made = Run.objects.bulk_create(Run(project=admin.project, name=name) for name in names)
    fields = {"runs": [str(run.pk) for run in made]}
    answer = admin.client.post(admin.address("find/compare"), fields)
    assert answer["Location"].count("runs=") == MAX_CHOSEN
    assert f"Only the first {MAX_CHOSEN} runs" in html(admin)


def test_saves_a_view_with_search_order_and_columns(member: Visitor, runs: list[Run]) -> None:
    query = "q=precision:fp8&sort=loss&col=loss&col=config.lr&page=7&evil=1"
    page = post(member, "views/save", name=" My runs ", query=query)
    view = SavedView.objects.get()
    assert (view.name, view.shared) == ("My runs", False)
    assert view.query == "q=precision%3Afp8&sort=loss&col=loss&col=config.lr"
    assert "Saved the view “My runs”, for you." in page and "config.lr" in page
    post(member, "views/save", name="My runs", query="q=other")
    assert SavedView.objects.get().query == "q=other", "the same name replaces the view"


def test_only_shared_views_are_seen_by_others(member: Visitor, viewer: Visitor) -> None:
    make_run(member.project, "run")
    post(member, "views/save", name="private one", query="q=a")
    post(member, "views/save", name="common one", query="q=b", shared="1")
    page = html(viewer)
    assert "common one" in page and "private one" not in page and "shared by mia" in page
    assert viewer.client.post(viewer.address("views/save"), {"name": "x", "shared": "1"}).status_code == 403
    post(viewer, "views/save", name="own", query="q=c")
    assert "own" in html(viewer) and "own</a>" not in html(member)


def test_only_the_owner_or_an_administrator_deletes_a_view(
    admin: Visitor, member: Visitor, viewer: Visitor
) -> None:
    make_run(member.project, "run")
    private = saved_views.save(member.project, member.user, "private", "", shared=False)
    shared = saved_views.save(member.project, member.user, "shared", "", shared=True)
    address = f"views/{shared.pk}/delete"
    assert viewer.client.post(viewer.address(address)).status_code == 403
    assert admin.client.post(admin.address(f"views/{private.pk}/delete")).status_code == 404
    post(admin, address)
    post(member, f"views/{private.pk}/delete")
    assert not SavedView.objects.exists()


LONG = "&".join(f"col=config.{'x' * 190}{i}" for i in range(16))


@pytest.mark.parametrize(("name", "query"), [("", "q=x"), ("x" * 81, ""), ("ok", LONG)])
def test_refuses_views_that_cannot_be_stored(admin: Visitor, name: str, query: str) -> None:
    with pytest.raises(common_views.ViewError):
        saved_views.save(admin.project, admin.user, name, query, shared=False)


def test_bounds_the_views_of_a_person(admin: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_views, "MAX_VIEWS", 1)
    saved_views.save(admin.project, admin.user, "a", "", shared=False)
    saved_views.save(admin.project, admin.user, "a", "q=x", shared=False)
    with pytest.raises(common_views.ViewError, match="delete one first"):
        saved_views.save(admin.project, admin.user, "b", "", shared=False)
    other = Project.objects.create(slug="other", name="Other")
    saved_views.save(other, admin.user, "b", "", shared=False)


def test_the_menu_says_which_view_the_list_shows(member: Visitor) -> None:
    make_run(member.project, "run")
    saved_views.save(member.project, member.user, "slow ones", "q=loss>3&sort=name", shared=True)
    shown = member.client.get(member.address("?q=loss>3&sort=name")).content.decode()
    assert re.search(r'aria-current="true"\s*>slow ones <small class="muted">shared</small>', shown)
    assert not re.search(r'aria-current="true"\s*>slow ones', html(member))
