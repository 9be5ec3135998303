"""The hours of all runs of a project: a page, and the same as JSON."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, JsonResponse

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages.access import in_project, page
from fp8scope_dashboard.pages.fleet.content import MAX_PRICE, fleet_of, price_of


@in_project()
def fleet(request: HttpRequest, project: Project) -> HttpResponse:
    """Hours, what was lost, and what FP8 saved. `price` in the address is that of a GPU hour."""
    text = request.GET.get("price", "")
    hours = fleet_of(project, price_of(text))
    context = {
        "fleet": hours,
        "price": text[:20],
        "max_price": MAX_PRICE,
        "price_is_wrong": bool(text.strip()) and hours.price is None,
    }
    return page(request, project, "fleet", "pages/fleet/fleet.html", context)


@in_project()
def fleet_json(request: HttpRequest, project: Project) -> HttpResponse:
    """The numbers of the page."""
    return JsonResponse(fleet_of(project, price_of(request.GET.get("price", ""))).as_dict())
