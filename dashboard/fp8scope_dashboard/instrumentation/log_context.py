"""The request or job that a log line belongs to."""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final

context: ContextVar[Mapping[str, str]] = ContextVar("fp8scope_log_context", default=MappingProxyType({}))
"""The request or job that is being worked on. Its names are those of the log: request, run, task, job.

Threads of a request's pool run in a copy of its context, and see it too.
"""

RUN: Final = re.compile(r"/runs/([0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12})(?:/|$)")
REQUEST_ID: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
"""Request ids of clients and proxies that are taken over. Others could forge a log line, or be secrets."""


def of_request(request_id: str, path: str) -> Mapping[str, str]:
    """The context of a request; with the run, if its address names one."""
    run = RUN.search(path)
    return {"request": request_id} if run is None else {"request": request_id, "run": run[1]}


class AddContext(logging.Filter):
    """Adds to a record the text `context`, such as ` [request=4f0c run=...]`, and `fields`."""

    def filter(self, record: logging.LogRecord) -> bool:
        fields = dict(context.get())
        record.fields = fields
        text = " ".join(f"{name}={value}" for name, value in fields.items())
        record.context = f" [{text}]" if fields else ""
        return True


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, process, the context, and the exception."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
            **getattr(record, "fields", {}),
        }
        # Filled in by the filter that redacts secrets; without it from the exception itself.
        if text := record.exc_text or _exception(record):
            document["exception"] = text
        return json.dumps(document, ensure_ascii=False)


def _exception(record: logging.LogRecord) -> str:
    if record.exc_info is None or record.exc_info[0] is None:
        return ""
    return "".join(traceback.format_exception(*record.exc_info))
