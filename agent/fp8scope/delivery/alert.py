"""An alert that came back from the server."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Alert:
    """What the server found. `step` is where it was noticed, `onset_step` where it began."""

    id: int
    kind: str
    severity: str
    message: str
    step: int | None = None
    onset_step: int | None = None
    value: float | None = None
    threshold: float | None = None
    opened_at: str = ""

    @classmethod
    def from_answer(cls, found: Mapping[str, Any]) -> "Alert":
        """Read one of the alerts of an answer; what is missing or of another type is left out."""

        def number(key: str) -> float | None:
            return float(found[key]) if isinstance(found.get(key), int | float) else None

        def whole(key: str) -> int | None:
            return int(found[key]) if isinstance(found.get(key), int) else None

        def text(key: str) -> str:
            return str(found.get(key) or "")[:4000]

        return cls(
            id=int(found["id"]),
            kind=text("kind"),
            severity=text("severity"),
            message=text("message"),
            step=whole("step"),
            onset_step=whole("onset_step"),
            value=number("value"),
            threshold=number("threshold"),
            opened_at=text("opened_at"),
        )
