"""Pages and the API while the cold store does not answer: they say which values are away, and go on."""

from __future__ import annotations

import pytest
from dashboard.helpers.object_stores import ColdFolder, old_run
from dashboard.helpers.recorder import Recorder
from dashboard.helpers.token_clients import client_with_token
from dashboard.helpers.visitors import Visitor, get_json, run_html, visitor_of
from django.core.cache import cache
from django.test import Client

from fp8scope_dashboard.accounts.models import Role
from fp8scope_dashboard.cold_store.object_store import object_store
from fp8scope_dashboard.pages.charts.first_paint import first_paint
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.cold import moving

pytestmark = pytest.mark.django_db(transaction=True)

SENTENCE = "The values before step 330 are in the cold store, which does not answer."


@pytest.fixture
def recorder(cold: ColdFolder) -> Recorder:
    """A run of 330 steps in the cold store, of which nothing is in a cache."""
    cache.clear()
    recorder = old_run(330)
    moving.move_run(recorder.run.pk)
    return recorder


@pytest.fixture
def away(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store rests, as after an operation that it has not answered."""
    monkeypatch.setattr(object_store(), "_rests_until", float("inf"))


@pytest.fixture
def visitor(recorder: Recorder) -> Visitor:
    return visitor_of(recorder.run.project, "ada", Role.MEMBER)


def test_it_works(away: None, recorder: Recorder, visitor: Visitor) -> None:
    """The page of the run is there, and each chart says why it is empty."""
    page = run_html(visitor, recorder.run)
    assert SENTENCE in page and "Points stored" in page
    address = f"runs/{recorder.run.pk}/figures"
    assert get_json(visitor, f"{address}/exponents.json", tensor="0") == {"empty": SENTENCE}
    loss = get_json(visitor, f"{address}/loss.json")
    assert len(loss["figure"]["data"]) > 0


def test_the_same_page_when_the_store_answers(recorder: Recorder, visitor: Visitor) -> None:
    assert "cold store" not in run_html(visitor, recorder.run)
    assert "figure" in get_json(visitor, f"runs/{recorder.run.pk}/figures/exponents.json", tensor="0")


def test_a_file_of_a_chart(away: None, recorder: Recorder, visitor: Visitor) -> None:
    address = visitor.address(f"runs/{recorder.run.pk}/figures/exponents.json")
    answer = visitor.client.get(address, {"tensor": "0", "format": "csv"})
    assert (answer.status_code, answer.content.decode()) == (503, f"{SENTENCE}\n")


def test_a_page_that_is_made_of_these_values(away: None, recorder: Recorder, visitor: Visitor) -> None:
    address = visitor.address(f"runs/{recorder.run.pk}/tensors/0/")
    answer = visitor.client.get(address)
    assert answer.status_code == 503 and answer["Retry-After"]
    assert SENTENCE in answer.content.decode() and f'href="{address}"' in answer.content.decode()
    part = visitor.client.get(address, headers={"HX-Target": 'a"<b'})
    assert part.status_code == 200
    assert part.content.decode() == f'<p class="notice" id="a&quot;&lt;b">{SENTENCE}</p>'


def test_the_first_chart_of_a_page(away: None, recorder: Recorder, visitor: Visitor) -> None:
    request = visitor.client.get(visitor.address()).wsgi_request
    address = visitor.address(f"runs/{recorder.run.pk}/figures/exponents.json?tensor=0")
    drawn = first_paint(request, address, "exponents", "")
    assert drawn is not None and drawn.text == SENTENCE


def reading(recorder: Recorder) -> Client:
    return client_with_token(recorder.run.project)


def test_the_api_refuses_and_says_so(away: None, recorder: Recorder) -> None:
    client, address = reading(recorder), f"/api/v1/runs/{recorder.run.pk}/series"
    answer = client.get(address, {"tensor": "a.input", "statistic": "amax"})
    assert answer.status_code == 503 and answer["Retry-After"]
    error = answer.json()["error"]
    assert (error["code"], error["message"]) == ("cold_store", SENTENCE)
    assert len(client.get(address, {"scalar": "loss"}).json()["steps"]) == 330


def test_damage_is_told_as_such(recorder: Recorder, cold: ColdFolder) -> None:
    (name,) = cold.names()
    cold.remove(name)
    answer = reading(recorder).get(
        f"/api/v1/runs/{recorder.run.pk}/series", {"tensor": "a.input", "statistic": "amax"}
    )
    assert answer.json()["error"]["message"] == (
        f"The values before step 330 are in the cold store, which lacks the file {name}."
    )


def test_new_values_of_a_moved_run_are_shown(away: None, recorder: Recorder) -> None:
    recorder.send([400], {"loss": [0.5]}, {"amax": [[3.0, 4.0]]})
    series = queries.tensor_series(recorder.run.pk, 0, "amax", first=350)
    assert (series.steps.tolist(), series.values.tolist()) == ([400], [3.0])
