"""The exponents of a tensor with the limits of its format: in one step, and over many."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, log2

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.what_if.formats import NumberFormat
from fp8scope_dashboard.pages.charts.theme import Theme, faded, new_figure, scale_of
from fp8scope_dashboard.statistics.arrays import Floats

HEIGHT = 320
# Empty exponents on both sides. The bars of zero and of NaN and Inf are one further out.
ROOM = 2
MIN_SPAN = 16
OUTCOMES = ("saturates", "normal", "subnormal", "becomes zero")


@dataclass(frozen=True, kw_only=True)
class History:
    """A tensor's histograms in N sampled steps.

    Attributes:
        steps: int64[N], increasing.
        first: the exponent of the first bin.
        shares: float64[N, E], shares of all elements with floor(log2 |x|) = first + i.
        scale_steps, scales: int64[S] and float64[S], the multipliers over the steps; empty if unknown.
        format: the tensor's format; None if it is not quantised.
        in_blocks: each block has its own scale, and `scales` are their medians.
    """

    steps: NDArray[np.int64]
    first: int
    shares: Floats
    scale_steps: NDArray[np.int64]
    scales: Floats
    format: NumberFormat | None
    in_blocks: bool = False


@dataclass(frozen=True, kw_only=True)
class Exponents:
    """A tensor's histogram of exponents at one step.

    Attributes:
        first: the exponent of counts[0].
        counts: float64[E], elements with floor(log2 |x|) = first + i.
        zeros, nonfinite: numbers of elements that are zero, and that are NaN or infinite.
        scale: the multiplier of that step; NaN if unknown.
        format: the tensor's format; None if it is not quantised.
        in_blocks: each block has its own scale, and `scale` is their median.
        amax: the largest finite |x|; NaN if unknown.
    """

    first: int
    counts: Floats
    zeros: float
    nonfinite: float
    scale: float
    format: NumberFormat | None
    in_blocks: bool = False
    amax: float = float("nan")

    @property
    def total(self) -> float:
        return float(self.counts.sum()) + self.zeros + self.nonfinite

    @property
    def limits(self) -> tuple[float, float, float, float] | None:
        """log2 |x| of the largest, smallest normal, smallest subnormal and largest flushed value."""
        if self.format is None or not (0 < self.scale < np.inf):
            return None
        of = self.format
        numbers = (of.largest, of.smallest_normal, of.smallest_subnormal, of.flushed)
        return tuple(log2(number) - log2(self.scale) for number in numbers)  # type: ignore[return-value]

    def outcomes(self) -> list[str]:
        """The outcome of each bin, one of OUTCOMES; all normal without a single known scale.

        A bin contains the values from 2^e up to 2^(e+1). If a limit lies inside, the bin's middle decides;
        but nothing saturates if amax does not.
        """
        if self.limits is None or self.in_blocks:
            return ["normal"] * len(self.counts)
        largest, normal, _, flushed = self.limits
        middles = self.first + np.arange(len(self.counts)) + log2(1.5)
        saturates = middles > (largest if not self._fits else np.inf)
        choice = np.select([saturates, middles <= flushed, middles < normal], [0, 3, 2], default=1)
        return [OUTCOMES[i] for i in choice]

    @property
    def _fits(self) -> bool:
        """Return whether amax is known, and in the range of the format."""
        # The float32 next to the largest value is the rounding of a scale.
        return self.format is not None and self.amax * self.scale <= self.format.largest * (1.0 + 2.0**-22)


def exponents_figure(histogram: Exponents, theme: Theme, *, compact: bool = False) -> go.Figure:
    """Bars over exponents with the format's limits. The log scale makes single outliers visible."""
    low, high = _span(histogram)
    bins = slice(low - histogram.first, high - histogram.first + 1)
    counts, outcomes = histogram.counts[bins], np.array(histogram.outcomes()[bins])
    exponents = np.arange(low, high + 1)
    figure = new_figure(
        theme,
        compact=compact,
        height=HEIGHT,
        x_title="exponent: floor(log₂ |x|)",
        y_title="share of elements",
    )
    colours = {
        "saturates": theme.danger,
        "normal": theme.muted,
        "subnormal": faded(theme.muted, 0.45),
        "becomes zero": theme.warning,
    }
    for outcome in OUTCOMES:
        chosen = (outcomes == outcome) & (counts > 0)
        if chosen.any():
            share = counts[chosen] / histogram.total
            _bars(figure, exponents[chosen], share, outcome, colours[outcome])
    _special(figure, "zero", low - ROOM - 1, histogram.zeros / histogram.total, theme.muted)
    _special(figure, "NaN or Inf", high + ROOM + 2, histogram.nonfinite / histogram.total, theme.danger)
    _limits(figure, histogram, theme, (low - ROOM, high + ROOM + 1), compact=compact)
    _axes(figure, histogram, low, high, compact=compact)
    return figure


def history_figure(history: History, theme: Theme, *, compact: bool = False) -> go.Figure:
    """Exponents by steps. The lines are the window that the scale of each step can represent."""
    figure = new_figure(theme, compact=compact, height=HEIGHT, x_title="step", y_title="log₂ |x|")
    low, high = _window_span(history)
    bins = slice(low - history.first, high - history.first + 1)
    shares = history.shares[:, bins].T
    with np.errstate(divide="ignore"):
        z = np.where(shares > 0, np.log10(np.maximum(shares, 1e-8)), np.nan)
    figure.add_heatmap(
        x=history.steps,
        # A bin covers e to e + 1.
        y=np.arange(low, high + 1) + 0.5,
        z=z.astype(np.float32),
        customdata=shares.astype(np.float32),
        colorscale=scale_of(theme.cool),
        zmin=-8.0,
        zmax=0.0,
        hoverongaps=False,
        hovertemplate="step %{x}<br>2<sup>%{y:.0f}</sup>: %{customdata:.3~p}<extra></extra>",
        colorbar={
            "tickvals": [-8, -6, -4, -2, 0],
            "ticktext": ["10⁻⁶ %", "0.0001 %", "0.01 %", "1 %", "100 %"],
            "thickness": 10,
            "outlinewidth": 0,
            "tickfont": {"size": 11, "color": theme.muted},
        },
        showscale=not compact,
    )
    _window(figure, history, theme)
    # Cells at the ends reach beyond the steps that were sampled.
    ends = [float(history.steps[0]), float(max(history.steps[-1], history.steps[0] + 1))]
    figure.update_xaxes(range=ends)
    figure.update_yaxes(range=[low - 0.5, high + 1.5], dtick=8 if high - low > 24 else 4, showgrid=False)
    figure.update_layout(
        hovermode="closest", showlegend=True, margin={"t": 34, "r": 10, "l": 44 if compact else 60, "b": 40}
    )
    return figure


def history_summary(history: History, name: str) -> str:
    """A one-sentence description of the figure for screen readers."""
    steps = f"{len(history.steps)} sampled steps from {history.steps[0]} to {history.steps[-1]}"
    if history.format is None or not len(history.scales):
        return f"Exponents of {name} in {steps}."
    highest = np.array([np.flatnonzero(row)[-1] if row.any() else -1 for row in history.shares])
    tops = history.first + highest + 1.0
    limits = np.log2(history.format.largest) - np.log2(_scales_at(history))
    above = int((tops > np.ceil(limits) + 1).sum())
    return f"Exponents of {name} in {steps}; {above} have some above the largest value."


def _scales_at(history: History) -> Floats:
    """The last known scale at each sampled step."""
    positions = np.searchsorted(history.scale_steps, history.steps, side="right") - 1
    return history.scales[np.maximum(positions, 0)]


def _window_span(history: History) -> tuple[int, int]:
    """The exponents to draw: those that occur, and the window of the format near them."""
    occurring = np.flatnonzero(history.shares.any(axis=0))
    ends = [history.first + int(i) for i in (occurring[0], occurring[-1])] if len(occurring) else [-8, 8]
    if history.format is not None and len(history.scales):
        with np.errstate(divide="ignore"):
            logs = np.log2(history.scales[history.scales > 0])
        if len(logs):
            ends.append(floor(log2(history.format.largest) - float(logs.min())))
            ends.append(floor(log2(history.format.smallest_subnormal) - float(logs.max())))
    last = history.first + history.shares.shape[1] - 1
    return max(history.first, min(ends) - 1), min(last, max(ends) + 1)


def _window(figure: go.Figure, history: History, theme: Theme) -> None:
    if history.format is None or not len(history.scales):
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        shift = np.where(history.scales > 0, np.log2(history.scales), np.nan)
    median = " (median block)" if history.in_blocks else ""
    for limit, name, colour, dash in (
        (history.format.largest, f"largest{median}", theme.danger, "solid"),
        (history.format.smallest_normal, "smallest normal", theme.muted, "dot"),
        (history.format.smallest_subnormal, "smallest subnormal", theme.warning, "dash"),
    ):
        figure.add_scatter(
            x=history.scale_steps,
            y=log2(limit) - shift,
            name=name,
            mode="lines",
            line={"color": colour, "width": 1.8, "dash": dash, "shape": "hv"},
            hovertemplate=f"2<sup>%{{y:.1f}}</sup><extra>{name}</extra>",
        )


def summary_of(histogram: Exponents, name: str) -> str:
    """A one-sentence description for screen readers."""
    if histogram.limits is None or histogram.in_blocks:
        how = "with a scale for each block" if histogram.in_blocks else "without a known scale"
        return f"Exponents of {name}, {how}; {histogram.zeros / histogram.total:.3%} are zero."
    outcomes = np.array(histogram.outcomes())
    shares = [
        f"{histogram.counts[outcomes == outcome].sum() / histogram.total:.3%} {outcome}"
        for outcome in OUTCOMES
    ]
    zeros = histogram.zeros / histogram.total
    return f"Exponents of {name}, by bins: {', '.join(shares)}; {zeros:.3%} are zero."


def _span(histogram: Exponents) -> tuple[int, int]:
    """The exponents to draw: those that occur, the format's limits, and at least MIN_SPAN."""
    occurring = np.flatnonzero(histogram.counts)
    ends = [float(histogram.first + i) for i in (occurring[0], occurring[-1])] if len(occurring) else []
    if histogram.limits is not None:
        ends += [histogram.limits[0], histogram.limits[2]]
    low, high = (floor(min(ends)), floor(max(ends))) if ends else (-MIN_SPAN // 2, MIN_SPAN // 2)
    missing = max(0, MIN_SPAN - (high - low))
    last = histogram.first + len(histogram.counts) - 1
    return max(histogram.first, low - missing // 2), min(last, high + (missing + 1) // 2)


def _bars(figure: go.Figure, exponents: NDArray[np.int64], share: Floats, name: str, colour: str) -> None:
    figure.add_bar(
        # A bar covers e to e + 1, which places the limits correctly.
        x=exponents + 0.5,
        y=share,
        width=0.92,
        name=name,
        marker={"color": colour, "line": {"width": 0}},
        customdata=np.stack((exponents, exponents + 1), axis=1),
        hovertemplate="2<sup>%{customdata[0]}</sup> ≤ |x| < 2<sup>%{customdata[1]}</sup>: %{y:.3~p}"
        f"<extra>{name}</extra>",
    )


def _special(figure: go.Figure, name: str, x: float, share: float, colour: str) -> None:
    """A separate bar for elements without an exponent, if there are any."""
    if share > 0:
        figure.add_bar(
            x=[x],
            y=[share],
            width=1.2,
            name=name,
            showlegend=False,
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate=f"{name}: %{{y:.3~p}}<extra></extra>",
        )


def _limits(
    figure: go.Figure, histogram: Exponents, theme: Theme, ends: tuple[float, float], *, compact: bool
) -> None:
    if histogram.limits is None:
        return
    largest, normal, subnormal, _ = histogram.limits
    named = (
        (largest, "largest", theme.danger),
        (normal, "smallest normal", theme.muted),
        (subnormal, "smallest subnormal", theme.warning),
    )
    for x, name, colour in named:
        if not ends[0] <= x <= ends[1]:
            continue
        figure.add_vline(x=x, line={"color": colour, "width": 1.5, "dash": "dash"})
        figure.add_annotation(
            x=x,
            y=1.0,
            yref="paper",
            text=_label(name, histogram.in_blocks, compact=compact),
            showarrow=False,
            # Inside the plot: left of the line of the largest value, right of the other lines.
            xanchor="right" if name == "largest" else "left",
            yanchor="top",
            xshift=-4 if name == "largest" else 4,
            # These lines are close to each other; in FP4 and FP6, all three are.
            yshift={"smallest subnormal": -14, "smallest normal": -28 if largest - normal < 8 else 0}.get(
                name, 0
            ),
            font={"size": 10 if compact else 11, "color": colour},
        )


def _label(name: str, in_blocks: bool, *, compact: bool) -> str:
    if compact:
        return name.replace("smallest ", "min ")
    return f"{name} (median block)" if in_blocks and name == "largest" else name


def _axes(figure: go.Figure, histogram: Exponents, low: int, high: int, *, compact: bool) -> None:
    smallest = 0.5 / max(histogram.total, 1.0)
    decades = range(floor(log2(smallest) / log2(10)), 1)
    step = max(1, -(-len(decades) // 5))
    ticks = [10.0**d for d in decades if d % step == 0]
    figure.update_yaxes(
        type="log",
        range=[float(np.log10(smallest)), 0.35],
        tickvals=ticks,
        ticktext=[f"{100 * tick:g} %" for tick in ticks],
    )
    every = 8 if high - low > (24 if compact else 48) else 4
    marks = list(range(-(-low // every) * every, high + 1, every))
    names = [f"2<sup>{e}</sup>" for e in marks]
    if histogram.zeros > 0:
        marks, names = [low - ROOM - 1, *marks], ["0", *names]
    if histogram.nonfinite > 0:
        marks, names = [*marks, high + ROOM + 2], [*names, "NaN"]
    figure.update_xaxes(
        range=[low - ROOM - 2, high + ROOM + 3], tickmode="array", tickvals=marks, ticktext=names
    )
    figure.update_layout(
        bargap=0,
        barmode="overlay",
        hovermode="closest",
        showlegend=True,
        margin={"t": 34, "r": 10, "l": 44 if compact else 60, "b": 44},
    )
