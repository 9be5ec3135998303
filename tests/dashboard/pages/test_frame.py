"""Parts shared by all pages: headers, help texts, error pages, scripts and icons."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from asgiref.sync import iscoroutinefunction
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor
from django.contrib.staticfiles import finders
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.test import Client

import fp8scope_dashboard.pages
from fp8scope_dashboard.pages.finders import PlotlyFinder
from fp8scope_dashboard.pages.glossary import GLOSSARY, title
from fp8scope_dashboard.pages.glossary.tensors import STATISTICS
from fp8scope_dashboard.pages.middleware import POLICY, content_security_policy

FOLDER = Path(fp8scope_dashboard.pages.__file__).parent
PAGES = ("", "compare/", "evaluations/", "alerts/", "settings/")


def test_it_works(admin: Visitor, seeded: Seeded) -> None:
    for rest in (*PAGES, f"runs/{seeded.healthy.id}/"):
        answer = admin.client.get(admin.address(rest))
        assert answer.status_code == 200 and answer["Content-Security-Policy"] == POLICY
        page = answer.content.decode()
        assert page.count("<h1") == 1 and 'lang="en"' in page and 'name="viewport"' in page


def test_a_page_says_from_when_on_changes_are_missing(admin: Visitor, seeded: Seeded) -> None:
    for rest in (*PAGES, f"runs/{seeded.healthy.id}/"):
        before = time.time()
        page = admin.client.get(admin.address(rest)).content.decode()
        (since,) = re.findall(r' data-since="(\d{13})"', page)
        assert before - 1 < int(since) / 1000 <= time.time(), rest


def test_pages_load_only_scripts_of_this_server(admin: Visitor, seeded: Seeded) -> None:
    assert "script-src 'self';" in POLICY and "unsafe-eval" not in POLICY
    for rest in (*PAGES, f"runs/{seeded.healthy.id}/"):
        page = admin.client.get(admin.address(rest)).content.decode()
        # Data in JSON is not run.
        inline = re.findall(r"<script(?![^>]*(?:\bsrc=|application/json))", page)
        assert not inline, "the policy blocks inline scripts"
        assert not re.findall(r"\son\w+=", page), "the policy blocks inline handlers"
        assert not re.findall(r'(?:src|href)="(?:https?:)?//', page), "the policy blocks other servers"


def test_form_fields_have_names_and_ids_are_unique(admin: Visitor, seeded: Seeded) -> None:
    for rest in (*PAGES, f"runs/{seeded.faulty.id}/"):
        page = admin.client.get(admin.address(rest)).content.decode()
        ids = re.findall(r'\sid="([^"]+)"', page)
        assert len(ids) == len(set(ids)), sorted(name for name in ids if ids.count(name) > 1)
        for label in re.findall(r'aria-labelledby="([^"]+)"', page):
            assert label in ids


def test_the_api_keeps_its_own_headers(db: None) -> None:
    assert "Content-Security-Policy" not in Client().get("/api/v1/openapi.json").headers


def test_the_policy_middleware_stays_sync_or_async() -> None:
    def sync(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    async def coroutine(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    assert not iscoroutinefunction(content_security_policy(sync))
    assert iscoroutinefunction(content_security_policy(coroutine))


@pytest.mark.parametrize("code", ["400", "403", "403_csrf", "404", "500"])
def test_renders_error_pages(code: str) -> None:
    page = render_to_string(f"{code}.html")
    assert "fp8scope" in page and 'href="/"' in page and "<h1>" in page


def test_errors_show_the_error_pages(admin: Visitor) -> None:
    assert "Page not found" in admin.client.get("/p/nothing/").content.decode()
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(admin.user)
    assert "This page has expired" in strict.post(admin.address("settings/margins")).content.decode()


def test_a_crash_shows_the_error_page(admin: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("fp8scope_dashboard.pages.runs.views.RenderedRows", fail)
    admin.client.raise_request_exception = False
    answer = admin.client.get(admin.address())
    assert answer.status_code == 500
    assert "Server error" in answer.content.decode() and "boom" not in answer.content.decode()


def test_only_plotlys_script_is_served() -> None:
    script = finders.find("plotly/plotly.min.js")
    assert isinstance(script, str) and b"* plotly.js" in Path(script).read_bytes()[:200]
    assert [path for path, _ in PlotlyFinder().list(None)] == ["plotly.min.js"]
    assert finders.find("plotly/widgetbundle.js") is None
    assert finders.find("plotly/../plotly.min.js") is None


def test_every_static_file_of_a_template_exists() -> None:
    named = set()
    for template in (FOLDER / "templates").rglob("*.html"):
        named |= set(re.findall(r"{% static '([^']+)' %}", template.read_text()))
    assert len(named) >= 10
    assert [name for name in named if not finders.find(name)] == []


def test_every_icon_exists() -> None:
    defined = set(re.findall(r'<symbol id="([\w-]+)"', (FOLDER / "static/pages/img/icons.svg").read_text()))
    sources = [path.read_text() for path in (*FOLDER.rglob("*.html"), FOLDER / "badges.py")]
    used = {name for text in sources for name in re.findall(r'{% icon "([\w-]+)" %}', text)}
    used |= set(re.findall(r'Badge\("[^"]+", "\w+", "([\w-]+)"\)', (FOLDER / "badges.py").read_text()))
    assert used and used <= defined


def test_every_statistic_is_explained() -> None:
    for name in STATISTICS:
        assert len(GLOSSARY[name].definition) > 20
    assert title("overflow_rate") == "Overflow rate" and title("my_scalar") == "my scalar"


def test_the_sign_in_page_shows_errors(db: None) -> None:
    page = Client().get("/signin/").content.decode()
    assert "<label" in page and 'name="username"' in page
    wrong = Client().post("/signin/", {"username": "x", "password": "y"}).content.decode()
    assert 'role="alert"' in wrong
