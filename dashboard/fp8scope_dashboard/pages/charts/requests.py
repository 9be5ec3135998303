"""Ask the address of a figure for the person whose request is being answered."""

from __future__ import annotations

import copy

from django.http import HttpRequest, HttpResponse, QueryDict
from django.urls import get_script_prefix, resolve


def answer_of(request: HttpRequest, address: str, query: QueryDict) -> HttpResponse:
    """What the address of a figure answers.

    The view is called as for a request of the same user, so that it checks the permissions.

    Args:
        address: as `reverse` returns it, so with the prefix below which the server is deployed.

    Raises:
        Resolver404: there is no such address.
    """
    path = f"/{address.removeprefix(get_script_prefix())}"
    inner = copy.copy(request)
    inner.method, inner.path, inner.path_info = "GET", address, path
    inner.GET = query  # type: ignore[assignment]
    # A compressed answer could not be read.
    inner.META = {**request.META, "HTTP_ACCEPT_ENCODING": "identity"}
    match = resolve(path)
    answer: HttpResponse = match.func(inner, *match.args, **match.kwargs)
    return answer
