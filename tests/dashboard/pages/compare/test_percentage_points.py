"""Differences of two shares are in percentage points, and other differences are not."""

from __future__ import annotations

from fp8scope_dashboard.pages.charts.theme import theme_named
from fp8scope_dashboard.pages.formatting import points
from fp8scope_dashboard.pages.scores.checkpoint_figures import CheckpointPoint, Zone, differences_figure
from fp8scope_dashboard.pages.scores.forest import signed
from fp8scope_dashboard.text import own_differences
from fp8scope_dashboard.text.numbers import MINUS, THIN


def test_it_works() -> None:
    assert signed(-0.0123, in_percent=True) == f"{MINUS}1.23{THIN}pp"
    assert signed(0.5, in_percent=False) == "+0.5"
    assert points(0.000001).endswith("pp")


def test_a_sentence_about_shares() -> None:
    assert own_differences.signed(0.02, "share") == "+2.00 percentage points"
    assert own_differences.signed(0.02, "relative") == "+2.00 %"


def test_the_figure() -> None:
    shown = [
        CheckpointPoint(step=10, name="fp8", arm="FP8", slot="fp8-1", value=-0.012, low=-0.02, high=None)
    ]
    margins = [Zone(10, -0.01, 0.01)]
    shares = differences_figure(shown, margins, theme_named("light"), in_percent=True)
    assert shares.layout.yaxis.title.text == "FP8 − BF16 (percentage points)"
    assert [trace.y[0] for trace in shares.data if len(trace.y)] == [-1.2]
    assert (shares.layout.shapes[0].y0, shares.layout.shapes[0].y1) == (-1.0, 1.0)
    means = differences_figure(shown, margins, theme_named("light"), in_percent=False)
    assert [trace.y[0] for trace in means.data if len(trace.y)] == [-0.012]
