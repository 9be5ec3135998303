"""The description of the API: for everybody, or with FP8SCOPE_PRIVATE_API_DOCS for users and tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache

from fp8scope_dashboard.accounts.services import authenticate_token
from fp8scope_dashboard.api.auth import secret_of
from fp8scope_dashboard.wire.errors import NoTokenError, error_bytes

HINT = "Sign in, or send the header Authorization: Bearer with a token."


def private_if_asked(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Decorate the pages of the description."""

    @wraps(view, assigned=())
    def wrapped(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if not settings.PRIVATE_API_DOCS or request.user.is_authenticated or _has_token(request):
            return view(request, *args, **kwargs)
        body = error_bytes("no_token", "The description of this API is private.", HINT)
        return HttpResponse(body, status=401, content_type="application/json")

    return never_cache(wrapped)


def _has_token(request: HttpRequest) -> bool:
    try:
        return authenticate_token(secret_of(request)) is not None
    except NoTokenError:
        return False
