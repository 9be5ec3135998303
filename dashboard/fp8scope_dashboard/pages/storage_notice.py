"""What people see when the database's disk is full: a banner on every page, and an answer to what fails."""

from __future__ import annotations

import sys
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.defaults import server_error

from fp8scope_dashboard.telemetry.disk_space import is_disk_full, shows_full


def storage_notice(request: HttpRequest) -> dict[str, Any]:
    """For templates: whether to warn that the disk is full."""
    return {"disk_is_full": shows_full()}


def on_server_error(request: HttpRequest) -> HttpResponse:
    """Answer a request that failed: 507 if the disk is full, else 500."""
    # Django calls this while it handles the exception, and hands it over in no other way.
    if is_disk_full(sys.exc_info()[1]):
        return render(request, "507.html", status=507)
    return server_error(request)
