"""A run as HTML for a notebook: self-contained, without scripts, and with every text escaped."""

from collections.abc import Mapping
from html import escape
from typing import Any, Final

import numpy as np

from fp8scope.client.history import RunHistory, Values
from fp8scope.client.verdicts import RunVerdict

POINTS: Final = 300
"""Points of the line."""
WIDTH, HEIGHT = 320.0, 48.0
NAME_LENGTH: Final = 200
TONES: Final = {"worse": "#b3261e", "equivalent": "#1a7f37", "better": "#1a7f37", "incomplete": "#9a6700"}
# Colours of text follow the notebook, so that both of its themes are readable.
BADGE: Final = "border:1px solid {0};color:{0};border-radius:4px;padding:0 .4em"


def run_html(row: Mapping[str, Any], verdict: RunVerdict | None, line: RunHistory | None) -> str:
    """A run of an answer with its verdict and its loss; both may be missing."""
    address = str(row["url"])
    name = escape(str(row["name"])[:NAME_LENGTH])
    title = f'<a href="{escape(address)}">{name}</a>' if address.startswith(("http://", "https://")) else name
    parts = [f"<strong>{title}</strong> {escape(str(row['state']))}", f"step {_count(row['last_step'])}"]
    parts += [escape(str(row["precision"])), escape(str(row["group"]))]
    body = f"<div>{' &middot; '.join(part for part in parts if part)}</div>"
    if verdict is not None:
        body += f"<div>{_badge(verdict)} {escape(verdict.explanation)}</div>"
        body += "".join(f"<div>Not judged: {escape(text)}</div>" for text in verdict.not_judged)
    if line is not None and len(line):
        body += f"<div>{line_svg(line.values)} {escape(line.name)} {_shown(line.values)}</div>"
    return f'<div class="fp8scope-run">{body}</div>'


def _badge(verdict: RunVerdict) -> str:
    style = BADGE.format(TONES.get(verdict.verdict, "#57606a"))
    return f'<span style="{style}">{escape(verdict.label)}</span>'


def _count(step: Any) -> str:
    return f"{step:,}" if isinstance(step, int) else "none yet"


def _shown(values: Values) -> str:
    finite = values[np.isfinite(values)]
    return f"{finite[-1]:.4g}" if len(finite) else "not finite"


def line_svg(values: Values) -> str:
    """A line through the finite values, with gaps between them; the range is that of its last nine tenths.

    The first steps of a training would flatten the rest.
    """
    settled = values[len(values) // 10 :]
    finite = settled[np.isfinite(settled)]
    if not len(finite):
        finite = np.zeros(1)
    low, high = float(finite.min()), float(finite.max())
    span = high - low or 1.0
    x = np.linspace(1.0, WIDTH - 1.0, len(values))
    # The range of the largest floats is no float, and what is not finite is left out below.
    with np.errstate(over="ignore", invalid="ignore"):
        y = 1.0 + (HEIGHT - 2.0) * (1.0 - np.clip((values - low) / span, 0.0, 1.0))
    points, pen = [], "M"
    for across, down in zip(x.tolist(), y.tolist(), strict=True):
        if np.isfinite(down):
            points.append(f"{pen}{across:.1f} {down:.1f}")
            pen = "L"
        else:
            pen = "M"
    size = f'width="{WIDTH:.0f}" height="{HEIGHT:.0f}" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}"'
    path = f'<path d="{"".join(points)}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    return f'<svg {size} role="img" aria-label="loss">{path}</svg>'
