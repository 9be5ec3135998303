"""Secrets in log records: replaced, and nothing else is."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.settings.redaction import RedactSecrets

SECRET = "-3C7v9ObPrbdCFCqB0XvJMiFWt2oQlzVIXeswKSiKgA"


def redact(message: str, *arguments: object) -> str:
    record = logging.LogRecord("django.request", logging.ERROR, __file__, 1, message, arguments, None)
    assert RedactSecrets().filter(record) is True
    return record.getMessage()


def test_it_works() -> None:
    shown = redact("%s: %s", "Internal Server Error", f"/signin/{SECRET}/")
    assert shown == "Internal Server Error: /signin/[redacted]"


@pytest.mark.parametrize(
    "message",
    [f"Not Found: /signin/{SECRET}", f"Authorization: Bearer {SECRET}", f"bad token fp8s_{SECRET} sent"],
)
def test_no_secret_is_left(message: str) -> None:
    assert SECRET[:8] not in redact(message)


@pytest.mark.parametrize(
    "message", ["Not Found: /signin/", "GET /runs/7/", "100 % of fp8s_ is kept", "Bearer of news"]
)
def test_other_lines_stay_as_they_are(message: str) -> None:
    assert redact(message) == message


@given(st.text(st.characters(categories=["L", "N"]), max_size=15))
def test_short_words_are_no_secrets(word: str) -> None:
    assert redact("signed in at /signin/" + word) == "signed in at /signin/" + word
