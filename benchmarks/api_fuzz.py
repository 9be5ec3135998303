"""Sends the API what its OpenAPI document allows, and what it forbids. Prints one JSON line.

    python benchmarks/api_fuzz.py SCHEMATHESIS [--cases 250] [--seed 1]

SCHEMATHESIS is the command of that program, installed apart (`pip install schemathesis`). It makes requests
from the document that an installation (`fp8scope up`) serves: examples, boundaries, random ones. A project
has two runs that the agent recorded, one with an alert; half of the requests name one of them, others
made-up ids. Standard error has an example of each failure, and a traceback of the server.

    requests        that were sent
    server_errors   answers with a status of 500 or more
    undocumented    answers with a status, a type or a body that the document does not have
    refused_valid   inputs that the schema allows, and the server refused with 400 or 422
    accepted_invalid
                    inputs that the schema forbids, and the server took
    alive           the server answers at the end, and the runs are there
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

CHECKS = {
    "not_a_server_error": "server_errors",
    "status_code_conformance": "undocumented",
    "content_type_conformance": "undocumented",
    "response_schema_conformance": "undocumented",
    "positive_data_acceptance": "refused_valid",
    "negative_data_rejection": "accepted_invalid",
}
# They end what the others need: the project's token, its runs.
ENDING = ("POST /api/v1/token/rotate", "DELETE /api/v1/runs/{run}")


def record_runs(url: str, token: str, folder: Path) -> list[str]:
    """Record a BF16 run, and an FP8 run with a loss that is not finite; returns their ids."""
    import torch

    import fp8scope

    ids = []
    for name in ("bf16", "fp8"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        if name == "fp8":
            fp8scope.convert(model, fp8scope.DelayedScaling())
        optimizer = torch.optim.AdamW(model.parameters())
        arm = {"group": "bf16"} if name == "bf16" else {"baseline": "bf16"}
        options: dict[str, Any] = {"url": url, "token": token, "directory": folder, **arm}
        run = fp8scope.attach(model, optimizer, name=name, **options)
        for step in range(60):
            loss = model(torch.randn(16, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 50 and name == "fp8":
                run.log(loss=float("nan"))
        run.log_eval("held-out", "accuracy", [1, 0, 1, 1])
        run.finish()
        ids.append(str(run.id))
    return ids


def command(program: str, url: str, token: str, folder: Path, cases: int, seed: int) -> list[str]:
    """The command line of a pass; its events go to `folder`/events.ndjson."""
    skipped = [word for name in ENDING for word in ("--exclude-name", name)]
    common = ["--header", f"Authorization: Bearer {token}", "--checks", ",".join(CHECKS), *skipped]
    return [
        *(program, "--config-file", str(folder / "schemathesis.toml")),
        *("run", f"{url}/api/v1/openapi.json", *common),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", str(cases), "--seed", str(seed)),
        *("--report", "ndjson", "--report-ndjson-path", str(folder / "events.ndjson"), "--no-shrink"),
        *("--suppress-health-check", "all", "--workers", "2", "--continue-on-failure"),
    ]


def failures_in(file: Path) -> tuple[int, Counter[str], dict[str, str]]:
    """The requests of a pass, its failures by kind, and one of each kind and operation."""
    requests, failures, examples = 0, Counter[str](), dict[str, str]()
    for line in file.read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        recorder = event.get("ScenarioFinished", {}).get("recorder")
        if not recorder:
            continue
        requests += len(recorder.get("interactions", {}))
        for checks in recorder.get("checks", {}).values():
            for check in checks:
                if check.get("status") == "failure" and (kind := CHECKS.get(check["name"])):
                    failures[kind] += 1
                    text = json.dumps(check.get("failure_info") or check)[:1500]
                    examples.setdefault(f"{kind} {recorder.get('label')}", text)
    return requests, failures, examples


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("program", metavar="SCHEMATHESIS")
    parser.add_argument("--cases", type=int, default=250, help="random requests for an endpoint and pass")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from chaos import make_token

    from fp8scope_dashboard.servers.supervisor import Supervisor

    requests, failures, examples = 0, Counter[str](), dict[str, str]()
    with tempfile.TemporaryDirectory() as name, Supervisor(Path(name) / "up", port=0) as supervisor:
        folder, url, token = Path(name), f"http://127.0.0.1:{supervisor.port}", make_token(supervisor)
        _, run = record_runs(url, token, folder / "spool")
        for real in (True, False):
            settings = f'[parameters]\n"path.run" = "{run}"\n' if real else ""
            (folder / "schemathesis.toml").write_text(settings)
            arguments = command(options.program, url, token, folder, options.cases, options.seed)
            subprocess.run(arguments, stdout=sys.stderr, check=False, cwd=folder)
            sent, failed, some = failures_in(folder / "events.ndjson")
            requests, failures, examples = requests + sent, failures + failed, some | examples
        alive = subprocess.run(
            [sys.executable, "-m", "fp8scope", "show", run, "--json"],
            env={"FP8SCOPE_URL": url, "FP8SCOPE_TOKEN": token},
            capture_output=True,
            check=False,
        )
        log = (folder / "up" / "logs" / "web.log").read_text()
    if "Traceback" in log:
        print(log[max(0, log.index("Traceback") - 300) :][:20_000], file=sys.stderr)
    for kind, example in sorted(examples.items()):
        print(kind, example, file=sys.stderr)
    figures = {kind: failures[kind] for kind in dict.fromkeys(CHECKS.values())}
    print(
        json.dumps({"benchmark": "api_fuzz", "requests": requests, **figures, "alive": alive.returncode == 0})
    )


if __name__ == "__main__":
    main()
