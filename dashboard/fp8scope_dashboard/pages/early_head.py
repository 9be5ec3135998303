"""Send the beginning of a page before its data is read: the browser loads styles and scripts meanwhile.

The beginning is `head_start.html`, with which `base.html` begins. What may change the answer's status or
headers comes before: the view checks permissions and addresses first, and requests whose answer sets a cookie
are answered as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

from django.contrib.messages import get_messages
from django.db import close_old_connections
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.middleware.csrf import get_token
from django.template.loader import render_to_string
from django.urls import get_script_prefix, set_script_prefix
from django.utils import timezone

from fp8scope_dashboard.edge.scope import LATER

logger = logging.getLogger(__name__)

BEGINNING: Final = "head_start.html"
Later = Callable[[Callable[[], bytes]], Awaitable[bytes]]


def with_early_head(
    request: HttpRequest, context: dict[str, Any], make: Callable[[], HttpResponse]
) -> HttpResponseBase:
    """The page that `make` returns; if possible its beginning is sent before `make` is called.

    Args:
        context: that of the beginning: `is_framed`, `page_styles`, `page_scripts` (paths of static files) and
            `has_chart` (plotly is loaded at once). The page must have the same entries.
        make: reads the data and renders. It must not rely on the status or the headers of what it returns.
    """
    later: Later | None = getattr(request, "scope", {}).get(LATER)
    # Messages that were shown are removed from a cookie.
    if later is None or len(get_messages(request)):
        return make()
    # Its cookie is set now or never.
    get_token(request)
    beginning = render_to_string(BEGINNING, context, request).encode()
    return StreamingHttpResponse(_parts(beginning, later, _in_its_context(make, beginning, context, request)))


async def _parts(beginning: bytes, later: Later, rest: Callable[[], bytes]) -> AsyncGenerator[bytes]:
    yield beginning
    yield await later(rest)


def _in_its_context(
    make: Callable[[], HttpResponse], beginning: bytes, context: dict[str, Any], request: HttpRequest
) -> Callable[[], bytes]:
    """The rest of the page, made in another thread with what middleware has set in this one."""
    zone, prefix = timezone.get_current_timezone(), get_script_prefix()

    def rest() -> bytes:
        set_script_prefix(prefix)
        try:
            with timezone.override(zone):
                return _after(beginning, make().content)
        except Http404:
            # The status is sent: the page says it.
            return _after(beginning, render_to_string("404.html", context, request).encode())
        except Exception:
            logger.exception("%s failed after the beginning of the page was sent.", request.path)
            return _after(beginning, render_to_string("500.html", context, request).encode())
        finally:
            close_old_connections()

    return rest


def _after(beginning: bytes, page: bytes) -> bytes:
    if not page.startswith(beginning):
        raise ValueError(
            f"The page does not begin with {BEGINNING}, or with another context than it was sent."
        )
    return page[len(beginning) :]
