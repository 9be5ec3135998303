"""The words of a message, for channels that people read."""

from __future__ import annotations

from fp8scope_dashboard.alerts.delivery.channels.base import Message, Notice

# Steps and values of so many alerts are written out in a digest; the others are counted.
MOST_ALERTS = 40
TITLE_LENGTH = 160
TENSORS = 5
_PREFIXES = {
    "reopened": "Reopened: ",
    "escalated": "Escalated: ",
    "resolved": "Resolved: ",
    "worse": "Got worse: ",
}


def title(message: Message) -> str:
    """One line without line breaks."""
    if not message.notices:
        return f"Test of an alert channel of {message.project}"
    if len(message.notices) > 1:
        runs = len({notice.run for notice in message.notices})
        where = f"in {runs} runs" if runs > 1 else f"in {message.notices[0].run_name}"
        return _one_line(f"{len(message.notices)} alerts {where} of {message.project}")
    return _one_line(headline(message.notices[0]))


def headline(notice: Notice) -> str:
    """What happened, how bad it is, and in which run."""
    return f"{_PREFIXES.get(notice.reason, '')}{notice.label} in {notice.run_name} [{notice.severity}]"


def text(message: Message) -> str:
    """The message as plain text, without its title."""
    if not message.notices:
        return f"This is a test. Alerts of the project {message.project} arrive here.\n\n{message.url}\n"
    if len(message.notices) == 1:
        (notice,) = message.notices
        return "\n".join([*details(notice), "", notice.url, ""])
    lines = []
    for notice in message.notices[:MOST_ALERTS]:
        lines += [f"* {headline(notice)}", *(f"  {line}" for line in details(notice)), f"  {notice.url}", ""]
    if len(message.notices) > MOST_ALERTS:
        lines += [f"... and {len(message.notices) - MOST_ALERTS} more", ""]
    return "\n".join([*lines, f"All alerts: {message.url}", ""])


def details(notice: Notice) -> list[str]:
    """The lines below the headline: what was measured, and where."""
    lines = [notice.message, f"Onset at step {notice.onset_step}, detected at step {notice.step}."]
    names = [str(tensor.get("name", "")) for tensor in notice.tensors]
    if names:
        more = f" and {len(names) - TENSORS} more" if len(names) > TENSORS else ""
        lines.append(f"Tensors: {', '.join(names[:TENSORS])}{more}")
    return lines


def _one_line(words: str) -> str:
    words = " ".join(words.split())
    return words if len(words) <= TITLE_LENGTH else f"{words[: TITLE_LENGTH - 3]}..."
