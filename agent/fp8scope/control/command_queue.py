"""Commands: what a person or a rule asks of this process, done on the training thread between two steps.

A server may ask only for what the training script allows:

| command              | is taken                                                                           |
|----------------------|------------------------------------------------------------------------------------|
| `fallback`           | unless `init(commands=...)` leaves it out, once a model with FP8 layers is watched |
| `pause`, `resume`    | after `run.allow_pause()`, or `init(commands=("fallback", "pause"))`               |
| `checkpoint`, others | after `run.on_command(name, callback)`                                             |

Falling back is allowed from the start because it can do no harm that it cannot undo: layers go to the more
exact precision, and only those that went there come back. Whatever stops the training or calls the script's
code has to be asked for.
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
"""The longest pause unless `allow_pause` says otherwise: where ranks wait for each other in a collective,
their own timeout has to be longer."""
MAX_PAUSE_SECONDS = 3600.0
MAX_WAITING = 1000
MAX_HANDLERS = 24
MAX_TEXT = 500

CommandState = Literal["accepted", "done", "refused", "failed"]


@dataclass(frozen=True)
class Command:
    """What is asked. `arguments` are plain JSON values; `given_by` is a person's name, or a rule."""

    id: int
    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    given_by: str = ""
    expires_at: float = float("inf")
    """By `time.monotonic`: what comes to its turn later is not done."""

    @classmethod
    def from_answer(cls, found: Mapping[str, Any]) -> "Command":
        """Read one of the commands of an answer. Raises KeyError or TypeError when it is none."""
        arguments = found.get("arguments")
        left = found.get("expires_in")
        if not isinstance(found["id"], int) or not isinstance(found["kind"], str):
            raise TypeError("a command has a whole number for its id and a text for its kind")
        return cls(
            id=found["id"],
            kind=found["kind"][:64],
            arguments=arguments if isinstance(arguments, dict) else {},
            reason=str(found.get("reason") or "")[:MAX_TEXT],
            given_by=str(found.get("given_by") or "")[:MAX_TEXT],
            expires_at=time.monotonic() + float(left) if isinstance(left, int | float) else float("inf"),
        )


class RefusedError(Exception):
    """The command is not done; the message says why, to the person who asked."""


Callback: TypeAlias = Callable[[Command], object]
Answer: TypeAlias = Callable[[Command, CommandState, str], None]


class CommandQueue:
    """Commands that arrive (`take`, on the sender's thread) and are run on the training thread (`work`).

    `answer(command, state, message)` tells the server; `fall_back(command)` runs a `fallback` or raises
    RefusedError; `listen(True)` makes the sender ask often, until `listen(False)`.
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
        """Commands that came since the last step ended."""
        self._newest = 0
        self._arrived = threading.Event()

    def accepts(self, has_layers: bool) -> list[str]:
        """The commands that are taken now; `has_layers`: there is something that could fall back."""
        found = set(self._handlers)
        if has_layers and "fallback" in self.allowed:
            found.add("fallback")
        if self.longest_pause:
            found |= {"pause", "resume"}
        return sorted(found)

    def handle(self, name: str, callback: Callback) -> None:
        """Have `callback(command)` do this command. Raises TypeError or ConfigurationError if it cannot."""
        if not callable(callback):
            raise ArgumentTypeError(f"on_command needs something to call, got {callback!r}.")
        if not isinstance(name, str):
            raise ArgumentTypeError(f"a command's name must be a text, got {name!r}.")
        usable = name.isascii() and name.replace("-", "_").isidentifier() and name == name.lower()
        if not usable or not name[0].isalpha() or len(name) > 64:
            raise ConfigurationError(
                "a command's name is at most 64 of the characters a-z 0-9 _ -, beginning with a letter, "
                f"got {name!r}."
            )
        if len(self._handlers) >= MAX_HANDLERS:
            raise ConfigurationError(f"at most {MAX_HANDLERS} commands can be handled.")
        self._handlers[name] = callback

    def take(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Keep what the server asks until the step ends. What was taken before is passed over."""
        for one in found:
            command = Command.from_answer(one)
            if command.id > self._newest:
                self._newest = command.id
                self.waiting.append(command)
                self._arrived.set()

    def work(self) -> None:
        """Do what was asked. What a callback raises is raised here, after it was told."""
        while self.waiting:
            self._do(self.waiting.popleft())

    def refuse_all(self, why: str) -> None:
        """Nothing will be done any more."""
        while self.waiting:
            self._answer(self.waiting.popleft(), "refused", why)

    def _do(self, command: Command) -> None:
        if time.monotonic() > command.expires_at:
            self._answer(command, "refused", "It had expired before the step ended.")
            return
        callback = self._handlers.get(command.kind) or self._own(command.kind)
        if callback is None:
            self._answer(command, "refused", "The training script does not allow it.")
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
            return lambda command: "It was not paused."
        return None

    def _pause(self, command: Command) -> str:
        """Hold the training thread until `resume` comes or the time is over. Other commands wait."""
        asked = command.arguments.get("seconds")
        seconds = float(asked) if isinstance(asked, int | float) and asked > 0 else self.longest_pause
        seconds = min(seconds, self.longest_pause)
        began = time.monotonic()
        self._answer(command, "accepted", f"Paused, for {seconds:.0f} s at most.")
        self._listen(True)
        try:
            while (left := began + seconds - time.monotonic()) > 0:
                # Cleared before it is looked at: what comes in between sets it again.
                self._arrived.clear()
                resume = next((one for one in list(self.waiting) if one.kind == "resume"), None)
                if resume is not None:
                    self.waiting.remove(resume)
                    self._answer(resume, "done", "")
                    return f"Went on after {time.monotonic() - began:.0f} s."
                self._arrived.wait(left)
            return f"Went on by itself after {seconds:.0f} s."
        finally:
            self._listen(False)


def check_allowed(commands: Sequence[str] | None) -> tuple[str, ...]:
    """`init`'s `commands`. Raises ConfigurationError when one cannot be meant."""
    if commands is None:
        return DEFAULT
    names = (commands,) if isinstance(commands, str) else tuple(commands)
    unknown = [name for name in names if name not in BUILT_IN]
    if unknown:
        raise ConfigurationError(
            f"commands must be among {', '.join(BUILT_IN)}, got {unknown[0]!r}; others come with "
            "run.on_command(name, callback)."
        )
    return names


def check_pause(seconds: object) -> float:
    """`allow_pause`'s bound. Raises ConfigurationError when it is none."""
    if not isinstance(seconds, int | float) or not 0 < seconds <= MAX_PAUSE_SECONDS:
        raise ConfigurationError(
            f"a pause lasts more than 0 and at most {MAX_PAUSE_SECONDS:.0f} seconds, got {seconds!r}."
        )
    return float(seconds)
