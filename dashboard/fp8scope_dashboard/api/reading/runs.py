"""The list of runs, in the search language and the order of its page."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from django.http import HttpRequest, QueryDict
from ninja import Query, Router

from fp8scope_dashboard.accounts.addresses import server_address
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.api.auth import READER, RUN_READER, project_of, run_of
from fp8scope_dashboard.api.reading.answers import as_verdict
from fp8scope_dashboard.api.reading.schemas import RunsOut
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.pages.run.summary import verdict_of
from fp8scope_dashboard.pages.runs.listing import Listing, ListState
from fp8scope_dashboard.pages.runs.rows import baselines_among, open_alerts_by_run
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.runs.search import MAX_LENGTH
from fp8scope_dashboard.runs.services import page_url
from fp8scope_dashboard.wire import limits, schemas
from fp8scope_dashboard.wire.errors import InvalidError, UnknownNameError

MAX_RUNS = 100
SUMMARY = (
    *("id", "name", "state", "precision", "recipe", "recipe_name", "group", "baseline", "parent", "relation"),
    *("seed", "tags", "last_step", "total_steps", "created_at", "heartbeat_at", "finished_at", "archived_at"),
)

router = Router(tags=["runs"], auth=RUN_READER)


@router.get("/runs", response={200: RunsOut, ERRORS: schemas.ErrorOut}, auth=READER)
def list_runs(
    request: HttpRequest,
    q: Annotated[str, Query(max_length=MAX_LENGTH, description="As on the page: state:failed lr>1e-3.")] = "",
    name: Annotated[str, Query(max_length=200, description="Only runs with exactly this name.")] = "",
    sort: Annotated[
        str, Query(max_length=200, description="A column of the page, -created by default; - is descending.")
    ] = "-created",
    after: Annotated[UUID | None, Query(description="`next` of the page before.")] = None,
    offset: Annotated[int, Query(ge=0, le=limits.MAX_INT, description="Slower than `after`.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_RUNS)] = MAX_RUNS,
) -> dict[str, Any]:
    """The project's runs that match a query, in pages; newest first unless `sort` says otherwise.

    What of the query is not understood is left out, and `problems` says so.
    """
    project = project_of(request)
    listing = listing_of(project, q, sort)
    if name:
        listing.runs = listing.runs.filter(name=name.replace("\0", ""))
    total = listing.runs.count()
    runs = listing.part(limit + 1, after=after, offset=offset)
    if runs is None:
        raise UnknownNameError(f"The project has no run {after}, so no page begins after it.", "Begin again.")
    shown = runs[:limit]
    return {
        "runs": _listed(project, shown, server_address(request)),
        "total": total,
        "problems": list(listing.query.problems),
        "next": shown[-1].pk if len(runs) > limit else None,
    }


def listing_of(project: Project, q: str, sort: str) -> Listing:
    """The list of the page for a search and an order. Raises InvalidError for an order that it has not."""
    address = QueryDict(mutable=True)
    address.update({"q": q, "sort": sort})
    state = ListState.of(address)
    if state.sort != sort:
        raise InvalidError(f"Runs cannot be sorted by {sort!r}.", "docs/api.md lists the columns.")
    return Listing(project, state)


def _listed(project: Project, runs: list[Run], server: str) -> list[dict[str, Any]]:
    baselines = baselines_among(project, {run.group for run in runs if run.group})
    opened = open_alerts_by_run(runs)
    for run in runs:
        run.project = project
    return [
        {
            **{field: getattr(run, field) for field in SUMMARY},
            "loss": (run.last_scalars or {}).get("loss"),
            "verdict": as_verdict(verdict_of(run, baselines)),
            "open_alerts": opened.get(run.pk, 0),
            "url": page_url(run, server),
        }
        for run in runs
    ]


@router.get("/runs/{run}/environment", response={200: dict[str, Any], ERRORS: schemas.ErrorOut})
def get_environment(request: HttpRequest, run: UUID) -> dict[str, Any]:
    """The machine, the versions and the source of the run, as its agent has sent them."""
    environment: dict[str, Any] = run_of(request, run).environment
    return environment
