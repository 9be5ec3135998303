"""Reads the commit and the uncommitted changes from git, in a background thread.

A repository on a slow file system can take seconds, so `init` does not wait. The result is added to the run's
registration at the end of the next step.
"""

import contextlib
import os
import subprocess
import threading
from typing import Any

from fp8scope.metadata.redaction import clean, redact

GIT_SECONDS = 2.0
"""Time limit of each git command; a command that exceeds it is killed and its result left out."""
MAX_DIFF_BYTES = 256 << 10
MAX_LINE = 2000
"""Longer lines of a diff (data, images in notebooks) are truncated."""


def describe_repository() -> dict[str, Any]:
    """Return commit, branch and the diff of tracked files in the working directory, with secrets redacted.

    Empty without a repository. A diff of more than MAX_DIFF_BYTES is truncated, and `git_diff_cut` is true.
    """
    commit = _git(["rev-parse", "HEAD"], 64).strip()
    if not commit:
        return {}
    branch = _git(["rev-parse", "--abbrev-ref", "HEAD"], 200).strip()
    # Do not run programs that the repository's configuration names.
    diff = _git(["diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv"], MAX_DIFF_BYTES + 1)
    cut = len(diff) > MAX_DIFF_BYTES
    lines = (line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}…" for line in diff.split("\n"))
    text = redact(clean("\n".join(lines)))[:MAX_DIFF_BYTES]
    return {"git_commit": commit, "git_branch": branch, "git_diff": text, "git_diff_cut": cut}


def _git(arguments: list[str], limit: int) -> str:
    """Return the first `limit` bytes of git's output; empty if it fails or takes too long."""
    try:
        process = subprocess.Popen(
            ["git", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
        )
    except OSError:
        return ""
    timeout = threading.Timer(GIT_SECONDS, process.kill)
    timeout.daemon = True
    timeout.start()
    with process:
        assert process.stdout is not None
        answer = process.stdout.read(limit)
        was_cut = len(answer) == limit
        with contextlib.suppress(OSError):
            if was_cut:
                process.kill()
        code = process.wait()
    timeout.cancel()
    return answer.decode(errors="replace") if code == 0 or was_cut else ""


class RepositoryLookup:
    """Runs `describe_repository` once, in a background thread."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        """The unexpected exception of the lookup; a missing repository or git is not one."""
        self._description: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._look, name="fp8scope-git", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        try:
            self._description = describe_repository()
        except Exception as error:
            self.failure = error

    def take(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """Return the description, or None while the lookup is running. Waits for at most `seconds`."""
        if seconds > 0 and self._thread.ident is not None:
            self._thread.join(seconds)
        return None if self._thread.is_alive() else self._description or {}
