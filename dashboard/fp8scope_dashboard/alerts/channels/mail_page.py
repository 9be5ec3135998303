"""The HTML of an e-mail: tables that mail programs show in light and in dark, with nothing from outside."""

from __future__ import annotations

import re
from typing import Any, Final

from django.template.loader import render_to_string
from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

from fp8scope_dashboard.alerts.channels import wording
from fp8scope_dashboard.alerts.channels.base import ChannelMessage, Notice

# Programs that know no <style> show these colours, on white.
PILLS: Final = {
    "critical": "background:#fde8eb;color:#c0213a",
    "warning": "background:#fdf1d8;color:#8a5800",
    "resolved": "background:#e2f4ec;color:#0f7a55",
}
TEXT, MUTED, LINE = "color: #1b2330", "color: #5b6676", "border-top: 1px solid #d9dfe7"
FACT: Final = f"{LINE}; font-size: 14px; line-height: 20px"
STYLES: Final = {
    "alert": "background: #ffffff; border: 1px solid #d9dfe7; border-radius: 10px; padding: 20px 24px; "
    "word-break: break-word",
    "pill": "display: inline-block; padding: 2px 10px; border-radius: 99px; font-size: 13px; "
    "line-height: 18px; font-weight: 600",
    "heading": f"margin: 10px 0 8px; font-size: 20px; line-height: 26px; {TEXT}",
    "fact_name": f"padding: 6px 14px 6px 0; {FACT}; {MUTED}; width: 24%",
    "fact_value": f"padding: 6px 0; {FACT}; {TEXT}",
    "button": "display: inline-block; padding: 10px 20px; border-radius: 6px; background: #0b63b5; "
    "color: #ffffff; font-size: 15px; line-height: 20px; font-weight: 600; text-decoration: none",
    "footer": f"padding: 14px 4px 0; {LINE}; font-size: 13px; line-height: 19px; {MUTED}",
}
"""The styles that are too long for a line of the template."""
# An alert among others has a smaller heading.
HEADING_IN_DIGEST: Final = f"margin: 10px 0 8px; font-size: 17px; line-height: 23px; {TEXT}"


def render(message: ChannelMessage, picture: str = "") -> str:
    """The page. `picture` is the content id of the chart in the mail, empty without one."""
    shown = message.notices[: wording.MAX_ALERTS]
    left = len(message.notices) - len(shown)
    is_single = len(message.notices) == 1
    is_digest = len(message.notices) > 1
    context = {
        "styles": STYLES | {"heading": HEADING_IN_DIGEST} if is_digest else STYLES,
        "subject": wording.title(message),
        "summary": message.notices[0].message if is_single else "",
        "project": message.project,
        "alerts": [_alert(notice) for notice in shown],
        "digest": is_digest,
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
