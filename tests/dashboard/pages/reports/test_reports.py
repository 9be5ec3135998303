"""Reports on the page of a run: reference windows, bisections and annotations in the loss."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.reporting import ANNOTATION, BISECT, INCIDENT, REFERENCE, send_report
from dashboard.helpers.visitors import Visitor, run_html
from django.test import Client

from fp8scope_dashboard.control.models import Report
from fp8scope_dashboard.pages.charts.theme import THEMES
from fp8scope_dashboard.pages.run.controls.figures import ranking_figure, window_figure
from fp8scope_dashboard.runs.models import Run


@pytest.fixture
def writer(admin: Visitor) -> Recorder:
    run = make_run(admin.project)
    recorder = Recorder(run=run, tensors=["blocks.0.up.input", "blocks.0.up.weight", "blocks.1.down.input"])
    recorder.rows(range(1, 60), {"loss": [2.0] * 59})
    return recorder


def figure(visitor: Visitor, run: Run, name: str, **query: Any) -> dict[str, Any]:
    answer = visitor.client.get(visitor.address(f"runs/{run.id}/reports/{name}.json"), query)
    assert answer.status_code == 200
    document: dict[str, Any] = json.loads(answer.content)
    return document


def test_it_works(admin: Visitor, writer: Recorder) -> None:
    send_report(writer, **BISECT)
    send_report(writer, **{**REFERENCE, "fp8": [2.0, 1.91], "delta": 0.0026, "step": 200})
    send_report(
        writer,
        **{**REFERENCE, "fp8": [2.0, 1.9], "delta": 0.0, "verdict": "within", "action": "", "step": 300},
    )
    shown = run_html(admin, writer.run)
    assert "BF16 reference windows" in shown and "1 over" in shown and "200–201" in shown
    assert "fell back to BF16" in shown and "Error of each matrix product" in shown and "blocks.0.up" in shown
    part = run_html(admin, writer.run, "reports")
    assert "Error of each matrix product" in part and "<html" not in part


def test_without_reports_there_is_no_card(admin: Visitor, writer: Recorder) -> None:
    shown = run_html(admin, writer.run)
    assert "Error of each matrix product" not in shown and "reference windows" not in shown
    assert 'id="reports"' in shown, "the empty element is there for the first report"
    for name in ("bisect", "reference"):
        assert "No report yet" in figure(admin, writer.run, name)["empty"]


def test_shows_incidents_and_where_they_are(admin: Visitor, writer: Recorder) -> None:
    assert "Incidents" not in run_html(admin, writer.run, "reports")
    send_report(writer, **ANNOTATION)
    send_report(writer, **INCIDENT)
    shown = run_html(admin, writer.run, "reports")
    for text in ("Incidents", "a critical alert", "1–130", "snapshots after step 80, 100", "5.0", "gpu-7"):
        assert text in shown
    assert "/data/&lt;run&gt;/incident-step-120" in shown
    assert shown.count("<li>") == 1


def test_draws_both_arms_of_a_window_over_steps(admin: Visitor, writer: Recorder) -> None:
    send_report(writer, **REFERENCE)
    answer = figure(admin, writer.run, "reference")
    names = [trace.get("name") for trace in answer["figure"]["data"]]
    assert "FP8" in names and "BF16 from the same state" in names
    assert "FP8: not finite" in names and "Difference: NaN" in answer["summary"]
    lines = [trace for trace in answer["figure"]["data"] if trace.get("name") == "BF16 from the same state"]
    assert len(lines) == 2, "one trace is the line, one its legend entry"


def test_draws_the_newest_report_unless_another_is_selected(admin: Visitor, writer: Recorder) -> None:
    for step, layer in ((10, "first"), (5, "second")):
        send_report(
            writer, **{**BISECT, "step": step, "products": [{**BISECT["products"][0], "layer": layer}]}
        )
    first, second = Report.objects.order_by("id")
    assert figure(admin, writer.run, "bisect")["summary"].endswith("from second dgrad.")
    assert figure(admin, writer.run, "bisect", report=first.pk)["summary"].endswith("from first dgrad.")
    assert "empty" in figure(admin, writer.run, "bisect", report=second.pk + 100)
    # An invalid id is ignored.
    assert figure(admin, writer.run, "bisect", report="x' OR 1")["summary"].endswith("from second dgrad.")


def test_reports_of_other_runs_are_not_served(admin: Visitor, stranger: Visitor, writer: Recorder) -> None:
    send_report(writer, **BISECT)
    other = make_run(admin.project, "other")
    report = Report.objects.get()
    assert "empty" in figure(admin, other, "bisect", report=report.pk)
    address = admin.address(f"runs/{writer.run.id}/reports/bisect.json")
    assert stranger.client.get(address).status_code == 404
    assert Client().get(address).status_code == 302
    assert admin.client.get(admin.address(f"runs/{writer.run.id}/reports/other.json")).status_code == 404


def test_marks_annotations_in_the_loss(admin: Visitor, writer: Recorder) -> None:
    send_report(writer, **{**ANNOTATION, "text": "2 layers to <BF16>"})
    answer = admin.client.get(admin.address(f"runs/{writer.run.id}/figures/loss.json"))
    traces = {trace.get("name"): trace for trace in json.loads(answer.content)["figure"]["data"]}
    assert traces["change"]["text"] == ["step 41: 2 layers to &lt;BF16&gt; (an alert)"]
    assert traces["change"]["x"] == [41.0] and traces["change"]["customdata"] == ["fallback"]


def test_escapes_the_content_of_reports(admin: Visitor, writer: Recorder) -> None:
    evil = "<script>alert(1)</script>"
    send_report(writer, **{**BISECT, "note": evil, "products": [{**BISECT["products"][0], "layer": evil}]})
    assert evil not in run_html(admin, writer.run)
    assert evil not in json.dumps(figure(admin, writer.run, "bisect")["figure"])


@pytest.mark.parametrize("theme", THEMES.values(), ids=lambda theme: str(theme.name))
def test_a_ranking_shows_every_product(theme: Any) -> None:
    products = [
        ("a" * 80, "dgrad", float("nan"), float("nan")),
        ("blocks.1.up", "wgrad", 0.5, 0.8),
        ("blocks.0.up", "fprop", 1e-4, 1.0),
        ("blocks.2.up", "fprop", 0.0, 1.0),
    ]
    drawn = ranking_figure(products, 0.6, theme)
    bars = {int(y): x for trace in drawn.data for y, x in zip(trace.y, trace.x, strict=True)}
    assert bars == {0: 0.6, 1: 0.5, 2: 1e-4, 3: 0.0}, "an error that is not finite gets the longest bar"
    labels = list(drawn.layout.yaxis.ticktext)
    assert "a…a" in labels[0] and labels[0].endswith("a dgrad") and len(labels[0]) < 60
    assert labels[1] == "blocks.1.up wgrad"
    low, high = drawn.layout.xaxis.range
    assert 10**low < 1e-4 < 0.6 < 10**high
    alone = ranking_figure([("x", "fprop", float("inf"), 0.0)], float("nan"), theme, compact=True)
    assert alone.data[0].text == ("not finite",)


def test_draws_a_window_without_finite_values() -> None:
    document = {"fp8": ["NaN", "Infinity"], "bf16": ["-Infinity", "NaN"]}
    assert window_figure(document, 3, THEMES["light"]).data
