"""What each answer means, and how long an attempt waits."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from agent.helpers.faulty_http import Fault
from agent.helpers.wire_server import WireServer
from hypothesis import given
from hypothesis import strategies as st

from fp8scope.config import Settings
from fp8scope.delivery.transport import MAX_RETRY_AFTER, Backoff, NextAction, Transport, classify, retry_after


def error(code: str) -> bytes:
    return json.dumps({"error": {"code": code, "message": "m", "hint": "h"}}).encode()


def test_it_works(server: WireServer, settings: Settings) -> None:
    transport = Transport(settings)
    outcome = transport.send("PUT", f"/runs/{'0' * 8}-0000-4000-8000-{'0' * 12}", b'{"name": "x"}')
    assert outcome.action is NextAction.DONE and outcome.status == 201
    assert outcome.answer["url"].startswith(server.url)
    transport.close()


@pytest.mark.parametrize(
    ("status", "body", "action"),
    [
        (200, b'{"status": "stored"}', NextAction.DONE),
        (201, b"{}", NextAction.DONE),
        (200, b"<html>", NextAction.RETRY),
        (200, b"[]", NextAction.RETRY),
        (200, error("malformed"), NextAction.RETRY),
        (204, b"", NextAction.RETRY),
        (302, b"", NextAction.HOLD),
        (400, error("malformed"), NextAction.SET_ASIDE),
        (400, b"", NextAction.HOLD),
        (401, error("bad_token"), NextAction.HOLD),
        (401, b"", NextAction.HOLD),
        (403, b"", NextAction.HOLD),
        (404, error("unknown_run"), NextAction.REGISTER),
        (404, b"", NextAction.HOLD),
        (408, b"", NextAction.RETRY),
        (409, error("writer_conflict"), NextAction.NEW_WRITER),
        (409, error("catalogue_gap"), NextAction.SEND_CATALOGUE),
        (409, error("run_conflict"), NextAction.HOLD),
        (409, b"", NextAction.RETRY),
        (413, error("too_large"), NextAction.HALVE),
        (413, b"", NextAction.HALVE),
        (422, error("invalid"), NextAction.SET_ASIDE),
        (429, error("slow_down"), NextAction.WAIT),
        (500, error("oops"), NextAction.RETRY),
        (502, b"", NextAction.RETRY),
        (503, b"", NextAction.WAIT),
        (504, b"", NextAction.RETRY),
        (507, error("storage_full"), NextAction.WAIT),
        (507, b"", NextAction.RETRY),
    ],
    ids=str,
)
def test_the_table(status: int, body: bytes, action: NextAction) -> None:
    assert classify(status, {}, body).action is action


@given(st.integers(100, 599), st.binary(max_size=200))
def test_only_our_answers_acknowledge(status: int, body: bytes) -> None:
    outcome = classify(status, {}, body)
    if outcome.action is NextAction.DONE:
        assert 200 <= status < 300 and isinstance(json.loads(body), dict)
    assert len(outcome.message) <= 1200


def test_retry_after() -> None:
    assert retry_after("1.5") == 1.5 and retry_after("-3") == 0
    assert retry_after("1e9") == MAX_RETRY_AFTER
    assert retry_after(None) is retry_after("soon") is retry_after("nan") is None
    later = retry_after(format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True))
    assert later is not None and 50 < later <= 60


@given(st.integers(0, 2000))
def test_backoff_stays_below_its_ceiling_and_starts_again(attempts: int) -> None:
    backoff = Backoff(0.5, 30.0)
    for attempt in range(attempts):
        assert 0 <= backoff.next() <= min(30.0, 0.5 * 2.0 ** min(attempt, 10))
    backoff.reset()
    assert backoff.next() <= 0.5


@pytest.mark.parametrize("fault", [Fault(hang=True), Fault(drop=True)], ids=["hang", "drop"])
def test_trouble_is_an_outcome(fault: Fault, server: WireServer, settings: Settings) -> None:
    server.plan = lambda method, path: fault
    outcome = Transport(settings).send("POST", "/runs/x/heartbeat", b"{}")
    assert outcome.action is NextAction.RETRY and outcome.message
    server.stop()
    refused = Transport(settings).send("POST", "/runs/x/heartbeat", b"{}")
    assert refused.action is NextAction.RETRY and "refused" in refused.message
    server.start()


def test_says_what_is_wrong_with_an_address(server: WireServer, settings: Settings) -> None:
    encrypted = replace(settings, url=server.url.replace("http://", "https://"))
    outcome = Transport(encrypted).send("POST", "/runs/x/heartbeat", b"{}")
    assert outcome.action is NextAction.RETRY and "begin it with http://" in outcome.message, outcome
    # The page of a proxy or of the dashboard itself, without an error code of the API.
    outcome = classify(404, {}, b"<html>Not found</html>")
    assert outcome.action is NextAction.HOLD and "Leave out the path of a page" in outcome.message
    known = classify(404, {}, b'{"error": {"code": "unknown_run", "message": "No such run."}}')
    assert known.message == "No such run."


def test_a_token_is_not_sent_to_where_a_redirect_points(settings: Settings) -> None:
    with WireServer() as other, WireServer() as server:
        server.plan = lambda method, path: Fault(status=307, headers=(("Location", other.url + path),))
        outcome = Transport(replace(settings, url=server.url)).send("POST", "/runs/x/heartbeat", b"{}")
        assert outcome.action is NextAction.HOLD and other.url in outcome.message
        assert other.requests == []


def test_the_settings_do_not_show_the_token(settings: Settings) -> None:
    assert settings.token and settings.token not in repr(settings)
