"""Read the rows of many writers that have just arrived, in two queries for all of them.

`replay.stream` reads one writer from anywhere in the store. This is for the usual case: the rows of the last
second of many runs, which are not compacted yet.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Final
from uuid import UUID

import numpy as np

from fp8scope_dashboard.db import sql
from fp8scope_dashboard.telemetry.codec import ChunkData, decode
from fp8scope_dashboard.telemetry.replay import stream

# All chunks that one call holds in memory; of each writer it reads at least one.
MAX_BYTES: Final = 128 << 20
_LAST: Final = 2**63 - 1

_ARRIVED: Final = """
    SELECT contiguous.until, gap.seq, gap.received_at
    FROM unnest(%(runs)s::uuid[], %(writers)s::uuid[], %(firsts)s::bigint[])
        WITH ORDINALITY AS asked (run_id, writer, first, number)
    CROSS JOIN LATERAL (
        SELECT coalesce(max(seq) + 1, asked.first) AS until FROM (
            SELECT seq, row_number() OVER (ORDER BY seq) - 1 + asked.first AS expected
            FROM ingest_receipt AS receipt
            WHERE receipt.run_id = asked.run_id AND receipt.writer = asked.writer AND seq >= asked.first
        ) AS arrived WHERE seq = expected
    ) AS contiguous
    LEFT JOIN LATERAL (
        SELECT seq, received_at FROM ingest_receipt AS receipt
        WHERE receipt.run_id = asked.run_id AND receipt.writer = asked.writer AND seq > contiguous.until
        ORDER BY seq LIMIT 1
    ) AS gap ON true
    ORDER BY asked.number
"""
# Blocks and chunks in one statement, so that compaction moves nothing between two.
_CHUNKS: Final = """
    SELECT asked.number, moved.into_blocks, chunk.seq, chunk.last_seq, chunk.total, chunk.body
    FROM unnest(%(runs)s::uuid[], %(writers)s::uuid[], %(firsts)s::bigint[], %(untils)s::bigint[])
        WITH ORDINALITY AS asked (run_id, writer, first, until, number)
    CROSS JOIN LATERAL (
        SELECT EXISTS (
            SELECT FROM telemetry_block AS block
            WHERE block.run_id = asked.run_id AND block.writer = asked.writer
                AND block.last_seq >= asked.first AND block.seq < asked.until
        ) AS into_blocks
    ) AS moved
    LEFT JOIN LATERAL (
        SELECT seq, last_seq, total, body FROM (
            SELECT seq, last_seq, body, count(*) OVER () AS total, row_number() OVER by_seq AS position,
                sum(octet_length(body)) OVER by_seq AS bytes
            FROM telemetry_chunk AS stored
            WHERE stored.run_id = asked.run_id AND stored.writer = asked.writer
                AND stored.last_seq >= asked.first AND stored.seq < asked.until
            WINDOW by_seq AS (ORDER BY seq)
        ) AS waiting WHERE position <= %(limit)s AND (position = 1 OR bytes <= %(bytes)s)
    ) AS chunk ON NOT moved.into_blocks
    ORDER BY asked.number, chunk.seq
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
    return [Arrived(int(until), None if seq is None else (int(seq), at)) for until, seq, at in rows]


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
    writers = groupby(sql.fetch(_CHUNKS, parameters), key=lambda row: int(row[0]))
    return [_pieces(request, list(rows), limit) for request, (_, rows) in zip(requests, writers, strict=True)]


def _pieces(request: Request, rows: Sequence[tuple[object, ...]], limit: int) -> Pieces:
    (_, into_blocks, *first), *_ = rows
    if into_blocks or any(seq != last for _, _, seq, last, _, _ in rows):
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
    if first[0] is None:
        return Pieces([], is_all=True)
    pieces = []
    for _, _, seq, _, _, body in rows:
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
    return Pieces(pieces, is_all=len(rows) == rows[0][4])
