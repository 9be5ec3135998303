"""Every figure over HTTP is the one that the page draws."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.exponents import histogram_of, store_histograms
from dashboard.helpers.reading import Reader
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor
from django.urls import reverse
from django.utils.html import escape

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.api.reading.figures import COMPARED, MORE, OF_PROJECT, REPORTS
from fp8scope_dashboard.pages.charts import addresses
from fp8scope_dashboard.pages.run.efficiency import PHASES
from fp8scope_dashboard.pages.run.figures.views import FIGURES
from fp8scope_dashboard.pages.urls import urlpatterns

OF_RUN = sorted([*FIGURES, *MORE, *REPORTS])


@pytest.fixture
def sampled(seeded: Seeded) -> Seeded:
    """Runs of which the faulty one has histograms, and times of the phases of its steps."""
    run = seeded.faulty
    for step in (10, 20, 30):
        store_histograms(run, step, {i: histogram_of(np.exp2(np.arange(-20.0, 4.0))) for i in range(3)})
    phases = {name: np.full(150, 0.1) for name in PHASES}
    Recorder(run=run, rank=1).rows(np.arange(150), phases)
    run.refresh_from_db()
    return seeded


def asked(seeded: Seeded) -> dict[str, str]:
    """Parameters with which most figures have data."""
    tensor = seeded.faulty.tensors.order_by("index").first()
    assert tensor is not None
    return {"name": "grad_norm", "tensor": tensor.name, "metric": "loss", "statistic": "amax"}


def page_of(viewer: Visitor, seeded: Seeded, name: str, query: dict[str, str]) -> bytes:
    run = seeded.faulty.pk
    views = {"panel": "panel_figure", "readiness": "readiness_figure"}
    slug = viewer.project.slug
    if name in views:
        address = reverse(views[name], args=[slug, run])
    else:
        address = reverse("report_figure" if name in REPORTS else "figure", args=[slug, run, name])
    answer = viewer.client.get(address, query)
    assert answer.status_code == 200
    return bytes(answer.content)


def test_it_works(reader: Reader, seeded: Seeded) -> None:
    assert reader.json(f"/runs/{seeded.faulty.pk}/figures")["figures"] == OF_RUN
    drawn = reader.json(f"/runs/{seeded.faulty.pk}/figures/loss")
    assert drawn["figure"]["data"] and "loss of" in drawn["summary"]


def test_every_figure_of_a_run_is_that_of_its_page(reader: Reader, sampled: Seeded, viewer: Visitor) -> None:
    query, with_data = asked(sampled), 0
    for name in OF_RUN:
        body = reader.body(f"/runs/{sampled.faulty.pk}/figures/{name}", **query)
        assert body == page_of(viewer, sampled, name, query), name
        with_data += "figure" in json.loads(body)
    assert with_data >= 8


def test_every_figure_of_several_runs_is_that_of_its_page(
    reader: Reader, seeded: Seeded, viewer: Visitor
) -> None:
    runs = [seeded.baselines[0].pk, seeded.baselines[1].pk, seeded.healthy.pk, seeded.faulty.pk]
    names = {"curves": "runs_figure", "scatter": "run_scatter", "parallel": "run_parallel"}
    names |= {"scores": "scores", "differences": "score_differences"}
    slug = viewer.project.slug
    with_data = 0
    for name in (*COMPARED, *OF_PROJECT):
        view = (
            reverse("compare_figure", args=[slug, name])
            if name in COMPARED
            else reverse(names[name], args=[slug])
        )
        query: dict[str, Any] = {"runs": runs, "name": "heldout", "metric": "accuracy"}
        if name == "curves":
            query = {"runs": ",".join(map(str, runs)), "metric": "loss"}
        elif name in ("scatter", "parallel"):
            query = {"setting": "seed", "settings": "seed,precision", "result": "loss"}
        body = reader.body(f"/figures/{name}", **query)
        assert body == viewer.client.get(view, query).content, name
        with_data += "figure" in json.loads(body)
    assert with_data == len((*COMPARED, *OF_PROJECT))


def test_no_figure_of_the_pages_is_missing() -> None:
    """Each address that draws a figure is answered here, too."""
    drawn = {entry.name for entry in urlpatterns if entry.callback in addresses._drawn_by}
    assert drawn == {
        *("figure", "panel_figure", "readiness_figure", "report_figure", "compare_figure", "runs_figure"),
        *("run_scatter", "run_parallel", "scores", "score_differences", "evidence"),
    }


def test_the_evidence_of_an_alert(reader: Reader, seeded: Seeded, viewer: Visitor) -> None:
    for alert in Alert.objects.all():
        page = viewer.client.get(viewer.address(f"alerts/{alert.pk}/evidence.json")).content
        assert reader.body(f"/alerts/{alert.pk}/figure") == page
    assert reader.refused("/alerts/999999/figure")["code"] == "not_found"


def test_the_data_of_a_figure(reader: Reader, seeded: Seeded) -> None:
    path = f"/runs/{seeded.faulty.pk}/figures/scalar"
    table = reader.json(path, name="grad_norm", format="json")
    assert table["columns"][0]["name"] == "step" and len(table["columns"][0]["values"]) > 100
    lines = reader.body(path, name="grad_norm", format="csv").decode().splitlines()
    assert len(lines) == 1 + len(table["columns"][0]["values"])
    assert reader.body(path, name="grad_norm", format="svg").startswith(b"<svg")


@pytest.mark.parametrize("form", ["plotly", "json"])
def test_a_figure_without_data_says_why(reader: Reader, viewer: Visitor, form: str) -> None:
    run = make_run(viewer.project, "run")
    assert "empty" in reader.json(f"/runs/{run.pk}/figures/efficiency", format=form)
    assert "No step times" in reader.refused(f"/runs/{run.pk}/figures/efficiency", format="csv")["message"]


def test_what_does_not_exist_is_refused(reader: Reader, seeded: Seeded) -> None:
    assert "scatter" in reader.refused("/figures/nothing")["hint"]
    assert "loss" in reader.refused(f"/runs/{seeded.faulty.pk}/figures/nothing")["hint"]
    assert "NUL" in reader.refused("/figures/loss", q="a\0")["message"]
    foreign = make_run(create_project("elsewhere", "Elsewhere"), "foreign")
    assert reader.refused(f"/runs/{foreign.pk}/figures/loss")["code"] == "unknown_run"
    # A run of another project in a query draws nothing.
    assert "empty" in reader.json("/figures/loss", runs=[foreign.pk])


def test_efficiency_and_fleet_are_those_of_their_pages(
    reader: Reader, seeded: Seeded, viewer: Visitor
) -> None:
    answer = reader.json(f"/runs/{seeded.healthy.pk}/efficiency")
    page = viewer.client.get(viewer.address(f"runs/{seeded.healthy.pk}/?tab=efficiency")).content.decode()
    assert answer["figures"] and all(escape(figure["value"]) in page for figure in answer["figures"])
    assert reader.json("/fleet") == viewer.client.get(viewer.address("fleet/fleet.json")).json()
