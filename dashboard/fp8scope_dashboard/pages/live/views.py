"""The event streams that update open pages."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from asgiref.sync import sync_to_async
from django.db.models import Count, Max, Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.views.decorators.http import require_safe

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.accounts.services import require_project
from fp8scope_dashboard.alerts.models import Alert, AlertState
from fp8scope_dashboard.analysis.models import Comparison, EvaluationComparison, JobProgress
from fp8scope_dashboard.control.models import Command, CommandResult, Listener, Report
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.media.models import MediaItem
from fp8scope_dashboard.notifications import project_channel, run_channel
from fp8scope_dashboard.pages.access import run_of
from fp8scope_dashboard.pages.live.stream import Fingerprint, release_connections, stream
from fp8scope_dashboard.runs.models import ConsoleLine, Run, StepNote, Tensor


@require_safe
async def run_events(request: HttpRequest, slug: str, run_id: UUID) -> HttpResponseBase:
    """Changes of one run."""

    def find(user: User) -> tuple[str, QuerySet[Run]]:
        run = run_of(require_project(user, slug), run_id)
        return run_channel(run.id), Run.objects.filter(pk=run.id)

    return await _events(request, find)


@require_safe
async def project_events(request: HttpRequest, slug: str) -> HttpResponseBase:
    """Changes of all runs of a project."""

    def find(user: User) -> tuple[str, QuerySet[Run]]:
        project = require_project(user, slug)
        return project_channel(project.pk), Run.objects.filter(project=project)

    return await _events(request, find)


async def _events(
    request: HttpRequest, find: Callable[[User], tuple[str, QuerySet[Run]]]
) -> HttpResponseBase:
    user = await request.auser()
    if not isinstance(user, User) or not user.is_active:
        # No redirect: an EventSource would follow it to a page that is not an event stream.
        return HttpResponse("Sign in first.\n", status=401, content_type="text/plain")

    def find_runs() -> tuple[str, QuerySet[Run]]:
        try:
            return find(user)
        finally:
            # Return the connection to the pool: the stream can stay open for minutes.
            release_connections()

    try:
        channel, runs = await sync_to_async(find_runs)()
    except Http404:
        return HttpResponse("No such run.\n", status=404, content_type="text/plain")
    session = str(request.session.session_key or user.pk)
    events = stream(channel, lambda: fingerprint_of(runs), session, _since(request))
    answer = StreamingHttpResponse(events, content_type="text/event-stream")
    answer["Cache-Control"] = "no-store"
    # Without this, nginx delays events until its buffer is full.
    answer["X-Accel-Buffering"] = "no"
    return answer


def _since(request: HttpRequest) -> float | None:
    """The Unix time in seconds; the address has milliseconds. None without a valid one."""
    text = request.GET.get("since", "")
    return int(text) / 1000 if text.isascii() and text.isdigit() and len(text) < 16 else None


def fingerprint_of(runs: QuerySet[Run]) -> Fingerprint:
    """For each kind of change, a value that differs after such a change."""
    events = Alert.objects.filter(run__in=runs)
    return {
        "rows": runs.aggregate(count=Count("pk"), latest=Max("heartbeat_at")),
        "state": tuple(runs.order_by("state").values_list("state").annotate(Count("pk"))),
        "tensors": Tensor.objects.filter(run__in=runs).aggregate(Max("pk")),
        "alert": events.aggregate(
            Max("pk"),
            open=Count("pk", filter=Q(state=AlertState.OPEN)),
            resolved=Count("pk", filter=Q(state=AlertState.RESOLVED)),
        ),
        "comparison": (
            Comparison.objects.filter(run__in=runs).aggregate(Max("computed_at")),
            EvaluationComparison.objects.filter(run__in=runs).aggregate(Max("computed_at")),
        ),
        "progress": JobProgress.objects.filter(run__in=runs).aggregate(Count("pk"), Max("updated_at")),
        "command": (
            Command.objects.filter(run__in=runs).aggregate(Max("pk"), Max("delivered_at")),
            CommandResult.objects.filter(command__run__in=runs).aggregate(Max("at")),
            Listener.objects.filter(run__in=runs).aggregate(Max("at")),
        ),
        "console": ConsoleLine.objects.filter(run__in=runs).aggregate(Max("pk"), Max("time")),
        "report": Report.objects.filter(run__in=runs).aggregate(Max("pk")),
        "note": StepNote.objects.filter(run__in=runs).aggregate(Count("pk"), Max("written_at")),
        "evaluation": Evaluation.objects.filter(run__in=runs).aggregate(Max("pk")),
        "media": MediaItem.objects.filter(run__in=runs).aggregate(Max("pk")),
    }
