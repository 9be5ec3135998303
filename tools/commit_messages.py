"""Check the messages of the commits since the rule began: what continuous integration runs.

    python tools/commit_messages.py [FIRST]

Every commit after FIRST has a subject `area: Verb ...` of at most 72 characters without ";", a body that says
why, and one parent. The exit status is 1 if one has not. A clone without the history (a shallow one) or a
folder without a repository says so in one line, with status 0.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FIRST = "551c13bb1094306608dc5141144e36e4b481d164"
"""The last commit before the rule."""
MAX_SUBJECT = 72
SUBJECT = re.compile(r"[a-z0-9][a-z0-9 ,_-]*: [A-Z]\S*( \S+)+")
FIELD, RECORD = "\x1f", "\x1e"
FORMAT = f"%h{FIELD}%P{FIELD}%s{FIELD}%b{RECORD}"


def git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # A clone may belong to another user, such as root's in a container.
    command = ["git", "-c", "safe.directory=*", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def problems_of(parents: str, subject: str, body: str) -> list[str]:
    """What is wrong with a commit."""
    problems = []
    if len(parents.split()) > 1:
        problems.append("is a merge; rebase or squash instead")
    if len(subject) > MAX_SUBJECT:
        problems.append(f"its subject has {len(subject)} characters, more than {MAX_SUBJECT}")
    if not SUBJECT.fullmatch(subject):
        problems.append("its subject is not like 'area: Verb ...'")
    if ";" in subject:
        problems.append("its subject contains ';': one idea a commit")
    if not body.strip():
        problems.append("has no body that says why")
    return problems


def check(folder: Path, first: str) -> list[str] | None:
    """A line for each problem of the commits after `first`; None where the history is missing."""
    try:
        if git(folder, "merge-base", "--is-ancestor", first, "HEAD").returncode:
            return None
    except FileNotFoundError:
        return None
    log = git(folder, "log", f"--format={FORMAT}", f"{first}..HEAD")
    log.check_returncode()
    lines = []
    for record in log.stdout.split(RECORD)[:-1]:
        name, parents, subject, body = record.strip("\n").split(FIELD)
        lines += [f"{name} {subject!r}: {problem}" for problem in problems_of(parents, subject, body)]
    return lines


def main(arguments: list[str], folder: Path) -> int:
    first = arguments[0] if arguments else FIRST
    lines = check(folder, first)
    if lines is None:
        print(f"Commit messages were not checked: this folder has no history since {first}.")
        return 0
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).parents[1]))
