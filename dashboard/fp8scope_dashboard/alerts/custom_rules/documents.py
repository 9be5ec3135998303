"""Rules as plain documents: the form in which people write them, in a file or on the page.

A built-in rule has `kind` and `parameters`; one that people add has `name`, `statistic`, `condition` and so
on. docs/alerts.md has the fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import time
from functools import cache
from typing import Any, Final
from uuid import UUID
from zoneinfo import available_timezones

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.models import Channel, Condition, Rule, RuleAction, RuleKind, Severity
from fp8scope_dashboard.runs.models import Run

LONGEST_NAME: Final = 128
LONGEST_PATTERN: Final = 512
LONGEST_ESCALATION: Final = 7 * 24 * 60
# The parameters of a rule that people add stand beside its other fields.
NUMBERS: Final = ("value", "points", "share", "window", "recover")
OWN: Final = ("name", "statistic", "tensors", "condition", *NUMBERS)
BUILT_IN: Final = ("kind", "parameters")
SHARED: Final = ("run", "severity", "enabled", "action", "channels", "quiet", "escalate")
QUIET: Final = ("from", "to", "zone", "critical_breaks_through")
ESCALATE: Final = ("after_minutes", "channels")
STATISTIC: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:@ -]{0,63}")

Key = tuple[str | int, ...]


class RuleDocumentError(ValueError):
    """A document is invalid. `key` leads to the field, such as ("quiet", "zone")."""

    def __init__(self, key: Key, message: str) -> None:
        super().__init__(f"{'.'.join(map(str, key))}: {message}" if key else message)
        self.key, self.message = key, message


@dataclass(frozen=True)
class Draft:
    """A valid rule that is not saved, and its channels, which can be stored only with a saved one."""

    rule: Rule
    channels: Sequence[Channel] = ()
    escalation_channels: Sequence[Channel] = field(default=())

    @property
    def key(self) -> tuple[str, str]:
        """Return what identifies the rule in its project: the run, if any, and the name or built-in kind."""
        return key_of(self.rule)


@cache
def time_zones() -> tuple[str, ...]:
    """The names of all time zones, sorted. They are read from hundreds of files, so only once."""
    return tuple(sorted(available_timezones()))


def key_of(rule: Rule) -> tuple[str, str]:
    """See `Draft.key`."""
    run = str(rule.run_id or "")
    return (run, f"name {rule.name}") if rule.kind == RuleKind.THRESHOLD else (run, f"kind {rule.kind}")


def document_of(rule: Rule) -> dict[str, Any]:
    """The document of a saved rule. `parse` turns it into the same rule."""
    document: dict[str, Any] = {}
    if rule.kind == RuleKind.THRESHOLD:
        document["name"] = rule.name
        document["statistic"] = rule.statistic
        if rule.tensors:
            document["tensors"] = rule.tensors
        document["condition"] = rule.condition
        document |= rules.saved_parameters(rule.kind, rule.parameters)
    else:
        document["kind"] = rule.kind
        document["parameters"] = rules.saved_parameters(rule.kind, rule.parameters)
    if rule.run_id is not None:
        document["run"] = str(rule.run_id)
    document |= {"severity": rule.severity, "enabled": rule.enabled, "action": rule.action or "none"}
    document["channels"] = _names(rule.channels.order_by("name", "id"))
    if rule.quiet_from is not None and rule.quiet_to is not None:
        document["quiet"] = {
            "from": f"{rule.quiet_from:%H:%M}",
            "to": f"{rule.quiet_to:%H:%M}",
            "zone": rule.quiet_zone,
            "critical_breaks_through": rule.critical_breaks_quiet,
        }
    if rule.escalate_minutes is not None:
        document["escalate"] = {
            "after_minutes": rule.escalate_minutes,
            "channels": _names(rule.escalation_channels.order_by("name", "id")),
        }
    return document


def parse(project: Project, document: Any) -> Draft:
    """Check a document. Fields that are left out have their defaults.

    Raises:
        RuleDocumentError: at the first field that is unknown or invalid.
    """
    if not isinstance(document, Mapping):
        raise RuleDocumentError((), "A rule has fields, such as name, statistic, condition and value.")
    is_built_in = "kind" in document
    allowed = (*(BUILT_IN if is_built_in else OWN), *SHARED)
    _check_fields(document, allowed)
    rule = _built_in(document) if is_built_in else _own(document)
    rule.project = project
    rule.run = _run(project, document.get("run"))
    rule.severity = _choice(document, "severity", Severity.values, rule.severity)
    rule.enabled = _flag(document, ("enabled",), default=True)
    action = _choice(document, "action", ("none", *filter(None, RuleAction.values)), "none")
    names_tensors = bool(rule.tensors) or (is_built_in and rules.kind_of(rule.kind).names_tensors)
    if action == RuleAction.FALLBACK and not names_tensors:
        raise RuleDocumentError(
            ("action",), "Only a rule about tensors can fall back: it says which layers. Use another action."
        )
    rule.action = "" if action == "none" else action
    _set_quiet(rule, document.get("quiet"))
    escalate = document.get("escalate")
    rule.escalate_minutes = _escalate_minutes(escalate)
    second = _channels(project, escalate.get("channels"), ("escalate", "channels")) if escalate else []
    return Draft(rule, _channels(project, document.get("channels"), ("channels",)), second)


def _built_in(document: Mapping[str, Any]) -> Rule:
    allowed = [kind.name for kind in rules.KINDS.values() if kind.is_default]
    kind = _choice(document, "kind", allowed, None)
    parameters = document.get("parameters", {})
    if not isinstance(parameters, Mapping):
        raise RuleDocumentError(("parameters",), "Write one line for each parameter, such as points: 3.")
    for name in parameters:
        if name not in rules.kind_of(kind).parameters:
            allowed = list(rules.kind_of(kind).parameters)
            raise RuleDocumentError(("parameters", name), f"unknown; {kind} takes: {', '.join(allowed)}.")
    checked = {name: _number(kind, name, value, ("parameters", name)) for name, value in parameters.items()}
    return Rule(kind=kind, severity=rules.kind_of(kind).severity, parameters=rules.validate(kind, checked))


def _own(document: Mapping[str, Any]) -> Rule:
    name = _text(document, "name", LONGEST_NAME)
    statistic = _text(document, "statistic", 64)
    if not STATISTIC.fullmatch(statistic):
        raise RuleDocumentError(("statistic",), "must be the name of a scalar or statistic, such as loss.")
    tensors = _text(document, "tensors", LONGEST_PATTERN, default="")
    condition = _choice(document, "condition", Condition.values, None)
    numbers = {
        key: _number(RuleKind.THRESHOLD, key, document[key], (key,)) for key in NUMBERS if key in document
    }
    if condition == Condition.NOT_FINITE and tensors:
        raise RuleDocumentError(
            ("condition",),
            "For tensors use the statistic nonfinite, the condition above and the value 0.",
        )
    if condition != Condition.NOT_FINITE and "value" not in numbers:
        raise RuleDocumentError(("value",), f"is missing: the condition {condition} needs it.")
    value = numbers.get("value", 0.0)
    if condition == Condition.CHANGES_BY_FACTOR and value <= 1:
        raise RuleDocumentError(("value",), "A factor must be above 1.")
    if condition in (Condition.RISES_BY, Condition.FALLS_BY) and value <= 0:
        raise RuleDocumentError(("value",), "must be above 0 for this condition.")
    return Rule(
        kind=RuleKind.THRESHOLD,
        name=name,
        statistic=statistic,
        tensors=tensors,
        condition=condition,
        severity=Severity.WARNING,
        parameters=rules.validate(RuleKind.THRESHOLD, numbers),
    )


def _set_quiet(rule: Rule, quiet: Any) -> None:
    if quiet is None:
        return
    if not isinstance(quiet, Mapping):
        raise RuleDocumentError(("quiet",), "Write from, to and zone.")
    _check_fields(quiet, QUIET, ("quiet",))
    rule.quiet_from, rule.quiet_to = _time(quiet, "from"), _time(quiet, "to")
    if rule.quiet_from == rule.quiet_to:
        raise RuleDocumentError(("quiet", "to"), "must differ from the beginning.")
    zone = quiet.get("zone", "UTC")
    if not isinstance(zone, str) or zone not in time_zones():
        raise RuleDocumentError(("quiet", "zone"), "must be the name of a time zone, such as Europe/Berlin.")
    rule.quiet_zone = zone
    rule.critical_breaks_quiet = _flag(quiet, ("quiet", "critical_breaks_through"), default=True)


def _escalate_minutes(escalate: Any) -> int | None:
    if escalate is None:
        return None
    if not isinstance(escalate, Mapping):
        raise RuleDocumentError(("escalate",), "Write after_minutes and channels.")
    _check_fields(escalate, ESCALATE, ("escalate",))
    minutes = escalate.get("after_minutes")
    if isinstance(minutes, int) and not isinstance(minutes, bool) and 1 <= minutes <= LONGEST_ESCALATION:
        return minutes
    raise RuleDocumentError(
        ("escalate", "after_minutes"), f"must be a whole number from 1 to {LONGEST_ESCALATION}."
    )


def _check_fields(document: Mapping[Any, Any], allowed: Sequence[str], at: Key = ()) -> None:
    for name in document:
        if name not in allowed:
            raise RuleDocumentError((*at, str(name)[:40]), f"unknown; known here: {', '.join(allowed)}.")


def _text(document: Mapping[str, Any], key: str, longest: int, default: str | None = None) -> str:
    text = document.get(key, default)
    if text is None:
        raise RuleDocumentError((key,), "is missing.")
    if not isinstance(text, str) or len(text) > longest or (not text.strip() and default is None):
        raise RuleDocumentError((key,), f"must be a text of 1 to {longest} characters.")
    if any(ord(character) < 32 for character in text):
        raise RuleDocumentError((key,), "must be one line.")
    return text.strip()


def _choice(document: Mapping[str, Any], key: str, choices: Sequence[str], default: str | None) -> str:
    chosen = document.get(key, default)
    if not isinstance(chosen, str) or chosen not in choices:
        raise RuleDocumentError((key,), f"must be one of: {', '.join(choices)}.")
    return chosen


def _flag(document: Mapping[str, Any], key: Key, *, default: bool) -> bool:
    value = document.get(str(key[-1]), default)
    if not isinstance(value, bool):
        raise RuleDocumentError(key, "must be true or false.")
    return value


def _number(kind: str, name: str, value: Any, key: Key) -> float:
    try:
        return rules.validate(kind, {name: value})[name]
    except rules.RuleError as error:
        raise RuleDocumentError(key, str(error).removeprefix(f"{name} ")) from None


def _time(quiet: Mapping[str, Any], key: str) -> time:
    value = quiet.get(key)
    # YAML 1.1 reads 22:00 without quotes as a number to the base 60.
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 24 * 60:
        return time(value // 60, value % 60)
    match = re.fullmatch(r"(\d{1,2}):(\d{2})", value) if isinstance(value, str) else None
    if match is None or int(match[1]) > 23 or int(match[2]) > 59:
        raise RuleDocumentError(("quiet", key), 'must be a time such as "22:00".')
    return time(int(match[1]), int(match[2]))


def _run(project: Project, value: Any) -> Run | None:
    if value is None:
        return None
    try:
        run = Run.objects.filter(project=project, pk=UUID(str(value))).first()
    except ValueError:
        run = None
    if run is None:
        raise RuleDocumentError(("run",), "must be the id of a run of this project.")
    return run


def _channels(project: Project, names: Any, key: Key) -> list[Channel]:
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RuleDocumentError(key, "must be a list of names of channels.")
    stored = {channel.name: channel for channel in Channel.objects.filter(project=project).order_by("-id")}
    for name in names:
        if name not in stored:
            stored_names = ", ".join(sorted(stored)) or "none"
            raise RuleDocumentError(
                key, f"there is no channel {name[:40]!r}; there are: {stored_names[:200]}."
            )
    return [stored[name] for name in dict.fromkeys(names)]


def _names(channels: Any) -> list[str]:
    return list(dict.fromkeys(channels.values_list("name", flat=True)))
