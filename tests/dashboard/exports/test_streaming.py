"""The limit on concurrent exports of a web process."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from dashboard.helpers.asgi_views import Answer, request, run
from dashboard.helpers.recorder import Recorder
from django.test import Client

from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.edge.threaded_asgi import Handler
from fp8scope_dashboard.exports.streaming import MAX_EXPORTS
from fp8scope_dashboard.runs.models import Run

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def stored() -> tuple[Run, dict[str, str]]:
    """A run with rows, and the headers of a request for it."""
    recorder = Recorder.of_new_run(["a.input"])
    recorder.send([0, 1, 2], {"loss": [3.0, 2.0, 1.0]})
    secret = create_token(recorder.run.project, "tests", scopes=("write", "read"))[1]
    return recorder.run, {"authorization": f"Bearer {secret}"}


def test_concurrent_requests_do_not_exceed_the_limit(stored: tuple[Run, dict[str, str]]) -> None:
    """All responses begin before any of them sends its first part."""
    recorded, headers = stored
    requests = 3 * MAX_EXPORTS

    async def ask_at_once() -> list[Answer]:
        handler, answered = Handler(), asyncio.Barrier(requests)

        async def wait_for_others() -> None:
            async with asyncio.timeout(60):
                await answered.wait()

        target = f"/api/v1/runs/{recorded.pk}/export"
        return await asyncio.gather(
            *(request(handler, target, headers=headers, on_start=wait_for_others) for _ in range(requests))
        )

    answers = run(ask_at_once)
    assert Counter(answer.status for answer in answers) == {200: MAX_EXPORTS, 429: requests - MAX_EXPORTS}
    assert all(answer.body.startswith(b"PAR1") for answer in answers if answer.status == 200)
    refused = next(answer for answer in answers if answer.status == 429)
    assert b'"slow_down"' in refused.body and b"retry-after" in {name.lower() for name, _ in refused.headers}
    # All slots are free again.
    answers = run(ask_at_once)
    assert sum(answer.status == 200 for answer in answers) == MAX_EXPORTS


def test_an_export_that_is_never_read_releases_its_slot(stored: tuple[Run, dict[str, str]]) -> None:
    recorded, headers = stored
    for _ in range(2 * MAX_EXPORTS):
        response = Client().get(f"/api/v1/runs/{recorded.pk}/export", headers=headers)
        assert response.status_code == 200
        response.close()


def test_an_export_that_fails_releases_its_slot(
    stored: tuple[Run, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, headers = stored
    with monkeypatch.context() as patch:
        patch.setattr("fp8scope_dashboard.exports.streaming.content_of", _fail)
        for _ in range(MAX_EXPORTS + 1):
            assert Client().get(f"/api/v1/runs/{recorded.pk}/export", headers=headers).status_code == 500
    assert Client().get(f"/api/v1/runs/{recorded.pk}/export", headers=headers).status_code == 200


def _fail(*_: object, **__: object) -> None:
    raise ValueError("a bug")
