"""Errors that refuse a request, with the status and code of docs/wire.md."""

from __future__ import annotations

import json
from typing import Any

from fp8scope_dashboard.wire import limits

TOKEN_HINT = "Create a token on the project's settings page and set FP8SCOPE_TOKEN, or run `fp8scope login`."


class RefusalError(Exception):
    """A refused request. `message` says what is wrong, `hint` what to do about it."""

    status = 400
    code = "malformed"
    retry_after: int | None = None

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def as_dict(self) -> dict[str, Any]:
        return error_body(self.code, self.message, self.hint)

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def error_body(code: str, message: str, hint: str) -> dict[str, Any]:
    """The body of every error response."""
    return {"error": {"code": code, "message": message, "hint": hint}}


def error_bytes(code: str, message: str, hint: str) -> bytes:
    """`error_body` as JSON."""
    return json.dumps(error_body(code, message, hint)).encode()


class MalformedError(RefusalError):
    pass


class NotArrowError(RefusalError):
    code = "not_arrow"


class ProtocolMismatchError(RefusalError):
    code = "protocol_mismatch"


class NoTokenError(RefusalError):
    status, code = 401, "no_token"

    def __init__(self) -> None:
        super().__init__("The request has no token.", TOKEN_HINT)


class BadTokenError(RefusalError):
    status, code = 401, "bad_token"

    def __init__(self, message: str = "The token is unknown or was revoked.") -> None:
        super().__init__(message, TOKEN_HINT)


class ForbiddenError(RefusalError):
    status, code = 403, "forbidden"


class UnknownRunError(RefusalError):
    status, code = 404, "unknown_run"


class UnknownNameError(RefusalError):
    """A tensor, a statistic, a figure or a place in a list that is not there."""

    status, code = 404, "unknown_name"


class WriterConflictError(RefusalError):
    status, code = 409, "writer_conflict"


class CatalogueGapRefusalError(RefusalError):
    status, code = 409, "catalogue_gap"


class ContentNeededError(RefusalError):
    status, code = 409, "content_needed"


class RunConflictRefusalError(RefusalError):
    status, code = 409, "run_conflict"


class NotRecordedError(RefusalError):
    """The run does not have what the answer would be made of."""

    status, code = 409, "not_recorded"


class TooLargeError(RefusalError):
    status, code = 413, "too_large"


class InvalidError(RefusalError):
    status, code = 422, "invalid"


class MediaFullError(RefusalError):
    status, code = 422, "media_full"


class SlowDownError(RefusalError):
    status, code = 429, "slow_down"
    retry_after = limits.SLOW_DOWN_SECONDS


class StorageFullError(RefusalError):
    status, code = 507, "storage_full"
    retry_after = limits.STORAGE_FULL_SECONDS


class UnavailableError(RefusalError):
    status, code = 503, "unavailable"
    retry_after = limits.UNAVAILABLE_SECONDS


class ColdStoreRefusalError(RefusalError):
    """The values are in the cold store, which does not give them."""

    status, code = 503, "cold_store"
    retry_after = limits.UNAVAILABLE_SECONDS
