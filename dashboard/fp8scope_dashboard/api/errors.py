"""The answers to errors of the API."""

from __future__ import annotations

import logging

from django.db import DataError, IntegrityError, InterfaceError, OperationalError

from fp8scope_dashboard.cold_store.errors import ColdStoreError
from fp8scope_dashboard.runs.services import TooManyWritersError
from fp8scope_dashboard.telemetry.cold.bodies import explained
from fp8scope_dashboard.telemetry.disk_space import is_disk_full
from fp8scope_dashboard.wire.errors import (
    ColdStoreRefusalError,
    InvalidError,
    MalformedError,
    RefusalError,
    StorageFullError,
    UnavailableError,
)

logger = logging.getLogger(__name__)


class InternalError(RefusalError):
    """A bug."""

    status, code = 500, "internal"


def refusal_of(error: Exception, request: str) -> RefusalError:
    """The answer to a request that failed with `error`; logs what is not the client's fault.

    Args:
        request: its method and path.
    """
    match error:
        case RefusalError():
            return error
        case RecursionError():
            return MalformedError("The JSON is nested too deeply.", "Send flat objects.")
        case DataError() | UnicodeEncodeError():
            message = "A text or number cannot be stored, such as the character NUL or NaN in config."
            return InvalidError(message, "Remove it, or send it as text.")
        case ColdStoreError():
            hint = (
                "Try again later; if it lasts, `fp8scope admin cold check` on the server says what is wrong."
            )
            return ColdStoreRefusalError(explained(error), hint)
        case TooManyWritersError():
            return InvalidError("The run has too many writers.", "Use one writer per process.")
        # IntegrityError: the run was deleted meanwhile; the next attempt gets 404.
        case OperationalError() | InterfaceError() | IntegrityError():
            return _database_failed(error, request)
    logger.error("%s failed", request, exc_info=error)
    return InternalError("The server had an internal error.", "Try again; see the server's log.")


def _database_failed(error: Exception, request: str) -> RefusalError:
    logger.error("%s: the database failed: %s", request, _first_line(error))
    if is_disk_full(error):
        return StorageFullError(
            "The disk of the server's database is full.",
            "Free space on the server, and keep the message until then.",
        )
    hint = "Wait for the seconds in Retry-After, then send again."
    return UnavailableError("The database is not available.", hint)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__
