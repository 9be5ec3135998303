"""Advice at the end of a run, in the process that has trained: for the run's page and for a terminal."""

import sys
from typing import Any, Final

from fp8scope.advice.advisor import advise, as_text, document
from fp8scope.advice.record import RunRecord, rank_of
from fp8scope.incidents.flight_recorder import FlightRecorder
from fp8scope.recording.records import Row

ADVICE: Final = "advice"
"""Its entry in the run's environment."""


def send_at_end(flight: FlightRecorder) -> None:
    """Send the advice of the first rank with the run's environment when the run ends.

    It is that of the last steps, which the flight recorder keeps (`FP8SCOPE_FLIGHT_STEPS`).
    """
    session = flight.session
    environment = session.registration.document["environment"]
    # Without a measured model the rows need not be read.
    if str(environment.get("rank") or 0) != "0" or not session.steps.measures.facts():
        return
    record = record_of(flight)
    if record is not None and record.first.is_measured:
        session.registration.set("environment", {**environment, ADVICE: document(record, advise(record))})
        session.registration.send_changes(now=True)


def print_at_end(flight: FlightRecorder) -> None:
    """Print the advice for this rank to standard error when the run ends."""
    flight.session.before_end.append(lambda: print(f"fp8scope advises:\n{_text(flight)}", file=sys.stderr))


def record_of(flight: FlightRecorder) -> RunRecord | None:
    """Return the steps that the flight recorder keeps; None if it keeps none."""
    flight.session.writers.pipeline.settle()
    rows: list[Any] = [Row.decode(payload) for payload in flight.ring.payloads()]
    return RunRecord(ranks=[rank_of(flight.session.registration.document, rows)]) if rows else None


def _text(flight: FlightRecorder) -> str:
    record = record_of(flight)
    if record is None:
        return "no step has ended, or none is kept (FP8SCOPE_FLIGHT_STEPS is 0)."
    return as_text(record, advise(record))
