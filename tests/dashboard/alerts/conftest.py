"""A server that receives alerts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dashboard.helpers.messages import Receiver, http_receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with http_receiver() as receiver:
        yield receiver
