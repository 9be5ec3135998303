"""Fill the store of an installation with a long run, for query.py and spikes.py.

    python benchmarks/store_fill.py [--recording DIR] --tensors T --statistics S --steps N [--spikes K] --name
    NAME

Run it in the environment of the installation. The values are resampled from recorded telemetry: each tensor
is a recorded one multiplied by a factor, and each block begins at a random step of the recording. Blocks and
roll-ups are made by the encoders and the compaction of the store. Memory holds one tile of one block at a
time. Prints the id of the run, its project and the steps of the spikes as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

START_US = 1_767_225_600_000_000
SPIKE = 10.0


def fill(options: argparse.Namespace) -> dict[str, Any]:
    """Store the run and roll it up."""
    from store_data import read_recording, synthetic_recording

    from fp8scope_dashboard.accounts.models import Project
    from fp8scope_dashboard.runs.models import Run, RunState, Tensor, Writer

    recording = read_recording(options.recording) if options.recording else synthetic_recording()
    # numel last: the rates need it.
    chosen = ["amax", "scale", "saturated", "underflow", "nonfinite", "numel"][-options.statistics :]
    project = Project.objects.get_or_create(slug="default", defaults={"name": "Default"})[0]
    run = Run.objects.create(
        project=project,
        name=options.name,
        state=RunState.FINISHED,
        statistics=chosen,
        last_scalars={"loss": 1.0},
        last_step=options.steps - 1,
        total_steps=options.steps,
        rows_stored=options.steps,
        points_stored=options.steps * (options.tensors * len(chosen) + 1),
    )
    names = [f"layers.{i // 12}.{recording.names[i % len(recording.names)]}" for i in range(options.tensors)]
    Tensor.objects.bulk_create(
        [
            Tensor(
                run=run, index=i, name=f"{name}#{i}", module=name, role=name.rpartition(".")[2], format="e4m3"
            )
            for i, name in enumerate(names)
        ]
    )
    writer = Writer.objects.create(
        run=run,
        uuid=uuid.uuid4(),
        catalogue=list(range(options.tensors)),
        first_step=0,
        last_step=options.steps - 1,
    )
    spikes = np.sort(
        np.random.default_rng(3).choice(np.arange(1, options.steps - 1), options.spikes, replace=False)
    )
    for begin in range(0, options.steps, ROWS):
        store_block(run, writer.uuid, recording, chosen, options, begin, spikes)
        print(f"{options.name}: {begin:,} of {options.steps:,} steps", file=sys.stderr, flush=True)
    roll(run)
    return {"run": str(run.id), "project": project.slug, "tensor": f"{names[0]}#0", "spikes": spikes.tolist()}


STEPS_A_MESSAGE = 20
ROWS = 8_180
"""The rows of a full block: a multiple of STEPS_A_MESSAGE, so that it ends at the end of a message."""


def store_block(
    run: Any,
    writer: uuid.UUID,
    recording: Any,
    chosen: list[str],
    options: argparse.Namespace,
    begin: int,
    spikes: NDArray[np.int64],
) -> None:
    """Store one block, encoding one tile at a time."""
    from django.db import transaction

    from fp8scope_dashboard.db import sql
    from fp8scope_dashboard.telemetry.models import Block
    from fp8scope_dashboard.telemetry.tile_codec import (
        WIDTH,
        encode_integers,
        encode_matrix,
        encode_series,
        encode_tile,
    )

    steps = np.arange(begin, min(begin + ROWS, options.steps))
    random = np.random.default_rng(begin)
    times = START_US + steps * 100_000 + random.integers(0, 5_000, len(steps))
    sources = (np.arange(len(steps)) + random.integers(0, len(recording.steps))) % len(recording.steps)
    loss = recording.scalars["loss"][sources]
    rows = [
        (
            "axis",
            0,
            encode_tile([encode_integers(axis) for axis in (steps, times, steps // STEPS_A_MESSAGE)]),
        ),
        ("scalar:loss", 0, encode_tile([encode_series(loss)])),
    ]
    for name in chosen:
        for tile in range(-(-options.tensors // WIDTH)):
            rows.append(
                (
                    f"tensor:{name}",
                    tile,
                    encode_matrix(matrix(recording, name, tile, options.tensors, steps, spikes)),
                )
            )
    seq = begin // STEPS_A_MESSAGE
    with transaction.atomic():
        Block.objects.create(
            run=run,
            writer=writer,
            seq=seq,
            last_seq=int(steps[-1] // STEPS_A_MESSAGE),
            first_step=begin,
            last_step=int(steps[-1]),
            rows=len(steps),
            points=len(steps) * (options.tensors * len(chosen) + 1),
            received_at=run.created_at,
        )
        sql.write(
            """
            INSERT INTO telemetry_tile (run_id, name, tile, writer, seq, offsets, body)
            VALUES (%s, %s, %s, %s, %s, %s, %s)
            """,
            (
                (run.id, name, tile, writer, seq, *encoded)
                for name, tile, encoded in rows
                if encoded is not None
            ),
        )


def matrix(
    recording: Any, name: str, tile: int, tensors: int, steps: NDArray[np.int64], spikes: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The values of a tile as float64[128, rows]; rows beyond the last tensor are NaN."""
    from fp8scope_dashboard.telemetry.tile_codec import WIDTH

    values = np.full((WIDTH, len(steps)), np.nan)
    source = recording.statistics[name]
    for row in range(min(WIDTH, tensors - tile * WIDTH)):
        index = tile * WIDTH + row
        random = np.random.default_rng([index, int(steps[0])])
        rows = (np.arange(len(steps)) + random.integers(0, len(source))) % len(source)
        column = source[rows, index % source.shape[1]]
        if name == "amax":
            factor = np.float32(np.random.default_rng(index).uniform(0.5, 2.0))
            column = (column.astype(np.float32) * factor).astype(np.float64)
            if index == 0 and len(spikes):
                # One-step spikes, 20 times the maximum of the recorded tensor.
                is_spike = np.isin(steps, spikes)
                column[is_spike] = SPIKE * source[:, 0].max() * 2.0
        values[row] = column
    return values


def roll(run: Any) -> None:
    """Run compaction until nothing is left to do."""
    from fp8scope_dashboard.telemetry import compaction
    from fp8scope_dashboard.telemetry.models import Rolling

    Rolling.objects.create(run=run)
    while compaction.compact_run(run.id, 1):
        until = Rolling.objects.values_list("until", flat=True).get(run=run)
        print(f"{run.name}: rolled up until {until:,}", file=sys.stderr, flush=True)


def main() -> None:
    """Fill, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--recording", type=Path, help="without it, the values are random walks")
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--statistics", type=int, default=6)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--spikes", type=int, default=0)
    parser.add_argument("--name", default="long run")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    import django

    django.setup()
    print(json.dumps(fill(options)))


if __name__ == "__main__":
    main()
