"""`fp8scope certify` and `fp8scope check` against a server; the file is then verified without it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from contract.helpers.wire_client import WireClient
from helpers.live_servers import Server

from fp8scope.cli import certify
from fp8scope.cli.main import main
from fp8scope.client.connection import Connection

STEPS = 200


@pytest.fixture
def groups(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds of BF16, two of an equal FP8 group, and two of one that is 3 % worse."""
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    for group, baseline, harm in (("bf16", "", 0.0), ("fp8", "bf16", 0.0), ("fp8 stale", "bf16", 0.03)):
        for seed in (1, 2):
            store(server, group, baseline, harm, seed)


def store(server: Server, group: str, baseline: str, harm: float, seed: int) -> None:
    client = WireClient(server.url, server.token)
    fields = {"group": group, "baseline": baseline, "seed": seed, "total_steps": STEPS}
    precision = "fp8" if baseline else "bf16"
    assert client.register(name=f"{group} {seed}", precision=precision, **fields).status == 201
    chance = np.random.default_rng([seed, len(group)])
    steps = np.arange(STEPS)
    shared = 0.02 * np.random.default_rng(5).normal(size=STEPS)
    loss = (2.0 + 2.0 * np.exp(-steps / 20.0)) * (1.0 + harm + shared + 0.001 * chance.normal(size=STEPS))
    assert client.send(client.batch(0, steps.tolist(), scalars={"loss": loss.tolist()})).status == 201
    ending = {"writer": str(client.writer), "seq": 1, "state": "finished", "rows_sent": STEPS}
    assert client.request("POST", "/finish", json={**ending, "points_sent": STEPS}).status == 201


@pytest.mark.usefixtures("groups")
def test_it_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "certificate.json"
    assert main(["certify", "fp8", "bf16", "--margin", "1%", "-o", str(output)]) == 0
    assert capsys.readouterr().out.startswith("equivalent: In the last compared window")
    assert "<h1" in output.with_suffix(".html").read_text()
    assert main(["verify", str(output)]) == 0
    assert "valid: FP8 is equivalent to BF16 within 1.00 %" in capsys.readouterr().out
    document = json.loads(output.read_text())
    assert document["names"]["judged"] == "fp8" and document["terms"]["margin"] == 0.01
    assert [len(arm) for arm in document["arms"].values()] == [2, 2]
    assert main(["certify", "fp8 stale", "bf16", "--margin-nats", "0.001", "-o", str(output)]) == 0
    assert json.loads(output.read_text())["claim"]["verdict"] == "worse"


@pytest.mark.usefixtures("groups")
def test_the_status_is_that_of_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    junit, comment, file = tmp_path / "junit.xml", tmp_path / "comment.md", tmp_path / "c.json"
    files = ["--junit", str(junit), "--markdown", str(comment), "--certificate", str(file)]
    assert main(["check", "fp8", "bf16", "--margin", "0.01", *files]) == 0
    assert ElementTree.parse(junit).getroot().get("failures") == "0"
    assert main(["check", "fp8 stale", "bf16", *files]) == 1
    assert ElementTree.parse(junit).getroot().get("failures") == "1"
    assert comment.read_text().startswith("### ❌ FP8 is worse than BF16")
    assert main(["verify", str(file)]) == 0
    assert main(["check", "fp8", "bf16", "--margin", "0.0001%"]) == 3
    assert main(["check", "fp8", "bf16", "--margin", "0.0001%", "--undecided", "pass"]) == 0
    assert "cannot_tell" in capsys.readouterr().out


@pytest.mark.usefixtures("groups")
def test_what_is_not_there_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, message in (
        (["fp16", "bf16"], "the project has no run of the group 'fp16'"),
        (['a"b', "bf16"], "the project has no run of the group"),
        (["fp8", "nothing"], "the run has no baseline that is stored"),
        (["00000000-0000-0000-0000-000000000000", "bf16"], "run"),
    ):
        assert main(["check", *arguments]) == 1
        assert message in capsys.readouterr().err
    assert main(["certify", "fp8", "bf16", "-o", str(tmp_path / "missing" / "c.json")]) == 1
    assert "No such file" in capsys.readouterr().err
    for margin in ("0", "x", "200%", "nan"):
        with pytest.raises(SystemExit, match="2"):
            main(["check", "fp8", "bf16", "--margin", margin])


def test_a_server_that_does_not_answer_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FP8SCOPE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("FP8SCOPE_TOKEN", "fp8s_secret")
    monkeypatch.setattr(certify, "Connection", partial(Connection, patience=0.1))
    assert main(["check", "fp8", "bf16"]) == 1
    error = capsys.readouterr().err
    assert "does not answer" in error and "fp8s_secret" not in error
