"""Commands to training processes: given by people and alert rules, delivered until they are answered.

A command is delivered at least once and carried out once. If a response is lost, a later one carries the same
command, and the process recognises its id.
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
from fp8scope_dashboard.alerts import lifecycle
from fp8scope_dashboard.alerts.models import Alert, EntryKind, RuleAction
from fp8scope_dashboard.control.models import Command, CommandKind, CommandResult, Listener, ResultState
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Run, RunState, Writer

# A command expires if no process takes it within this time: later, nobody expects it any more.
LIFETIME = timedelta(minutes=15)
MAX_WAITING = 100
# Keeps a response, with 100 patterns in each command, below the size that agents read.
MAX_AT_ONCE = 20
MAX_PATTERNS, LONGEST_PATTERN = 100, 512
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 600, 3_600
MESSAGE_LENGTH = 500

# A result never replaces one of a higher rank, so that repeated and late messages do no harm.
_RANK_OF_STATE = {state: rank for rank, state in enumerate(("accepted", "done", "refused", "failed"))}


class CommandError(ValueError):
    """The command cannot be given; the message says why and what to do."""


class UnknownCommandError(LookupError):
    """The run has no command with this id."""


def accepted_kinds(run: Run) -> set[str]:
    """The kinds of commands that the run's unfinished processes accept."""
    finished = Writer.objects.filter(run=run).exclude(finished_at=None).values("uuid")
    listeners = (
        Listener.objects.filter(run=run).exclude(writer__in=finished).values_list("accepts", flat=True)
    )
    return {kind for accepts in listeners for kind in accepts}


@transaction.atomic
def give(
    run: Run,
    kind: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    user: User | None = None,
    alert: Alert | None = None,
    reason: str = "",
) -> Command:
    """Give a command to the run's processes; they receive it with the next response to one of their messages.

    Raises:
        CommandError: if the run is over, its processes do not accept the command, or an argument is invalid.
    """
    if kind not in CommandKind.values:
        raise CommandError(f"There is no command {kind[:40]!r}.")
    if run.state not in (RunState.RUNNING, RunState.SILENT):
        raise CommandError(f"The run is {run.state}: no process can carry out the command.")
    if kind not in accepted_kinds(run):
        raise CommandError(f"The training script does not accept this command. {HOW_TO_ALLOW[kind]}")
    checked = _checked(kind, arguments or {})
    now = timezone.now()
    waiting = Command.objects.filter(run=run, results=None, expires_at__gt=now)
    if waiting.count() >= MAX_WAITING:
        raise CommandError(f"{MAX_WAITING} commands are already waiting for this run.")
    command = Command.objects.create(
        run=run,
        kind=kind,
        arguments=checked,
        reason=reason[:MESSAGE_LENGTH],
        given_by=user,
        event=alert,
        given_at=now,
        expires_at=now + LIFETIME,
    )
    run_changed(run.id, run.project_id, "command")
    return command


HOW_TO_ALLOW: Mapping[str, str] = {
    "fallback": "It needs FP8 layers found by run.watch(model), and init(commands=…) must not exclude it.",
    "checkpoint": 'Call run.on_command("checkpoint", callback) in the script.',
    "pause": "Call run.allow_pause() in the script.",
    "resume": "Call run.allow_pause() in the script.",
}


def carry_out_rule_action(alert: Alert) -> None:
    """Give the command that the rule of an alert asks for, if any, and note it in the alert's history.

    Call it when the alert opens, and when it opens again.
    """
    if alert.rule is None or not alert.rule.action:
        return
    label = str(RuleAction(alert.rule.action).label)
    try:
        if alert.rule.action == RuleAction.FALLBACK:
            command = fall_back(alert)
        else:
            command = give(alert.run, alert.rule.action, alert=alert, reason=alert.message)
    except CommandError as error:
        lifecycle.write(alert, EntryKind.ORDERED, text=f"{label}: not possible. {error}")
    else:
        layers = ", ".join(command.arguments.get("patterns", ()))
        lifecycle.write(alert, EntryKind.ORDERED, text=f"{label}{f': {layers}' if layers else ''}")


def fall_back(alert: Alert) -> Command:
    """Ask for BF16 in the layers that an alert's evidence names.

    Raises:
        CommandError: as `give`, or if the evidence names no layer.
    """
    tensors = [str(tensor["name"]) for tensor in alert.evidence.get("tensors", ())][:MAX_PATTERNS]
    modules = alert.run.tensors.filter(name__in=tensors).values_list("module", flat=True)
    layers = sorted(set(filter(None, modules)))
    if not layers:
        raise CommandError("The alert names no layer of the run.")
    arguments = {"patterns": layers, "precision": "bf16"}
    return give(alert.run, "fallback", arguments, alert=alert, reason=alert.message)


def commands_for(run: Run, writer: UUID, after: int) -> list[dict[str, Any]]:
    """The commands to deliver to a writer: those after the last that it knows, oldest first.

    Leaves out commands that the writer has answered, and commands from before it started that another process
    has answered.
    """
    now = timezone.now()
    unexpired = Command.objects.filter(run=run, id__gt=after, expires_at__gt=now)
    started = Writer.objects.filter(run=run, uuid=writer).values_list("created_at", flat=True).first() or now
    for_writer = unexpired.exclude(results__writer=writer).filter(Q(given_at__gte=started) | Q(results=None))
    commands = list(for_writer.select_related("given_by", "event__rule").order_by("id")[:MAX_AT_ONCE])
    undelivered = [command.pk for command in commands if command.delivered_at is None]
    if undelivered:
        Command.objects.filter(pk__in=undelivered, delivered_at=None).update(delivered_at=now)
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
        for command in commands
    ]


def giver_of(command: Command) -> str:
    """The person or rule that gave a command, for display."""
    if command.event_id is not None:
        return "an alert rule"
    return command.given_by.username if command.given_by is not None else "somebody"


def note_result(run: Run, writer: UUID, command_id: int, state: str, message: str, step: int) -> None:
    """Store a writer's result of a command. Call it in the transaction that stores the message.

    Raises:
        UnknownCommandError: if the run has no such command.
    """
    if not Command.objects.filter(run=run, pk=command_id).exists():
        raise UnknownCommandError
    values = {"state": state, "message": message, "step": step, "at": timezone.now()}
    result, created = CommandResult.objects.get_or_create(
        command_id=command_id, writer=writer, defaults=values
    )
    if not created and _RANK_OF_STATE[state] >= _RANK_OF_STATE[result.state]:
        CommandResult.objects.filter(pk=result.pk).update(**values)
    Command.objects.filter(pk=command_id, delivered_at=None).update(delivered_at=F("given_at"))


def state_of(command: Command, results: Iterable[CommandResult]) -> str:
    """The state of a command over all its results: `waiting`, `delivered`, `expired`, or a ResultState.

    The worst result of any process; `accepted` until every process that accepted it is done.
    """
    states = {result.state for result in results}
    for state in (ResultState.FAILED, ResultState.REFUSED, ResultState.ACCEPTED, ResultState.DONE):
        if state in states:
            return state.value
    if timezone.now() >= command.expires_at:
        return "expired"
    return "waiting" if command.delivered_at is None else "delivered"


def _checked(kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The validated arguments of a command. Raises CommandError."""
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
    if not isinstance(patterns, list) or not 1 <= len(patterns) <= MAX_PATTERNS:
        raise CommandError(f"Name 1 to {MAX_PATTERNS} layers, such as blocks.*.mlp.down.")
    for pattern in patterns:
        if not isinstance(pattern, str) or not 1 <= len(pattern) <= LONGEST_PATTERN or "\0" in pattern:
            raise CommandError(f"A layer's name or pattern has 1 to {LONGEST_PATTERN} characters.")
    return {"patterns": patterns, "precision": precision}
