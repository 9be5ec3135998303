"""The hours of all runs of a project: a page, and the same as JSON."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, JsonResponse

from fp8scope_dashboard.accounts.models import MAX_PRICE, MIN_PRICE, Project
from fp8scope_dashboard.pages.access import in_project, page
from fp8scope_dashboard.pages.fleet.content import fleet_of
from fp8scope_dashboard.pages.hours.wording import price_of


@in_project()
def fleet(request: HttpRequest, project: Project) -> HttpResponse:
    """Hours, what was lost, and what FP8 saved. `price` in the address stands for the project's."""
    text = request.GET.get("price", "")
    price = price_of(text)
    hours = fleet_of(project, price)
    context = {
        "fleet": hours,
        "price": text[:20] or ("" if hours.price is None else f"{hours.price:g}"),
        "min_price": MIN_PRICE,
        "max_price": MAX_PRICE,
        "price_is_wrong": bool(text.strip()) and price is None,
    }
    return page(request, project, "fleet", "pages/fleet/fleet.html", context)


@in_project()
def fleet_json(request: HttpRequest, project: Project) -> HttpResponse:
    """The numbers of the page."""
    return JsonResponse(fleet_of(project, price_of(request.GET.get("price", ""))).as_dict())
