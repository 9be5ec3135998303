"""Fixtures for tests of compaction."""

import pytest

from fp8scope_dashboard.telemetry import compaction
from fp8scope_dashboard.telemetry.rollups import schedule


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the thresholds, so that compaction starts after a few rows."""
    monkeypatch.setattr(compaction, "ENOUGH_CHUNKS", 8)
    monkeypatch.setattr(compaction, "FULL_ROWS", 100)
    monkeypatch.setattr(compaction, "MAX_SMALL_BLOCKS", 4)
    monkeypatch.setattr(schedule, "MIN_STEPS", 64)
    monkeypatch.setattr(schedule, "SHORT_RUN", 1)
