"""The content of a media as an answer that no browser runs anything of."""

from __future__ import annotations

from typing import Final

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.http import content_disposition_header, quote_etag

from fp8scope_dashboard.media import contents
from fp8scope_dashboard.media.models import MediaItem
from fp8scope_dashboard.media.sniffing import IMAGE_TYPES
from fp8scope_dashboard.runs.models import Run

# A content never changes. Browsers ask again only after a day, since its run may be deleted.
FRESH_SECONDS: Final = 86_400
HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; sandbox; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": f"private, max-age={FRESH_SECONDS}, immutable",
}


def address_of(run: Run, item: MediaItem) -> str:
    """The path of a content."""
    return reverse("media_content", args=[run.project.slug, run.pk, item.pk])


def respond(request: HttpRequest, item: MediaItem) -> HttpResponse:
    """Answer with a content. Images of known types are shown, unless `download` is asked for."""
    content = item.content
    etag = quote_etag(item.hex)
    if request.headers.get("If-None-Match") == etag:
        return HttpResponse(status=304, headers={"ETag": etag, **HEADERS})
    is_shown = content.type in IMAGE_TYPES and "download" not in request.GET
    name = contents.download_name(item.name, item.file_name, content.type)
    disposition = content_disposition_header(not is_shown, name) or "attachment"
    return HttpResponse(
        contents.read(content),
        content_type=content.type if is_shown else "application/octet-stream",
        headers={"Content-Disposition": disposition, "ETag": etag, **HEADERS},
    )
