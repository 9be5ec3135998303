"""Template tags of the pages."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django import template
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

from fp8scope_dashboard.pages import formatting, glossary
from fp8scope_dashboard.pages.badges import Badge, badge_html, icon_html, on_off_badge
from fp8scope_dashboard.pages.charts import interval_bar as bars
from fp8scope_dashboard.pages.charts.arms import precision_label
from fp8scope_dashboard.pages.charts.run_colours import colour_number
from fp8scope_dashboard.pages.project.comparison_margin import margin_entry, margin_of
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.text import run_summary
from fp8scope_dashboard.text.numbers import MINUS

register = template.Library()


@register.filter
def number(value: float | str | None) -> str:
    """Like formatting.number, and also accepts the strings of docs/wire.md for non-finite scalars."""
    if isinstance(value, str):
        return {"Infinity": "+∞", "-Infinity": f"{MINUS}∞"}.get(value, value)
    return formatting.number(value)


@register.filter
def with_spread(value: float, spread: float | None) -> str:
    """Like formatting.with_spread."""
    return formatting.with_spread(value, spread)


@register.filter
def percent(value: float | None) -> str:
    return formatting.percent(value)


@register.filter
def written(sentence: str) -> str:
    return formatting.written(sentence)


@register.filter
def signed_percent(value: float | None) -> str:
    return formatting.percent(value, signed=True)


@register.filter
def difference(value: float | None, unit: str) -> str:
    return formatting.difference(value, unit)


@register.filter
def signed_difference(value: float | None, unit: str) -> str:
    return formatting.difference(value, unit, signed=True)


@register.filter
def count(value: int | None) -> str:
    return formatting.count(value)


@register.filter
def ordinal(value: float) -> str:
    return formatting.ordinal(int(value))


@register.filter
def compact(value: float | None) -> str:
    return formatting.compact(value)


@register.filter
def size(value: float | None) -> str:
    return formatting.size(value)


@register.filter
def span(value: float | timedelta | None) -> str:
    return formatting.span(value)


@register.filter
def ago(value: datetime | None) -> str:
    return formatting.ago(value, timezone.now())


@register.filter
def ahead(value: datetime) -> str:
    """Return how long until a moment: `in 5 min`; empty if it is over."""
    left = value - timezone.now()
    return f"in {formatting.span(left)}" if left > timedelta(0) else ""


@register.filter
def in_sentence(title: str) -> str:
    """A title inside of a sentence."""
    return run_summary.in_sentence(title)


@register.filter
def precision(value: str) -> str:
    return precision_label(value)


@register.filter
def term(name: str) -> str:
    """The title of a statistic or scalar in the glossary."""
    return glossary.title(name)


@register.filter
def dotted(name: str) -> SafeString:
    """A dotted name that breaks after its dots where it does not fit in a line."""
    return format_html_join(mark_safe(".<wbr>"), "{}", ((part,) for part in name.split(".")))


@register.simple_tag
def interval_bar(positions: Mapping[str, float | None], slot: str, verdict: str) -> SafeString:
    """The difference of a row of the forest plot, on its bar of margins."""
    return bars.interval_bar(positions, slot, verdict)


@register.simple_tag
def icon(name: str) -> SafeString:
    """An icon; see badges.icon_html."""
    return icon_html(name)


@register.simple_tag
def badge(content: Badge | Mapping[str, str]) -> SafeString:
    """A badge, or what a stored document has of one; see badges.badge_html."""
    if isinstance(content, Badge):
        return badge_html(content)
    return badge_html(Badge(content["label"], content["tone"], content["icon"]))  # type: ignore[arg-type]


@register.simple_tag
def on_off(title: str, is_on: bool) -> SafeString:
    """A badge with the title of what can be switched off; see badges.on_off_badge."""
    return badge_html(on_off_badge(title, is_on))


@register.simple_tag
def run_dot(run: Run) -> SafeString:
    """A dot in the colour of a run. It is decorative: its name is beside it."""
    return format_html('<span class="run-dot run-colour--{}" aria-hidden="true"></span>', colour_number(run))


@register.inclusion_tag("pages/_help.html")
def help(*names: str) -> dict[str, Any]:
    """A small button that shows the definitions of glossary terms, or of the groups `group:NAME`."""
    terms = [term for name in names for term in glossary.terms(name)]
    return {"terms": terms, "titles": ", ".join(term.title for term in terms)}


@register.filter
def pretty(value: object) -> str:
    """A value as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True)


@register.filter
def entries(values: dict[str, Any], most: int) -> list[tuple[str, str]]:
    """The first `most` entries of a JSON object by name, each value on one line."""
    return [(name, _on_one_line(values[name])) for name in sorted(values)[:most]]


def _on_one_line(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return formatting.number(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:59]}…"


@register.filter
def log_width(rate: float) -> str:
    """The width of a bar for a rate, in per cent: logarithmic from one in a million to one."""
    if not rate > 0:
        return "0"
    return f"{max(2.0, min(100.0, 100.0 * (1.0 + math.log10(rate) / 6.0))):.1f}"


@register.filter
def unlocalised(value: float) -> str:
    """A number in the format of an input field."""
    return f"{value:.12g}"


register.filter("margin", margin_of)
register.filter("margin_entry", margin_entry)


@register.filter
def times_100(value: float) -> str:
    """A fraction as per cent in the format of an input field."""
    return f"{100.0 * value:.10g}"
