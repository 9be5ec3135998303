"""The data of figures, as CSV and JSON."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import plotly.graph_objects as go
import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.seeding import TENSORS, Seeded
from dashboard.helpers.visitors import Visitor

from fp8scope_dashboard.pages.charts.curves import Curve, curves_figure
from fp8scope_dashboard.pages.charts.marks import Mark
from fp8scope_dashboard.pages.charts.table import Table, table_of
from fp8scope_dashboard.pages.charts.theme import theme_named
from fp8scope_dashboard.pages.compare.delta_figure import DeltaCurve, delta_figure
from fp8scope_dashboard.pages.scores.checkpoint_figures import CheckpointPoint, scores_figure
from fp8scope_dashboard.runs.models import Run

LIGHT = theme_named("light")


def rows(table: Table) -> list[list[str]]:
    return list(csv.reader(io.StringIO(table.csv())))


def test_it_works() -> None:
    first = Curve(
        name="fp8", arm="FP8", slot="fp8-1", x=np.array([1.0, 2.0, 3.0]), y=np.array([4.0, np.nan, np.inf])
    )
    second = Curve(name="bf16", arm="BF16", slot="bf16", x=np.array([2.0, 4.0]), y=np.array([5.5, 5.25]))
    drawn = curves_figure(
        [first, second], LIGHT, y_title="loss", marks=[Mark(x=2.0, text="spike")], y_range=(4, 5)
    )
    assert rows(table_of(drawn)) == [
        ["step", "fp8 [loss]", "bf16 [loss]"],
        ["1", "4", ""],
        ["2", "NaN", "5.5"],
        ["3", "Infinity", ""],
        ["4", "", "5.25"],
    ]


def test_json_has_names_units_and_words_for_what_json_lacks() -> None:
    curve = Curve(name="fp8", arm="FP8", slot="fp8-1", x=np.array([1.0, 2.0]), y=np.array([-np.inf, 0.5]))
    document = json.loads(table_of(curves_figure([curve], LIGHT, y_title="loss")).json("A loss."))
    assert document == {
        "summary": "A loss.",
        "columns": [
            {"name": "step", "unit": "", "values": [1, 2]},
            {"name": "fp8", "unit": "loss", "values": ["-Infinity", 0.5]},
        ],
    }


def test_an_interval_is_two_columns() -> None:
    x, delta = np.array([10.0, 20.0]), np.array([0.5, 0.25])
    drawn = delta_figure(
        [
            DeltaCurve(
                name="a", slot="fp8-1", x=x, delta=delta, low=delta - 0.5, high=delta + 0.5, tolerance=None
            )
        ],
        0.5,
        LIGHT,
    )
    header, *values = rows(table_of(drawn))
    assert [name.partition(" [")[0] for name in header] == [
        "tokens",
        "a, interval, low",
        "a, interval, high",
        "a",
    ]
    assert values == [["10", "0", "1", "0.5"], ["20", "-0.25", "0.75", "0.25"]]


def test_scores_have_a_row_for_each_run_and_checkpoint() -> None:
    points = [
        CheckpointPoint(step=step, name="a", arm="FP8", slot="fp8-1", value=0.5, low=0.25, high=0.75)
        for step in (100, 200)
    ]
    header, *values = rows(table_of(scores_figure(points, [], LIGHT, y_title="accuracy")))
    assert header == ["series", "checkpoint (step)", "accuracy", "low", "high"]
    assert values == [["FP8", step, "0.5", "0.25", "0.75"] for step in ("100", "200")]


@pytest.mark.parametrize("name", ["=1+1", "+a", "-a", "@a"])
def test_a_spreadsheet_runs_no_name_as_a_formula(name: str) -> None:
    figure = go.Figure()
    figure.add_scatter(x=[1], y=[2], name=name)
    assert rows(table_of(figure))[0] == ["x", f"'{name}"]


def test_names_of_series_are_plain_text() -> None:
    figure = go.Figure()
    for _ in range(2):
        figure.add_scatter(x=[1], y=[2], name="a &amp; b<br>c")
    assert rows(table_of(figure))[0] == ["x", "a & bc", "a & bc (2)"]


def test_a_figure_is_downloaded_as_csv_or_json(admin: Visitor, seeded: Seeded) -> None:
    path = admin.address(f"runs/{seeded.healthy.id}/figures/loss.json")
    answer = admin.client.get(path, {"format": "csv", "smooth": "0", "first": "20", "last": "29"})
    assert answer["Content-Type"].startswith("text/csv")
    assert (
        answer["Content-Disposition"]
        == f'attachment; filename="fp8scope-loss-{str(seeded.healthy.id)[:8]}.csv"'
    )
    header, *values = csv.reader(io.StringIO(answer.content.decode()))
    assert header[0] == "step" and "gpt fp8 delayed [loss]" in header and "gpt bf16 seed 1 [loss]" in header
    assert [row[0] for row in values] == [str(step) for step in range(20, 30)]
    document = json.loads(admin.client.get(path, {"format": "json", "smooth": "0"}).content)
    assert document["summary"].startswith("loss of gpt fp8 delayed")
    assert len(document["columns"][0]["values"]) == 150


def test_the_data_of_a_narrow_chart_has_full_names(admin: Visitor, seeded: Seeded) -> None:
    name = "a run with a name that is too long for the legend of a phone, seed 12"
    Run.objects.filter(pk=seeded.faulty.pk).update(name=name)
    address = admin.address(f"runs/{seeded.faulty.pk}/figures/panels.json")
    text = admin.client.get(address, {"format": "csv", "compact": "1"}).content.decode()
    assert name in text.partition("\r\n")[0]


def test_a_heat_map_is_downloaded_with_full_names_and_measured_values(admin: Visitor, seeded: Seeded) -> None:
    path = admin.address(f"runs/{seeded.faulty.id}/figures/heatmap.json")
    answer = admin.client.get(path, {"format": "csv", "statistic": "amax"})
    header, *values = csv.reader(io.StringIO(answer.content.decode()))
    assert header == ["step", *TENSORS] and len(values) == 150
    assert all(float(cell) > 0 for cell in values[3][1:])


def test_a_figure_without_data_has_no_file(admin: Visitor) -> None:
    run = make_run(admin.project, "new")
    answer = admin.client.get(admin.address(f"runs/{run.id}/figures/loss.json"), {"format": "csv"})
    assert answer.status_code == 404 and b"No loss yet" in answer.content
