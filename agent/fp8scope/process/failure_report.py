"""The text that describes how a run failed."""

import sys
import traceback

from fp8scope.metadata.redaction import clean, redact

MAX_TEXT = 20_000


def failure(text: str) -> str:
    """Return the text of a failure as sent to the server: the last MAX_TEXT characters, secrets removed."""
    return redact(clean(text[-MAX_TEXT:]))


def with_stack_of(thread: int, why: str) -> str:
    """Return `why`, followed by the current stack of the thread with this ident."""
    training = sys._current_frames().get(thread)
    stack = "".join(traceback.format_stack(training)) if training is not None else ""
    return f"{why}\n\nThe training was here:\n{stack}" if stack else why
