"""The state of the server, for its administrators and for monitoring."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from fp8scope_dashboard.monitoring import exposition, status
from fp8scope_dashboard.monitoring.access import has_status_token
from fp8scope_dashboard.pages.access import person
from fp8scope_dashboard.pages.badges import Badge

REFUSAL = (
    "This needs an administrator's session, or the header Authorization: Bearer with the value of "
    "FP8SCOPE_STATUS_TOKEN on the server."
)
TONES = {
    "good": Badge("Good", "good", "check"),
    "warning": Badge("Look at it", "warning", "alert"),
    "danger": Badge("Needs action", "danger", "cross"),
    "neutral": Badge("Information", "neutral", "minus"),
}


@never_cache
@require_safe
@login_required
def server_status(request: HttpRequest) -> HttpResponse:
    """The page, or only its measurements for a refresh. For server administrators."""
    if not person(request).is_superuser:
        raise PermissionDenied("Only server administrators see the state of the server.")
    measured = status.current()
    context = {
        "section": "server",
        "status": measured,
        "badge": TONES[measured.tone],
        "checks": [(check, TONES[check.tone]) for check in measured.checks],
    }
    is_part = request.headers.get("HX-Target") == "server"
    return render(
        request,
        "pages/project/_server_status.html" if is_part else "pages/project/server_status.html",
        context,
    )


@never_cache
@require_safe
def server_status_json(request: HttpRequest) -> HttpResponse:
    """The same as JSON: for administrators, or with the token of FP8SCOPE_STATUS_TOKEN."""
    if not _may_read(request):
        return JsonResponse({"error": REFUSAL}, status=401, headers={"WWW-Authenticate": "Bearer"})
    return JsonResponse(status.current().as_dict())


@never_cache
@require_safe
def server_metrics(request: HttpRequest) -> HttpResponse:
    """Metrics of the whole server for Prometheus, with the permission of `server_status_json`."""
    if not _may_read(request):
        return HttpResponse(
            f"{REFUSAL}\n", status=401, content_type="text/plain", headers={"WWW-Authenticate": "Bearer"}
        )
    body, content_type = exposition.render(status.current(), request.headers.get("Accept", ""))
    return HttpResponse(body, content_type=content_type)


def _may_read(request: HttpRequest) -> bool:
    if has_status_token(request.headers.get("Authorization", "")):
        return True
    return request.user.is_authenticated and person(request).is_superuser
