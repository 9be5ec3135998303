"""The level of the logs."""

from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured

from fp8scope_dashboard.settings.log_level import log_level_from_text


@pytest.mark.parametrize(
    ("text", "level"), [("", "INFO"), ("warning", "WARNING"), (" Debug ", "DEBUG"), ("ERROR", "ERROR")]
)
def test_any_case_will_do(text: str, level: str) -> None:
    assert log_level_from_text(text) == level


@pytest.mark.parametrize("text", ["warn", "10", "NOTSET", "verbose"])
def test_an_unknown_level_is_refused(text: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=f"FP8SCOPE_LOG_LEVEL must be one of DEBUG.*not {text!r}"):
        log_level_from_text(text)
