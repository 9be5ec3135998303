"""The time of a traced step by layer and by kind of operator, as the agent's trace has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fp8scope_dashboard.pages.formatting import aligned, count, number, percent, size
from fp8scope_dashboard.runs.models import Run

STEP_TIMES: Final = "step_times"
"""The entry of the run's environment."""
PASSES: Final = ("forward", "backward", "recomputed")
KINDS: Final = ("products", "attention", "casts", "other")
MAX_ROWS: Final = 64
OPTIMIZER: Final = "optimizer"
INPUT: Final = "input"


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """A layer, or all layers whose paths differ by numbers only; times are in milliseconds."""

    path: str
    module: str
    count: str
    share: str
    passes: list[str]
    kinds: list[str]
    launches: str


@dataclass(frozen=True, kw_only=True)
class LayerTable:
    """The content of the card. `columns`: the titles of the passes and kinds that have any time."""

    step: int
    sentence: str
    held: str
    columns: list[str]
    rows: list[LayerRow] = field(default_factory=list)
    has_launches: bool = False


@dataclass(frozen=True, kw_only=True)
class _Layer:
    path: str
    module: str
    count: int
    launches: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds[name] for name in KINDS)


def step_times_of(run: Run) -> LayerTable | None:
    """Return the content of the card; None for a run without a traced step, or with one that is not sound."""
    document = run.environment.get(STEP_TIMES)
    if not isinstance(document, dict) or not isinstance(step := document.get("step"), int):
        return None
    layers = [layer for row in _list(document.get("layers"))[:MAX_ROWS] if (layer := _layer(row))]
    whole = sum(layer.total for layer in layers)
    if whole <= 0:
        return None
    sums = {name: sum(layer.seconds[name] for layer in layers) for name in (*PASSES, *KINDS)}
    passes, kinds = ([name for name in names if sums[name] > 0] for names in (PASSES, KINDS))
    has_launches = any(layer.launches for layer in layers)
    return LayerTable(
        step=step,
        sentence=_sentence(sums, whole, "accelerator" if document.get("device") == "accelerator" else "host"),
        held=_held(document.get("held")),
        columns=[TITLES[name] for name in (*passes, *kinds)],
        rows=_rows(sorted(layers, key=lambda layer: -layer.total), whole, passes, kinds),
        has_launches=has_launches,
    )


TITLES: Final = {
    "forward": "Forward",
    "backward": "Backward",
    "recomputed": "Recomputed",
    "products": "Products",
    "attention": "Attention",
    "casts": "Casts and scales",
    "other": "Other",
}


def _rows(layers: list[_Layer], whole: float, passes: list[str], kinds: list[str]) -> list[LayerRow]:
    columns = {
        name: aligned([_milliseconds(layer, name) for layer in layers], 3) for name in (*passes, *kinds)
    }
    return [
        LayerRow(
            path=layer.path or "Outside of modules",
            module=layer.module,
            count=count(layer.count) if layer.count > 1 else "",
            share=percent(layer.total / whole),
            passes=[columns[name][index] for name in passes],
            kinds=[columns[name][index] for name in kinds],
            launches=count(layer.launches),
        )
        for index, layer in enumerate(layers)
    ]


def _milliseconds(layer: _Layer, name: str) -> float | None:
    # The optimizer is in no pass.
    is_absent = name in PASSES and layer.path == OPTIMIZER
    return None if is_absent or not layer.seconds[name] else 1e3 * layer.seconds[name]


def _sentence(sums: Mapping[str, float], whole: float, device: str) -> str:
    casts, products = sums["casts"], sums["products"]
    parts = [f"{percent(products / whole)} in matrix products"]
    if casts > 0:
        parts.append(f"{percent(casts / whole)} in casts and scales of FP8 layers")
    if sums["attention"] > 0:
        parts.append(f"{percent(sums['attention'] / whole)} in attention")
    told = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    text = f"Operators took {number(1e3 * whole, 3)} ms on the {device}: {told}"
    if casts > products > 0:
        text += ". Casts take longer than products: FP8 cannot pay at these sizes"
    return f"{text}."


def _held(document: object) -> str:
    """The bytes that FP8 layers keep for the backward pass, beside those of layers in high precision."""
    if not isinstance(document, dict):
        return ""
    sizes = {name: value for name, value in document.items() if _is_amount(value)}
    instead = sizes.pop(INPUT, 0.0)
    stored = sum(sizes.values())
    if not stored or not instead:
        return ""
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
    formats = ", ".join(f"{size(value)} of {str(name)[:24]}" for name, value in largest)
    return (
        f"Until their backward pass, FP8 layers keep {size(stored)} ({formats}). With the same inputs and no "
        f"casts they would keep {size(instead)}."
    )


def _layer(row: object) -> _Layer | None:
    if not isinstance(row, dict):
        return None
    seconds = {name: row.get(name, 0) for name in (*PASSES, *KINDS)}
    amount, launches = row.get("count", 1), row.get("launches", 0)
    if not all(map(_is_amount, (*seconds.values(), amount, launches))):
        return None
    return _Layer(
        path=str(row.get("path", ""))[:512],
        module=str(row.get("module", ""))[:128],
        count=int(amount),
        launches=int(launches),
        seconds={name: float(value) for name, value in seconds.items()},
    )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
