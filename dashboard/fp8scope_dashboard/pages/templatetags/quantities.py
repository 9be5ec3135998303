"""Template tags for costs and savings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django import template

from fp8scope_dashboard.pages.run.quantities import quantity_rows

register = template.Library()


@register.inclusion_tag("pages/run/_quantities.html")
def quantities(result: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """The costs and savings of a comparison's result as a list; nothing without any."""
    stored = (result.get("quantities") or {}) if isinstance(result, Mapping) else {}
    return {"rows": quantity_rows(stored)}
