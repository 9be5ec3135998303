"""Log lines of requests and jobs: text and JSON."""

from __future__ import annotations

import io
import json
import logging
import logging.config
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from fp8scope_dashboard.instrumentation.log_context import JsonLines, context, of_request
from fp8scope_dashboard.settings import base
from fp8scope_dashboard.settings.log_level import log_format_from_text

RUN = "3f0c9c5e-0000-4000-8000-000000000000"


@pytest.fixture
def _in_a_request() -> Iterator[None]:
    token = context.set(of_request("4f0c", f"/api/v1/runs/{RUN}/batches"))
    yield
    context.reset(token)


def logged(kind: str, record: logging.LogRecord) -> str:
    """The line of a record with the handler that the settings describe."""
    logging_settings: Any = base.LOGGING
    described = logging_settings["handlers"]["console"]
    configurator = logging.config.DictConfigurator({"version": 1})
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    for name in described["filters"]:
        handler.addFilter(configurator.configure_filter(dict(logging_settings["filters"][name])))
    handler.setFormatter(configurator.configure_formatter(dict(logging_settings["formatters"][kind])))
    handler.handle(record)
    return stream.getvalue()


def record(text: str, *values: object, **more: Any) -> logging.LogRecord:
    return logging.LogRecord("fp8scope.test", logging.WARNING, __file__, 1, text, values, None, **more)


@pytest.mark.usefixtures("_in_a_request")
def test_a_json_line_has_the_request_and_the_run() -> None:
    (line,) = logged("json", record("stored %d rows\nof “a”", 3)).splitlines()
    document = json.loads(line)
    assert document["message"] == "stored 3 rows\nof “a”" and document["level"] == "WARNING"
    assert (document["request"], document["run"]) == ("4f0c", RUN)
    assert document["logger"] == "fp8scope.test" and document["time"].endswith("+00:00")
    assert "exception" not in document


@pytest.mark.usefixtures("_in_a_request")
def test_a_text_line_ends_with_them() -> None:
    assert logged("line", record("refused")).endswith(f"refused [request=4f0c run={RUN}]\n")


def test_lines_without_a_request_are_as_before() -> None:
    assert logged("line", record("started")).endswith("fp8scope.test: started\n")
    assert "request" not in json.loads(logged("json", record("started")))


@pytest.mark.parametrize("kind", ["line", "json"])
def test_secrets_are_redacted_in_messages_and_tracebacks(kind: str) -> None:
    secret = "fp8s_0123456789abcdefghij"
    try:
        raise ValueError(f"Bearer {secret}")
    except ValueError:
        failed = record("token %s", secret)
        failed.exc_info = sys.exc_info()
    line = logged(kind, failed)
    assert secret not in line and "ValueError" in line
    if kind == "json":
        assert "Traceback" in json.loads(line)["exception"]


def test_an_exception_without_the_filter_is_written_as_well() -> None:
    try:
        raise KeyError("x")
    except KeyError:
        failed = record("failed")
        failed.exc_info = sys.exc_info()
    assert "KeyError: 'x'" in json.loads(JsonLines().format(failed))["exception"]


@pytest.mark.parametrize(
    ("path", "run"),
    [
        (f"/api/v1/runs/{RUN}", RUN),
        (f"/p/default/runs/{RUN}/", RUN),
        (f"/api/v1/runs/{RUN}x/batches", None),
        ("/api/v1/runs/", None),
        ("/metrics", None),
    ],
)
def test_the_run_is_that_of_the_address(path: str, run: str | None) -> None:
    assert of_request("1", path).get("run") == run


def test_the_format_is_one_of_two() -> None:
    assert [log_format_from_text(text) for text in ("", " JSON", "line")] == ["line", "json", "line"]
    with pytest.raises(ImproperlyConfigured, match="FP8SCOPE_LOG_FORMAT must be line or json, not 'xml'"):
        log_format_from_text("xml")
