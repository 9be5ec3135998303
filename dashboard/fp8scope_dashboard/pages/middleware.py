"""Middleware of the pages: the content security policy, early loading of plotly, reading from a replica."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.core.exceptions import MiddlewareNotUsed
from django.db import InterfaceError, OperationalError
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.templatetags.static import static
from django.utils.decorators import sync_and_async_middleware
from django.utils.deprecation import MiddlewareMixin

from fp8scope_dashboard.db import replica
from fp8scope_dashboard.pages.finders import PLOTLY

# Inline styles are allowed because plotly and htmx set them; inline scripts are not.
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
# The API answers with data, except for the page that describes it.
DATA_PREFIX = "/api/"
DATA_EXCEPT = "/api/v1/docs"

Handler = Callable[[HttpRequest], HttpResponseBase | Awaitable[HttpResponseBase]]


@sync_and_async_middleware
def content_security_policy(get_response: Handler) -> Handler:
    """Add the policy to every page."""

    def add(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        if not request.path.startswith(DATA_PREFIX) or request.path == DATA_EXCEPT:
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


class PlotlyAnnounced(MiddlewareMixin):
    """Announce plotly's script in the headers of a page whose first chart is drawn."""

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        # The template tag sets it. Parts of pages do not need it: the script is there.
        if getattr(request, "has_first_chart", False) and "HX-Request" not in request.headers:
            response["Link"] = f"<{static(PLOTLY)}>; rel=modulepreload"
        return response


class FiguresFromReplica(MiddlewareMixin):
    """Read figures from the replica. If that fails, build the figure again from the primary."""

    def __init__(self, get_response: Any) -> None:
        if replica.REPLICA not in settings.DATABASES:
            raise MiddlewareNotUsed
        super().__init__(get_response)

    def process_view(
        self, request: HttpRequest, view: Callable[..., HttpResponseBase], args: Any, kwargs: Any
    ) -> HttpResponseBase | None:
        if request.method != "GET" or "/figures/" not in request.path:
            return None
        try:
            with replica.from_replica():
                return view(request, *args, **kwargs)
        except (OperationalError, InterfaceError):
            replica.health.failed()
            return view(request, *args, **kwargs)
