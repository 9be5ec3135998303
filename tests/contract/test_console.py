"""A training script as a process: what it prints, and links, are on the server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from contract.helpers.wire_client import WireClient
from helpers.live_servers import Server

from fp8scope.cli.main import main
from fp8scope_dashboard.pages.run.onset_facts import failure_line
from fp8scope_dashboard.runs.models import Artefact, ConsoleLine, Note, Run, StepNote

SCRIPT = """
import logging, os, sys
import fp8scope

logging.basicConfig(format="%(message)s", stream=sys.stderr)
run = fp8scope.init(name="prints", **{init})
for number in range(1, 4):
    with run.step() as step:
        step.log(loss=1.0)
    print("loss at", number)
    sys.stderr.write(f"\\r{number * 30} %")
sys.stderr.write("\\n")
logging.warning("\\x1b[31mslow\\x1b[0m FP8SCOPE_TOKEN " + os.environ["FP8SCOPE_TOKEN"])
run.log_artefact("Checkpoint", "s3://bucket/step-3", step=3)
run.log_artefact("Bad", "javascript:alert(1)")
subprocess = os.system("echo not seen")
{end}
"""


def train(server: Server, folder: Path, end: str, init: str = "{}", **more: str) -> None:
    environment = {
        **os.environ,
        "FP8SCOPE_URL": server.url,
        "FP8SCOPE_TOKEN": server.token,
        "FP8SCOPE_DIR": str(folder / "spool"),
        "FP8SCOPE_INTERVAL": "0.05",
        **more,
    }
    (folder / "train.py").write_text(SCRIPT.replace("{init}", init).replace("{end}", end))
    command = [sys.executable, str(folder / "train.py")]
    subprocess.run(command, env=environment, timeout=120, check=False, capture_output=True)


def texts(run: Run) -> list[str]:
    return list(ConsoleLine.objects.filter(run=run).order_by("number").values_list("text", flat=True))


def test_it_works(server: Server, tmp_path: Path) -> None:
    train(server, tmp_path, 'raise RuntimeError("the end")')
    run = Run.objects.get()
    lines = texts(run)
    assert [line for line in lines if line.startswith("loss at")] == [f"loss at {n}" for n in (1, 2, 3)]
    assert "90 %" in lines and "30 %" not in lines
    assert "slow FP8SCOPE_TOKEN [redacted]" in lines
    assert "RuntimeError: the end" in lines and failure_line(run) == "RuntimeError: the end"
    assert not any(server.token in line or "not seen" in line for line in lines)
    assert ConsoleLine.objects.get(text="90 %").stream == "stderr"
    assert ConsoleLine.objects.get(text="loss at 2").step == 2
    artefact = Artefact.objects.get()
    assert (artefact.name, artefact.address, artefact.step) == ("Checkpoint", "s3://bucket/step-3", 3)
    # The invalid link.
    assert run.agent_errors == 1


@pytest.mark.parametrize(
    ("init", "more"), [("{'console': 'off'}", {}), ("{}", {"FP8SCOPE_CONSOLE": "off"}), ("{}", {"RANK": "1"})]
)
def test_can_be_switched_off(server: Server, tmp_path: Path, init: str, more: dict[str, str]) -> None:
    train(server, tmp_path, "run.finish()", init, **more)
    assert Run.objects.get().state == "finished" and texts(Run.objects.get()) == []


def test_what_a_killed_process_printed_is_sent_later(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = """
import time, traceback
try:
    {}["missing"]
except KeyError:
    traceback.print_exc()
time.sleep(7)
os._exit(9)"""
    train(server, tmp_path, end, "{'mode': 'offline'}")
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    assert main(["sync", str(tmp_path / "spool")]) == 0
    run = Run.objects.get()
    assert run.state == "failed" and "was killed" in run.error
    # The agent does not know why it ended; its log does.
    assert failure_line(run) == "KeyError: 'missing'"


def test_an_export_brings_all_of_it_back(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(server, tmp_path, "run.finish()")
    run = Run.objects.get()
    Note.objects.create(run=run, text="**Seen**, commas; and so on", version=3)
    StepNote.objects.create(run=run, step=2, text='Here, "too"\nand below')
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    for form in ("parquet", "csv"):
        file = tmp_path / f"run.{form}"
        assert main(["export", str(run.id), "-o", str(file)]) == 0
        copied = uuid4()
        assert main(["import", "--id", str(copied), str(file)]) == 0
        copy = Run.objects.get(pk=copied)
        assert texts(copy) == texts(run) != []
        assert Note.objects.get(run=copy).text == "**Seen**, commas; and so on"
        pinned = StepNote.objects.get(run=copy)
        assert (pinned.step, pinned.text) == (2, 'Here, "too"\nand below')
        link = Artefact.objects.get(run=copy)
        assert (link.name, link.address, link.step) == ("Checkpoint", "s3://bucket/step-3", 3)


@pytest.fixture
def client(server: Server) -> WireClient:
    client = WireClient(server.url, server.token, run=UUID(int=7))
    assert client.register().status == 201
    return client


def send(client: WireClient, seq: int, lines: list[dict[str, object]]) -> int:
    document = {"writer": str(UUID(int=1)), "seq": seq, "kind": "console", "lines": lines}
    return client.request("POST", "/reports", json=document).status


def line(number: int, text: str = "x", **more: object) -> dict[str, object]:
    return {"number": number, "time": 1795431435.5, "text": text, **more}


def test_a_later_line_replaces_an_earlier_one(client: WireClient) -> None:
    assert send(client, 0, [line(0), line(1, "10 %")]) == 201
    assert send(client, 1, [line(1, "20 %"), line(2, "a"), line(2, "b")]) == 201
    assert send(client, 1, [line(1, "20 %"), line(2, "a"), line(2, "b")]) == 200
    run = Run.objects.get()
    assert texts(run) == ["x", "20 %", "b"]
    (found,) = client.request("GET", "/console?q=20").json["lines"]
    assert (found["text"], found["number"], found["rank"]) == ("20 %", 1, 0)
    earlier = client.request("GET", f"/console?before={found['id']}").json["lines"]
    assert [each["text"] for each in earlier] == ["x"]
    assert client.request("GET", "/console?before=999999").code == "unknown_name"


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [line(0, "x" * 4_001)],
        [line(number) for number in range(1_001)],
        [line(-1)],
        [line(0, stream="console")],
        [{"number": 0, "text": "x"}],
    ],
)
def test_refuses_what_is_too_large_or_malformed(client: WireClient, lines: list[dict[str, object]]) -> None:
    assert send(client, 0, lines) == 422
    assert not ConsoleLine.objects.exists()
