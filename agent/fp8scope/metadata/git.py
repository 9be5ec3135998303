"""The commit that is trained, and what was changed since: asked of git by a thread of its own.

A repository on a slow file system may take its time: `init` does not wait for it. What is found completes the
run's registration at the end of the next step.
"""

import contextlib
import os
import subprocess
import threading
from typing import Any

from fp8scope.metadata.environment import clean, redact

GIT_SECONDS = 2.0
"""For each of git's answers; what takes longer is left out."""
MAX_DIFF_BYTES = 256 << 10
MAX_LINE = 2000
"""Longer lines of a diff (data, notebooks' images) are cut."""


def describe_repository() -> dict[str, Any]:
    """The working directory's commit and branch, and the difference of tracked files to it; secrets redacted.

    Empty where there is no repository. A diff of more than MAX_DIFF_BYTES is cut, and `git_diff_cut` true.
    """
    commit = _git(["rev-parse", "HEAD"], 64).strip()
    if not commit:
        return {}
    branch = _git(["rev-parse", "--abbrev-ref", "HEAD"], 200).strip()
    # Nothing that the repository's configuration names is run.
    diff = _git(["diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv"], MAX_DIFF_BYTES + 1)
    cut = len(diff) > MAX_DIFF_BYTES
    lines = (line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}…" for line in diff.split("\n"))
    text = redact(clean("\n".join(lines)))[:MAX_DIFF_BYTES]
    return {"git_commit": commit, "git_branch": branch, "git_diff": text, "git_diff_cut": cut}


def _git(arguments: list[str], limit: int) -> str:
    """The first `limit` bytes of git's answer; empty when it fails or takes too long."""
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
    late = threading.Timer(GIT_SECONDS, process.kill)
    late.daemon = True
    late.start()
    with process:
        assert process.stdout is not None
        answer = process.stdout.read(limit)
        was_cut = len(answer) == limit
        with contextlib.suppress(OSError):
            if was_cut:
                process.kill()
        code = process.wait()
    late.cancel()
    return answer.decode(errors="replace") if code == 0 or was_cut else ""


class RepositoryLookup:
    """Asks once, in the background."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        """What kept it from finding out, besides there being no repository, or no git."""
        self._found: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._look, name="fp8scope-git", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        try:
            self._found = describe_repository()
        except Exception as error:
            self.failure = error

    def take(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """What was found, once and as soon as it is known; None before. Waits `seconds` at most."""
        if seconds > 0 and self._thread.ident is not None:
            self._thread.join(seconds)
        return None if self._thread.is_alive() else self._found or {}
