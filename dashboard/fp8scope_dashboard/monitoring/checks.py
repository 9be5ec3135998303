"""Measurements of the server, and those that need somebody: pure functions with an advice each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Tone = Literal["good", "warning", "danger", "neutral"]
WORST_FIRST: Final[tuple[Tone, ...]] = ("danger", "warning", "neutral", "good")

# Seconds that a task may wait. Alerts are late by what the first two wait.
WAITS: Final = {"deliveries": (15.0, 60.0), "evaluations": (10.0, 60.0), "celery": (120.0, 900.0)}
# Batches wait up to ten minutes to be compacted together; the store is exact all the same.
COMPACTION_SECONDS: Final = (1_500.0, 7_200.0)
# Free shares of a disk.
DISK_SHARES: Final = (0.1, 0.03)
CONNECTION_SHARES: Final = (0.8, 0.95)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One measured thing. `advice` says what to do; it is empty if nothing is."""

    key: str
    title: str
    value: str
    tone: Tone = "good"
    detail: str = ""
    advice: str = ""


def tone_of(value: float, limits: tuple[float, float]) -> Tone:
    """Good up to the first limit, a warning up to the second."""
    return "good" if value <= limits[0] else "warning" if value <= limits[1] else "danger"


def worst(checks: Sequence[Check]) -> Tone:
    """The most serious tone; good if there is only information besides."""
    tones = {check.tone for check in checks}
    return "danger" if "danger" in tones else "warning" if "warning" in tones else "good"


def unanswered(key: str, title: str, seconds: float, advice: str) -> Check:
    """A part of the server that did not answer in time."""
    return Check(key=key, title=title, value=f"no answer within {seconds:g} s", tone="danger", advice=advice)


def queue(name: str, length: int, oldest: float | None) -> Check:
    """A queue of tasks. `oldest`: seconds that its first task waits; None if it is empty or unknown."""
    titles = {
        "deliveries": "Queue of alert messages",
        "evaluations": "Queue of alert detection",
        "celery": "Queue of comparisons and compaction",
    }
    tone = tone_of(oldest or 0.0, WAITS[name])
    wait = "" if oldest is None else f"the first waits {oldest:.0f} s"
    advice = (
        "Look below whether workers answer. If all are busy, start another worker process "
        "(`celery -A fp8scope_dashboard.celery:app worker`), on this or another machine."
    )
    return Check(
        key=f"queue_{name}",
        title=titles.get(name, name),
        value=f"{length:,} task{'s' if length != 1 else ''}",
        tone=tone,
        detail=wait,
        advice=advice if tone != "good" else "",
    )


def workers(number: int, waiting: int) -> Check:
    """Worker processes that answer; without one, tasks only queue up."""
    if number:
        return Check(key="workers", title="Workers", value="1 answers" if number == 1 else f"{number} answer")
    return Check(
        key="workers",
        title="Workers",
        value="none answers",
        tone="danger" if waiting else "warning",
        detail="Data is still stored. Verdicts, alerts and compaction wait." if waiting else "",
        advice="Look at logs/worker.log in the data directory, and restart the worker or the server.",
    )


def compaction(chunks: int, oldest: float | None) -> Check:
    """Batches that are stored as received; `oldest`: seconds since the first of them arrived."""
    tone = tone_of(oldest or 0.0, COMPACTION_SECONDS)
    return Check(
        key="compaction",
        title="Oldest batch that is not compacted",
        value="none" if oldest is None else f"{oldest / 60:.0f} min",
        tone=tone,
        detail=f"{chunks:,} batches wait",
        advice="Charts become slower, nothing is lost. Look at the queue of comparisons and compaction."
        if tone != "good"
        else "",
    )


def detectors(unread: int, runs: int) -> Check:
    """Runs with rows that the detectors have not read yet, of the runs that send now."""
    is_behind = unread > max(5, runs)
    return Check(
        key="detectors",
        title="Runs with data that no detector has read",
        value=f"{unread:,}",
        tone="warning" if is_behind else "good",
        detail=f"{runs:,} run{'s send' if runs != 1 else ' sends'} now",
        advice="Alerts are late. Start another worker process." if is_behind else "",
    )


def ingest(per_minute: Sequence[int], runs: int) -> Check:
    """Messages that were stored in each of the last minutes."""
    rate = sum(per_minute) / max(1, len(per_minute)) / 60.0
    detail = f"in each of the last minutes: {', '.join(map(str, per_minute))}" if runs else "no run sends now"
    return Check(key="ingest", title="Messages stored", value=f"{rate:.1f}/s", tone="neutral", detail=detail)


def disk(name: str, total: int, free: int) -> Check:
    """The disk of a directory, in bytes."""
    share = free / total if total else 0.0
    tone: Tone = "good" if share >= DISK_SHARES[0] else "warning" if share >= DISK_SHARES[1] else "danger"
    return Check(
        key=f"disk_{name.replace(' ', '_')}",
        title=f"Disk of the {name}",
        value=f"{free / 2**30:.1f} GiB free",
        tone=tone,
        detail=f"{100 * share:.0f} % of {total / 2**30:.0f} GiB",
        advice="Free space, or set the retention in projects' settings. Without space PostgreSQL stops "
        "storing; agents then keep their data and send it later."
        if tone != "good"
        else "",
    )


def connections(used: int, limit: int) -> Check:
    """Connections to PostgreSQL."""
    share = used / limit if limit else 0.0
    tone = tone_of(share, CONNECTION_SHARES)
    return Check(
        key="connections",
        title="Connections to PostgreSQL",
        value=f"{used} of {limit}",
        tone=tone,
        detail="",
        advice="Lower FP8SCOPE_DB_POOL in each web process, or raise max_connections of PostgreSQL."
        if tone != "good"
        else "",
    )
