"""Advice at the end of a run, in the process that has trained: for runs that are sent and not kept here."""

import sys

from fp8scope.advice.advisor import advise, as_text
from fp8scope.advice.record import RunRecord, rank_of
from fp8scope.recording.records import Row
from fp8scope.run import Run


def print_at_end(run: Run) -> None:
    """Print the advice for this rank to standard error when the run ends.

    It is that of the last steps, which the flight recorder keeps (`FP8SCOPE_FLIGHT_STEPS`).
    """
    run.session.before_end.append(lambda: print(f"fp8scope advises:\n{_text(run)}", file=sys.stderr))


def _text(run: Run) -> str:
    run.session.writers.pipeline.settle()
    rows = [Row.decode(payload) for payload in run.flight.ring.payloads()]
    if not rows:
        return "no step was recorded, or none is kept (FP8SCOPE_FLIGHT_STEPS is 0)."
    record = RunRecord(ranks=[rank_of(run.session.registration.document, rows)])
    return as_text(record, advise(record))
