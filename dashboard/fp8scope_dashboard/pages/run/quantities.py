"""Costs and savings of a run against its baseline, prepared for the pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8scope_dashboard.pages.formatting import number, percent, span
from fp8scope_dashboard.text.quantities import share, times


@dataclass(frozen=True)
class QuantityRow:
    """One quantity: its term in the glossary, its value with the interval, and what that rests on."""

    term: str
    value: str
    explanation: str

    @property
    def is_known(self) -> bool:
        return bool(self.value)


def quantity_rows(stored: Mapping[str, Any]) -> list[QuantityRow]:
    """The quantities of a comparison's result, the most important first; empty if there are none."""
    if not stored.get("tokens_cost"):
        return []
    rows = []
    net = stored.get("net")
    if net:
        rows.append(
            QuantityRow(
                "net_speed",
                times(net["ratio"], net["interval"]),
                "Throughput divided by 1 + the cost in tokens.",
            )
        )
    rows += [
        _ratio("throughput_ratio", stored["throughput"]),
        _share("tokens_cost", stored["tokens_cost"]),
        *_time(stored.get("time_to_loss")),
        _ratio("memory_ratio", stored["memory"]),
        *([_ratio("energy_ratio", stored["energy"])] if stored.get("energy") else []),
        _share("gradient_norm_delta", stored["gradient_norm"]),
    ]
    return rows


def cost_line(stored: Mapping[str, Any]) -> str:
    """Speed, memory and tokens against BF16 in one line, without intervals; empty if none is known."""
    parts = []
    for name, word in (("throughput", "the speed"), ("memory", "the memory")):
        ratio = (stored.get(name) or {}).get("ratio")
        if ratio is not None:
            parts.append(f"{times(ratio)} {word}")
    cost = stored.get("tokens_cost") or {}
    if cost.get("delta") is not None:
        word = "more" if cost["delta"] >= 0 else "fewer"
        parts.append(f"{percent(abs(cost['delta']))} {word} {cost.get('axis', 'tokens')}")
    return " · ".join(parts)


def _ratio(term: str, entry: Mapping[str, Any]) -> QuantityRow:
    value = "" if entry["ratio"] is None else times(entry["ratio"], entry["interval"])
    return QuantityRow(term, value, str(entry["explanation"]))


def _time(entry: Mapping[str, Any] | None) -> list[QuantityRow]:
    """The time to the same loss; no row for results of before it was computed."""
    if entry is None:
        return []
    row = _ratio("time_to_loss", entry)
    if entry["ratio"] is None:
        return [row]
    value = f"{span(entry['seconds'])} against {span(entry['baseline_seconds'])}: {row.value}"
    sentence = f"Training time until a loss of {number(entry['loss'])}."
    return [QuantityRow(row.term, value, f"{sentence} {row.explanation}")]


def _share(term: str, entry: Mapping[str, Any]) -> QuantityRow:
    delta, interval = entry["delta"], entry["interval"]
    if delta is None:
        return QuantityRow(term, "", str(entry["explanation"]))
    if term == "tokens_cost":
        value = share(delta, interval) + f" {entry['axis']}"
    else:
        value = percent(delta, signed=True)
        if interval is not None:
            value += f" ({percent(interval[0], signed=True)} to {percent(interval[1], signed=True)})"
    # The first sentence of the cost repeats the value.
    explanation = str(entry["explanation"]).partition(". ")[2] or str(entry["explanation"])
    return QuantityRow(term, value, explanation if term == "tokens_cost" else str(entry["explanation"]))
