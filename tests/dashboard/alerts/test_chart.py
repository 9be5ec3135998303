"""The picture of an alert: what is drawn where, from what an event stores."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fp8scope_dashboard.alerts.delivery import chart
from fp8scope_dashboard.text.ticks import ticks

STEPS = list(range(900, 1101))


def series(values: list[Any], **fields: str) -> dict[str, Any]:
    return {"name": "loss", "steps": STEPS, "values": values, **fields}


def pixels(
    evidence: dict[str, Any], *, threshold: float | None = None, onset: int = 1000
) -> np.ndarray[Any, Any]:
    """The picture as int[H, W, 3]."""
    drawn = chart.draw(
        evidence, title="Loss divergence", onset=onset, detected=onset + 20, threshold=threshold
    )
    assert drawn is not None
    image = Image.open(io.BytesIO(drawn))
    assert image.format == "PNG" and image.size == (chart.WIDTH, chart.HEIGHT)
    return np.asarray(image.convert("RGB")).astype(int)


def has(picture: np.ndarray[Any, Any], colour: str) -> np.ndarray[Any, Any]:
    """Where the picture has about this colour: bool[H, W]."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    near: np.ndarray[Any, Any] = np.abs(picture - rgb).sum(axis=2) < 60
    return near


def columns(mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.flatnonzero(mask[chart.TOP + 40 : chart.HEIGHT - chart.BOTTOM - 4].any(axis=0))


def test_it_works() -> None:
    values = [2.0] * 100 + list(np.linspace(2.0, 4.0, 101))
    picture = pixels({"series": [series(values)]}, threshold=3.0)
    line = has(picture, chart.COLOURS[0])
    rows_of = [np.flatnonzero(line[chart.TOP + 40 :, x]).mean() for x in (chart.LEFT + 100, chart.WIDTH - 60)]
    # The loss rises, so its end is above its beginning.
    assert rows_of[1] < rows_of[0] - 100
    across = chart.WIDTH - chart.LEFT - chart.RIGHT
    onset = columns(has(picture, chart.ONSET)).min()
    assert onset == pytest.approx(chart.LEFT + across * 0.5, abs=4)
    dashes = has(picture, chart.THRESHOLD)[:, chart.LEFT + 10 : chart.WIDTH - chart.RIGHT].sum(axis=1)
    # The threshold is halfway between the values, margins aside.
    middle = (chart.TOP + chart.HEIGHT - chart.BOTTOM) / 2
    assert np.argmax(dashes[chart.TOP + 40 : -90]) + chart.TOP + 40 == pytest.approx(middle, abs=12)


def test_values_that_are_not_finite_are_marked_above_the_axis() -> None:
    values: list[Any] = [2.0] * 150 + ["NaN", "Infinity"] + [2.1] * 49
    marked = has(pixels({"series": [series(values)]}), chart.ONSET)
    without = has(pixels({"series": [series([2.0] * 201)]}), chart.ONSET)
    edge = slice(chart.TOP - 2, chart.TOP + 12)
    x = chart.LEFT + round((chart.WIDTH - chart.LEFT - chart.RIGHT) * 150 / 200)
    assert marked[edge, x - 6 : x + 6].sum() > 40 and without[edge, x - 6 : x + 6].sum() == 0


def test_draws_baselines_and_tensors_in_colours_of_their_own() -> None:
    one, other = series([2.0] * 201), series([1.0] * 201, name="bf16")
    picture = pixels({"series": [one], "baseline": [other]})
    assert len(columns(has(picture, chart.BASELINE))) > 500
    tensors = [series([0.1 * i] * 201, tensor=f"model.layers.{i}.input") for i in range(1, 4)]
    picture = pixels({"series": [*tensors, one]})
    assert all(has(picture, colour)[chart.TOP :].any(axis=0).sum() > 500 for colour in chart.COLOURS)


def test_a_wide_range_is_drawn_on_a_logarithmic_axis() -> None:
    picture = pixels({"series": [series([2.0] * 100 + list(np.geomspace(2.0, 2e9, 101)))]})
    rows = [
        np.flatnonzero(has(picture, chart.COLOURS[0])[chart.TOP + 40 :, x]).mean() for x in (850, 930, 1010)
    ]
    # A geometric growth is a straight line.
    assert rows[0] - rows[1] == pytest.approx(rows[1] - rows[2], abs=6)


@pytest.mark.parametrize(
    "evidence",
    [
        {},
        {"series": []},
        {"series": [series(["NaN"] * 201)]},
        {"series": [{"name": "loss", "steps": [], "values": []}]},
    ],
)
def test_without_values_there_is_no_picture(evidence: dict[str, Any]) -> None:
    assert chart.draw(evidence, title="x", onset=1000, detected=1000, threshold=None) is None


@pytest.mark.parametrize(
    ("values", "threshold"),
    [
        ([0.0], None),
        ([2.5], 0.0),
        ([-1.0, -1.0], 1e12),
        ([1e-300, 1e300], 3.0),
        ([0.0, 1.7e308], float("inf")),
        ([5.0, "NaN"], float("nan")),
    ],
)
def test_draws_extreme_values(values: list[Any], threshold: float | None) -> None:
    evidence = {"series": [{"name": "loss", "steps": STEPS[: len(values)], "values": values}]}
    title = "A very long title " * 40
    assert chart.draw(evidence, title=title, onset=900, detected=900, threshold=threshold)


@pytest.mark.parametrize(
    ("low", "high", "logarithmic", "expected"),
    [
        (0.0, 10.0, False, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]),
        (2.31, 2.36, False, [2.31, 2.32, 2.33, 2.34, 2.35, 2.36]),
        (-3.0, 2.0, False, [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0]),
        (0.5, 2e4, True, [1.0, 10.0, 100.0, 1e3, 1e4]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, logarithmic: bool, expected: list[float]) -> None:
    assert ticks(low, high, logarithmic) == pytest.approx(expected)
