"""The map of differences between the tensors of two runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.charts.theme import Theme, escaped, new_figure, scale_of
from fp8scope_dashboard.pages.tensors.heat_map import MIN_PIXELS, ROW_PIXELS, colour_bar, name_rows
from fp8scope_dashboard.statistics.arrays import Floats

# Differences of rates are shown from one in a million on, by their power of ten.
MIN_RATE: Final = 1e-6
DECADES: Final = 6.0
MARGIN_PIXELS: Final = 90


def difference_figure(
    names: Sequence[str],
    step_edges: NDArray[np.int64],
    values: Floats,
    statistic: str,
    theme: Theme,
    *,
    is_rate: bool,
    runs: tuple[str, str],
    compact: bool = False,
) -> go.Figure:
    """Draw float64[T, C]: red where the second run has more, blue where it has less, NaN blank."""
    height = max(MIN_PIXELS, ROW_PIXELS * len(names) + MARGIN_PIXELS)
    figure = new_figure(theme, compact=compact, height=height, x_title="step")
    z, limit, ticks, labels = _levels(values, is_rate)
    unit = "difference %{customdata:+.3~g}" if is_rate else "2^%{customdata:+.2f}"
    title = escaped(glossary.title(statistic))
    figure.add_heatmap(
        x=(step_edges[:-1] + step_edges[1:] - 1) / 2.0,
        y=np.arange(len(names)),
        z=z.astype(np.float32),
        customdata=values.astype(np.float32),
        colorscale=scale_of((*theme.cool[:0:-1], theme.heat[0], *theme.heat[1:])),
        zmin=-limit,
        zmax=limit,
        ygap=1,
        hoverongaps=False,
        hovertemplate=f"<b>%{{y}}</b><br>step %{{x:.0f}}<br>{title} {unit}<extra>{escaped(runs[1])} against "
        f"{escaped(runs[0])}</extra>",
        colorbar=colour_bar(ticks, labels, theme, compact=False),
    )
    name_rows(figure, names, theme, compact=compact)
    # The page lets the chart choose what it shows.
    figure.add_annotation(
        text=title,
        xref="paper",
        yref="paper",
        x=0,
        y=1,
        xanchor="left",
        yanchor="bottom",
        yshift=4,
        showarrow=False,
        font={"size": 12, "color": theme.muted},
    )
    figure.update_layout(
        hovermode="closest", plot_bgcolor=theme.surface, meta={"names": list(names)}, margin={"l": 8, "r": 8}
    )
    return figure


def _levels(values: Floats, is_rate: bool) -> tuple[Floats, float, list[float], list[str]]:
    """The colour level of each value, the end of the scale, and the ticks of the colour bar."""
    if is_rate:
        with np.errstate(divide="ignore"):
            size = np.clip(np.log10(np.abs(values) / MIN_RATE), 0.0, DECADES)
        levels = np.where(np.isnan(values), np.nan, np.sign(values) * size)
        ticks = [-6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0]
        return levels, DECADES, ticks, ["−100 %", "−1 %", "−0.01 %", "0", "0.01 %", "1 %", "100 %"]
    finite = np.abs(values[np.isfinite(values)])
    # A few extreme cells must not bleach the others.
    limit = float(np.clip(np.ceil(np.quantile(finite, 0.995)) if len(finite) else 1.0, 1.0, 24.0))
    ticks = [-limit, -limit / 2, 0.0, limit / 2, limit]
    return values, limit, ticks, [f"2^{tick:+.3g}" if tick else "equal" for tick in ticks]
