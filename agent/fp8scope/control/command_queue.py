"""Commands that a person or a rule sends to this process. They run on the training thread between two steps.

The server can run only commands that the training script allows:

| command              | is accepted                                                                        |
|----------------------|------------------------------------------------------------------------------------|
| `fallback`           | unless `init(commands=...)` leaves it out, once a model with FP8 layers is watched |
| `pause`, `resume`    | after `run.allow_pause()`, or `init(commands=("fallback", "pause"))`               |
| `checkpoint`, others | after `run.on_command(name, callback)`                                             |

`fallback` is allowed by default because it is safe and reversible: it switches layers to a higher precision,
and only these layers can be switched back. Commands that stop the training or call the script's code must be
enabled explicitly.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from fp8scope.config import ArgumentTypeError, ConfigurationError

DEFAULT = ("fallback",)
BUILT_IN = ("fallback", "pause", "resume")
PAUSE_SECONDS = 600.0
"""Default limit of a pause. If ranks wait for each other in collectives, their timeout must be longer."""
MAX_PAUSE_SECONDS = 3600.0
MAX_WAITING = 1000
MAX_HANDLERS = 24
MAX_TEXT = 500

CommandState = Literal["accepted", "done", "refused", "failed"]


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command from the server. `arguments` are plain JSON values; `given_by` names a person or a rule."""

    id: int
    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    given_by: str = ""
    expires_at: float = float("inf")
    """In terms of `time.monotonic`; the command is refused if its turn comes later."""

    @classmethod
    def from_answer(cls, document: Mapping[str, Any]) -> "Command":
        """Parse a command from a server response. Raises KeyError or TypeError if it is malformed."""
        arguments = document.get("arguments")
        left = document.get("expires_in")
        if not isinstance(document["id"], int) or not isinstance(document["kind"], str):
            raise TypeError("a command's id must be a whole number and its kind a string")
        return cls(
            id=document["id"],
            kind=document["kind"][:64],
            arguments=arguments if isinstance(arguments, dict) else {},
            reason=str(document.get("reason") or "")[:MAX_TEXT],
            given_by=str(document.get("given_by") or "")[:MAX_TEXT],
            expires_at=time.monotonic() + float(left) if isinstance(left, int | float) else float("inf"),
        )


class RefusedError(Exception):
    """The command is refused; the message tells its sender why."""


Callback: TypeAlias = Callable[[Command], object]
Answer: TypeAlias = Callable[[Command, CommandState, str], None]


class CommandQueue:
    """Queues commands on the sender thread (`take`), and runs them on the training thread (`work`).

    `answer(command, state, message)` reports to the server. `fall_back(command)` runs a `fallback` or raises
    RefusedError. `listen(True)` makes the sender poll frequently, until `listen(False)`.
    """

    def __init__(
        self,
        allowed: Sequence[str],
        answer: Answer,
        fall_back: Callable[[Command], str],
        listen: Callable[[bool], object],
    ) -> None:
        self.allowed = frozenset(allowed)
        self.longest_pause = PAUSE_SECONDS if self.allowed & {"pause", "resume"} else 0.0
        self._answer = answer
        self._listen = listen
        self._fall_back = fall_back
        self._handlers: dict[str, Callback] = {}
        self.waiting: deque[Command] = deque(maxlen=MAX_WAITING)
        """Commands that arrived since the end of the last step."""
        self._newest = 0
        self._arrived = threading.Event()

    def accepts(self, has_layers: bool) -> list[str]:
        """Return the commands that are accepted now; `has_layers`: whether there are layers to fall back."""
        kinds = set(self._handlers)
        if has_layers and "fallback" in self.allowed:
            kinds.add("fallback")
        if self.longest_pause:
            kinds |= {"pause", "resume"}
        return sorted(kinds)

    def handle(self, name: str, callback: Callback) -> None:
        """Register `callback(command)` for a command. Raises ConfigurationError if an argument is invalid."""
        if not callable(callback):
            raise ArgumentTypeError(f"on_command needs a callable, got {callback!r}.")
        if not isinstance(name, str):
            raise ArgumentTypeError(f"a command's name must be a string, got {name!r}.")
        usable = name.isascii() and name.replace("-", "_").isidentifier() and name == name.lower()
        if not usable or not name[0].isalpha() or len(name) > 64:
            raise ConfigurationError(
                "a command's name must have at most 64 characters of a-z 0-9 _ - and begin with a letter, "
                f"got {name!r}."
            )
        if len(self._handlers) >= MAX_HANDLERS:
            raise ConfigurationError(f"at most {MAX_HANDLERS} commands can be handled.")
        self._handlers[name] = callback

    def take(self, documents: Sequence[Mapping[str, Any]]) -> None:
        """Queue commands from the server until the step ends, skipping those that were queued before."""
        for document in documents:
            command = Command.from_answer(document)
            if command.id > self._newest:
                self._newest = command.id
                self.waiting.append(command)
                self._arrived.set()

    def work(self) -> None:
        """Run the queued commands. An exception of a callback is reported to the server, then raised."""
        while self.waiting:
            self._do(self.waiting.popleft())

    def refuse_all(self, why: str) -> None:
        """Refuse all queued commands."""
        while self.waiting:
            self._answer(self.waiting.popleft(), "refused", why)

    def _do(self, command: Command) -> None:
        if time.monotonic() > command.expires_at:
            self._answer(command, "refused", "The command expired before the step ended.")
            return
        callback = self._handlers.get(command.kind) or self._own(command.kind)
        if callback is None:
            self._answer(command, "refused", "The training script does not allow this command.")
            return
        try:
            message = callback(command)
        except RefusedError as refusal:
            self._answer(command, "refused", str(refusal))
        except BaseException as error:
            self._answer(command, "failed", f"{type(error).__name__}: {error}")
            raise
        else:
            self._answer(command, "done", message if isinstance(message, str) else "")

    def _own(self, kind: str) -> Callback | None:
        if kind == "fallback" and "fallback" in self.allowed:
            return self._fall_back
        if kind == "pause" and self.longest_pause:
            return self._pause
        if kind == "resume" and self.longest_pause:
            return lambda command: "The training was not paused."
        return None

    def _pause(self, command: Command) -> str:
        """Block the training thread until `resume` arrives or the time is over. Other commands wait."""
        asked = command.arguments.get("seconds")
        seconds = float(asked) if isinstance(asked, int | float) and asked > 0 else self.longest_pause
        seconds = min(seconds, self.longest_pause)
        began = time.monotonic()
        self._answer(command, "accepted", f"Paused for at most {seconds:.0f} s.")
        self._listen(True)
        try:
            while (left := began + seconds - time.monotonic()) > 0:
                # Clear the event before looking: a command that arrives in between sets it again.
                self._arrived.clear()
                resume = next((waiting for waiting in list(self.waiting) if waiting.kind == "resume"), None)
                if resume is not None:
                    self.waiting.remove(resume)
                    self._answer(resume, "done", "")
                    return f"Resumed after {time.monotonic() - began:.0f} s."
                self._arrived.wait(left)
            return f"Resumed automatically after {seconds:.0f} s."
        finally:
            self._listen(False)


def check_allowed(commands: Sequence[str] | None) -> tuple[str, ...]:
    """Return the `commands` of `init` as a tuple. Raises ConfigurationError if one is unknown."""
    if commands is None:
        return DEFAULT
    names = (commands,) if isinstance(commands, str) else tuple(commands)
    unknown = [name for name in names if name not in BUILT_IN]
    if unknown:
        raise ConfigurationError(
            f"commands must be among {', '.join(BUILT_IN)}, got {unknown[0]!r}; add others with "
            "run.on_command(name, callback)."
        )
    return names


def check_pause(seconds: object) -> float:
    """Return the limit of `allow_pause` as a float. Raises ConfigurationError if it is invalid."""
    if not isinstance(seconds, int | float) or not 0 < seconds <= MAX_PAUSE_SECONDS:
        raise ConfigurationError(
            f"a pause must be longer than 0 and at most {MAX_PAUSE_SECONDS:.0f} seconds, got {seconds!r}."
        )
    return float(seconds)
