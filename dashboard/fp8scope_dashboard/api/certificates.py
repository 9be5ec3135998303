"""The certificate of a run's verdict: as its file, as one page, and for continuous integration."""

from __future__ import annotations

from typing import Annotated, Final, Literal
from uuid import UUID

from django.http import HttpRequest, HttpResponse
from ninja import Query, Router

from fp8scope_dashboard.accounts.addresses import server_address
from fp8scope_dashboard.api.auth import READER, run_of
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.certificates.claim import MAX_MARGIN, MAX_NATS, MIN_MARGIN
from fp8scope_dashboard.certificates.document import as_text
from fp8scope_dashboard.certificates.errors import CertificateError
from fp8scope_dashboard.certificates.gate import junit, markdown
from fp8scope_dashboard.certificates.stored_runs import certificate_of
from fp8scope_dashboard.pages.certificate.sheet import sheet
from fp8scope_dashboard.wire import schemas
from fp8scope_dashboard.wire.errors import NotRecordedError

Form = Literal["json", "html", "markdown", "junit"]
MEDIA_TYPES: Final[dict[Form, str]] = {
    "json": "application/json",
    "html": "text/html; charset=utf-8",
    "markdown": "text/markdown; charset=utf-8",
    "junit": "application/xml",
}
OUTCOME: Final = "X-Fp8scope-Outcome"
FILE: Final = {
    "responses": {
        200: {
            "description": "The certificate; docs/certificates.md tells what it has. The header "
            f"{OUTCOME} is pass, fail or undecided.",
            "content": {
                kind.partition(";")[0]: {"schema": {"type": "object" if form == "json" else "string"}}
                for form, kind in MEDIA_TYPES.items()
            },
        }
    }
}

# Not of a token that only writes runs: the baselines are others.
router = Router(tags=["runs"], auth=READER)


@router.get("/runs/{run}/certificate", response={ERRORS: schemas.ErrorOut}, openapi_extra=FILE)
def get_certificate(
    request: HttpRequest,
    run: UUID,
    baseline: Annotated[
        str, Query(max_length=128, description="A group or a run's id; default: the run's baseline.")
    ] = "",
    margin: Annotated[
        float | None,
        Query(ge=MIN_MARGIN, le=MAX_MARGIN, description="Relative difference that counts as none."),
    ] = None,
    margin_nats: Annotated[
        float | None,
        Query(ge=MIN_MARGIN, le=MAX_NATS, description="The same in the unit of the loss, in its place."),
    ] = None,
    form: Annotated[Form, Query(alias="format")] = "json",
) -> HttpResponse:
    """The signed verdict on the loss of a run and its seeds, with the curves that it was computed from.

    With both margins, that in the unit of the loss counts.
    """
    try:
        document = certificate_of(
            run_of(request, run),
            server=server_address(request),
            baseline_name=baseline,
            margin=margin,
            margin_nats=margin_nats,
        )
    except CertificateError as error:
        raise NotRecordedError(f"No certificate: {error}.", "See docs/certificates.md.") from None
    made = {"json": as_text, "html": sheet, "markdown": markdown, "junit": junit}[form](document)
    answer = HttpResponse(made, content_type=MEDIA_TYPES[form])
    answer[OUTCOME] = document["claim"]["outcome"]
    if form == "html":
        # A page with a name of a run on the dashboard's own address: nothing in it may run.
        answer["Content-Security-Policy"] = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
    return answer
