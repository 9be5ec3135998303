"""`fp8scope plan`: what it prints, and what it says about documents that it cannot use."""

import json
import re
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from fp8scope.cli.main import main

COSTS = {
    "layers": [{"seconds": 1.0, "weights": 6e9, "activations": 2e9}] * 24,
    "first": {"weights": 12e9},
    "last": {"seconds": 1.8, "weights": 12e9, "activations": 4e9},
}
PLAN = {
    "shape": {
        "layers": 84, "hidden": 8192, "sequence": 4096, "vocabulary": 135040, "architecture": "lfa"
    },
    "plan": {
        "pipeline": 32, "tensor": 1, "data": 3, "accumulation": 384,
        "optimizer_parallel": True, "stages_share_node": True,
    },
    "cluster": {"flops": 171.6e12, "link": 85e9, "network": 24.375e9, "connectors": 2},
}  # fmt: skip


def written(path: Path, document: object) -> str:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def test_it_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = written(tmp_path / "costs.json", COSTS)
    assert main(["plan", "split", costs, "--stages", "8"]) == 0
    text = capsys.readouterr().out
    assert "78 GB -> 56 GB" in text and "[2, 2, 3, 3, 4, 4, 4, 2]" in text
    assert main(["plan", "split", costs, "--stages", "8", "--json", "--memory-limit", "55"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["proposed"]["memory"] <= 55e9 and document["before"]["layers"] == [3] * 8
    assert main(["plan", "split", costs, "--stages", "8", "--memory-limit", "20"]) == 1
    assert "No split keeps each stage below 2e+10 bytes" in capsys.readouterr().err


class Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert self.path.startswith("/api/v1/runs/") and "/series?scalar=step_seconds" in self.path
        body = json.dumps({"steps": [1, 2, 3], "values": [500.0, 240.0, 240.0]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def test_the_time_of_a_step_against_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "plan.json", PLAN)
    assert main(["plan", "step", path]) == 0
    assert "total         238.397 s  100.0%" in capsys.readouterr().out
    server = HTTPServer(("127.0.0.1", 0), Server)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("FP8SCOPE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("FP8SCOPE_TOKEN", "fp8_test")
    run = "1b671a64-40d5-491e-99b0-da01ff1f3341"
    try:
        assert main(["plan", "step", path, "--run", run]) == 0
        assert "the model is off by -0.7%" in capsys.readouterr().out
        assert main(["plan", "step", path, "--run", run, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["measured"] == 240.0
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("arguments", "document", "message"),
    [
        (["split", "--stages", "2"], "{", "is no JSON"),
        (["split", "--stages", "2"], {"layers": [{}]}, "2 stages need 2 to"),
        (["step"], {"shape": {}}, "shape:.*missing"),
        (["step"], {**PLAN, "cluster": 3}, "needs an object `cluster`"),
        (
            ["step"],
            {**PLAN, "cluster": {"flops": 0, "link": 1, "network": 1}},
            "flops must be a number",
        ),
    ],
)
def test_errors_say_what_is_wrong(
    arguments: list[str], document: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *options = arguments
    assert main(["plan", command, written(tmp_path / "it.json", document), *options]) == 1
    assert re.search(message, capsys.readouterr().err)
