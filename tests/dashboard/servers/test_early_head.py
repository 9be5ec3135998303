"""The page of a run begins before its data is read, and is the same page."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from dashboard.helpers.asgi_views import Answer, ask
from dashboard.helpers.recording import make_run
from dashboard.helpers.shown_html import as_shown
from dashboard.helpers.visitors import Visitor, visitor_of
from django.contrib.messages import constants
from django.contrib.messages.storage.cookie import CookieStorage
from django.db import connections
from django.http import HttpResponse
from django.test import RequestFactory
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Role
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.time_zones import SESSION_ENTRY
from fp8scope_dashboard.edge.threaded_asgi import Handler
from fp8scope_dashboard.pages import early_head
from fp8scope_dashboard.pages.run import views as run_view
from fp8scope_dashboard.runs.models import Run

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def viewer() -> Visitor:
    return visitor_of(create_project("research", "Research"), "vic", Role.VIEWER)


@pytest.fixture
def shown(viewer: Visitor) -> Run:
    return make_run(viewer.project, "café", error="boom", state="failed", finished_at=timezone.now())


def get(viewer: Visitor, target: str, **cookies: str) -> Answer:
    known = {name: morsel.value for name, morsel in viewer.client.cookies.items()}
    cookie = "; ".join(f"{name}={value}" for name, value in {**known, **cookies}.items())
    return ask(Handler(), target, headers={"cookie": cookie})


def header(answer: Answer, name: str) -> list[str]:
    return [value.decode() for key, value in answer.headers if key.decode().lower() == name]


def without_tokens(page: bytes) -> str:
    """The page without what differs at each rendering: tokens, and the time of the rendering."""
    tokens = r'("X-CSRFToken": "|csrfmiddlewaretoken" value="|data-since=")\w+'
    return re.sub(tokens, "", as_shown(page.decode()))


def test_the_page_is_the_same_as_in_one_piece(viewer: Visitor, shown: Run) -> None:
    for tab in ("", "?tab=environment"):
        target = viewer.address(f"runs/{shown.id}/{tab}")
        answer = get(viewer, target)
        assert answer.status == 200 and len(answer.parts) > 2
        whole = viewer.client.get(target)
        assert not whole.streaming and without_tokens(answer.body) == without_tokens(whole.content)
        assert header(answer, "content-security-policy") == [whole["Content-Security-Policy"]]
        assert header(answer, "cache-control") == [whole["Cache-Control"]]


def test_the_beginning_comes_before_the_data_is_read(
    viewer: Visitor, shown: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Answer()
    begun: list[bytes] = []
    read = run_view.head_context

    def slow(*given: Any) -> dict[str, Any]:
        begun.append(answer.body)
        return read(*given)

    monkeypatch.setattr(run_view, "head_context", slow)
    session = viewer.client.cookies["sessionid"].value
    ask(
        Handler(),
        viewer.address(f"runs/{shown.id}/"),
        headers={"cookie": f"sessionid={session}"},
        answer=answer,
    )
    assert len(begun) == 1 and begun[0].startswith(b"<!doctype html>") and b"plotly" in begun[0]
    assert b"</head>" not in begun[0] and answer.body.count(b"<!doctype html>") == 1


def test_what_changes_the_status_comes_first(viewer: Visitor, shown: Run) -> None:
    assert get(viewer, viewer.address("runs/00000000-0000-4000-8000-000000000000/")).status == 404
    assert get(viewer, viewer.address(f"runs/{shown.id}/?first=1&last=5")).status == 302
    assert ask(Handler(), viewer.address(f"runs/{shown.id}/")).status == 302
    stranger = visitor_of(create_project("elsewhere", "Elsewhere"), "sam", Role.ADMIN)
    assert get(stranger, viewer.address(f"runs/{shown.id}/")).status == 404


def test_a_new_visitor_gets_the_token_of_the_forms(viewer: Visitor, shown: Run) -> None:
    answer = get(viewer, viewer.address(f"runs/{shown.id}/"))
    assert any(cookie.startswith("csrftoken=") for cookie in header(answer, "set-cookie"))


def test_messages_are_shown_once(viewer: Visitor, shown: Run) -> None:
    request = RequestFactory().get("/")
    storage = CookieStorage(request)
    storage.add(constants.INFO, "Saved it.")
    response = HttpResponse()
    storage.update(response)
    answer = get(viewer, viewer.address(f"runs/{shown.id}/"), messages=response.cookies["messages"].value)
    assert b"Saved it." in answer.body
    assert any("messages=" in cookie and "Max-Age=0" in cookie for cookie in header(answer, "set-cookie"))


def test_an_error_ends_the_page_with_words(
    viewer: Visitor, shown: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: Any) -> dict[str, Any]:
        raise ValueError("a bug")

    monkeypatch.setattr(run_view, "head_context", fail)
    with caplog.at_level(logging.ERROR):
        answer = get(viewer, viewer.address(f"runs/{shown.id}/"))
    assert "a bug" in caplog.text and "failed after the beginning" in caplog.text
    page = answer.body.decode()
    assert page.count("<!doctype html>") == 1 and "Server error" in page and page.rstrip().endswith("</html>")


def test_a_run_that_is_deleted_meanwhile_is_not_found(
    viewer: Visitor, shown: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def delete(run: Run, *given: Any) -> dict[str, Any]:
        Run.with_deleted.filter(pk=run.pk).delete()
        run.refresh_from_db()
        return {}

    monkeypatch.setattr(run_view, "head_context", delete)
    with caplog.at_level(logging.ERROR):
        page = get(viewer, viewer.address(f"runs/{shown.id}/")).body.decode()
    assert not caplog.records
    assert (
        page.count("<!doctype html>") == 1 and "Page not found" in page and page.rstrip().endswith("</html>")
    )


def test_the_time_zone_holds_and_the_connection_is_returned(
    viewer: Visitor, shown: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = viewer.client.session
    session[SESSION_ENTRY] = "Asia/Tokyo"
    session.save()
    seen: list[Any] = []
    read = run_view.head_context

    def look(*given: Any) -> dict[str, Any]:
        seen.extend((timezone.get_current_timezone_name(), connections["default"]))
        return read(*given)

    monkeypatch.setattr(run_view, "head_context", look)
    get(viewer, viewer.address(f"runs/{shown.id}/"))
    name, connection = seen
    assert name == "Asia/Tokyo" and connection.connection is None


def test_a_page_that_begins_otherwise_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"does not begin with head_start\.html"):
        early_head._after(b"<!doctype html>", b"<html>")
