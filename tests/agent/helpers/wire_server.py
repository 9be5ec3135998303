"""A small server for docs/wire.md that checks every message and misbehaves when asked to.

It keeps what it stored in memory, so that a test can compare it with what the agent says it sent.
"""

import hashlib
import json
import threading
import uuid
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs

from agent.helpers.faulty_http import Fault, Plan, WireHandler, WireHttp
from agent.helpers.stored_run import StoredRun
from agent.helpers.wire_messages import Refusal, read_batch, read_histograms


class WireServer:
    """`with WireServer() as server:` listens on a free port; `stop` and `start` keep port and data."""

    def __init__(self, max_body: int = 32 << 20) -> None:
        self.token = "fp8s_test-token"
        self.max_body = max_body
        self.runs: dict[str, StoredRun] = {}
        self.plan: Plan = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self.alerts: list[dict[str, Any]] = []
        self.commands: list[dict[str, Any]] = []
        self.asked_for_commands = 0
        self.problems: list[str] = []
        self.released = threading.Event()
        self.lock = threading.Lock()
        self.echo_seq = True
        self.pause: object = None
        """What answers to batches ask for."""
        self.accepts: list[str] = []
        """What it says to accept; none, as older servers."""
        self._port = 0
        self._http: WireHttp | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def run(self) -> StoredRun:
        """The only run there is."""
        assert len(self.runs) == 1, list(self.runs)
        return next(iter(self.runs.values()))

    def start(self) -> None:
        self.released.clear()
        self._http = WireHttp(("127.0.0.1", self._port), WireHandler)
        self._http.wire = self
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.released.set()
        if self._http is not None:
            self._http.shutdown()
            self._http.close_connections()
            self._http.server_close()
            self._http = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def times(self, count: int, fault: Fault, path: str = "/") -> None:
        """Have `fault` for the next `count` requests whose path contains `path`."""
        left = [count]

        def plan(method: str, where: str) -> Fault | None:
            if path not in where or left[0] <= 0:
                return None
            left[0] -= 1
            return fault

        self.plan = plan

    # The API

    def answer(
        self, method: str, path: str, query: str, content_type: str, body: bytes
    ) -> tuple[int, dict[str, Any]]:
        parts = path.removeprefix("/api/v1/").split("/")
        if parts[0] != "runs" or len(parts) < 2:
            raise Refusal(404, "not_found")
        run, rest = parts[1], parts[2:]
        uuid.UUID(run)
        if method == "PUT" and not rest:
            return self._register(run, json.loads(body))
        stored = self.runs.get(run)
        if stored is None:
            raise Refusal(404, "unknown_run")
        if method == "GET" and not rest:
            attempts = [place["attempt"] for place in stored.places.values()]
            return 200, {"id": run, "last_attempt": max(attempts, default=None)}
        if len(body) > self.max_body:
            raise Refusal(413, "too_large")
        if rest[:1] == ["writers"]:
            return 200, _extend_catalogue(stored, rest[1], json.loads(body))
        after = int(parse_qs(query).get("alerts_after", ["0"])[0])
        tail = {"alerts": [a for a in self.alerts if a["id"] > after], "commands": self._commands(query)}
        if rest == ["heartbeat"]:
            document = json.loads(body)
            assert set(document) == {"writer", "dropped", "errors", "pending"}, document
            stored.heartbeats.append(document)
            return 200, {"state": "running", **tail}
        status, answer = self._message(run, stored, rest[0], content_type, body)
        return status, {**answer, **tail}

    def _commands(self, query: str) -> list[dict[str, Any]]:
        """To those who ask: what they do not know yet and nobody has answered."""
        known = parse_qs(query).get("commands_after")
        if known is None:
            return []
        self.asked_for_commands += 1
        return [c for c in self.commands if c["id"] > int(known[0]) and c["id"] not in self._answered()]

    def _answered(self) -> set[int]:
        return {number for stored in self.runs.values() for number in stored.answered}

    def _register(self, run: str, document: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        known = {"name", "precision", "recipe", "config", "environment", "tags", "group", "baseline", "seed"}
        known |= {"total_steps", "created_at", "summary", "replace_tags", "parent", "relation"}
        if not document.get("name") or set(document) - known:
            raise Refusal(422, "invalid", f"unknown fields {set(document) - known}")
        new = run not in self.runs
        # What was registered first stays, what it left open is filled in; the configuration is added to.
        first = self.runs.setdefault(run, StoredRun(registration=document)).registration
        sent, stored = document.get("environment", {}), first.get("environment", {})
        latest = {name: sent[name] for name in ("training", "advice", "step_times") if name in sent}
        first["environment"] = {**sent, **stored, **latest}
        for name in ("config", "summary"):
            first[name] = {**first.get(name, {}), **document.get(name, {})}
        if first.get("precision", "unknown") == "unknown":
            first["precision"] = document.get("precision", "unknown")
        if document.get("replace_tags"):
            first["tags"] = document["tags"]
        page: dict[str, Any] = {
            "id": run,
            "project": "default",
            "url": f"{self.url}/runs/{run}",
            "state": "running",
        }
        if self.accepts:
            page["accepts"] = self.accepts
        return (201 if new else 200), page

    def _message(
        self, run: str, stored: StoredRun, kind: str, content_type: str, body: bytes
    ) -> tuple[int, dict[str, Any]]:
        if kind == "histograms":
            batch = read_histograms(body, content_type, stored)
        elif kind == "batches":
            batch = read_batch(body, content_type, stored)
            if batch["run"] != run:
                raise Refusal(400, "malformed", "another run's batch")
        elif kind == "media":
            line, _, content = body.partition(b"\n")
            batch, body = json.loads(line), line
            sha256 = batch["sha256"]
            if content:
                assert hashlib.sha256(content).hexdigest() == sha256 and len(content) == batch["size"]
                stored.contents[sha256] = content
            if sha256 not in stored.contents:
                raise Refusal(409, "content_needed")
        else:
            batch = json.loads(body)
        writer, seq = str(uuid.UUID(batch["writer"])), batch["seq"]
        digest = hashlib.sha256(body).digest()
        if (writer, seq) in stored.receipts:
            before, answer = stored.receipts[writer, seq]
            if before != digest:
                raise Refusal(409, "writer_conflict")
            return 200, {**answer, "status": "duplicate"}
        mine = [s for w, s in stored.receipts if w == writer]
        if seq != len(mine):
            raise Refusal(422, "invalid", f"seq {seq} after {len(mine)} messages")
        answer = {"status": "stored", "rows": 0, "points": 0}
        if self.echo_seq:
            answer["seq"] = seq
        if kind == "batches":
            stored.rows += batch["rows"]
            stored.points += batch["points"]
            stored.dropped = max(stored.dropped, batch["dropped"])
            answer |= {"rows": len(batch["rows"]), "points": batch["points"]}
            if self.pause is not None:
                answer["pause"] = self.pause
        elif kind == "histograms":
            stored.histograms += batch["rows"]
        elif kind == "evaluations":
            stored.evaluations.append(batch)
        elif kind == "reports":
            assert batch["kind"] in ("accepts", "annotation", "bisect", "command", "reference"), batch
            stored.reports.append(batch)
        elif kind == "media":
            stored.media.append(batch)
        elif kind == "finish":
            stored.finishes.append(batch)
        else:
            raise Refusal(404, "not_found")
        stored.receipts[writer, seq] = (digest, answer)
        return 201, answer


def _extend_catalogue(stored: StoredRun, writer: str, document: dict[str, Any]) -> dict[str, Any]:
    assert set(document) == {"rank", "hostname", "attempt", "offset", "tensors"}, document
    stored.places[str(uuid.UUID(writer))] = {name: document[name] for name in ("rank", "hostname", "attempt")}
    catalogue = stored.catalogues.setdefault(str(uuid.UUID(writer)), [])
    offset, tensors = document["offset"], document["tensors"]
    if offset > len(catalogue):
        raise Refusal(409, "catalogue_gap")
    for index, tensor in enumerate(tensors, offset):
        assert set(tensor) == {"name", "module", "role", "format", "shape", "numel"}, tensor
        if index < len(catalogue) and catalogue[index] != tensor:
            raise Refusal(409, "writer_conflict")
    catalogue[offset : offset + len(tensors)] = tensors
    return {"count": len(catalogue)}
