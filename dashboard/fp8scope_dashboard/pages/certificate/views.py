"""The certificate of a run, from its menu."""

from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from fp8scope_dashboard.accounts.addresses import server_address
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.certificates.document import as_text
from fp8scope_dashboard.certificates.errors import CertificateError
from fp8scope_dashboard.certificates.stored_runs import certificate_of
from fp8scope_dashboard.pages.access import in_project, run_of
from fp8scope_dashboard.pages.certificate.sheet import sheet


@in_project()
def certificate(request: HttpRequest, project: Project, run_id: UUID, form: str) -> HttpResponse:
    """Download the certificate of the run's verdict: `html`, one page, or `json`, the signed file."""
    run = run_of(project, run_id)
    try:
        document = certificate_of(run, server=server_address(request))
    except CertificateError as error:
        messages.error(request, f"There is no certificate: {error}.")
        return redirect("run", project.slug, run_id)
    text, kind = (sheet(document), "text/html") if form == "html" else (as_text(document), "application/json")
    answer = HttpResponse(text, content_type=f"{kind}; charset=utf-8")
    answer["Content-Disposition"] = f'attachment; filename="certificate-{run_id}.{form}"'
    return answer
