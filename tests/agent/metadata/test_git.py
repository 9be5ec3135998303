"""The commit and the changes since: found in the background, bounded, without secrets."""

import os
import subprocess
import time
from pathlib import Path

import pytest
from agent.helpers.wire_server import WireServer

import fp8scope
from fp8scope.metadata import git as metadata_git
from fp8scope.metadata.git import MAX_DIFF_BYTES, RepositoryLookup, describe_repository


def git(*arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "init.defaultBranch=trunk"]
    done = subprocess.run(["git", *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one committed file, in which we are."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    git("init", "-q")
    (folder / "train.py").write_text("lr = 1\n")
    git("add", ".")
    git("commit", "-q", "-m", "x")
    return folder


def test_it_works(work: Path, server: WireServer, tmp_path: Path) -> None:
    (work / "train.py").write_text("lr = 2\npassword = 'SECRET'\n")
    run = fp8scope.init(name="x", url=server.url, token=server.token, directory=tmp_path / "spool")
    with run.step() as step:
        step.log(loss=1.0)
    # Whether it was known in time for the first step or not: at the end the server has it.
    assert run.finish().errors == 0
    found = server.run.registration["environment"]
    assert found["git_commit"] == git("rev-parse", "HEAD") and found["git_branch"] == "trunk"
    assert "-lr = 1" in found["git_diff"] and "+lr = 2" in found["git_diff"]
    assert "SECRET" not in found["git_diff"] and found["git_diff_cut"] is False
    assert found["hostname"]


def test_no_repository(tmp_path: Path) -> None:
    assert describe_repository() == {}


def test_a_repository_without_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git("init", "-q")
    assert describe_repository() == {}


def test_a_large_change_is_cut(work: Path) -> None:
    (work / "train.py").write_text("x = 1\n" * MAX_DIFF_BYTES)
    found = describe_repository()
    assert found["git_diff_cut"] is True and MAX_DIFF_BYTES // 2 < len(found["git_diff"]) <= MAX_DIFF_BYTES


def test_a_long_line_is_cut(work: Path) -> None:
    (work / "train.py").write_text("a" * 100_000 + "\nlast = 1\n")
    diff = describe_repository()["git_diff"]
    assert len(diff) < 5000 and "+last = 1" in diff


def test_text_that_a_database_cannot_hold(work: Path) -> None:
    (work / "train.py").write_bytes(b"x = '\xff\xfe'\n")
    diff: str = describe_repository()["git_diff"]
    assert diff.encode() and "\x00" not in diff


def test_nothing_of_the_repositorys_configuration_is_run(work: Path) -> None:
    ran = work.parent / "ran"
    git("config", "diff.external", f"touch {ran}")
    git("config", "diff.x.textconv", f"touch {ran};cat")
    (work / ".gitattributes").write_text("*.py diff=x\n")
    (work / "train.py").write_text("lr = 3\n")
    assert "+lr = 3" in describe_repository()["git_diff"] and not ran.exists()


def test_a_git_that_hangs_is_given_up(
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
    deadline = time.monotonic() + 60
    while (found := lookup.take()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found == {}
    run = fp8scope.init(name="x", url=server.url, token=server.token, directory=tmp_path / "spool")
    with run.step():
        pass
    assert run.finish().complete and "git_commit" not in server.run.registration["environment"]


def test_no_git_at_all(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert describe_repository() == {}
