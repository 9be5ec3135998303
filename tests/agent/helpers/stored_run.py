"""What the wire server holds of one run, to be compared with what the agent says it sent."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class StoredRun:
    """What the server holds of one run."""

    registration: dict[str, Any] = field(default_factory=dict)
    catalogues: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    receipts: dict[tuple[str, int], tuple[bytes, dict[str, Any]]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    points: int = 0
    dropped: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    finishes: list[dict[str, Any]] = field(default_factory=list)
    heartbeats: list[dict[str, Any]] = field(default_factory=list)
    histograms: list[dict[str, Any]] = field(default_factory=list)
    """One entry a tensor: step, time, name and counts."""

    reports: list[dict[str, Any]] = field(default_factory=list)
    media: list[dict[str, Any]] = field(default_factory=list)
    contents: dict[str, bytes] = field(default_factory=dict)
    """By their SHA-256."""

    def reports_of(self, kind: str) -> list[dict[str, Any]]:
        return [report for report in self.reports if report["kind"] == kind]

    @property
    def answered(self) -> set[int]:
        """The commands that somebody has answered."""
        return {report["command"] for report in self.reports_of("command")}

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows]

    @property
    def finish(self) -> dict[str, Any]:
        """How the run ended; not how a child or an earlier attempt did."""
        (found,) = [one for one in self.finishes if one["ends_run"]]
        return found

    def scalars(self, name: str) -> list[float | None]:
        return [row["scalars"].get(name) for row in self.rows]
