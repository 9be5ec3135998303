"""Errors as MLflow's clients read them: a code, a message and a status."""

from __future__ import annotations

from typing import Final

from fp8scope_dashboard.wire.errors import RefusalError

INVALID: Final = "INVALID_PARAMETER_VALUE"
MISSING: Final = "RESOURCE_DOES_NOT_EXIST"
EXISTS: Final = "RESOURCE_ALREADY_EXISTS"
NO_ENDPOINT: Final = "ENDPOINT_NOT_FOUND"

_CODES: Final = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: MISSING,
    409: EXISTS,
    413: INVALID,
    429: "REQUEST_LIMIT_EXCEEDED",
    500: "INTERNAL_ERROR",
    503: "TEMPORARILY_UNAVAILABLE",
    507: "RESOURCE_EXHAUSTED",
}


class MlflowError(Exception):
    """A refused request of an MLflow client."""

    def __init__(self, message: str, code: str = INVALID, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.code, self.status = message, code, status
        self.headers: dict[str, str] = {}

    def document(self) -> dict[str, str]:
        """The body of the answer."""
        return {"error_code": self.code, "message": self.message}


def missing(what: str) -> MlflowError:
    """The answer where an experiment or a run does not exist."""
    # MLflow's servers say "not found", and some scripts look for that.
    return MlflowError(f"{what} not found in the project of this token.", MISSING, 404)


def of_refusal(refusal: RefusalError) -> MlflowError:
    """The same refusal in MLflow's words."""
    code = _CODES.get(refusal.status, INVALID)
    error = MlflowError(f"{refusal.message} {refusal.hint}".strip(), code, refusal.status)
    error.headers = refusal.headers()
    return error
