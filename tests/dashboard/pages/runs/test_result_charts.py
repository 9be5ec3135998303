"""Charts of settings against results: which runs and values they show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor, get_json, html, trace_values

from fp8scope_dashboard.pages.charts.svg import svg_of
from fp8scope_dashboard.pages.charts.theme import THEMES
from fp8scope_dashboard.pages.runs.result_figures import SHADES, parallel_figure
from fp8scope_dashboard.pages.runs.result_values import ValueAxis

SCATTER, PARALLEL = "charts/scatter.json", "charts/parallel.json"


@pytest.fixture
def sweep(viewer: Visitor) -> Visitor:
    """Rates as numbers and as the texts that YAML reads 1e-4 as; one run without, one with a loss of NaN."""
    rates: tuple[Any, ...] = (1e-4, "1e-3", 3e-4, None, 6e-4)
    for number, (rate, loss) in enumerate(zip(rates, (2.0, 2.5, 2.1, 2.2, "NaN"), strict=True)):
        config = {"optim": {} if rate is None else {"lr": rate}, "depth": 12 + number % 2, "data": "mix"}
        make_run(
            viewer.project, f"run {number}", config=config, last_scalars={"loss": loss}, colour=number + 1,
            precision="fp8", recipe_name="MXFP8" if number % 2 else "BlockScaling",
        )  # fmt: skip
    return viewer


def points(visitor: Visitor, **query: str) -> dict[str, tuple[float, float]]:
    trace = get_json(visitor, SCATTER, **query)["figure"]["data"][0]
    x, y = trace_values(trace["x"]), trace_values(trace["y"])
    names = [text.partition("<br>")[0] for text in trace["text"]]
    return {name: (float(a), float(b)) for name, a, b in zip(names, x, y, strict=True)}


def test_it_works(sweep: Visitor) -> None:
    assert points(sweep, setting="config.optim.lr", result="loss") == {
        "run 0": (1e-4, 2.0), "run 1": (1e-3, 2.5), "run 2": (3e-4, 2.1)
    }  # fmt: skip
    answer = get_json(sweep, SCATTER, setting="config.optim.lr", result="loss")
    assert answer["summary"] == "Last loss over optim.lr of 3 of 5 runs."
    trace = answer["figure"]["data"][0]
    light = THEMES["light"].arms
    assert trace["marker"]["color"] == [light["run-3"], light["run-2"], light["run-1"]]
    assert all(address.startswith("/p/research/runs/") for address in trace["customdata"])


def test_the_page_offers_the_settings_that_differ(sweep: Visitor) -> None:
    page = html(sweep, "charts/?q=precision:fp8")
    assert '<option value="config.optim.lr">' in page and '<option value="config.depth">' in page
    assert 'value="config.data"' not in page, "the same in all runs"
    assert 'value="config.depth,config.optim.lr"' in page and "5 runs" in page


def test_texts_are_positions_with_names(sweep: Visitor) -> None:
    answer = get_json(sweep, SCATTER, setting="recipe", result="loss")
    axis = answer["figure"]["layout"]["xaxis"]
    assert axis["ticktext"] == ["BlockScaling", "MXFP8"]
    assert {x for x, _ in points(sweep, setting="recipe", result="loss").values()} == {0.0, 1.0}


def test_a_search_chooses_the_runs(sweep: Visitor) -> None:
    assert set(points(sweep, setting="config.depth", result="loss", q="recipe:MXFP8")) == {"run 1", "run 3"}


def test_parallel_coordinates(sweep: Visitor) -> None:
    answer = get_json(sweep, PARALLEL, settings="config.optim.lr,recipe,nonsense,name", result="loss")
    assert answer["figure"]["layout"]["xaxis"]["ticktext"] == ["optim.lr", "Recipe", "Last loss"]
    lines = [trace for trace in answer["figure"]["data"] if trace["mode"] == "lines+markers"]
    texts = "".join(text for trace in lines for text in trace["text"])
    assert "run 4" not in texts, "a loss of NaN has no place"
    assert "run 3<br>Recipe MXFP8" in texts and "run 3<br>optim.lr" not in texts
    low, high = (trace["line"]["color"] for trace in (lines[0], lines[-1]))
    assert low != high


@pytest.mark.parametrize(
    "query",
    [
        {}, {"setting": "spark", "result": "loss"}, {"setting": "config.nothing", "result": "loss"},
        {"setting": "config.depth", "result": "scalar.nothing"},
        {"setting": "config." + "x" * 500, "result": "loss"},
        {"setting": "config.depth", "result": "loss", "q": "nothing at all"},
    ],
)  # fmt: skip
def test_without_values_it_says_what_to_choose(sweep: Visitor, query: dict[str, str]) -> None:
    assert "Choose" in get_json(sweep, SCATTER, **query)["empty"]
    parallel = {**query, "settings": query.get("setting", "")}
    if query.get("setting") not in ("config.nothing",):
        assert "Choose" in get_json(sweep, PARALLEL, **parallel)["empty"]


def test_names_are_escaped(viewer: Visitor) -> None:
    make_run(viewer.project, "<b>x</b>", config={"<i>": 1}, last_scalars={"loss": 1.0})
    answer = get_json(viewer, SCATTER, setting="config.<i>", result="loss")
    assert "<b>" not in str(answer["figure"]["data"]) and "&lt;b&gt;" in str(answer["figure"]["data"])


def test_an_extreme_does_not_hide_the_others() -> None:
    losses = np.array([2.0, 2.1, 2.2, 1e6, np.nan])
    axis = ValueAxis(title="a", positions=np.arange(5.0))
    result = ValueAxis(title="loss", positions=losses)
    figure = parallel_figure([axis], result, list("abcde"), THEMES["light"], compact=False)
    assert len({trace.line.color for trace in figure.data}) == 4 <= SHADES
    assert svg_of(figure, THEMES["light"], width=900) is not None


def test_wide_positive_numbers_are_logarithmic() -> None:
    assert ValueAxis(title="a", positions=np.array([1e-5, 1e-3, np.nan])).is_log
    assert not ValueAxis(title="a", positions=np.array([0.0, 1e3])).is_log
    assert not ValueAxis(title="a", positions=np.array([np.nan])).is_log
    assert not ValueAxis(title="a", positions=np.array([0.0, 1.0]), texts=("x", "y")).is_log
