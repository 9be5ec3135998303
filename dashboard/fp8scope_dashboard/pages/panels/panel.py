"""The content of a panel: its metrics, formula or pattern, its axes, its smoothing and its size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args
from uuid import uuid4

from django.http import QueryDict

from fp8scope_dashboard.db.regular_expressions import MAX_LENGTH as MAX_PATTERN
from fp8scope_dashboard.pages.charts.series import Axis
from fp8scope_dashboard.pages.panels import formulas

Smoothing = Literal["auto", "none", "exponential", "window"]
Height = Literal["small", "medium", "large"]

MAX_PANELS: Final = 60
MAX_METRICS: Final = 12
MAX_NAME: Final = 512
MAX_TITLE: Final = 120
MAX_WIDTH: Final = 3
WIDTHS: Final = tuple(str(number) for number in range(1, MAX_WIDTH + 1))
# The weight of an exponential average, and the steps of a window.
MAX_WEIGHT, MAX_WINDOW = 0.999, 10_001
USUAL_STRENGTH: Final[Mapping[Smoothing, float]] = {"exponential": 0.9, "window": 101}
PIXELS: Final[Mapping[Height, int]] = {"small": 200, "medium": 280, "large": 420}


class PanelError(ValueError):
    """The panel cannot be shown; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart that a person has arranged.

    Attributes:
        id: tells it apart in its view.
        title: empty: made from what it shows.
        metrics, formula, pattern: what it draws: these scalars, a formula, and those whose names match.
        low, high: the range of the vertical axis; None: that of the data.
        strength: the weight of the exponential average, or the steps of the window.
        width: in columns.
        is_pinned: it stands above all others.
    """

    id: str = ""
    title: str = ""
    metrics: tuple[str, ...] = ()
    formula: str = ""
    pattern: str = ""
    x: Axis = "step"
    log: bool = False
    low: float | None = None
    high: float | None = None
    smoothing: Smoothing = "auto"
    strength: float = 0.0
    width: int = 1
    height: Height = "medium"
    is_pinned: bool = False

    @property
    def name(self) -> str:
        """Its title, or what it shows."""
        if self.title:
            return self.title
        return ", ".join(filter(None, (*self.metrics, self.formula, self.pattern and f"/{self.pattern}/")))

    @property
    def query(self) -> QueryDict:
        """Return what the address of its figure needs."""
        query = QueryDict(mutable=True)
        query.setlist("metric", list(self.metrics))
        plain: dict[str, Any] = {
            "formula": self.formula,
            "pattern": self.pattern,
            "x": self.x if self.x != "step" else "",
            "log": "1" if self.log else "",
            "low": "" if self.low is None else f"{self.low:g}",
            "high": "" if self.high is None else f"{self.high:g}",
            "smoothing": self.smoothing if self.smoothing != "auto" else "",
            "strength": f"{self.strength:g}" if self.smoothing in USUAL_STRENGTH else "",
            "height": self.height if self.height != "medium" else "",
        }
        for name, value in plain.items():
            if value:
                query[name] = value
        return query

    def as_json(self) -> dict[str, Any]:
        """Return what is stored of it; see `of_json`."""
        return {**asdict(self), "metrics": list(self.metrics)}


def new_id() -> str:
    """The id of a new panel."""
    return uuid4().hex[:10]


def read_panel(fields: QueryDict) -> Panel:
    """The panel that a form or the address of a figure describes.

    Raises:
        PanelError: a field is out of its bounds, or there is nothing to show.
    """
    metrics = tuple(dict.fromkeys(name for name in fields.getlist("metric") if name))
    if len(metrics) > MAX_METRICS:
        raise PanelError(f"A panel shows at most {MAX_METRICS} metrics; use a regular expression for more.")
    if any(len(name) > MAX_NAME for name in metrics):
        raise PanelError(f"The name of a metric has at most {MAX_NAME} characters.")
    formula, pattern = fields.get("formula", "").strip(), fields.get("pattern", "").strip()
    if len(pattern) > MAX_PATTERN:
        raise PanelError(f"A regular expression has at most {MAX_PATTERN} characters.")
    if formula:
        try:
            formulas.parse(formula, metrics)
        except formulas.FormulaError as error:
            raise PanelError(str(error)) from error
    if not (metrics or formula or pattern):
        raise PanelError("Choose a metric, or write a formula or a regular expression.")
    title = fields.get("title", "").strip()
    if len(title) > MAX_TITLE:
        raise PanelError(f"A title has at most {MAX_TITLE} characters.")
    low, high = (_bound(fields.get(name, "")) for name in ("low", "high"))
    if low is not None and high is not None and low >= high:
        raise PanelError("The upper end of the range must be above the lower one.")
    smoothing: Smoothing = _choice(fields.get("smoothing", ""), get_args(Smoothing), "auto")
    width = fields.get("width", "1")
    return Panel(
        id=fields.get("panel", "")[:32],
        title=title,
        metrics=metrics,
        formula=formula,
        pattern=pattern,
        x=_choice(fields.get("x", ""), get_args(Axis), "step"),
        log=fields.get("log") == "1",
        low=low,
        high=high,
        smoothing=smoothing,
        strength=_strength(fields.get("strength", ""), smoothing),
        width=int(width) if width in WIDTHS else 1,
        height=_choice(fields.get("height", ""), get_args(Height), "medium"),
        is_pinned=fields.get("pinned") == "1",
    )


def typed_panel(fields: QueryDict) -> Panel:
    """The panel of a form with a mistake, as far as it can be shown again."""
    width = fields.get("width", "1")
    return Panel(
        id=fields.get("panel", "")[:32],
        title=fields.get("title", "")[: 2 * MAX_TITLE],
        metrics=tuple(name[:MAX_NAME] for name in fields.getlist("metric")[: 4 * MAX_METRICS]),
        formula=fields.get("formula", "")[: 2 * formulas.MAX_LENGTH],
        pattern=fields.get("pattern", "")[: 2 * MAX_PATTERN],
        x=_choice(fields.get("x", ""), get_args(Axis), "step"),
        log=fields.get("log") == "1",
        smoothing=_choice(fields.get("smoothing", ""), get_args(Smoothing), "auto"),
        width=int(width) if width in WIDTHS else 1,
        height=_choice(fields.get("height", ""), get_args(Height), "medium"),
        is_pinned=fields.get("pinned") == "1",
    )


def panels_of(stored: Iterable[Mapping[str, Any]]) -> list[Panel]:
    """The panels of a view as it is stored."""
    names = Panel.__dataclass_fields__.keys()
    fields = ({name: value for name, value in entry.items() if name in names} for entry in stored)
    return [Panel(**{**entry, "metrics": tuple(entry.get("metrics", ()))}) for entry in fields]


def _choice(text: str, choices: Sequence[str], usual: str) -> Any:
    return text if text in choices else usual


def _bound(text: str) -> float | None:
    """An end of a range; None if it is empty."""
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise PanelError(f"“{text[:20]}” is no number.") from error
    if not math.isfinite(value):
        raise PanelError("The ends of a range are finite numbers.")
    return value


def _strength(text: str, smoothing: Smoothing) -> float:
    """The strength of a smoothing that has one, within its bounds."""
    if smoothing not in USUAL_STRENGTH:
        return 0.0
    value = _bound(text)
    if value is None:
        return USUAL_STRENGTH[smoothing]
    if smoothing == "exponential" and not 0.0 <= value <= MAX_WEIGHT:
        raise PanelError(f"The weight of an exponential average is from 0 to {MAX_WEIGHT}.")
    if smoothing == "window" and not 1 <= value <= MAX_WINDOW:
        raise PanelError(f"A window has from 1 to {MAX_WINDOW:,} steps.")
    return value
