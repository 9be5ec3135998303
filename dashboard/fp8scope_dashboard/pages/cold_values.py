"""Answers to requests for values that the cold store does not give; the rest of a page needs none of them."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.utils.deprecation import MiddlewareMixin
from django.utils.html import format_html

from fp8scope_dashboard.cold_store.errors import ColdStoreError
from fp8scope_dashboard.pages.charts.answers import EmptyChart, answer
from fp8scope_dashboard.telemetry.cold.bodies import explained

# The API has errors of its own.
API = "/api/"
RETRY_SECONDS = 30


class ColdValuesExplained(MiddlewareMixin):
    """Middleware that says which values are away: in a chart, in a part of a page, or as a page."""

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        if not isinstance(error, ColdStoreError) or request.path.startswith(API):
            return None
        sentence = explained(error)
        if request.path.endswith(".json"):
            return answer(request, EmptyChart(sentence, status=503))
        if target := request.headers.get("HX-Target"):
            # htmx shows nothing of an answer with another status.
            return HttpResponse(format_html('<p class="notice" id="{}">{}</p>', target, sentence))
        again = request.get_full_path() if request.method == "GET" else ""
        page = render_to_string("cold_store.html", {"sentence": sentence, "again": again})
        return HttpResponse(page, status=503, headers={"Retry-After": str(RETRY_SECONDS)})
