"""Reports are validated, bounded and stored once."""

from __future__ import annotations

from typing import Any

import pytest
from dashboard.helpers.recording import Recorder
from dashboard.helpers.reporting import (
    ANNOTATION,
    BISECT,
    INCIDENT,
    PRODUCT,
    REFERENCE,
    another,
    send_report,
)
from pydantic import ValidationError

from fp8scope_dashboard.control import reports, schemas
from fp8scope_dashboard.control.models import Listener, Report
from fp8scope_dashboard.receipts.dedup import identify
from fp8scope_dashboard.receipts.models import Receipt
from fp8scope_dashboard.runs.models import ConsoleLine
from fp8scope_dashboard.wire.errors import InvalidError, WriterConflictError


@pytest.mark.parametrize(
    "document",
    [BISECT, REFERENCE, ANNOTATION, INCIDENT],
    ids=lambda document: str(document.get("name", document["kind"])),
)
def test_it_works(writer: Recorder, document: dict[str, Any]) -> None:
    assert send_report(writer, **document)
    report = Report.objects.get()
    assert (report.kind, report.step, report.writer) == (document["kind"], document["step"], writer.uuid)
    for key, value in document.items():
        if key not in ("kind", "step"):
            assert report.document[key] == value
    assert not set(report.document) & reports.ENVELOPE


def test_a_repeated_report_is_stored_once(writer: Recorder) -> None:
    assert send_report(writer, **ANNOTATION)
    writer.seq -= 1
    assert not send_report(writer, **ANNOTATION)
    with pytest.raises(WriterConflictError):
        send_report(writer, **{**ANNOTATION, "text": "another"})
    assert Report.objects.count() == Receipt.objects.filter(kind="report").count() == 1


def test_console_lines_are_as_a_terminal_shows_them(writer: Recorder) -> None:
    text = "\x1b[32m10 %\x1b[0m\r\x1b[K\x1b]0;title\x0720 %\0"
    assert send_report(
        writer, kind="console", lines=[{"number": 0, "time": "2026-01-01T00:00:00Z", "text": text}]
    )
    assert ConsoleLine.objects.get().text == "20 %"


@pytest.mark.parametrize(
    ("document", "change"),
    [
        (BISECT, {"products": []}),
        (BISECT, {"products": [PRODUCT] * (schemas.MAX_PRODUCTS + 1)}),
        (BISECT, {"products": [{**PRODUCT, "product": "sideways"}]}),
        (BISECT, {"products": [{**PRODUCT, "relative_error": "much"}]}),
        (BISECT, {"products": [{**PRODUCT, "layer": "x" * 513}]}),
        (BISECT, {"total_error": float("nan")}),
        (BISECT, {"note": "x\0"}),
        (REFERENCE, {"fp8": [1.0]}),
        (REFERENCE, {"fp8": [1.0], "bf16": [1.0]}),
        (REFERENCE, {"fp8": [1.0] * 1001, "bf16": [1.0] * 1001}),
        (REFERENCE, {"tolerance": 0}),
        (REFERENCE, {"verdict": "fine"}),
        (ANNOTATION, {"text": ""}),
        (INCIDENT, {"incident": {**INCIDENT["incident"], "target": -1}}),
        (INCIDENT, {"incident": {**INCIDENT["incident"], "folder": "x" * 513}}),
        (INCIDENT, {"incident": {**INCIDENT["incident"], "snapshots": [1] * 17}}),
        (ANNOTATION, {"name": "Some Thing"}),
        (ANNOTATION, {"layers": ["a"] * 501}),
        (ANNOTATION, {"step": -1}),
        (ANNOTATION, {"kind": "story"}),
        ({"kind": "accepts"}, {"accepts": ["a"] * 33}),
        ({"kind": "accepts"}, {"accepts": ["rm -rf"]}),
        ({"kind": "command", "command": 1}, {"state": "perhaps"}),
    ],
)
def test_refuses_values_out_of_bounds(
    writer: Recorder, document: dict[str, Any], change: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        send_report(writer, **{**document, **change})


def test_the_number_of_reports_is_bounded(writer: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MAX_REPORTS", 2)
    for _ in range(2):
        send_report(writer, **ANNOTATION)
    with pytest.raises(InvalidError, match="has 2 reports"):
        send_report(writer, **ANNOTATION)


def test_the_last_list_of_accepted_commands_counts(writer: Recorder) -> None:
    send_report(writer, kind="accepts", accepts=["pause", "fallback", "fallback"])
    send_report(writer, kind="accepts", accepts=["fallback"])
    assert Listener.objects.get().accepts == ["fallback"]


def test_a_report_counts_as_a_sign_of_life(writer: Recorder) -> None:
    other = another(writer.run)
    writer.run.state = "silent"
    writer.run.save()
    send_report(other, **ANNOTATION)
    writer.run.refresh_from_db()
    assert writer.run.state == "running"
    same = identify(writer.run.id, other.uuid, 0, "report", b"x")
    assert same.kind == "report"
