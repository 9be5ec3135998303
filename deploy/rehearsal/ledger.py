"""Compares what the server stores with what it acknowledged and what the training recorded."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Prints every stored row of a run as "writer seq step loss", compacted or not.
READ_ROWS = """
import django; django.setup()
import sys
from uuid import UUID
from fp8scope_dashboard.telemetry import queries
run = UUID(sys.argv[1])
for writer in queries.writers(run):
    seq = 0
    while pieces := queries.stream(run, writer, seq, 16):
        for last, data in pieces:
            for i, step in enumerate(data.steps):
                number = last if data.seqs is None else data.seqs[i]
                print(writer, number, step, repr(float(data.scalars["loss"][i])))
            seq = last + 1
"""


@dataclass(frozen=True, kw_only=True)
class Acknowledgement:
    """A batch that the server acknowledged at a moment of CLOCK_MONOTONIC."""

    at: float
    writer: str
    seq: int
    status: str
    steps: list[int]
    losses: list[str]


def acknowledgements(file: Path) -> list[Acknowledgement]:
    """What one training process was acknowledged so far, without a line that is being written."""
    text = file.read_text() if file.exists() else ""
    return [
        Acknowledgement(**json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")
    ]


def compare(
    stored: str, acknowledged: list[list[Acknowledgement]], ends: list[dict[str, Any]]
) -> dict[str, Any]:
    """The figures of a scene.

    Args:
        stored: the output of READ_ROWS.
        acknowledged: the acknowledgements of each training process.
        ends: how each training process ended.

    Returns:
        `acknowledged`, `lost`, `doubled`: rows. A row counts as lost if it was acknowledged and is not stored
        with its value, and as doubled for each time that a writer's step is stored after the first.
        `missing`: rows that were recorded, and are not stored at the end, acknowledged or not. `repeated`:
        acknowledged messages of which the server said that it had them.
    """
    rows = [tuple(line.split(" ")) for line in stored.splitlines() if line]
    counts = Counter((writer, step) for writer, _, step, _ in rows)
    values = set(rows)
    expected = {
        (batch.writer, str(batch.seq), str(step), loss)
        for batches in acknowledged
        for batch in batches
        for step, loss in zip(batch.steps, batch.losses, strict=True)
    }
    return {
        "acknowledged": len(expected),
        "lost": len(expected - values),
        "doubled": sum(count - 1 for count in counts.values()),
        "missing": sum(int(end["steps"]) for end in ends) - len(counts),
        "dropped": sum(int(end["dropped"]) for end in ends),
        "repeated": sum(batch.status == "duplicate" for batches in acknowledged for batch in batches),
        "complete": all(end["complete"] for end in ends),
    }
