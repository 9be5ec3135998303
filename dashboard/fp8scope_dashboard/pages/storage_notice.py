"""The full-disk banner on every page, and the error page for requests that fail because of a full disk."""

from __future__ import annotations

import sys
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.defaults import server_error

from fp8scope_dashboard.telemetry.disk_space import is_disk_full, shows_full


def storage_notice(request: HttpRequest) -> dict[str, Any]:
    """Context processor: whether to warn that the disk is full."""
    return {"disk_is_full": shows_full()}


def on_server_error(request: HttpRequest) -> HttpResponse:
    """Respond to a failed request with status 507 if the disk is full, else 500."""
    # Django calls this while it handles the exception and does not pass it.
    if is_disk_full(sys.exc_info()[1]):
        return render(request, "507.html", status=507)
    return server_error(request)
