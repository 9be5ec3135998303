"""Read the rows of many writers that have just arrived, in two queries for all of them.

`replay.stream` reads one writer from anywhere in the store. This is for the usual case: the rows of the last
second of many runs, which are not compacted yet.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any, Final
from uuid import UUID

import numpy as np

from fp8scope_dashboard.db import sql
from fp8scope_dashboard.telemetry.codec import ChunkData, decode
from fp8scope_dashboard.telemetry.replay import stream

# All chunks that one call holds in memory; of each writer it reads at least one.
MAX_BYTES: Final = 128 << 20
_LAST: Final = 2**63 - 1

# These statements join, group and number by the run, so that in a distributed store each node answers for its
# own runs. Messages that follow a gap have a higher number than the one expected at their place.
_ARRIVED: Final = """
    SELECT run_id, writer, first, max(seq) FILTER (WHERE seq = expected) + 1,
        min(seq) FILTER (WHERE seq > expected),
        (array_agg(received_at ORDER BY seq) FILTER (WHERE seq > expected))[1]
    FROM (
        SELECT receipt.run_id, receipt.writer, asked.first, receipt.seq, receipt.received_at,
            asked.first - 1 + row_number() OVER (
                PARTITION BY receipt.run_id, receipt.writer, asked.first ORDER BY receipt.seq) AS expected
        FROM unnest(%(runs)s::uuid[], %(writers)s::uuid[], %(firsts)s::bigint[])
            AS asked (run_id, writer, first)
        JOIN ingest_receipt AS receipt ON receipt.run_id = asked.run_id AND receipt.writer = asked.writer
            AND receipt.seq >= asked.first
    ) AS arrived
    GROUP BY run_id, writer, first
"""
# Blocks and chunks in one statement, so that compaction moves nothing between two. A writer with blocks has a
# row without a body, and is read by `replay.stream`.
_CHUNKS: Final = """
    SELECT * FROM (
        SELECT block.run_id, block.writer, asked.first, true AS into_blocks, 0 AS seq, 0 AS last_seq,
            0 AS total, NULL::bytea AS body
        FROM unnest(%(runs)s::uuid[], %(writers)s::uuid[], %(firsts)s::bigint[], %(untils)s::bigint[])
            AS asked (run_id, writer, first, until)
        JOIN telemetry_block AS block ON block.run_id = asked.run_id AND block.writer = asked.writer
            AND block.last_seq >= asked.first AND block.seq < asked.until
        GROUP BY block.run_id, block.writer, asked.first
        UNION ALL
        SELECT run_id, writer, first, false, seq, last_seq, total, body FROM (
            SELECT stored.run_id, stored.writer, asked.first, stored.seq, stored.last_seq, stored.body,
                count(*) OVER (PARTITION BY stored.run_id, stored.writer, asked.first) AS total,
                row_number() OVER by_seq AS position, sum(octet_length(stored.body)) OVER by_seq AS bytes
            FROM unnest(%(runs)s::uuid[], %(writers)s::uuid[], %(firsts)s::bigint[], %(untils)s::bigint[])
                AS asked (run_id, writer, first, until)
            JOIN telemetry_chunk AS stored ON stored.run_id = asked.run_id AND stored.writer = asked.writer
                AND stored.last_seq >= asked.first AND stored.seq < asked.until
            WINDOW by_seq AS (PARTITION BY stored.run_id, stored.writer, asked.first ORDER BY stored.seq)
        ) AS waiting WHERE position <= %(limit)s AND (position = 1 OR bytes <= %(bytes)s)
    ) AS pieces ORDER BY run_id, writer, first, seq
"""


@dataclass(frozen=True)
class Arrived:
    """The messages of a writer that have arrived.

    Attributes:
        until: the first seq from the asked one on that has not.
        after_gap: the first seq after that which has, and when it did; None if there is none.
    """

    until: int
    after_gap: tuple[int, datetime] | None


@dataclass(frozen=True, kw_only=True)
class Request:
    """The messages first..until - 1 of a writer, and the columns to read of them."""

    run_id: UUID
    writer: UUID
    first: int
    until: int = _LAST
    scalars: Collection[str] | None = None
    statistics: Collection[str] | None = None


@dataclass(frozen=True)
class Pieces:
    """The rows of a request, in order: each piece with the seq of its last message.

    `is_all`: whether nothing of the request is left; otherwise continue after the last piece.
    """

    pieces: list[tuple[int, ChunkData]]
    is_all: bool


def arrived(writers: Sequence[tuple[UUID, UUID, int]]) -> list[Arrived]:
    """For each (run, writer, seq): which messages from this seq on have arrived."""
    if not writers:
        return []
    runs, ids, firsts = zip(*writers, strict=True)
    rows = sql.fetch(_ARRIVED, {"runs": list(runs), "writers": list(ids), "firsts": list(firsts)})
    stored = {(run, writer, first): values for run, writer, first, *values in rows}
    return [_arrived(stored.get(asked), asked[2]) for asked in writers]


def _arrived(stored: list[Any] | None, first: int) -> Arrived:
    if stored is None:
        return Arrived(first, None)
    until, seq, received_at = stored
    return Arrived(first if until is None else until, None if seq is None else (seq, received_at))


def read(requests: Sequence[Request], limit: int) -> list[Pieces]:
    """Read the rows of all requests, up to `limit` pieces of each; see `replay.stream`."""
    if not requests:
        return []
    parameters = {
        "runs": [request.run_id for request in requests],
        "writers": [request.writer for request in requests],
        "firsts": [request.first for request in requests],
        "untils": [request.until for request in requests],
        "limit": limit,
        "bytes": MAX_BYTES // len(requests),
    }
    stored = {
        asked: [row[3:] for row in rows]
        for asked, rows in groupby(sql.fetch(_CHUNKS, parameters), key=lambda row: row[:3])
    }
    keys = [(request.run_id, request.writer, request.first) for request in requests]
    return [_pieces(request, stored.get(key, []), limit) for request, key in zip(requests, keys, strict=True)]


def _pieces(request: Request, rows: Sequence[tuple[object, ...]], limit: int) -> Pieces:
    if not rows:
        return Pieces([], is_all=True)
    if any(into_blocks or seq != last for into_blocks, seq, last, _, _ in rows):
        read_one_by_one = stream(
            request.run_id,
            request.writer,
            request.first,
            limit,
            until=request.until,
            scalars=request.scalars,
            statistics=request.statistics,
        )
        return Pieces(read_one_by_one, len(read_one_by_one) < limit)
    pieces = []
    for _, seq, _, _, body in rows:
        assert isinstance(seq, int) and isinstance(body, bytes)
        data = decode(body, scalars=request.scalars, statistics=request.statistics)
        seqs = np.full(len(data), seq, np.int64)
        pieces.append(
            (
                seq,
                ChunkData(
                    steps=data.steps,
                    times=data.times,
                    scalars=data.scalars,
                    logged=data.logged,
                    statistics=data.statistics,
                    seqs=seqs,
                ),
            )
        )
    return Pieces(pieces, is_all=len(rows) == rows[0][3])
