"""The chart of runs that are chosen in the list, and the colours of runs."""

from __future__ import annotations

from uuid import UUID, uuid4

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor, get_json, html

from fp8scope_dashboard.audit.models import Entry
from fp8scope_dashboard.pages.charts.run_colours import NAMES, RunArms, colour_number, colour_slot
from fp8scope_dashboard.pages.charts.theme import RUN_SLOTS, THEMES
from fp8scope_dashboard.pages.runs.overlay import MAX_CURVES
from fp8scope_dashboard.runs.models import Run, StepNote

CURVES = "find/curves.json"


def logged(visitor: Visitor, name: str, scalar: str = "loss", **fields: object) -> Run:
    run = make_run(visitor.project, name, **fields)
    Recorder(run=run).rows(np.arange(20), {scalar: np.linspace(3.0, 2.0, 20)})
    run.refresh_from_db()
    return run


def colours_of(answer: dict[str, object]) -> dict[str, str]:
    figure = answer["figure"]
    assert isinstance(figure, dict)
    return {trace["name"]: trace["line"]["color"] for trace in figure["data"] if trace.get("x") == [None]}


def test_it_works(viewer: Visitor) -> None:
    a, b = logged(viewer, "a", colour=2), logged(viewer, "b", colour=5)
    answer = get_json(viewer, CURVES, runs=f"{a.pk},{b.pk}", smooth="0")
    light = THEMES["light"].arms
    assert colours_of(answer) == {"a": light["run-2"], "b": light["run-5"]}
    assert answer["summary"] == "loss of a, b."


def test_runs_of_one_name_are_told_apart(viewer: Visitor) -> None:
    runs = [logged(viewer, "same") for _ in range(2)]
    answer = get_json(viewer, CURVES, runs=",".join(str(run.pk) for run in runs))
    assert set(colours_of(answer)) == {f"same ({str(run.pk)[:8]})" for run in runs}


def test_any_metric(viewer: Visitor) -> None:
    run = logged(viewer, "a", "train/grad_norm")
    assert "figure" in get_json(viewer, CURVES, runs=str(run.pk), metric="scalar.train/grad_norm")
    assert "logged “loss”" in get_json(viewer, CURVES, runs=str(run.pk))["empty"]
    names = get_json(viewer, "find/suggestions.json", q="grad", **{"for": "metric"})["suggestions"]
    assert [entry["text"] for entry in names] == ["train/grad_norm"]


def test_marks_have_the_colour_and_the_name_of_their_run(viewer: Visitor) -> None:
    a, b, silent = logged(viewer, "a", colour=2), logged(viewer, "b", colour=5), make_run(viewer.project, "c")
    for run, step in ((a, 3), (b, 7), (silent, 5)):
        StepNote.objects.create(run=run, step=step, text="Warmer.")
    ids = ",".join(str(run.pk) for run in (a, b, silent))
    light = THEMES["light"].arms
    for axis, place in (("step", 1.0), ("time", 0.1 / 60.0)):
        figure = get_json(viewer, CURVES, runs=ids, x=axis)["figure"]
        (notes,) = (trace for trace in figure["data"] if trace.get("name") == "note")
        np.testing.assert_allclose(notes["x"], [7 * place, 3 * place])
        assert notes["marker"]["color"] == [light["run-5"], light["run-2"]]
        assert notes["text"] == ["b: Note at step 7<br>Warmer.", "a: Note at step 3<br>Warmer."]
    assert "note" not in str(get_json(viewer, CURVES, runs=ids, marks="0"))


def test_only_runs_of_the_project(viewer: Visitor, stranger: Visitor) -> None:
    foreign = logged(stranger, "secret")
    for ids in (str(foreign.pk), str(uuid4()), "nonsense", ""):
        assert "No run is chosen" in get_json(viewer, CURVES, runs=ids)["empty"]


def test_the_number_of_curves_is_bounded(viewer: Visitor) -> None:
    runs = [make_run(viewer.project, str(number)) for number in range(MAX_CURVES)]
    beyond = logged(viewer, "beyond")
    ids = ",".join(str(run.pk) for run in (*runs, beyond))
    assert "logged" in get_json(viewer, CURVES, runs=ids)["empty"]


def test_the_colour_follows_from_the_id_until_one_is_chosen(member: Visitor) -> None:
    run = make_run(member.project, "a", id=UUID(int=14))
    assert colour_slot(run) == "run-3" and NAMES[colour_number(run) - 1] == "Purple"
    assert 'run-colour--3" data-run-dot' in html(member) and "slot=run-3" in html(member)
    address = member.address(f"runs/{run.pk}/colour")
    assert member.client.post(address, {"colour": "7"}).status_code == 302
    run.refresh_from_db()
    assert run.colour == 7 and "slot=run-7" in html(member)
    assert 'class="run-dot run-colour--7"' in html(member, f"runs/{run.pk}/"), "the same on its page"
    assert Entry.objects.get(project=member.project).text == "colour of a: indigo"
    member.client.post(address, {"colour": ""})
    run.refresh_from_db()
    assert run.colour is None and colour_slot(run) == "run-3"


@pytest.mark.parametrize("number", ["0", "13", "-1", "1e3", "99999999999999999999", "red"])
def test_other_numbers_are_no_colours(member: Visitor, number: str) -> None:
    run = make_run(member.project, "a", colour=4)
    member.client.post(member.address(f"runs/{run.pk}/colour"), {"colour": number})
    run.refresh_from_db()
    assert run.colour is None


def test_a_viewer_sees_colours_and_changes_none(viewer: Visitor) -> None:
    run = make_run(viewer.project, "a")
    page = html(viewer)
    assert f'data-run-dot="{run.pk}"' in page and "data-colour-of" not in page
    assert viewer.client.post(viewer.address(f"runs/{run.pk}/colour"), {"colour": "1"}).status_code == 403


def test_there_are_twelve_different_colours() -> None:
    for theme in THEMES.values():
        assert len({theme.arms[slot] for slot in RUN_SLOTS}) == len(NAMES) == 12


def test_a_run_alone_has_its_name(viewer: Visitor) -> None:
    run = make_run(viewer.project, "a")
    assert RunArms([run]).of(run).label == "a"
