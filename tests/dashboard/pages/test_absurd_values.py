"""No value in an address or a form ends in an error of the server, whatever the address reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final
from zlib import crc32

import pytest
from dashboard.helpers.addresses import Addresses
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor
from django.db import transaction
from django.http import HttpResponseBase, QueryDict
from django.test import Client
from django.urls import URLPattern, reverse
from django.utils.http import urlencode

from fp8scope_dashboard.accounts import urls as account_urls
from fp8scope_dashboard.exports.formats import MEDIA_TYPES
from fp8scope_dashboard.pages.run.figures.views import FIGURES
from fp8scope_dashboard.pages.run.tabs import TABS
from fp8scope_dashboard.pages.urls import urlpatterns

VALUES: Final = (
    "",
    "-1",
    "9" * 400,
    "NaN",
    "-inf",
    "1e308",
    "1e-320",
    "1e999999999",
    "٣",
    "½",
    "x" * 5_000,
    b"\xed\xa0\x80",
    "[" * 300,
    "../..",
    "\x1b[0m\u202e",
    "loss<nan lr>=1e999 tag:",
    "00000000-0000-0000-0000-000000000000",
    "9999999..-1",
    "9" * 18,
    "2026-99-99",
    "a*b?c[(\\",
)
# Streams do not end; signing out would end the test.
LEFT_OUT: Final = ("project_events", "run_events", "signout", "account_sign_out")
# Parts of addresses outside of projects.
OUTSIDE: Final = {"secret": "x", "signed": "x"}


def names_in(patterns: Iterable[URLPattern]) -> list[str]:
    return [entry.name for entry in patterns if entry.name and entry.name not in LEFT_OUT]


class RecordedQuery(QueryDict):
    """The fields of an address or a form; it notes the names that the view asks for."""

    asked: Final[set[str]] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def getlist(self, key: str, default: Any = None) -> list[Any]:
        self.asked.add(key)
        return super().getlist(key, default)

    def dict(self) -> Any:
        return self


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django.core.handlers.wsgi.QueryDict", RecordedQuery)
    monkeypatch.setattr("django.http.request.QueryDict", RecordedQuery)


@pytest.fixture
def client(admin: Visitor) -> Client:
    admin.client.raise_request_exception = False
    return admin.client


def send(client: Client, method: str, address: str, query: str) -> HttpResponseBase:
    """A request whose changes are rolled back, so that the next one finds the same objects."""
    answer: HttpResponseBase
    with transaction.atomic():
        if method == "get":
            answer = client.get(f"{address}{'&' if '?' in address else '?'}{query}")
        else:
            answer = client.post(address, query, content_type="application/x-www-form-urlencoded")
        transaction.set_rollback(True)
    return answer


def queries(address: str, fields: set[str]) -> Iterator[str]:
    """Each field with one of the values, then all fields with one value and a second one."""
    for field in sorted(fields):
        value = VALUES[crc32(f"{field} {address.rpartition('/')[2]}".encode()) % len(VALUES)]
        yield urlencode({field: value})
    value = VALUES[crc32(address.rpartition("/")[2].encode()) % len(VALUES)]
    yield urlencode({field: [value, "x"] for field in sorted(fields)}, doseq=True)


def assert_survives(client: Client, method: str, address: str) -> None:
    """Send absurd values in all fields that the view reads, also in those that it reads because of others."""
    RecordedQuery.asked.clear()
    answer = send(client, method, address, "")
    assert answer.status_code < 500, (method, address)
    known: set[str] = set()
    while fields := RecordedQuery.asked - known - {"csrfmiddlewaretoken"}:
        known |= fields
        for query in queries(address, fields):
            answer = send(client, method, address, query)
            assert answer.status_code < 500, (method, address, query)


def test_it_works(client: Client, admin: Visitor) -> None:
    RecordedQuery.asked.clear()
    send(client, "get", admin.address(), "q=x")
    assert {"q", "sort"} <= RecordedQuery.asked


def test_figures(client: Client, admin: Visitor, seeded: Seeded) -> None:
    addresses = Addresses(admin, seeded.faulty)
    pair = f"?runs={seeded.healthy.pk}&runs={seeded.faulty.pk}"
    for name in FIGURES:
        assert_survives(client, "get", addresses.of("figure", name=name))
    for name in ("loss", "delta", "tensors"):
        assert_survives(client, "get", addresses.of("compare_figure", name=name) + pair)
    for name in ("reference", "bisect"):
        assert_survives(client, "get", addresses.of("report_figure", name=name))


def test_downloads_of_figures(client: Client, admin: Visitor, seeded: Seeded) -> None:
    addresses = Addresses(admin, seeded.faulty)
    for name in FIGURES:
        for number, form in enumerate(("svg", "csv", "json")):
            values = iter(VALUES[number::3])
            query = {field: next(values) for field in ("width", "title", "theme")}
            answer = send(
                client, "get", f"{addresses.of('figure', name=name)}?format={form}", urlencode(query)
            )
            # 404: there is no such chart without a tensor in the address.
            assert answer.status_code in (200, 404), (name, form, query)


def test_pages(client: Client, admin: Visitor, seeded: Seeded) -> None:
    addresses = Addresses(admin, seeded.faulty)
    for tab in TABS:
        assert_survives(client, "get", f"{addresses.of('run')}?tab={tab}")
    for form in MEDIA_TYPES:
        assert_survives(client, "get", addresses.of("run_export", form=form))
    assert_survives(client, "get", addresses.of("tensor_map", form="json"))
    for name in names_in(urlpatterns):
        assert_survives(client, "get", addresses.of(name, **OUTSIDE))


def test_pages_of_an_empty_run(client: Client, admin: Visitor) -> None:
    addresses = Addresses(admin)
    for name in names_in(urlpatterns):
        assert_survives(client, "get", addresses.of(name, **OUTSIDE))


def test_forms(client: Client, admin: Visitor, seeded: Seeded) -> None:
    addresses = Addresses(admin, seeded.healthy)
    for name in names_in(urlpatterns):
        assert_survives(client, "post", addresses.of(name, **OUTSIDE))


@pytest.mark.parametrize("method", ["get", "post"])
def test_account(client: Client, method: str) -> None:
    for name in names_in(account_urls.urlpatterns):
        address = reverse(name, args={"signin_link": ["x"], "factor_change": ["recovery"]}.get(name, []))
        assert_survives(client, method, address)
