"""Decides which run a process writes to: a new one, a resumed one, or one that it shares with other ranks.

Resuming a run starts a new *attempt*: new writers with the next attempt number. Steps that an earlier attempt
stored after the point of resumption are kept separately.
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
from fp8scope.delivery.transport import NextAction, Transport
from fp8scope.process.launch_ranks import Job

ASK_SECONDS = 3.0
"""Approximate upper bound of the time that a resumed run waits for the server to name the last attempt."""
LEDGER = "latest.json"
_begun = itertools.count()
_drafts = itertools.count()
MAX_LEDGER_BYTES = 4096


Failed = Callable[[str, Exception], None]
"""Called with the kind of work that failed, and its exception."""


@dataclass(frozen=True)
class Identity:
    """A run and an attempt at it, which begins after `step` steps and `tokens` tokens."""

    run: str
    attempt: int = 0
    step: int = 0
    tokens: int = 0
    resumed: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint."""
        return {
            "version": 1,
            "run": self.run,
            "attempt": self.attempt,
            "step": self.step,
            "tokens": self.tokens,
        }


def identity_from_state(state: Mapping[str, Any]) -> Identity:
    """Return the attempt that follows a checkpoint's. Raises ConfigurationError if `state` is invalid."""
    try:
        counts = [int(state[name]) for name in ("attempt", "step", "tokens")]
        if min(counts) < 0:
            raise ValueError("a count is negative")
        return Identity(run_id(str(state["run"])), counts[0] + 1, counts[1], counts[2], resumed=True)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"resume is not a state that run.state_dict() returned ({type(error).__name__}: {error})."
        ) from None


def run_id(text: str) -> str:
    """Return the canonical form of a run id. Raises ConfigurationError if it is not a UUID."""
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise ConfigurationError(
            f"a run id must be a UUID, as in run.id and in the address of the run's page, got {text[:80]!r}."
        ) from None


def identify(
    resume: str | Mapping[str, Any] | None, settings: Settings, environment: Mapping[str, str] | None = None
) -> Identity:
    """Decide which run this process writes to, and as which attempt.

    `resume` is a run id, a `run.state_dict()`, or "auto": the latest run in this spool directory unless it
    finished successfully, else a new run. Without `resume`, FP8SCOPE_RUN_ID names the run. Without either,
    the ranks of a multi-process launch agree on a new run (see `fp8scope.process.launch_ranks`).

    Raises ConfigurationError if `resume` or FP8SCOPE_RUN_ID is invalid.
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
        previous = ledger.attempt if ledger is not None and ledger.run == chosen.run else -1
        attempt = max(attempt, previous + 1, last_attempt(chosen.run, settings) + 1)
        # The ranks ask at different times; the answer that the first one got is used by all.
        attempt = int(job.agree(f"attempt of {chosen.run}", str(attempt)))
    return replace(chosen, attempt=attempt)


def last_attempt(run: str, settings: Settings) -> int:
    """Return the latest attempt known to the server; -1 if there is none or the server cannot be asked."""
    if settings.mode != "online" or not (settings.url and settings.token):
        return -1
    impatient = replace(settings, connect_timeout=ASK_SECONDS, read_timeout=ASK_SECONDS)
    transport = Transport(impatient)
    outcome = transport.send("GET", f"/runs/{run}", b"")
    transport.close()
    attempt = outcome.answer.get("last_attempt") if outcome.action is NextAction.DONE else None
    return attempt if isinstance(attempt, int) else -1


# The ledger: the latest run of a spool directory


@dataclass(frozen=True)
class Ledger:
    """The latest run in a spool directory. `over`: it finished successfully."""

    run: str
    attempt: int
    over: bool


def read_ledger(directory: Path) -> Ledger | None:
    """Return the directory's ledger; None if it does not exist or cannot be read."""
    try:
        with (directory / LEDGER).open("rb") as file:
            document = json.loads(file.read(MAX_LEDGER_BYTES))
        return Ledger(run_id(document["run"]), int(document["attempt"]), bool(document["over"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_ledger(
    directory: Path, identity: Identity, *, over: bool, failed: Failed = lambda kind, error: None
) -> None:
    """Store the run as the directory's latest. Calls `failed` if the directory cannot be written."""
    document = {"run": identity.run, "attempt": identity.attempt, "over": over}
    # Several runs of one process may begin at once, each in a thread.
    draft = directory / f"{LEDGER}.{os.getpid()}.{next(_drafts)}"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft.write_text(json.dumps(document))
        os.replace(draft, directory / LEDGER)
    except OSError as error:
        failed("remembering the run for resume='auto'", error)
        # On a full disk the draft exists but is empty.
        with contextlib.suppress(OSError):
            draft.unlink()
