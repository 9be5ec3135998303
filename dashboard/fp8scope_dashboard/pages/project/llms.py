"""`/llms.txt`: what fp8scope is and how a program reads it, for language models. Public, without data."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import cache_control
from django.views.decorators.http import require_safe


@require_safe
@cache_control(public=True, max_age=3_600)
def llms(request: HttpRequest) -> HttpResponse:
    """The text of docs/llms.txt."""
    return render(request, "pages/llms.txt", content_type="text/plain; charset=utf-8")
