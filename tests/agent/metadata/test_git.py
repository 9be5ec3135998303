"""The background lookup of the git commit and diff."""

import os
import subprocess
from pathlib import Path

import pytest
from agent.helpers.wire_server import WireServer
from helpers.waiting import wait_until

import fp8scope
from fp8scope.metadata import git as metadata_git
from fp8scope.metadata.git import MAX_DIFF_BYTES, RepositoryLookup, describe_repository


def git(*arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "init.defaultBranch=trunk"]
    done = subprocess.run(["git", *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one committed file, as the working directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    git("init", "-q")
    (folder / "train.py").write_text("lr = 1\n")
    git("add", ".")
    git("commit", "-q", "-m", "x")
    return folder


def test_the_registration_has_commit_branch_and_redacted_diff(
    work: Path, server: WireServer, tmp_path: Path
) -> None:
    (work / "train.py").write_text("lr = 2\npassword = 'SECRET'\n")
    run = fp8scope.init(name="x", url=server.url, token=server.token, directory=tmp_path / "spool")
    with run.step() as step:
        step.log(loss=1.0)
    # `finish` waits for the lookup if it has not ended by the first step.
    assert run.finish().errors == 0
    environment = server.run.registration["environment"]
    assert environment["git_commit"] == git("rev-parse", "HEAD") and environment["git_branch"] == "trunk"
    assert "-lr = 1" in environment["git_diff"] and "+lr = 2" in environment["git_diff"]
    assert "SECRET" not in environment["git_diff"] and environment["git_diff_cut"] is False
    assert environment["hostname"]


def test_empty_without_a_repository(tmp_path: Path) -> None:
    assert describe_repository() == {}


def test_empty_without_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git("init", "-q")
    assert describe_repository() == {}


def test_truncates_a_large_diff(work: Path) -> None:
    (work / "train.py").write_text("x = 1\n" * MAX_DIFF_BYTES)
    description = describe_repository()
    assert description["git_diff_cut"] is True
    assert MAX_DIFF_BYTES // 2 < len(description["git_diff"]) <= MAX_DIFF_BYTES


def test_truncates_a_long_line(work: Path) -> None:
    (work / "train.py").write_text("a" * 100_000 + "\nlast = 1\n")
    diff = describe_repository()["git_diff"]
    assert len(diff) < 5000 and "+last = 1" in diff


def test_replaces_bytes_that_are_not_utf_8(work: Path) -> None:
    (work / "train.py").write_bytes(b"x = '\xff\xfe'\n")
    diff: str = describe_repository()["git_diff"]
    assert diff.encode() and "\x00" not in diff


def test_runs_no_program_of_the_repository_configuration(work: Path) -> None:
    ran = work.parent / "ran"
    git("config", "diff.external", f"touch {ran}")
    git("config", "diff.x.textconv", f"touch {ran};cat")
    (work / ".gitattributes").write_text("*.py diff=x\n")
    (work / "train.py").write_text("lr = 3\n")
    assert "+lr = 3" in describe_repository()["git_diff"] and not ran.exists()


def test_gives_up_a_git_that_hangs(
    work: Path, monkeypatch: pytest.MonkeyPatch, server: WireServer, tmp_path: Path
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "git").write_text("#!/bin/sh\nexec sleep 600\n")
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(metadata_git, "GIT_SECONDS", 0.2)
    lookup = RepositoryLookup()
    assert lookup.take() is None
    wait_until(lambda: lookup.take() is not None, "the end of git")
    assert lookup.take() == {}
    run = fp8scope.init(name="x", url=server.url, token=server.token, directory=tmp_path / "spool")
    with run.step():
        pass
    assert run.finish().complete and "git_commit" not in server.run.registration["environment"]


def test_empty_without_git(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert describe_repository() == {}
