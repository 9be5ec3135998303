"""The words of a message, for channels that people read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fp8scope_dashboard.alerts.channels.base import ChannelMessage, Notice
from fp8scope_dashboard.text.onsets import steps_in_words

# Steps and values of so many alerts are written out in a digest; the others are counted.
MAX_ALERTS = 40
TITLE_LENGTH = 160
TENSORS = 5
# Of a message that is cut, so much is kept for its title at least.
MIN_TITLE = 40
_PREFIXES = {
    "reopened": "Reopened: ",
    "escalated": "Escalated: ",
    "resolved": "Resolved: ",
    "worse": "Got worse: ",
}


def title(message: ChannelMessage, longest: int = TITLE_LENGTH) -> str:
    """One line without line breaks, of at most `longest` characters."""
    if not message.notices:
        return _one_line(f"Test of an alert channel of {message.project}", longest)
    if len(message.notices) > 1:
        runs = len({notice.run for notice in message.notices})
        where = f"in {runs} runs" if runs > 1 else f"in {message.notices[0].run_name}"
        return _one_line(f"{len(message.notices)} alerts {where} of {message.project}", longest)
    return _one_line(headline(message.notices[0]), longest)


def headline(notice: Notice) -> str:
    """Return what happened, how bad it is, and in which run."""
    return f"{prefix(notice)}{notice.label} in {notice.run_name} [{notice.severity}]"


def prefix(notice: Notice) -> str:
    """Return what a later notice begins with, such as `Reopened: `; empty for the first."""
    return _PREFIXES.get(notice.reason, "")


def text(message: ChannelMessage, longest: int | None = None) -> str:
    """The message as plain text, without its title.

    Args:
        longest: in characters. A longer text is cut at a line, and says how many alerts it leaves out; its
            link stays.
    """
    if not message.notices:
        lines = [f"This is a test. Alerts of the project {message.project} arrive here.", ""]
        return _ending_in(lines, message.url, longest)
    if len(message.notices) == 1:
        (notice,) = message.notices
        return _ending_in([*details(notice), ""], notice.url, longest)
    whole = _digest(message, _written_out)
    return whole if longest is None or len(whole) <= longest else _digest(message, _headline_only, longest)


def details(notice: Notice) -> list[str]:
    """The lines below the headline: what was measured, since when, where, and what is known of it."""
    since = f"Onset {_onset(notice)}, found {_found(notice)}. Alert opened {_opened(notice)}."
    lines = [notice.message, *([notice.note] if notice.note else []), since]
    count, names = _tensors(notice)
    if names:
        lines.append(f"Tensors ({count:,}): {names}")
    if notice.also:
        lines.append(f"Also: {', '.join(notice.also)}.")
    if notice.cause:
        lines.append(f"Suspected cause: {notice.cause}")
    return [*lines, *(f"Command: {command}" for command in notice.commands)]


def facts(notice: Notice) -> list[tuple[str, str]]:
    """The same as `details`, without the message, as names and values of a table."""
    count, names = _tensors(notice)
    rows = [
        ("News", notice.note),
        ("Onset", _onset(notice)),
        ("Found", f"{_found(notice)}, {_opened(notice)}"),
        (f"Tensors ({count:,})", names),
        ("Also", ", ".join(notice.also)),
        ("Suspected cause", notice.cause),
        *(("Command", command) for command in notice.commands),
    ]
    return [(name, value) for name, value in rows if value]


def _tensors(notice: Notice) -> tuple[int, str]:
    """The number of tensors, and the names of some; no names of a single one, which the message names."""
    names = [str(tensor.get("name", "")) for tensor in notice.tensors]
    count = max(notice.tensors_over, len(names))
    more = f" and {count - TENSORS:,} more" if count > TENSORS else ""
    return count, f"{', '.join(names[:TENSORS])}{more}" if len(names) > 1 else ""


def _onset(notice: Notice) -> str:
    return f"at step {steps_in_words(notice.onset_step, notice.after_step)}"


def _found(notice: Notice) -> str:
    later = max(notice.step - notice.onset_step, 0)
    after = f", {later:,} step{'' if later == 1 else 's'} later" if later else ""
    return f"at step {notice.step:,}{after}"


def _opened(notice: Notice) -> str:
    return f"{notice.opened_at:%Y-%m-%d %H:%M:%S} UTC"


def _written_out(notice: Notice) -> list[str]:
    return [f"* {headline(notice)}", *(f"  {line}" for line in details(notice)), f"  {notice.url}", ""]


def _headline_only(notice: Notice) -> list[str]:
    return [f"* {headline(notice)}"]


def _digest(message: ChannelMessage, words: Callable[[Notice], list[str]], longest: int | None = None) -> str:
    """As many alerts as fit, at most MAX_ALERTS, and how many are left out."""
    lines: list[str] = []
    shown = 0
    for notice in message.notices[:MAX_ALERTS]:
        longer = [*lines, *words(notice)]
        if longest is not None and len(_closed(message, longer, shown + 1)) > longest:
            break
        lines, shown = longer, shown + 1
    if not shown:
        return _ending_in([f"{len(message.notices):,} alerts:", ""], message.url, longest)
    return _closed(message, lines, shown)


def _closed(message: ChannelMessage, lines: Sequence[str], shown: int) -> str:
    left = len(message.notices) - shown
    more = [f"... and {left:,} more", ""] if left else []
    return "\n".join([*lines, *more, f"All alerts: {message.url}", ""])


def _ending_in(lines: Sequence[str], url: str, longest: int | None) -> str:
    """The lines with the link below; too long a text loses its last lines, then the end of the first."""
    shown = list(lines)
    while longest is not None and len(shown) > 1 and len("\n".join([*shown, url, ""])) > longest:
        shown.pop()
    whole = "\n".join([*shown, url, ""])
    if longest is None or len(whole) <= longest:
        return whole
    room = longest - len(url) - 1
    # A receiver for which the link alone is too long gets the words.
    return f"{_one_line(shown[0], room)}\n{url}" if room >= MIN_TITLE else _one_line(shown[0], longest)


def _one_line(words: str, longest: int = TITLE_LENGTH) -> str:
    words = " ".join(words.split())
    return words if len(words) <= longest else f"{words[: max(longest - 3, 0)]}..."[: max(longest, 0)]
