"""Give errors that no API function raised (such as 404 and 405) the format of API errors."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.deprecation import MiddlewareMixin

from fp8scope_dashboard.wire.errors import error_bytes

API = "/api/"
# Not 400: Django sends it for other reasons than the message, such as a host name that is not allowed. With
# one of our codes the agent would take it for a refusal and set the message aside.
CODES = {404: "not_found", 405: "method_not_allowed", 413: "too_large", 500: "internal"}
HINT = "See /api/v1/openapi.json for the endpoints."


class ApiErrors(MiddlewareMixin):
    """Middleware that turns error responses under /api/ into JSON."""

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        status = response.status_code
        is_json = response.headers.get("Content-Type", "").startswith("application/json")
        if status not in CODES or is_json or not request.path.startswith(API):
            return response
        body = error_bytes(
            CODES[status], f"{request.method} {request.path[:200]}: {response.reason_phrase}.", HINT
        )
        answer = HttpResponse(body, status=status, content_type="application/json")
        if "Allow" in response.headers:
            answer["Allow"] = response.headers["Allow"]
        return answer
