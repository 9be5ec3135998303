"""A client of the protocol in docs/wire.md that can also violate it. Shares no code with the agent."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

import numpy as np
import pyarrow as pa
import urllib3

ARROW = "application/vnd.apache.arrow.stream"
TIME = 1_767_225_600_000_000


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of the error. Checks that the answer has exactly the documented form."""
        document = self.json
        assert document.keys() == {"error"}, document
        assert document["error"].keys() == {"code", "message", "hint"}, document
        assert document["error"]["message"] and document["error"]["hint"]
        assert self.headers["Content-Type"].startswith("application/json")
        return str(document["error"]["code"])


@dataclass
class WireClient:
    """Sends to one run as one writer; the attributes can be changed between calls."""

    url: str
    token: str | None
    run: UUID = field(default_factory=uuid.uuid4)
    writer: UUID = field(default_factory=uuid.uuid4)

    def request(
        self,
        method: str,
        path: str = "",
        *,
        json: object = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a request to /api/v1/runs/{run}{path}."""
        authorization = {"Authorization": f"Bearer {self.token}"} if self.token is not None else {}
        response = urllib3.request(
            method,
            f"{self.url}/api/v1/runs/{self.run}{path}",
            json=json,
            body=body,
            headers={**authorization, **(headers or {})},
            retries=False,
            timeout=60,
        )
        return Answer(response.status, response.headers, response.data)

    def register(self, **fields: object) -> Answer:
        return self.request("PUT", json={"name": "a run", **fields})

    def catalogue(self, names: Sequence[str], offset: int = 0, **fields: object) -> Answer:
        tensors = [
            {"name": name, "module": name.rpartition(".")[0], "role": "input", "format": "e4m3", "numel": 64}
            for name in names
        ]
        body = {"rank": 0, "hostname": "node1", "offset": offset, "tensors": tensors, **fields}
        return self.request("POST", f"/writers/{self.writer}/tensors", json=body)

    def send(self, body: bytes, content_type: str = ARROW, query: str = "") -> Answer:
        return self.request("POST", f"/batches{query}", body=body, headers={"Content-Type": content_type})

    def batch(self, seq: int, steps: Sequence[int], **columns: Any) -> bytes:
        """`arrow_batch` of this run and writer."""
        return arrow_batch(self.run, self.writer, seq, steps, **columns)


def arrow_batch(
    run: UUID | str,
    writer: UUID | str,
    seq: int | str,
    steps: Sequence[int],
    *,
    scalars: Mapping[str, Sequence[float | None]] | None = None,
    tensors: Mapping[str, Sequence[Sequence[float | None]]] | None = None,
    columns: Mapping[str, pa.Array[Any]] | None = None,
    metadata: Mapping[str, str] | None = None,
    compression: Literal["zstd", "lz4"] | None = "zstd",
    record_batches: int = 1,
) -> bytes:
    """An Arrow batch as docs/wire.md describes it; `columns` and `metadata` override the valid values."""
    arrays: dict[str, Any] = {
        "step": pa.array(steps, pa.int64()),
        "time": pa.array(TIME + 1000 * np.arange(len(steps)), pa.timestamp("us", tz="UTC")),
    }
    for name, values in (scalars or {}).items():
        arrays[f"scalar:{name}"] = pa.array(values, pa.float64())
    for name, lists in (tensors or {}).items():
        arrays[f"tensor:{name}"] = pa.array(lists, pa.list_(pa.float64(), len(lists[0])))
    arrays.update(columns or {})
    described = {
        "fp8scope.protocol": "1",
        "fp8scope.run": str(run),
        "fp8scope.writer": str(writer),
        "fp8scope.seq": str(seq),
        **(metadata or {}),
    }
    table = pa.table(arrays).replace_schema_metadata(
        {key: value for key, value in described.items() if value}
    )
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, table.schema, options=options) as stream:
        stream.write_table(table, max_chunksize=max(1, -(-len(steps) // record_batches)))
    return sink.getvalue().to_pybytes()
