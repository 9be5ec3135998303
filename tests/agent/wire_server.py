"""A small server for docs/wire.md that checks every message and can be told to misbehave.

It keeps what it stored in memory, so that a test can compare it with what the agent says it sent.
"""

import hashlib
import json
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa

STATISTICS = {"numel", "amax", "scale", "saturated", "underflow", "subnormal", "nonfinite"}
SAMPLED = {"blocks", "saturated_blocks", "scale_min", "scale_median", "scale_max", "sq_error", "sq_signal"}
SAMPLED |= {"scale_frozen", "scale_stale", "history_amax", "update_ratio"}
EXPONENT_BINS = 279


@dataclass(frozen=True)
class Fault:
    """What to do instead of a proper answer.

    `status` (with `code` and `headers`) answers so without storing. `hang` never answers. `drop` closes the
    connection: before the message is stored, or `after`. `twice` sends the proper answer two times. `page`
    answers 200 with a page that is none of the API's.
    """

    status: int = 0
    code: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    hang: bool = False
    drop: bool = False
    after: bool = False
    twice: bool = False
    page: bool = False


Plan = Callable[[str, str], Fault | None]
"""Given the method and the path, the fault to have now."""


@dataclass
class StoredRun:
    """What the server holds of one run."""

    registration: dict[str, Any] = field(default_factory=dict)
    catalogues: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    receipts: dict[tuple[str, int], tuple[bytes, dict[str, Any]]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    points: int = 0
    dropped: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    finishes: list[dict[str, Any]] = field(default_factory=list)
    heartbeats: list[dict[str, Any]] = field(default_factory=list)
    histograms: list[dict[str, Any]] = field(default_factory=list)
    """One entry a tensor: step, time, name and counts."""

    reports: list[dict[str, Any]] = field(default_factory=list)

    def reports_of(self, kind: str) -> list[dict[str, Any]]:
        return [report for report in self.reports if report["kind"] == kind]

    @property
    def answered(self) -> set[int]:
        """The commands that somebody has answered."""
        return {report["command"] for report in self.reports_of("command")}

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows]

    @property
    def finish(self) -> dict[str, Any]:
        """How the run ended; not how a child or an earlier attempt did."""
        (found,) = [one for one in self.finishes if one["ends_run"]]
        return found

    def scalars(self, name: str) -> list[float | None]:
        return [row["scalars"].get(name) for row in self.rows]


class Refusal(Exception):
    """An error of the API."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(message or code)
        self.status = status
        self.code = code


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
        self._port = 0
        self._http: ThreadingHTTPServer | None = None

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
        self._http = _Server(("127.0.0.1", self._port), _Handler)
        self._http.wire = self
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.released.set()
        if self._http is not None:
            self._http.shutdown()
            cast(_Server, self._http).close_connections()
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
        known |= {"total_steps", "created_at"}
        if not document.get("name") or set(document) - known:
            raise Refusal(422, "invalid", f"unknown fields {set(document) - known}")
        new = run not in self.runs
        # What was registered first stays, what it left open is filled in.
        first = self.runs.setdefault(run, StoredRun(registration=document)).registration
        first["environment"] = {**document.get("environment", {}), **first.get("environment", {})}
        page = {"id": run, "project": "default", "url": f"{self.url}/runs/{run}", "state": "running"}
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
        elif kind == "histograms":
            stored.histograms += batch["rows"]
        elif kind == "evaluations":
            stored.evaluations.append(batch)
        elif kind == "reports":
            assert batch["kind"] in ("accepts", "annotation", "bisect", "command", "reference"), batch
            stored.reports.append(batch)
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


def read_histograms(body: bytes, content_type: str, stored: StoredRun) -> dict[str, Any]:
    """Check histograms against docs/wire.md and return them as plain objects."""
    assert content_type == "application/vnd.apache.arrow.stream"
    with pa.ipc.open_stream(body) as stream:
        table = stream.read_all()
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    types = {column.name: column.type for column in table.schema}
    assert types == {
        "step": pa.int64(),
        "time": pa.timestamp("us", tz="UTC"),
        "tensor": pa.int32(),
        "counts": pa.list_(pa.float64(), EXPONENT_BINS),
    }, types
    assert metadata["fp8scope.protocol"] == "1" and "fp8scope.dropped" not in metadata
    writer = metadata["fp8scope.writer"]
    names = [tensor["name"] for tensor in stored.catalogues.get(writer, [])]
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        assert all(value is not None for value in row.values()) and min(row["counts"]) >= 0
        row["name"] = names[row.pop("tensor")]
    return {"rows": rows, "writer": writer, "seq": int(metadata["fp8scope.seq"])}


def read_batch(body: bytes, content_type: str, stored: StoredRun | None = None) -> dict[str, Any]:
    """Check a batch against docs/wire.md and return it as plain objects."""
    if content_type != "application/vnd.apache.arrow.stream":
        raise Refusal(400, "not_arrow")
    try:
        with pa.ipc.open_stream(body) as stream:
            table = stream.read_all()
    except (pa.ArrowException, OSError) as error:
        raise Refusal(400, "malformed", str(error)) from error
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    if metadata["fp8scope.protocol"] != "1":
        raise Refusal(400, "protocol_mismatch")
    writer = metadata["fp8scope.writer"]
    steps = table.column("step")
    assert steps.type == pa.int64() and steps.null_count == 0
    times = table.column("time")
    assert times.type == pa.timestamp("us", tz="UTC") and times.null_count == 0
    numbers = cast(list[int], steps.to_pylist())
    assert numbers == sorted(numbers)
    rows: list[dict[str, Any]] = [
        {"step": step, "time": moment, "scalars": {}, "tensors": {}, "writer": writer}
        for step, moment in zip(numbers, times.to_pylist(), strict=True)
    ]
    points = 0
    for name in table.column_names[2:]:
        kind, _, label = name.partition(":")
        column = table.column(name)
        if kind == "scalar":
            assert column.type == pa.float64()
        else:
            assert kind == "tensor" and label in STATISTICS | SAMPLED, name
            assert pa.types.is_fixed_size_list(column.type)
            if stored is not None and column.type.list_size > len(stored.catalogues.get(writer, [])):
                raise Refusal(422, "invalid", "more values than the catalogue has tensors")
        for row, value in zip(rows, column.to_pylist(), strict=True):
            row[f"{kind}s"][label] = value
            points += sum(v is not None for v in value) if isinstance(value, list) else value is not None
    return {
        "run": metadata["fp8scope.run"],
        "writer": writer,
        "seq": int(metadata["fp8scope.seq"]),
        "dropped": int(metadata.get("fp8scope.dropped", "0")),
        "rows": rows,
        "points": points,
    }


class _Server(ThreadingHTTPServer):
    """Knows its open connections: a server that stops must not go on answering on them."""

    daemon_threads = True
    allow_reuse_address = True
    wire: WireServer

    def __init__(self, *arguments: Any) -> None:
        self.connections: set[Any] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        for connection in list(self.connections):
            super().shutdown_request(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is part of the tests; anything else should not have been sent."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | ValueError):
            self.wire.problems.append(f"{type(error).__name__}: {error}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _serve(self) -> None:
        wire = self.server.wire
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        where = urlsplit(self.path)
        with wire.lock:
            wire.requests.append((self.command, where.path))
            fault = wire.plan(self.command, where.path)
        if fault is not None and fault.hang:
            wire.released.wait(60)
            self.close_connection = True
            return
        if fault is not None and fault.drop and not fault.after:
            self.close_connection = True
            return
        if fault is not None and fault.page:
            self._reply(200, b"<html>Please sign in</html>", ())
            return
        if fault is not None and fault.status:
            error = {"error": {"code": fault.code, "message": "as planned", "hint": ""}}
            self._reply(fault.status, json.dumps(error if fault.code else {}).encode(), fault.headers)
            return
        status, answer = self._answer(where.path, where.query, body)
        if fault is not None and fault.drop:
            self.close_connection = True
            return
        content = json.dumps(answer).encode()
        self._reply(status, content, ())
        if fault is not None and fault.twice:
            # Late enough that the client has taken the first answer, and perhaps sent its next request.
            time.sleep(0.005)
            self._reply(status, content, ())

    def _answer(self, path: str, query: str, body: bytes) -> tuple[int, dict[str, Any]]:
        wire = self.server.wire
        try:
            if self.headers.get("Authorization") != f"Bearer {wire.token}":
                raise Refusal(401, "bad_token")
            with wire.lock:
                return wire.answer(self.command, path, query, self.headers.get("Content-Type", ""), body)
        except Refusal as refusal:
            return refusal.status, {"error": {"code": refusal.code, "message": str(refusal), "hint": ""}}

    def _reply(self, status: int, content: bytes, headers: tuple[tuple[str, str], ...]) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = _serve

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""
