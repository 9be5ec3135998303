"""Notes at steps: their form, their list, and the marks of charts with them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor, get_json, trace_values

from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.control.models import Report, ReportKind
from fp8scope_dashboard.runs.models import Run, StepNote
from fp8scope_dashboard.runs.notes import STEP_NOTE_LENGTH

LARGEST = str(2**62)
NAMES = ("alert", "change", "note")


def run_with_loss(visitor: Visitor, name: str = "r") -> Run:
    run = make_run(visitor.project, name)
    Recorder(run=run).rows(np.arange(20), {"loss": np.linspace(3.0, 2.0, 20)})
    return run


def saved(visitor: Visitor, run: Run, **fields: str) -> Any:
    sent = {"step": "5", "text": "Halved the rate.", **fields}
    return visitor.client.post(visitor.address(f"runs/{run.id}/note/at-step/save"), sent)


def marks(visitor: Visitor, run: Run, rest: str = "figures/loss.json") -> dict[str, dict[str, Any]]:
    answer = get_json(visitor, f"runs/{run.id}/{rest}")
    return {trace["name"]: trace for trace in answer["figure"]["data"] if trace.get("name") in NAMES}


def test_it_works(member: Visitor, viewer: Visitor) -> None:
    """A saved note is a mark of every chart over steps, which leads to the note in the tab of notes."""
    run = run_with_loss(member)
    answer = saved(member, run, text="Halved <b>the\r\nrate.")
    note = StepNote.objects.get()
    assert (note.step, note.text, note.written_by) == (5, "Halved <b>the\nrate.", member.user)
    assert answer.status_code == 302 and answer["Location"].endswith(f"?tab=notes#step-note-{note.pk}")
    tab = viewer.client.get(viewer.address(f"runs/{run.id}/?tab=notes")).content.decode()
    assert "Halved &lt;b&gt;the rate.</p>" in tab and f'id="step-note-{note.pk}"' in tab
    assert "steps=0..55" in tab and "data-note-form" not in tab
    for rest in ("figures/loss.json", "figures/panels.json", "charts/figure.json?metric=loss"):
        mark = marks(viewer, run, rest)["note"]
        assert mark["x"] == [5.0]
        assert mark["text"] == ["Note at step 5, mia<br>Halved &lt;b&gt;the rate."]
        assert mark["meta"]["addresses"] == [viewer.address(f"runs/{run.id}/?tab=notes#step-note-{note.pk}")]


def test_one_function_marks_alerts_changes_and_notes(member: Visitor) -> None:
    run = run_with_loss(member)
    event = Alert.objects.create(
        run=run,
        kind="scale_frozen",
        severity="critical",
        onset_step=4,
        step=6,
        message="The scale of a.input.",
    )
    document = {"name": "fallback", "text": "a to BF16", "why": "frozen"}
    Report.objects.create(
        run=run, writer=run.id, seq=1, kind=ReportKind.ANNOTATION, step=8, document=document
    )
    saved(member, run)
    drawn = marks(member, run)
    assert drawn["alert"]["text"] == ["Frozen scale from step 4<br>The scale of a.input."]
    assert drawn["alert"]["meta"]["addresses"] == [member.address(f"alerts/{event.pk}/")]
    assert drawn["change"]["text"] == ["step 8: a to BF16 (frozen)"]
    assert [drawn[name]["marker"]["symbol"] for name in NAMES] == ["diamond", "square", "circle"]
    for rest in ("figures/loss.json?", "figures/panels.json?", "charts/figure.json?metric=loss&"):
        assert set(marks(member, run, rest)) == set(NAMES)
        assert not marks(member, run, f"{rest}marks=0"), rest


def test_marks_are_at_their_steps_on_every_axis(member: Visitor) -> None:
    """Also over tokens and time, where the page can tell the step of each drawn point, for a note there."""
    steps = np.arange(20)
    run = make_run(member.project, "r")
    Recorder(run=run).rows(steps[::2], {"loss": np.linspace(3.0, 2.0, 10), "tokens": 10.0 * steps[::2] ** 2})
    saved(member, run, step="4")
    saved(member, run, step="7")
    saved(member, run, step="900")
    begin = np.datetime64("2026-01-01", "ms").astype(float)
    expected = {
        "tokens": [(360.0 + 640.0) / 2, 160.0],
        "time": [0.7 / 60.0, 0.4 / 60.0],
        "wall": [begin + 700.0, begin + 400.0],
    }
    for axis, places in expected.items():
        for rest in ("figures/loss.json?", "charts/figure.json?metric=loss&"):
            figure = get_json(member, f"runs/{run.id}/{rest}x={axis}")["figure"]
            (mark,) = (trace for trace in figure["data"] if trace.get("name") == "note")
            np.testing.assert_allclose(mark["x"], places)
            (line,) = (trace for trace in figure["data"] if (trace.get("meta") or {}).get("steps"))
            np.testing.assert_array_equal(trace_values(line["customdata"]), steps[::2])
            shapes = [shape["x0"] for shape in figure["layout"]["shapes"]]
            np.testing.assert_allclose(shapes, places)


def test_minutes_count_from_the_first_step_of_the_run(member: Visitor) -> None:
    """Also for a metric that begins later: otherwise it, and its marks, would be moved to the left."""
    run = make_run(member.project, "r")
    recorder = Recorder(run=run)
    recorder.rows(np.arange(600), {"loss": np.linspace(3.0, 2.0, 600)}, rows_per_batch=600)
    recorder.rows(np.arange(600, 1800, 300), {"eval/loss": np.linspace(2.5, 2.0, 4)})
    saved(member, run, step="900")
    for rest, most in (("", 4), ("&from=1.2&to=1.8", 3)):
        figure = get_json(member, f"runs/{run.id}/charts/figure.json?metric=eval/loss&x=time{rest}")["figure"]
        (line,) = (trace for trace in figure["data"] if (trace.get("meta") or {}).get("steps"))
        np.testing.assert_allclose(trace_values(line["x"]), [1.0, 1.5, 2.0, 2.5][:most])
        (mark,) = (trace for trace in figure["data"] if trace.get("name") == "note")
        assert mark["x"] == [1.5]


def test_the_switch_of_marks_is_in_the_address(member: Visitor) -> None:
    """The first paint shows the state that the page's address has, as the script does."""
    run = run_with_loss(member)
    saved(member, run)
    page = member.client.get(member.address(f"runs/{run.id}/")).content.decode()
    hidden = member.client.get(member.address(f"runs/{run.id}/?panels.marks=0")).content.decode()
    circle = ' d="M-1 0A1 1'
    assert page.count(circle) > hidden.count(circle)
    charts = member.client.get(member.address(f"runs/{run.id}/?tab=charts")).content.decode()
    assert 'data-controls="charts chart-' in charts


def test_the_form(member: Visitor) -> None:
    run = run_with_loss(member)
    path = member.address(f"runs/{run.id}/note/at-step")
    page = member.client.get(f"{path}?step=12").content.decode()
    assert 'name="step" value="12"' in page and "<main" in page
    part = member.client.get(f"{path}?step=12", headers={"HX-Request": "true"}).content.decode()
    assert "<main" not in part and "<form" in part
    for step in ("", "x", "-1", "1.5", "9" * 30):
        assert 'name="step" value=""' in member.client.get(f"{path}?step={step}").content.decode()
    saved(member, run)
    note = StepNote.objects.get()
    assert "Halved the rate.</textarea>" in member.client.get(f"{path}?note={note.pk}").content.decode()
    assert member.client.get(f"{path}?note=999999").status_code == 404


def test_the_dialog_is_told_what_was_saved(member: Visitor) -> None:
    run = run_with_loss(member)
    path = member.address(f"runs/{run.id}/note/at-step/save")
    answer = member.client.post(path, {"step": "5000", "text": "x"}, headers={"HX-Request": "true"})
    assert answer.status_code == 204
    assert json.loads(answer["HX-Trigger"]) == {"fp8:noted": {"said": "The note at step 5,000 is saved."}}


def test_a_note_that_is_refused_is_not_lost(member: Visitor) -> None:
    run = run_with_loss(member)
    for fields, problem in (
        ({"text": "  "}, "Write what the note says."),
        ({"text": "x" * (STEP_NOTE_LENGTH + 1)}, "at most 1,000 are possible"),
        ({"step": ""}, "A step is a whole number"),
        ({"step": "-1"}, "A step is a whole number"),
        ({"step": "9" * 40}, "A step is a whole number"),
    ):
        answer = saved(member, run, **{"text": "My <i>text", **fields})
        page = answer.content.decode()
        assert answer.status_code == 422 and problem in page, fields
        assert "text" in fields or "My &lt;i&gt;text</textarea>" in page
    assert not StepNote.objects.exists()


def test_changes_and_removes(member: Visitor, admin: Visitor) -> None:
    run, other = run_with_loss(member), make_run(member.project, "other")
    saved(member, run)
    note = StepNote.objects.get()
    assert saved(admin, run, note=str(note.pk), step="7", text="Quartered it.").status_code == 302
    note.refresh_from_db()
    assert (note.step, note.text, note.written_by) == (7, "Quartered it.", admin.user)
    # Only under the run that has it.
    assert saved(member, other, note=str(note.pk)).status_code == 404
    gone = f"note/at-step/{note.pk}/remove"
    assert member.client.post(member.address(f"runs/{other.id}/{gone}")).status_code == 404
    page = member.client.post(member.address(f"runs/{run.id}/{gone}"), follow=True).content.decode()
    assert "Removed the note at step 7: Quartered it." in page and not StepNote.objects.exists()


def test_long_notes_are_short_in_the_hover_text(member: Visitor) -> None:
    run = run_with_loss(member)
    saved(member, run, text="word " * 190)
    [text] = marks(member, run)["note"]["text"]
    lines = text.split("<br>")
    assert len(lines) <= 6 and max(map(len, lines)) <= 60 and lines[-1].endswith("…")
