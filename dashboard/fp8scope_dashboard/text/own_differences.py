"""Sentences about runs that left their seed group."""

from __future__ import annotations

from fp8scope_dashboard.text.numbers import MINUS, number, percent, percentage_points


def signed(value: float, unit: str) -> str:
    """A difference with its sign in the unit of a comparison: relative, nats, share (of items) or score."""
    write = {"relative": percent, "share": percentage_points}.get(unit, number)
    size = write(abs(value))
    sign = MINUS if value < 0 else "+"
    return f"{sign}{size} nats" if unit == "nats" else f"{sign}{size}"


def left(name: str, difference: float | None, from_group: float, unit: str) -> str:
    """That a run left its group, and how far."""
    if difference is None:
        return f"{name} left its group: its loss is not finite."
    return (
        f"{name} left its group: {signed(difference, unit)} against BF16, {signed(from_group, unit)} against "
        "the mean of the group's other runs."
    )
