"""Names of metrics as the wire takes them, and which of them is the loss."""

import hashlib
from typing import Final

from fp8scope.event_files.names import is_loss
from fp8scope.importing.limits import MAX_SCALARS
from fp8scope.step import MAX_NAME, SCALAR_NAME, valid_name

LOSS: Final = "loss"


class MetricNames:
    """The names of one run's scalars. Names that differ stay different.

    `loss` chooses the metric that is also recorded as `loss`; empty for the first with a usual name.
    """

    def __init__(self, loss: str = "") -> None:
        self.left_out: set[str] = set()
        """Names beyond those that a run may have; at most 1,000 are counted."""
        self._loss = loss
        self._chosen = loss
        self._names: dict[str, str | None] = {}
        self._taken: set[str] = set()

    def of(self, raw: str) -> str | None:
        """The name under which a metric is recorded; None if the run has as many as it may have."""
        if raw in self._names:
            return self._names[raw]
        name = valid_name(raw)
        if name in self._taken or len(raw) > MAX_NAME or not SCALAR_NAME.fullmatch(name):
            digest = hashlib.sha256(raw.encode("utf-8", "replace")).hexdigest()[:8]
            name = f"{name[: MAX_NAME - 9]}-{digest}"
        # One name stays free for the loss.
        if len(self._taken) >= MAX_SCALARS - 1 and name != LOSS:
            if len(self.left_out) < 1_000:
                self.left_out.add(raw)
            if len(self._names) < 10 * MAX_SCALARS:
                self._names[raw] = None
            return None
        self._names[raw] = name
        self._taken.add(name)
        return name

    def is_loss(self, raw: str) -> bool:
        """Return whether the metric's values are the loss as well. A metric that is called so is it alone."""
        if not self._loss and (raw == LOSS or (not self._chosen and is_loss(raw))):
            self._chosen = raw
        return raw == self._chosen and raw != LOSS

    def notes(self) -> list[str]:
        """Say what a person who imports should know."""
        if not self.left_out:
            return []
        example = min(self.left_out)[:80]
        return [
            f"{len(self.left_out)} metrics were left out, because a run has at most {MAX_SCALARS:,}, "
            f"for example {example!r}. Keep step numbers out of names."
        ]
