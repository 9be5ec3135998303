from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from django.conf import settings

from fp8scope_dashboard.accounts import attempts, views
from fp8scope_dashboard.accounts.attempts import Attempts, RedisCounts


@pytest.fixture(autouse=True)
def no_attempts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins with no attempts counted, in Redis and in this process."""
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        for key in client.scan_iter(f"{attempts.KEY_PREFIX}*"):
            client.delete(key)
    monkeypatch.setattr(views, "attempts", Attempts(RedisCounts(settings.REDIS_URL)))
    yield
