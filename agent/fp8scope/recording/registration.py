"""The description of a run, the body of PUT /runs/{run}: checked, readable and writable while it runs."""

import operator
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fp8scope.config import ConfigurationError
from fp8scope.guard import Guard
from fp8scope.metadata.git import RepositoryLookup
from fp8scope.metadata.redaction import plain

if TYPE_CHECKING:
    from fp8scope.recording.entries import Document, SpoolEntry

MAX_TAGS = 50
SEND_SECONDS = 1.0
"""Changes of the registration are sent together, at most this often."""
_TEXT_LIMITS = {"name": 200, "group": 128, "baseline": 128, "parent": 128, "precision": 32}
RELATIONS = ("resumed", "reference")
"""The relations of a run to its parent."""


def blank_registration(name: str) -> dict[str, Any]:
    """A registration in which only the name is known."""
    return {
        "name": name,
        "precision": "unknown",
        "recipe": {},
        "config": {},
        "environment": {},
        "tags": [],
        "group": "",
        "baseline": "",
        "parent": "",
        "relation": "",
        "seed": None,
        "total_steps": None,
        "created_at": datetime.now(UTC).isoformat(),
    }


def whole(name: str, value: int | None) -> int | None:
    """`value` as a plain integer of 64 bits. Raises ConfigurationError if it is not one."""
    if value is None:
        return None
    try:
        whole = operator.index(value)
    except TypeError:
        raise ConfigurationError(f"{name} must be a whole number, got {value!r}.") from None
    if not -(2**63) <= whole < 2**63:
        raise ConfigurationError(f"{name} must fit 64 bits, got {whole}.")
    return whole


def check_registration(registration: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if the server would refuse the registration."""
    for key, limit in _TEXT_LIMITS.items():
        value = registration[key]
        if not isinstance(value, str) or len(value) > limit:
            raise ConfigurationError(f"{key} must be a text of at most {limit} characters, got {value!r}.")
    if registration["relation"] not in ("", *RELATIONS):
        raise ConfigurationError(
            f"relation must be one of {', '.join(RELATIONS)}, got {registration['relation']!r}."
        )
    if registration["relation"] and not registration["parent"]:
        raise ConfigurationError("relation needs parent: the id of the run that this one comes from.")
    if (registration["total_steps"] or 0) < 0:
        raise ConfigurationError(f"total_steps must not be negative, got {registration['total_steps']}.")
    if not registration["name"].strip():
        raise ConfigurationError("name must not be empty; leave it out for a default one.")
    if len(registration["tags"]) > MAX_TAGS or any(not 1 <= len(tag) <= 64 for tag in registration["tags"]):
        raise ConfigurationError(f"tags must be at most {MAX_TAGS} texts of 1 to 64 characters.")


class Registration:
    """The registration of a run in this process. `put` hands an entry to the current writer."""

    def __init__(
        self,
        document: Mapping[str, Any],
        guard: Guard,
        put: "Callable[[SpoolEntry], object]",
        *,
        enabled: bool,
    ) -> None:
        self.document = dict(document)
        self.pending = False
        """Whether `send_changes` may have something to do; read at every step."""
        self._guard = guard
        self._put = put
        self._enabled = enabled
        self._changed = False
        self._sent_at = 0.0
        self._repository: RepositoryLookup | None = None

    @property
    def lacks_precision(self) -> bool:
        """Return whether neither script nor FP8 layers have said the run's precision."""
        return bool(self.document["precision"] == "unknown")

    def entry(self) -> "Document":
        """The registration as it is now, for the spool."""
        # Here, because both need NumPy, and `fp8scope run` goes on without.
        from fp8scope.recording.entries import Document
        from fp8scope.recording.records import RecordKind, dump_json

        document = dict(self.document)
        return Document(RecordKind.REGISTRATION, lambda: dump_json(document))

    def send(self) -> None:
        """Hand the registration to the writer."""
        self._changed, self._sent_at = False, time.monotonic()
        self.pending = self._repository is not None
        if self._enabled:
            self._put(self.entry())

    def set(self, name: str, value: Any) -> None:
        """Set an entry. It is sent soon, together with other changes."""
        self.document[name] = value
        self._changed = self.pending = True
        self.send_changes()

    def send_changes(self, *, now: bool = False) -> None:
        """Take git's answer if it has come, and send what has changed if that is due (or `now`)."""
        self.take_repository()
        if self._changed and (now or time.monotonic() - self._sent_at >= SEND_SECONDS):
            self.send()

    def look_up_repository(self) -> None:
        """Ask git in the background for the commit and the uncommitted changes."""
        self._repository = RepositoryLookup()
        self.pending = True

    def take_repository(self, seconds: float = 0.0) -> None:
        """Add git's answer to the environment; wait at most `seconds` for it."""
        lookup = self._repository
        facts = lookup.take(seconds) if lookup is not None else None
        if lookup is None or facts is None:
            return
        if lookup.failure is not None:
            self._guard.caught("looking at the repository", lookup.failure)
        self._repository = None
        self.pending = self._changed
        if facts:
            self.document["environment"] = {**self.document["environment"], **facts}
            self.send()


class Entries(Mapping[str, Any]):
    """Plain values by name, such as `run.config`. Setting a value sends it; values cannot be deleted.

    A value that is a mapping is read as `Entries` as well, so that `run.config["model"]["width"] = 8` works.
    Values are converted to what JSON can hold. A tensor of one element becomes its number, which waits for
    its device.
    """

    def __init__(
        self, read: Callable[[], Mapping[str, Any]], write: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._read = read
        self._write = write

    def __getitem__(self, name: str) -> Any:
        value = self._read()[name]
        if isinstance(value, dict):
            return Entries(
                lambda: self._read().get(name, {}), lambda new: self.update({name: {**value, **new}})
            )
        return list(value) if isinstance(value, list) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def update(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Set several values; those of the same name are replaced."""
        self._write({**(values or {}), **named})

    def __repr__(self) -> str:
        return repr(dict(self._read()))


def plain_entries(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON can hold them; see `Entries`."""
    converted: dict[str, Any] = plain({str(name): _number(value) for name, value in values.items()})
    return converted


def _number(value: Any) -> Any:
    # Needs NumPy.
    from fp8scope.scalars import is_tensor

    if is_tensor(value):
        return value.item() if value.numel() == 1 else f"<Tensor {list(value.shape)}>"
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return value.item()
    if isinstance(value, Mapping):
        return {str(name): _number(entry) for name, entry in value.items()}
    return value
