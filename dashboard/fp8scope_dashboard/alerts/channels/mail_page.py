"""The HTML of an e-mail: tables that mail programs show in light and in dark, with nothing from outside."""

from __future__ import annotations

import re
from typing import Any, Final

from django.template.loader import render_to_string
from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

from fp8scope_dashboard.alerts.channels import wording
from fp8scope_dashboard.alerts.channels.base import Message, Notice

# Programs that know no <style> show these colours, on white.
PILLS: Final = {
    "critical": "background:#fde8eb;color:#c0213a",
    "warning": "background:#fdf1d8;color:#8a5800",
    "resolved": "background:#e2f4ec;color:#0f7a55",
}


def render(message: Message, picture: str = "") -> str:
    """The page. `picture` is the content id of the chart in the mail, empty without one."""
    shown = message.notices[: wording.MOST_ALERTS]
    left = len(message.notices) - len(shown)
    is_single = len(message.notices) == 1
    context = {
        "subject": wording.title(message),
        "summary": message.notices[0].message if is_single else "",
        "project": message.project,
        "alerts": [_alert(notice) for notice in shown],
        "digest": len(message.notices) > 1,
        "left": f"{left:,} more alerts are on the page." if left else "",
        "picture": picture if is_single else "",
        "url": message.notices[0].url if is_single else message.url,
    }
    return render_to_string("alerts/mail.html", context)


def _breakable(text: str) -> SafeString:
    """The text as HTML, in which names of tensors break after their dots."""
    return mark_safe(re.sub(r"\.(?=[A-Za-z_])", ".<wbr>", escape(text)))


def _alert(notice: Notice) -> dict[str, Any]:
    is_over = notice.reason == "resolved"
    tone = "resolved" if is_over else notice.severity
    prefix = wording.prefix(notice)
    return {
        "tone": tone,
        "pill": PILLS.get(tone, PILLS["warning"]),
        "label": "Resolved" if is_over else notice.severity.capitalize(),
        "title": f"{'' if is_over else prefix}{notice.label} in {notice.run_name}",
        "message": _breakable(notice.message),
        "facts": [(name, _breakable(value)) for name, value in wording.facts(notice)],
        "url": notice.url,
    }
