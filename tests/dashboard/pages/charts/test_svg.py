"""Figures drawn on the server: as files, in pages, and without what they cannot draw."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import plotly.graph_objects as go
import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor
from django.http import QueryDict
from PIL import Image

from fp8scope_dashboard.pages.charts.axes import axis_of, formatted
from fp8scope_dashboard.pages.charts.curves import Curve, curves_figure
from fp8scope_dashboard.pages.charts.first_paint import THEME_COOKIE, figure_query
from fp8scope_dashboard.pages.charts.marks import Mark
from fp8scope_dashboard.pages.charts.svg import MAX_POINTS, svg_of
from fp8scope_dashboard.pages.charts.theme import RUN_SLOTS, THEMES, escaped, new_figure, theme_named
from fp8scope_dashboard.pages.tensors.heat_map import TensorLines, heatmap_figure, tensor_figure
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.text.ticks import tick_label, ticks

LIGHT = theme_named("light")
SVG = "{http://www.w3.org/2000/svg}"


def a_curve(y: list[float], name: str = "a run") -> Curve:
    return Curve(name=name, arm="FP8", slot="fp8-1", x=np.arange(len(y), dtype=float), y=np.array(y))


def parsed(figure: go.Figure, width: int | None = 900) -> ElementTree.Element:
    text = svg_of(figure, LIGHT, width=width, title="Loss")
    assert text is not None
    return ElementTree.fromstring(text if width else text.replace("<svg", f'<svg xmlns="{SVG[1:-1]}"', 1))


def lines(root: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """The points of each line, in tenths of a pixel from the upper left corner of its panel."""
    paths = [
        path for path in root.iter(f"{SVG}path") if path.get("fill") == "none" and not path.get("transform")
    ]
    parts = [part for path in paths for part in str(path.get("d")).split("M") if part]
    return [[(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", part)] for part in parts]


def texts(root: ElementTree.Element) -> list[str]:
    return [str(text.text) for text in root.iter(f"{SVG}text")]


def test_bars_on_a_logarithmic_axis_stand_on_its_lower_end() -> None:
    figure = go.Figure(go.Bar(x=[1, 2, 3], y=[0.0, 0.01, 1.0], marker={"color": "#123456"}))
    figure.update_layout(template={}, height=300, paper_bgcolor=LIGHT.surface)
    figure.update_yaxes(type="log", range=[-4, 0])
    bars = [each for each in parsed(figure).iter(f"{SVG}rect") if each.get("fill") == "#123456"]
    heights = [float(str(bar.get("height"))) for bar in bars]
    assert heights[0] == 0 and heights[1] == pytest.approx(heights[2] / 2, abs=0.1) and heights[2] > 100


def test_it_works() -> None:
    root = parsed(curves_figure([a_curve([3.0, 2.0, 1.0])], LIGHT, y_range=(0, 4), y_title="loss"))
    (points,) = lines(root)
    assert [x for x, _ in points] == pytest.approx([0, points[-1][0] / 2, points[-1][0]], abs=1)
    heights = [y for _, y in points]
    assert heights == pytest.approx([heights[0], 2 * heights[0], 3 * heights[0]], rel=0.01)
    assert {"Loss", "loss", "step", "0", "4"} <= set(texts(root))


def test_a_line_has_a_gap_where_values_are_not_finite() -> None:
    root = parsed(curves_figure([a_curve([1.0, 2.0, math.nan, math.inf, 2.0, 1.0])], LIGHT, y_range=(0, 3)))
    assert [len(points) for points in lines(root)][:2] == [2, 2]


def test_a_spike_of_one_step_is_drawn() -> None:
    loss = [1.0] * 50 * MAX_POINTS
    loss[777] = 3.0
    (points,) = lines(parsed(curves_figure([a_curve(loss)], LIGHT, y_range=(0, 4))))
    assert len(points) <= MAX_POINTS
    base = points[0][1]
    assert min(y for _, y in points) == pytest.approx(base / 3, rel=0.01)


def test_marks_of_alerts_are_drawn_within_the_chart() -> None:
    curve = a_curve([3.0, 2.0, 1.0])
    figure = curves_figure(
        [curve], LIGHT, marks=[Mark(x=1.0, text="spike", severe=True), Mark(x=99.0, text="later")]
    ).editable()
    figure.update_xaxes(range=[0, 2])
    dotted = [line for line in parsed(figure).iter(f"{SVG}line") if line.get("stroke-dasharray")]
    assert [line.get("stroke") for line in dotted] == [LIGHT.danger]


def test_a_page_has_the_colours_of_its_theme_and_a_file_its_own() -> None:
    figure = curves_figure([a_curve([1.0, 2.0])], LIGHT)
    page, file = svg_of(figure, LIGHT), svg_of(figure, LIGHT, width=600)
    assert page is not None and file is not None
    assert "var(--fp8-1)" in page and not re.search(r"#[0-9a-f]{6}", page)
    assert LIGHT.arms["fp8-1"] in file and "var(" not in file


def test_names_cannot_add_elements() -> None:
    figure = curves_figure(
        [a_curve([1.0, 2.0], "<script>alert(1)</script>")], LIGHT, y_title="<img src=x>"
    ).editable()
    figure.update_layout(showlegend=True)
    text = svg_of(figure, LIGHT, width=600, title='"><script>')
    assert text is not None and "<script" not in text and "<img" not in text
    ElementTree.fromstring(text)


def test_the_browser_makes_the_rows_of_a_legend_in_a_page() -> None:
    figure = new_figure(LIGHT, compact=True, height=300)
    for name in ("a <b>", "c"):
        figure.add_scatter(x=[0, 1], y=[0, 1], name=escaped(name))
    text = svg_of(figure, LIGHT)
    assert text is not None
    assert re.findall("<span>(.*?)</span>", text) == ["a &lt;b&gt;", "c"]


def test_a_long_name_ends_inside_of_a_file() -> None:
    figure = new_figure(LIGHT, compact=True, height=300)
    figure.add_scatter(x=[0, 1], y=[0, 1], name="start " + "x" * 200 + " end")
    figure.update_layout(showlegend=True)
    (name,) = [text for text in texts(parsed(figure, width=400)) if text.startswith("start")]
    assert name.endswith("end") and len(name) < 60


def test_exponents_are_raised_digits() -> None:
    figure = new_figure(LIGHT, compact=False, height=300)
    figure.add_scatter(x=[-8, 4], y=[0, 1])
    figure.update_xaxes(tickvals=[-8, 4], ticktext=["2<sup>-8</sup>", "2<sup>4</sup>"])
    assert {"2⁻⁸", "2⁴"} <= set(texts(parsed(figure)))


def test_panels_are_below_each_other_with_one_horizontal_axis() -> None:
    steps = np.arange(100)
    series = {"amax": (steps, np.exp(steps / 20)), "overflow_rate": (steps, steps / 1e4)}
    root = parsed(tensor_figure(TensorLines("t", "e4m3", series), LIGHT))
    panels = [float(str(each.get("y"))) for each in root if each.tag == f"{SVG}svg"]
    assert len(panels) == 2 and panels[1] - panels[0] > 150
    assert texts(root).count("step") == 1 and "amax" in texts(root)


def test_a_heat_map_is_a_picture_with_one_pixel_for_each_value() -> None:
    values = np.full((3, 7), 0.5)
    values[1, 2] = np.nan
    figure = heatmap_figure(["a", "b", "c"], np.arange(8), values, "overflow_rate", LIGHT)
    address = next(str(image.get("href")) for image in parsed(figure).iter(f"{SVG}image"))
    picture = Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))
    assert picture.size == (7, 3)
    alphas = np.asarray(picture)[..., 3]
    assert np.argwhere(alphas == 0).tolist() == [[1, 2]]


def test_a_heat_map_over_numbers_has_the_smallest_at_the_bottom() -> None:
    heatmap = go.Heatmap(
        x=[0, 1],
        y=[-3.5, -2.5],
        z=[[0.0, 0.0], [1.0, 1.0]],
        colorscale=[[0, "#000000"], [1, "#ffffff"]],
        zmin=0,
        zmax=1,
    )
    figure = go.Figure(heatmap, {"yaxis": {"range": [-4, -2]}, "height": 200, "margin": {"t": 0, "b": 0}})
    image = next(iter(parsed(figure).iter(f"{SVG}image")))
    assert float(str(image.get("y"))) == 0.0 and float(str(image.get("height"))) == pytest.approx(
        200.0, abs=40
    )
    picture = Image.open(io.BytesIO(base64.b64decode(str(image.get("href")).partition(",")[2])))
    upper, lower = np.asarray(picture.convert("L"))[:, 0]
    assert upper > lower


def test_what_it_does_not_draw_is_left_to_the_browser() -> None:
    pie = go.Figure(go.Pie(values=[1, 2]))
    words = go.Figure(go.Scatter(x=["a", "b"], y=[1, 2]))
    assert svg_of(pie, LIGHT) is None and svg_of(words, LIGHT) is None and svg_of(go.Figure(), LIGHT) is None


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 150.0, [0, 20, 40, 60, 80, 100, 120, 140]), (-0.5, 0.5, [-0.4, -0.2, 0, 0.2, 0.4])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, most=9 if high > 1 else 5) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "largest", "label"),
    [
        (0.0, 1.0, "0"),
        (-0.5, 1.0, "−0.5"),
        (5_000.0, 8_000.0, "5000"),
        (5_000.0, 20_000.0, "5k"),
        (1.5e6, 3e6, "1.5M"),
        (2e9, 4e9, "2B"),
        (2e-5, 1e-4, "2·10⁻⁵"),
        (1e-7, 1e-6, "10⁻⁷"),
    ],
)
def test_tick_labels_read_as_people_write_them(value: float, largest: float, label: str) -> None:
    assert tick_label(value, largest) == label


@pytest.mark.parametrize(
    ("pattern", "value", "label"),
    [
        (".2~p", 0.005, "0.5%"),
        ("+.2~%", 0.0025, "+0.25%"),
        ("+.2~%", -0.01, "−1%"),
        ("~g", 1e-3, "0.001"),
        (".3~p", 1.0, "100%"),
    ],
)
def test_formats_of_ticks_are_those_of_plotly(pattern: str, value: float, label: str) -> None:
    assert formatted(value, pattern, 1.0) == label


def test_a_logarithmic_axis_has_ticks_at_powers_of_ten() -> None:
    figure = curves_figure([a_curve([1e-6, 1e2])], LIGHT, log=True)
    axis = axis_of(figure, "y", 280)
    assert axis.is_log and {10.0**power for power in (-6, -4, -2, 0, 2)} >= {value for value, _ in axis.ticks}
    assert axis.share(1e2) - axis.share(1e-6) > 0.85 and math.isnan(axis.share(-1.0))


def test_every_colour_of_the_themes_has_a_variable_in_the_page() -> None:
    for theme in THEMES.values():
        figure = curves_figure(
            [Curve(name="a", arm=slot, slot=slot, x=np.arange(2.0), y=np.arange(2.0)) for slot in theme.arms],
            theme,
        )
        text = svg_of(figure, theme)
        own = [slot for slot in theme.arms if slot not in RUN_SLOTS]
        assert text is not None and all(f"var(--{slot})" in text for slot in own)
        assert "#" not in "".join(re.findall(r'stroke="([^"]*)"', text)), "those of runs have one, too"


def test_the_first_chart_comes_with_the_page(admin: Visitor, seeded: Seeded) -> None:
    path = admin.address(f"runs/{seeded.healthy.id}/")
    page = admin.client.get(path).content.decode()
    figure = page[page.index('id="panels"') :]
    figure = figure[: figure.index("</figure>")]
    assert 'data-state="drawn"' in figure and "gpt fp8 delayed" in figure
    assert "var(--fp8-1)" in figure and "var(--bf16)" in figure
    # The state of the chart is in the address of the page.
    zoomed = admin.client.get(path, {"steps": "40..60"}).content.decode()
    assert ">50</text>" in zoomed and ">100</text>" not in zoomed[: zoomed.index("</figure>")]
    assert ">100</text>" in page


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_brings_the_answer_of_its_first_chart(admin: Visitor, seeded: Seeded, theme: str) -> None:
    run = seeded.healthy
    Run.objects.filter(pk=run.pk).update(name="</script><script>alert(1)")
    if theme == "dark":
        admin.client.cookies[THEME_COOKIE] = theme
    page = admin.client.get(admin.address(f"runs/{run.id}/"), {"steps": "40..60", "panels.log": "1"})
    script = re.search(r"<script [^>]*data-answer ([^>]*)>(.*?)</script>", page.content.decode(), re.DOTALL)
    assert script and f'data-theme="{theme}"' in script[1]
    assert html.unescape(script[1]).endswith('data-query="steps=40..60&panels.log=1"')
    query = {"first": "40", "last": "60", "log": "1", "theme": theme}
    asked = admin.client.get(admin.address(f"runs/{run.id}/figures/panels.json"), query)
    assert json.loads(script[2]) == asked.json()


def test_a_page_leaves_out_a_large_answer(
    admin: Visitor, seeded: Seeded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8scope_dashboard.pages.charts.first_paint.MAX_CHARACTERS", 1_000)
    page = admin.client.get(admin.address(f"runs/{seeded.healthy.id}/")).content.decode()
    assert 'data-state="drawn"' in page and "data-answer" not in page


def test_a_page_says_at_once_why_there_is_no_chart(admin: Visitor) -> None:
    run = make_run(admin.project, "new")
    page = admin.client.get(admin.address(f"runs/{run.id}/")).content.decode()
    assert 'data-state="empty"' in page and "No loss yet." in page


def test_a_page_without_its_first_chart_is_shown(
    admin: Visitor, seeded: Seeded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **more: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("fp8scope_dashboard.pages.charts.first_paint.svg_of", fail)
    answer = admin.client.get(admin.address(f"runs/{seeded.healthy.id}/"))
    assert answer.status_code == 200 and b'data-state="drawn"' not in answer.content
    assert "could not be drawn" in caplog.text


def test_the_state_of_a_chart_is_read_from_the_address_of_its_page() -> None:
    page = QueryDict("loss.x=step&loss.log=1&steps=240..260.5&scalar.name=grad_norm&tensor=a.b")
    query = figure_query("own=1", page, "loss", "steps")
    assert query.dict() == {
        "own": "1",
        "x": "step",
        "log": "1",
        "first": "240",
        "last": "261",
    }
    assert figure_query("", page, "tensor", "")["tensor"] == "a.b"
    assert "first" not in figure_query("", QueryDict("steps=1..1e999&loss.x=step"), "loss", "steps")
    tokens = figure_query("", QueryDict("steps=5..9&loss.x=tokens&loss.tokens=10..20.5"), "loss", "steps")
    assert "first" not in tokens and (tokens["from"], tokens["to"]) == ("10.0", "20.5")


def test_a_chart_is_a_picture_without_javascript(admin: Visitor, seeded: Seeded) -> None:
    path = admin.address(f"runs/{seeded.faulty.id}/figures/heatmap.json")
    answer = admin.client.get(path, {"format": "svg", "width": "640", "title": "Tensors"})
    assert answer["Content-Type"] == "image/svg+xml"
    root = ElementTree.fromstring(answer.content)
    assert root.get("width") == "640" and "Tensors" in texts(root)
    page = admin.client.get(admin.address(f"runs/{seeded.faulty.id}/?tab=efficiency")).content.decode()
    assert re.search(
        r"<noscript><picture>(<source media=[^>]*(width=400|theme=dark)[^>]*>)+\s*"
        r"<img [^>]*efficiency\.json\?format=svg",
        page,
    )


def test_a_chart_without_data_is_a_picture_of_the_reason(admin: Visitor) -> None:
    run = make_run(admin.project, "new")
    answer = admin.client.get(
        admin.address(f"runs/{run.id}/figures/loss.json"), {"format": "svg", "width": "x"}
    )
    assert "No loss yet" in " ".join(texts(ElementTree.fromstring(answer.content)))


def test_steps_that_are_close_to_each_other_have_all_their_digits() -> None:
    steps = np.arange(1_234_561.0, 1_234_581.0)
    drawn = curves_figure([Curve(name="a run", arm="FP8", slot="fp8-1", x=steps, y=np.ones(20))], LIGHT)
    texts = [text.text for text in parsed(drawn).iter(f"{SVG}text") if text.text and "234" in text.text]
    assert "1\u202f234\u202f565" in texts and len(set(texts)) == len(texts) > 2
    assert drawn.layout.separators == ".\u202f" and drawn.layout.xaxis.tickformatstops[0].value == ",d"
    thousands = Curve(name="a run", arm="FP8", slot="fp8-1", x=1_000.0 * np.arange(100.0), y=np.ones(100))
    assert "20k" in [text.text for text in parsed(curves_figure([thousands], LIGHT)).iter(f"{SVG}text")]
