"""Secrets in log records are replaced, and nothing else is."""

import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable

import pytest
from django.core.exceptions import ImproperlyConfigured
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.settings.database import broker_from_url, database_from_url
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
def test_redacts_secrets(message: str) -> None:
    assert SECRET[:8] not in redact(message)


@pytest.mark.parametrize(
    "message", ["Not Found: /signin/", "GET /runs/7/", "100 % of fp8s_ is kept", "Bearer of keys"]
)
def test_does_not_change_other_lines(message: str) -> None:
    assert redact(message) == message


@given(st.text(st.characters(categories=["L", "N"]), max_size=15))
def test_does_not_redact_short_words(word: str) -> None:
    assert redact("signed in at /signin/" + word) == "signed in at /signin/" + word


@pytest.mark.parametrize(
    "address",
    [
        f"postgresql://fp8scope:{SECRET}@db.test/fp8scope",
        f"redis://:{SECRET}@redis.test:6379/0",
        f"postgresql://fp8scope:a/b:{SECRET}@db.test/fp8scope",
        f"https://user:p@ss{SECRET}@hook.test/x",
    ],
)
def test_redacts_passwords_in_addresses(address: str) -> None:
    shown = redact(f"cannot connect to {address}: refused")
    assert SECRET[:8] not in shown and ".test" in shown and "refused" in shown


def test_redacts_tracebacks() -> None:
    try:
        raise ValueError(f"no such host: redis://:{SECRET}@redis.test")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    RedactSecrets().filter(record)
    shown = logging.Formatter().format(record)
    assert SECRET not in shown and "ValueError" in shown and "redis.test" in shown


SCRIPT = """
import logging
from fp8scope_dashboard.celery import app
app.log.setup(loglevel="INFO")
logging.getLogger("celery.worker").error("lost redis://:%s@redis.test", "{secret}")
logging.getLogger("urllib3.connectionpool").debug("POST /services/{secret}")
logging.getLogger("celery.worker").debug("not shown")
"""


def test_redacts_the_log_of_the_worker() -> None:
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "fp8scope_dashboard.settings.test"}
    command = [sys.executable, "-c", SCRIPT.format(secret=SECRET)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    shown = done.stdout + done.stderr
    assert SECRET not in shown and "redis.test" in shown and "not shown" not in shown


@pytest.mark.parametrize(
    ("parse", "url"),
    [
        (database_from_url, f"postgresql://u:{SECRET}@[h/db"),
        (database_from_url, f"postgresql://u:{SECRET}%zz@h/db"),
        (broker_from_url, f"redis://:{SECRET}/x@h/0"),
        (broker_from_url, f"redis://:x@[{SECRET}/0"),
    ],
)
def test_errors_do_not_quote_invalid_addresses(parse: Callable[[str], object], url: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="is not a valid") as raised:
        parse(url)
    assert SECRET[:8] not in "".join(traceback.format_exception(raised.value))
