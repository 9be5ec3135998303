"""tools/commit_messages.py refuses messages against CONTRIBUTING.md, and says where it cannot check."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "commit_messages.py"
BODY = "Readers ask why."


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a copy of the script and one commit, the tag `first`."""
    folder = tmp_path / "repository"
    (folder / "tools").mkdir(parents=True)
    shutil.copy(SCRIPT, folder / "tools")
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(folder, "anything before the rule")
    git(folder, "tag", "first")
    return folder


def git(folder: Path, *arguments: str) -> None:
    names = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **names, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", "-C", folder, *arguments], env=environment, capture_output=True, check=True)


def commit(folder: Path, subject: str, body: str = "") -> None:
    git(folder, "commit", "--quiet", "--allow-empty", "--message", f"{subject}\n\n{body}")


def check(folder: Path, first: str = "first") -> tuple[int, str]:
    """The exit status and the output of the script in this repository."""
    done = subprocess.run(
        [sys.executable, folder / "tools" / SCRIPT.name, first], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_it_works(repository: Path) -> None:
    assert check(repository) == (0, "")
    commit(repository, "agent: Keep hooks out of pickles", BODY)
    commit(repository, "docs, ci: Say " + "x" * 58, BODY)
    assert check(repository) == (0, "")


@pytest.mark.parametrize(
    ("subject", "body", "problem"),
    [
        ("agent: Keep hooks out of pickles", "", "has no body"),
        ("agent: Keep " + "x" * 61, BODY, "73 characters, more than 72"),
        ("agent: Keep hooks; docs: Say so", BODY, "contains ';'"),
        ("agent: keep hooks", BODY, "not like 'area: Verb ...'"),
        ("Keep hooks out of pickles", BODY, "not like 'area: Verb ...'"),
        ("wip", BODY, "not like 'area: Verb ...'"),
    ],
)
def test_names_the_commit_and_what_is_wrong(repository: Path, subject: str, body: str, problem: str) -> None:
    commit(repository, subject, body)
    commit(repository, "agent: Keep hooks out of pickles", BODY)
    status, output = check(repository)
    assert status == 1 and output.count("\n") == 1
    assert repr(subject) in output and problem in output


def test_a_merge_is_refused(repository: Path) -> None:
    git(repository, "switch", "--quiet", "--create", "side")
    commit(repository, "agent: Keep hooks", BODY)
    git(repository, "switch", "--quiet", "main")
    git(repository, "merge", "--quiet", "--no-ff", "--message", f"agent: Merge hooks\n\n{BODY}", "side")
    status, output = check(repository)
    assert status == 1 and "is a merge" in output and output.count("\n") == 1


def test_a_clone_without_the_history_says_so(repository: Path, tmp_path: Path) -> None:
    commit(repository, "wip", BODY)
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repository}", "shallow")
    shutil.copytree(repository / "tools", tmp_path / "folder" / "tools")
    for name, status in (("repository", 1), ("shallow", 0), ("folder", 0)):
        folder = tmp_path / name
        (folder / "tools").mkdir(exist_ok=True)
        shutil.copy(SCRIPT, folder / "tools")
        done, output = check(folder)
        assert done == status and output.count("\n") == 1
        assert ("not checked" in output) == (status == 0), name
