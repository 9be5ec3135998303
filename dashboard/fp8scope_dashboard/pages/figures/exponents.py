"""How a tensor's elements are distributed over exponents, and what its format can hold of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, log2

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from fp8scope_dashboard.pages.figures.formats import FormatRange
from fp8scope_dashboard.pages.figures.theme import Theme, faded, new_figure

Floats = NDArray[np.float64]

HEIGHT = 320
# Exponents beside those that occur; the bars of zeros and of NaN and Inf stand one further out.
ROOM = 2
LEAST_SPAN = 16
FATES = ("saturates", "normal", "subnormal", "becomes zero")


@dataclass(frozen=True)
class Exponents:
    """A tensor's distribution in one step.

    Attributes:
        first: the exponent of counts[0].
        counts: float64[E], elements with floor(log2 |x|) = first + i.
        zeros, nonfinite: elements that are zero; that are NaN or infinite.
        scale: the multiplier used in that step; NaN where none is known.
        format: the tensor's format; None where it is not quantised.
        in_blocks: each block has a scale of its own, and `scale` is the median one.
    """

    first: int
    counts: Floats
    zeros: float
    nonfinite: float
    scale: float
    format: FormatRange | None
    in_blocks: bool = False

    @property
    def total(self) -> float:
        return float(self.counts.sum()) + self.zeros + self.nonfinite

    @property
    def limits(self) -> tuple[float, float, float, float] | None:
        """log2 |x| above which x saturates, below which q is subnormal, the smallest q, and what flushes."""
        if self.format is None or not (0 < self.scale < np.inf):
            return None
        of = self.format
        numbers = (of.largest, of.smallest_normal, of.smallest_subnormal, of.flushed)
        return tuple(log2(number) - log2(self.scale) for number in numbers)  # type: ignore[return-value]

    def fates(self) -> list[str]:
        """What becomes of most of each bin: FATES; all are normal where no single scale tells.

        A bin is the values from 2^e up to 2^(e+1). The limit may lie inside: then its middle decides.
        """
        if self.limits is None or self.in_blocks:
            return ["normal"] * len(self.counts)
        largest, normal, _, flushed = self.limits
        middles = self.first + np.arange(len(self.counts)) + log2(1.5)
        choice = np.select([middles > largest, middles <= flushed, middles < normal], [0, 3, 2], default=1)
        return [FATES[i] for i in choice]


def exponents_figure(found: Exponents, theme: Theme, *, compact: bool = False) -> go.Figure:
    """Bars over exponents, logarithmic upwards so that single outliers show, with the format's limits."""
    low, high = _span(found)
    kept = slice(low - found.first, high - found.first + 1)
    counts, fates = found.counts[kept], np.array(found.fates()[kept])
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
        "normal": theme.arms["bf16"],
        "subnormal": faded(theme.arms["bf16"], 0.45),
        "becomes zero": theme.warning,
    }
    for fate in FATES:
        chosen = (fates == fate) & (counts > 0)
        if chosen.any():
            share = counts[chosen] / found.total
            _bars(figure, exponents[chosen], share, fate, colours[fate])
    _special(figure, "zero", low - ROOM - 1, found.zeros / found.total, theme.muted)
    _special(figure, "NaN or Inf", high + ROOM + 2, found.nonfinite / found.total, theme.danger)
    _limits(figure, found, theme, (low - ROOM, high + ROOM + 1), compact=compact)
    _axes(figure, found, low, high, compact=compact)
    return figure


def summary_of(found: Exponents, what: str) -> str:
    """In one sentence, for those who cannot see it."""
    if found.limits is None or found.in_blocks:
        how = "with a scale for each block" if found.in_blocks else "without a known scale"
        return f"Exponents of {what}, {how}; {found.zeros / found.total:.3%} are zero."
    fates = np.array(found.fates())
    shares = [f"{found.counts[fates == fate].sum() / found.total:.3%} {fate}" for fate in FATES]
    return f"Exponents of {what}, by bins: {', '.join(shares)}; {found.zeros / found.total:.3%} are zero."


def _span(found: Exponents) -> tuple[int, int]:
    """The exponents drawn: those that occur and the format's limits, and room for a shape to be seen."""
    there = np.flatnonzero(found.counts)
    ends = [float(found.first + i) for i in (there[0], there[-1])] if len(there) else []
    if found.limits is not None:
        ends += [found.limits[0], found.limits[2]]
    low, high = (floor(min(ends)), floor(max(ends))) if ends else (-LEAST_SPAN // 2, LEAST_SPAN // 2)
    missing = max(0, LEAST_SPAN - (high - low))
    last = found.first + len(found.counts) - 1
    return max(found.first, low - missing // 2), min(last, high + (missing + 1) // 2)


def _bars(figure: go.Figure, exponents: NDArray[np.int64], share: Floats, name: str, colour: str) -> None:
    figure.add_bar(
        # From e to e + 1, so that the limits stand where they are.
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
    """A bar apart for what has no exponent; nothing where there is none of it."""
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
    figure: go.Figure, found: Exponents, theme: Theme, ends: tuple[float, float], *, compact: bool
) -> None:
    if found.limits is None:
        return
    largest, normal, subnormal, _ = found.limits
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
            text=_label(name, found.in_blocks, compact=compact),
            showarrow=False,
            # Within the plot, beside its line: to the left of the largest, to the right of the others.
            xanchor="right" if name == "largest" else "left",
            yanchor="top",
            xshift=-4 if name == "largest" else 4,
            # The two smallest are close to each other.
            yshift=-14 if name == "smallest subnormal" else 0,
            font={"size": 10 if compact else 11, "color": colour},
        )


def _label(name: str, in_blocks: bool, *, compact: bool) -> str:
    if compact:
        return name.replace("smallest ", "min ")
    return f"{name} (median block)" if in_blocks and name == "largest" else name


def _axes(figure: go.Figure, found: Exponents, low: int, high: int, *, compact: bool) -> None:
    smallest = 0.5 / max(found.total, 1.0)
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
    if found.zeros > 0:
        marks, names = [low - ROOM - 1, *marks], ["0", *names]
    if found.nonfinite > 0:
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
