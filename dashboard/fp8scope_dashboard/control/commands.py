"""Commands: given by people and rules, delivered until answered, shown with what became of them.

Delivered at least once and carried out once: an answer that is lost is followed by another with the same
command, and the process knows by its id that it has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.alerts.models import Event
from fp8scope_dashboard.control.models import Command, CommandKind, CommandResult, Listener, ResultState
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Run, RunState, Writer

# A process that has not taken a command by then is not meant any more: nobody expects it.
LIFETIME = timedelta(minutes=15)
MOST_WAITING = 100
# So that an answer stays below what agents read of one, with 100 patterns in each.
MOST_AT_ONCE = 20
MOST_PATTERNS, LONGEST_PATTERN = 100, 512
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 600, 3_600
MESSAGE_LENGTH = 500

# From the least to the most that is known: a repeated or late word never takes one back.
_ORDER = {state: place for place, state in enumerate(("accepted", "done", "refused", "failed"))}


class CommandError(ValueError):
    """The command cannot be given; the message says why, and what would help."""


class UnknownCommandError(LookupError):
    """The run has no command of this id."""


def accepted_kinds(run: Run) -> set[str]:
    """The commands that the run's living processes take."""
    over = Writer.objects.filter(run=run).exclude(finished_at=None).values("uuid")
    listeners = Listener.objects.filter(run=run).exclude(writer__in=over).values_list("accepts", flat=True)
    return {kind for accepts in listeners for kind in accepts}


@transaction.atomic
def give(
    run: Run,
    kind: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    user: User | None = None,
    event: Event | None = None,
    reason: str = "",
) -> Command:
    """Ask the run's processes to do something; they get it with their next answer.

    Raises:
        CommandError: the run is over, its processes do not take this command, or an argument is no good.
    """
    if kind not in CommandKind.values:
        raise CommandError(f"There is no command {kind[:40]!r}.")
    if run.state not in (RunState.RUNNING, RunState.SILENT):
        raise CommandError(f"The run is {run.state}: nobody is there to do it.")
    if kind not in accepted_kinds(run):
        raise CommandError(f"The training script does not take this command. {HOW_TO_ALLOW[kind]}")
    checked = _checked(kind, arguments or {})
    now = timezone.now()
    waiting = Command.objects.filter(run=run, results=None, expires_at__gt=now)
    if waiting.count() >= MOST_WAITING:
        raise CommandError(f"{MOST_WAITING} commands wait for this run already.")
    command = Command.objects.create(
        run=run,
        kind=kind,
        arguments=checked,
        reason=reason[:MESSAGE_LENGTH],
        given_by=user,
        event=event,
        given_at=now,
        expires_at=now + LIFETIME,
    )
    run_changed(run.id, run.project_id, "command")
    return command


HOW_TO_ALLOW: Mapping[str, str] = {
    "fallback": "It does once run.watch(model) has found FP8 layers, unless init(commands=…) leaves it out.",
    "checkpoint": 'run.on_command("checkpoint", callback) makes it.',
    "pause": "run.allow_pause() makes it.",
    "resume": "run.allow_pause() makes it.",
}


def fall_back(event: Event) -> Command | None:
    """Have the layers named in an alert's evidence computed in BF16; None where that cannot be asked for."""
    tensors = [str(tensor["name"]) for tensor in event.evidence.get("tensors", ())][:MOST_PATTERNS]
    modules = event.run.tensors.filter(name__in=tensors).values_list("module", flat=True)
    layers = sorted(set(filter(None, modules)))
    if not layers:
        return None
    arguments = {"patterns": layers, "precision": "bf16"}
    try:
        return give(event.run, "fallback", arguments, event=event, reason=event.message)
    except CommandError:
        return None


def commands_for(run: Run, writer: UUID, after: int) -> list[dict[str, Any]]:
    """The commands that a writer has to be told: those after the last that it knows, oldest first.

    Not those that it has answered, and not those from before its time that another process took.
    """
    now = timezone.now()
    open_ones = Command.objects.filter(run=run, id__gt=after, expires_at__gt=now)
    born = Writer.objects.filter(run=run, uuid=writer).values_list("created_at", flat=True).first() or now
    mine = open_ones.exclude(results__writer=writer).filter(Q(given_at__gte=born) | Q(results=None))
    found = list(mine.select_related("given_by", "event__rule").order_by("id")[:MOST_AT_ONCE])
    fresh = [command.pk for command in found if command.delivered_at is None]
    if fresh:
        Command.objects.filter(pk__in=fresh, delivered_at=None).update(delivered_at=now)
        run_changed(run.id, run.project_id, "command")
    return [
        {
            "id": command.pk,
            "kind": command.kind,
            "arguments": command.arguments,
            "reason": command.reason,
            "given_by": giver_of(command),
            "expires_in": (command.expires_at - now).total_seconds(),
        }
        for command in found
    ]


def giver_of(command: Command) -> str:
    """Who gave it, in words."""
    if command.event_id is not None:
        return "an alert rule"
    return command.given_by.username if command.given_by is not None else "somebody"


def note_result(run: Run, writer: UUID, command_id: int, state: str, message: str, step: int) -> None:
    """Keep what a writer made of a command. Within the transaction that stores the message.

    Raises:
        UnknownCommandError: the run has no such command.
    """
    if not Command.objects.filter(run=run, pk=command_id).exists():
        raise UnknownCommandError
    said = {"state": state, "message": message, "step": step, "at": timezone.now()}
    result, created = CommandResult.objects.get_or_create(command_id=command_id, writer=writer, defaults=said)
    if not created and _ORDER[state] >= _ORDER[result.state]:
        CommandResult.objects.filter(pk=result.pk).update(**said)
    Command.objects.filter(pk=command_id, delivered_at=None).update(delivered_at=F("given_at"))


def state_of(command: Command, results: Iterable[CommandResult]) -> str:
    """One word for a command and its results: `waiting`, `delivered`, `expired`, or a ResultState.

    The worst that any process said; `accepted` until all that have begun are done.
    """
    states = {result.state for result in results}
    for state in (ResultState.FAILED, ResultState.REFUSED, ResultState.ACCEPTED, ResultState.DONE):
        if state in states:
            return state.value
    if timezone.now() >= command.expires_at:
        return "expired"
    return "waiting" if command.delivered_at is None else "delivered"


def _checked(kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a command, bounded. Raises CommandError."""
    if kind == CommandKind.FALLBACK:
        return _checked_fallback(arguments)
    if kind == CommandKind.PAUSE:
        seconds = arguments.get("seconds", PAUSE_SECONDS)
        whole = isinstance(seconds, int) and not isinstance(seconds, bool)
        if not whole or not 1 <= seconds <= LONGEST_PAUSE_SECONDS:
            raise CommandError(f"A pause lasts 1 to {LONGEST_PAUSE_SECONDS} seconds.")
        return {"seconds": seconds}
    return {}


def _checked_fallback(arguments: Mapping[str, Any]) -> dict[str, Any]:
    patterns, precision = arguments.get("patterns"), arguments.get("precision", "bf16")
    if precision not in ("bf16", "fp8"):
        raise CommandError("The precision is bf16, or fp8 to undo it.")
    if not isinstance(patterns, list) or not 1 <= len(patterns) <= MOST_PATTERNS:
        raise CommandError(f"Name 1 to {MOST_PATTERNS} layers, such as blocks.*.mlp.down.")
    for pattern in patterns:
        if not isinstance(pattern, str) or not 1 <= len(pattern) <= LONGEST_PATTERN or "\0" in pattern:
            raise CommandError(f"A layer's name or pattern has 1 to {LONGEST_PATTERN} characters.")
    return {"patterns": patterns, "precision": precision}
