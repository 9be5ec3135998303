"""The model card section of a run."""

from __future__ import annotations

from uuid import UUID

from django.http import HttpRequest
from ninja import Router

from fp8scope_dashboard.accounts.addresses import server_address
from fp8scope_dashboard.api.auth import RUN_READER, run_of
from fp8scope_dashboard.api.reading.schemas import CardOut
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.pages.run.model_card import model_card
from fp8scope_dashboard.wire import schemas

router = Router(tags=["runs"], auth=RUN_READER)


@router.get("/runs/{run}/card", response={200: CardOut, ERRORS: schemas.ErrorOut})
def get_card(request: HttpRequest, run: UUID) -> dict[str, str]:
    """A section for a model card, in Markdown: recipe, formats, verdict, hours, link."""
    return {"markdown": model_card(run_of(request, run), server_address(request))}
