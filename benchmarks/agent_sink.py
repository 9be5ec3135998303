"""A server that acknowledges every message of an agent and stores nothing: `python benchmarks/agent_sink.py`.

Prints its address. For benchmarks of the agent alone: it answers within microseconds and uses little CPU
time.
"""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pyarrow as pa


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        self._body()
        self._answer(201, {"id": self.path.split("/")[4], "project": "sink", "url": "", "state": "running"})

    def do_POST(self) -> None:
        body = self._body()
        kind = self.path.partition("?")[0].rsplit("/", 1)[1]
        answer: dict[str, Any] = {"status": "stored", "rows": 0, "points": 0, "state": "running"}
        if kind == "tensors":
            document = json.loads(body)
            answer["count"] = document["offset"] + len(document["tensors"])
        elif kind in ("batches", "histograms"):
            table = pa.ipc.open_stream(body).read_all()
            answer["seq"] = int((table.schema.metadata or {})[b"fp8scope.seq"])
            answer |= {"rows": table.num_rows, "points": points_of(table)}
        else:
            answer["seq"] = json.loads(body).get("seq", 0)
        self._answer(201, {**answer, "alerts": [], "commands": []})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", "0")))

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


def points_of(table: pa.Table) -> int:
    """The number of values that are not null, without the columns `step` and `time`."""
    points = 0
    for column in table.columns[2:]:
        for chunk in column.chunks:
            values: Any = chunk
            if isinstance(chunk, pa.FixedSizeListArray):
                values = chunk.values
            points += len(values) - values.null_count
    return points


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
