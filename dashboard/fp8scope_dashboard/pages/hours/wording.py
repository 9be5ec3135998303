"""Hours and their price in words."""

from __future__ import annotations

from typing import Final

from fp8scope_dashboard.accounts.models import MAX_PRICE, MIN_PRICE
from fp8scope_dashboard.pages.formatting import count, number
from fp8scope_dashboard.text.numbers import MINUS, THIN

HOUR: Final = 3_600.0
MIN_HOURS: Final = 0.01
"""A shorter time is shown as less than this."""


def hours(seconds: float) -> str:
    """Seconds as hours: < 0.01, 0.013, 3.2, 41.0, 4 120."""
    amount = abs(seconds) / HOUR
    sign = MINUS if seconds < 0.0 else ""
    if 0.0 < amount < MIN_HOURS:
        return f"> {sign}{MIN_HOURS}" if sign else f"< {MIN_HOURS}"
    if amount >= 99.95:
        return f"{sign}{count(round(amount))}"
    return f"{sign}{amount:.1f}" if amount >= 0.95 or amount == 0.0 else f"{sign}{number(amount, 2)}"


def cost(seconds: float, price: float) -> str:
    """The price of hours, in the unit of the price."""
    amount = price * seconds / HOUR
    return f"{MINUS if amount < 0.0 else ''}{abs(amount):,.2f}".replace(",", THIN)


def price_of(text: str) -> float | None:
    """A price of a GPU hour that somebody has typed, within its bounds; None if it is none."""
    try:
        price = float(text.strip().replace(",", "."))
    except ValueError:
        return None
    return price if MIN_PRICE <= price <= MAX_PRICE else None
