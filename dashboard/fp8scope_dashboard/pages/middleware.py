"""Headers that tell the browser what a page of ours may do: run our own scripts and nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

# Styles may be inline: plotly and htmx set them while they draw. Scripts never.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
# The API's own documentation page has scripts in it.
UNTOUCHED = "/api/"

Handler = Callable[[HttpRequest], HttpResponseBase | Awaitable[HttpResponseBase]]


@sync_and_async_middleware
def content_security_policy(get_response: Handler) -> Handler:
    """Add the policy to every answer for people."""

    def add(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        if not request.path.startswith(UNTOUCHED):
            response.headers.setdefault("Content-Security-Policy", POLICY)
            response.headers.setdefault("Permissions-Policy", "camera=(), geolocation=(), microphone=()")
        return response

    if iscoroutinefunction(get_response):

        async def handle_async(request: HttpRequest) -> HttpResponseBase:
            answer = get_response(request)
            assert not isinstance(answer, HttpResponseBase)
            return add(request, await answer)

        return handle_async

    def handle(request: HttpRequest) -> HttpResponseBase:
        answer = get_response(request)
        assert isinstance(answer, HttpResponseBase)
        return add(request, answer)

    return handle
