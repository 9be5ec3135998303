"""Which run a process belongs to: a new one, one that is continued, or one that other ranks write to as well.

A run that is continued has a new *attempt*: new writers with the next number. What an earlier attempt had
stored beyond the point where it begins is kept apart.
"""

import contextlib
import itertools
import json
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8scope.config import ConfigurationError, Settings
from fp8scope.delivery.transport import Action, Transport
from fp8scope.process.launch_ranks import Job

ASK_SECONDS = 3.0
"""A resumed run waits at most about this long for the server to say which attempt was the last."""
LEDGER = "latest.json"
_begun = itertools.count()
MAX_LEDGER_BYTES = 4096


Failed = Callable[[str, Exception], None]
"""Called with the kind of work that failed, and its exception."""


@dataclass(frozen=True)
class Identity:
    """A run, the attempt at it, and where it begins: after `step` steps and `tokens` tokens."""

    run: str
    attempt: int = 0
    step: int = 0
    tokens: int = 0
    resumed: bool = False

    def to_dict(self) -> dict[str, Any]:
        """What belongs into a checkpoint."""
        return {
            "version": 1,
            "run": self.run,
            "attempt": self.attempt,
            "step": self.step,
            "tokens": self.tokens,
        }


def identity_from_state(state: Mapping[str, Any]) -> Identity:
    """The identity that follows a checkpoint's. Raises ConfigurationError when it is none of ours."""
    try:
        counts = [int(state[name]) for name in ("attempt", "step", "tokens")]
        if min(counts) < 0:
            raise ValueError("a count is negative")
        return Identity(run_id(str(state["run"])), counts[0] + 1, counts[1], counts[2], resumed=True)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"this is not what run.state_dict() returned ({type(error).__name__}: {error})."
        ) from None


def run_id(text: str) -> str:
    """The canonical form of a run's id. Raises ConfigurationError when it is no UUID."""
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise ConfigurationError(
            f"a run's id is a UUID, as run.id and the address of its page show it; got {text[:80]!r}."
        ) from None


def identify(
    resume: str | Mapping[str, Any] | None, settings: Settings, environment: Mapping[str, str] | None = None
) -> Identity:
    """Decide which run this process writes to, and as which attempt.

    `resume` is a run's id, what `run.state_dict()` returned, or "auto": the run that was begun last with this
    spool directory unless it ended well, else a new one. Without it FP8SCOPE_RUN_ID counts; then, under a
    launcher of several ranks, what these have in common (see `fp8scope.process.launch_ranks`).

    Raises ConfigurationError when that cannot be meant.
    """
    env = os.environ if environment is None else environment
    job = Job.of(env)
    given = env.get("FP8SCOPE_RUN_ID", "")
    ledger = read_ledger(settings.directory)
    if isinstance(resume, Mapping):
        chosen = identity_from_state(resume)
    elif resume is not None and not isinstance(resume, str):
        raise ConfigurationError(f'resume must be a run\'s id, its state_dict() or "auto", got {resume!r}.')
    elif resume not in (None, "", "auto"):
        chosen = Identity(run_id(str(resume)), resumed=True)
    elif given:
        chosen = Identity(run_id(given), resumed=True)
    elif resume == "auto" and ledger is not None and not ledger.over:
        chosen = Identity(job.agree("resumed", ledger.run), resumed=True)
    else:
        chosen = Identity(job.shared_run(next(_begun)) or str(uuid.uuid4()))
    attempt = max(chosen.attempt, job.restarts)
    if chosen.resumed:
        known = ledger.attempt if ledger is not None and ledger.run == chosen.run else -1
        attempt = max(attempt, known + 1, last_attempt(chosen.run, settings) + 1)
        # The ranks ask at different moments: what the first of them found out holds for all.
        attempt = int(job.agree(f"attempt of {chosen.run}", str(attempt)))
    return replace(chosen, attempt=attempt)


def last_attempt(run: str, settings: Settings) -> int:
    """The latest attempt that the server knows of; -1 when it knows none, or cannot be asked."""
    if settings.mode != "online" or not (settings.url and settings.token):
        return -1
    hasty = replace(settings, connect_timeout=ASK_SECONDS, read_timeout=ASK_SECONDS)
    transport = Transport(hasty)
    outcome = transport.send("GET", f"/runs/{run}", b"")
    transport.close()
    found = outcome.answer.get("last_attempt") if outcome.action is Action.DONE else None
    return found if isinstance(found, int) else -1


# What this directory remembers


@dataclass(frozen=True)
class Ledger:
    """The run that was begun last with a spool directory. `over`: it ended well."""

    run: str
    attempt: int
    over: bool


def read_ledger(directory: Path) -> Ledger | None:
    """None where nothing is remembered, or it cannot be read."""
    try:
        with (directory / LEDGER).open("rb") as file:
            document = json.loads(file.read(MAX_LEDGER_BYTES))
        return Ledger(run_id(document["run"]), int(document["attempt"]), bool(document["over"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_ledger(
    directory: Path, identity: Identity, *, over: bool, failed: Failed = lambda kind, error: None
) -> None:
    """Remember the run. Calls `failed` if the directory cannot be written; then nothing is remembered."""
    document = {"run": identity.run, "attempt": identity.attempt, "over": over}
    draft = directory / f"{LEDGER}.{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft.write_text(json.dumps(document))
        os.replace(draft, directory / LEDGER)
    except OSError as error:
        failed("remembering the run for resume='auto'", error)
        # A full disk leaves an empty file.
        with contextlib.suppress(OSError):
            draft.unlink()
