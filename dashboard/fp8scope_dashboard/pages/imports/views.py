"""Upload files of other tools, and the list of the project's imports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render

from fp8scope_dashboard.accounts import permissions
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.file_imports import limits
from fp8scope_dashboard.file_imports.models import ImportJob, ImportState
from fp8scope_dashboard.file_imports.services import MISSING, UploadError, accept, can_import
from fp8scope_dashboard.pages.access import POST, in_project, page, person
from fp8scope_dashboard.pages.badges import Badge
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.wire.limits import MIB

MAX_LINKS: Final = 20
"""Runs of an import that are named; the list of runs has the others."""
MAX_OPTION: Final = 128
PRECISIONS: Final = (
    ("", "As the file says"),
    ("fp8", "FP8"),
    ("bf16", "BF16"),
    ("fp16", "FP16"),
    ("fp32", "FP32"),
)
FORMATS: Final = (
    *("wandb", "mlflow", "mlflow-sqlite", "trackio", "aim", "lm-eval", "lighteval", "opencompass"),
    *("te-inspect", "megatron", "neptune", "csv", "jsonl", "parquet", "fp8scope"),
)
"""Names of the importer's --format. Those that it refuses are left out."""
BADGES: Final[Mapping[str, Badge]] = {
    ImportState.WAITING: Badge("Waiting", "neutral", "clock"),
    ImportState.RUNNING: Badge("Importing", "live", "pulse"),
    ImportState.DONE: Badge("Imported", "good", "check"),
    ImportState.FAILED: Badge("Failed", "danger", "cross"),
}
IN_PART: Final = Badge("Imported in part", "warning", "alert")


@dataclass(frozen=True)
class ShownImport:
    """An import with its badge, and the runs that it has stored: each with what was stored of it."""

    job: ImportJob
    badge: Badge
    runs: Sequence[tuple[Run, str]]
    more: int


@in_project(permissions.IMPORT_FILES)
def imports(request: HttpRequest, project: Project) -> HttpResponse:
    """The form, and the imports of the project, newest first."""
    return page(request, project, "runs", "pages/imports/imports.html", _context(project))


@in_project(permissions.IMPORT_FILES)
def import_list(request: HttpRequest, project: Project) -> HttpResponse:
    """The list alone, which asks for itself again while an import is not over."""
    return render(request, "pages/imports/_imports.html", {"project": project, **_listed(project)})


@in_project(permissions.IMPORT_FILES, methods=POST)
def import_new(request: HttpRequest, project: Project) -> HttpResponse:
    """Take uploaded files and start their import."""
    try:
        if not can_import():
            raise UploadError(MISSING)
        job = accept(project, person(request), request.FILES.getlist("files"), _options(request))
    except UploadError as error:
        context = {**_context(project), "problem": str(error), "entered": request.POST}
        return page(request, project, "runs", "pages/imports/imports.html", context, 422)
    record(actor_of(request), project, Action.IMPORTED, job.title)
    messages.success(request, f"Uploaded {job.title}.")
    return redirect("imports", project.slug)


def _options(request: HttpRequest) -> dict[str, str]:
    options = {
        name: request.POST.get(name, "").strip() for name in ("group", "baseline", "precision", "format")
    }
    if any(len(text) > MAX_OPTION or not text.isprintable() for text in options.values()):
        raise UploadError(f"Group and baseline have at most {MAX_OPTION} printable characters.")
    if options["precision"] not in dict(PRECISIONS):
        raise UploadError("Choose a precision of the list.")
    if options["format"] not in ("", *FORMATS):
        raise UploadError("Choose a format of the list.")
    return options


def _context(project: Project) -> dict[str, Any]:
    return {
        "is_missing": not can_import(),
        "missing": MISSING,
        "precisions": PRECISIONS,
        "formats": FORMATS,
        "max_mib": limits.MAX_BYTES // MIB,
        "max_files": limits.MAX_FILES,
        "max_option": MAX_OPTION,
        **_listed(project),
    }


def _listed(project: Project) -> dict[str, Any]:
    jobs = ImportJob.objects.filter(project=project).select_related("created_by")[: limits.KEPT_JOBS]
    named = {run_id for job in jobs for run_id, _ in job.results[:MAX_LINKS]}
    stored = Run.objects.filter(project=project, pk__in=named).in_bulk()
    shown = [_shown(job, stored) for job in jobs]
    return {"imports": shown, "is_live": any(not entry.job.is_over for entry in shown)}


def _shown(job: ImportJob, stored: Mapping[UUID, Run]) -> ShownImport:
    runs = [
        (stored[UUID(run_id)], what) for run_id, what in job.results[:MAX_LINKS] if UUID(run_id) in stored
    ]
    badge = IN_PART if job.state == ImportState.DONE and job.problems else BADGES[job.state]
    return ShownImport(job, badge, runs, max(0, len(job.results) - MAX_LINKS))
