"""Read the diagnosis of a run."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import HttpRequest
from ninja import Router, Schema

from fp8scope_dashboard.api.auth import RUN_READER, run_of
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.diagnosis.models import Diagnosis
from fp8scope_dashboard.diagnosis.reading import inputs_of
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.wire import schemas

router = Router(tags=["runs"], auth=RUN_READER)


class LinkOut(Schema):
    """A part of a link to evidence: `tensor` and `statistic`, `run`, or the `address` of a source."""

    kind: str
    label: str
    parts: dict[str, str]


class FindingOut(Schema):
    """The result of one step; docs/diagnosis.md describes the steps.

    What begins at `onset` may have begun at `earliest`: the steps between them were not observed.
    """

    step: str
    outcome: str
    sentence: str
    cause: str
    onset: int | None
    earliest: int | None = None
    tensors: list[str]
    suggestion: str
    links: list[LinkOut]


class DiagnosisOut(Schema):
    """`sentence` is null until the first diagnosis is made. `current`: it is of the present data."""

    current: bool
    sentence: str | None = None
    outcome: str = ""
    cause: str = ""
    cause_name: str = ""
    onset: int | None = None
    suggestion: str = ""
    decided_by: str = ""
    method_version: int | None = None
    findings: list[FindingOut] = []


@router.get("/runs/{run}/diagnosis", response={200: DiagnosisOut, ERRORS: schemas.ErrorOut})
def get_diagnosis(request: HttpRequest, run: UUID) -> dict[str, Any]:
    """The latest diagnosis. Starts one if it is not of the present data: ask again until `current`."""
    stored_run = run_of(request, run)
    stored = Diagnosis.objects.filter(run=stored_run).first()
    current = stored is not None and stored.inputs == inputs_of(stored_run)
    if not current:
        run_changed(stored_run.id, stored_run.project_id, "diagnosis")
    return {**(stored.result if stored is not None else {}), "current": current}
