"""Measure the speed of compaction and its cost for ingest. Prints one JSON line.

Uses a whole installation on this machine. For `points_per_s`, a run of `--points` points (1,000 tensors x 7
statistics of a recorded FP8 training run) is stored as chunks, and one process compacts it completely:
blocks, merges and roll-ups.

`ingest_share` is the ingest throughput while another process compacts continuously, relative to ingest
alone. It is the median of the ratios of alternating rounds. The senders post bodies that are encoded
beforehand (see ingest.py).

    python benchmarks/compaction.py [--recording DIR] [--points 20000000] [--rounds 3] [--seconds 8]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np

TENSORS, ROWS = 1_000, 64


def store_chunks(recording: Any, points: int, over: bool) -> uuid.UUID:
    """Store the batches of a run as ingest does."""
    from django.db import transaction

    from fp8scope_dashboard.accounts.models import Project
    from fp8scope_dashboard.receipts.models import Receipt
    from fp8scope_dashboard.runs.models import Run, RunState, Tensor, Writer
    from fp8scope_dashboard.telemetry.codec import ChunkData, encode
    from fp8scope_dashboard.telemetry.models import Chunk

    names = list(recording.statistics)
    width = recording.statistics[names[0]].shape[1]
    columns = np.arange(TENSORS) % width
    steps = points // (TENSORS * len(names))
    project = Project.objects.get_or_create(slug="default", defaults={"name": "Default"})[0]
    state = RunState.FINISHED if over else RunState.RUNNING
    run = Run.objects.create(project=project, name="compaction", state=state, statistics=names)
    Tensor.objects.bulk_create([Tensor(run=run, index=i, name=f"t{i}") for i in range(TENSORS)])
    writer = Writer.objects.create(
        run=run, uuid=uuid.uuid4(), catalogue=list(range(TENSORS)), first_step=0, last_step=steps - 1
    )
    shifts = np.random.default_rng(0).integers(0, len(recording.steps), TENSORS)
    for seq, begin in enumerate(range(0, steps, ROWS)):
        here = np.arange(begin, min(begin + ROWS, steps))
        places = (here[:, None] + shifts[None]) % len(recording.steps)
        data = ChunkData(
            steps=here,
            times=(1_767_225_600_000_000 + here * 100_000).view("datetime64[us]"),
            scalars={},
            logged={},
            statistics={name: recording.statistics[name][places, columns[None]] for name in names},
        )
        with transaction.atomic():
            Receipt.objects.create(run=run, writer=writer.uuid, seq=seq, kind="batch", digest=b"0" * 32)
            Chunk.objects.create(
                run=run, writer=writer.uuid, seq=seq, last_seq=seq, body=encode(data), first_step=begin,
                last_step=int(here[-1]), rows=len(here), points=len(here) * TENSORS * len(names),
            )  # fmt: skip
    return run.id


def compact(recording_at: Path, points: int, forever: bool) -> None:
    """In a separate process: store and compact, and print the seconds of compaction."""
    import django

    django.setup()
    from store_data import read_recording

    from fp8scope_dashboard.runs.models import Run
    from fp8scope_dashboard.telemetry import compaction

    recording = read_recording(recording_at)
    while True:
        run = store_chunks(recording, points, over=True)
        print("ready", flush=True)
        begin = time.perf_counter()
        while compaction.compact_run(run):
            pass
        print(json.dumps({"seconds": time.perf_counter() - begin}), flush=True)
        Run.objects.get(pk=run).delete()
        if not forever:
            return


def start(
    environment: dict[str, str], options: argparse.Namespace, points: int, forever: bool
) -> subprocess.Popen[str]:
    """`compact` as another process."""
    command = [
        sys.executable,
        __file__,
        "--recording",
        str(options.recording),
        "--points",
        str(points),
        "--compact",
    ]
    if forever:
        command.append("--forever")
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)


def ingest_rate(url: str, token: str, options: argparse.Namespace) -> float:
    """Points per second acknowledged to two agents."""
    import ingest

    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(3), context.Queue()
    wanted = argparse.Namespace(rows=None, seconds=options.seconds, bodies=6)
    agents = [
        context.Process(
            target=ingest.work, args=((url, token, str(uuid.uuid4()), i), wanted, False, ready, results)
        )
        for i in range(2)
    ]
    for agent in agents:
        agent.start()
    ready.wait(300)
    points = sum(results.get(timeout=options.seconds + 120)[0] for _ in agents)
    for agent in agents:
        agent.join()
    return float(points / options.seconds)


def main() -> None:
    """Measure, and print one JSON line."""
    # PYTHONSAFEPATH, which the server processes set, leaves this folder out.
    sys.path.insert(0, str(Path(__file__).parent))
    import store_data

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--recording", type=Path, default=store_data.RECORDING, help="made when there is none"
    )
    parser.add_argument("--points", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--compact", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--forever", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compact:
        compact(options.recording, options.points, options.forever)
        return
    from chaos import make_token

    from fp8scope_dashboard.servers.supervisor import Supervisor

    options.recording.mkdir(parents=True, exist_ok=True)
    store_data.record(options.recording, 2400)
    with tempfile.TemporaryDirectory() as scratch, Supervisor(Path(scratch) / "up", port=0) as supervisor:
        token = make_token(supervisor)
        with start(supervisor.environment, options, options.points, forever=False) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            seconds = json.loads(process.stdout.readline())["seconds"]
        ratios, rates = [], []
        for _ in range(options.rounds):
            alone = ingest_rate(supervisor.url, token, options)
            with start(supervisor.environment, options, options.points, forever=True) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                beside = ingest_rate(supervisor.url, token, options)
                process.kill()
            rates.append((round(alone), round(beside)))
            ratios.append(beside / alone)
    print(
        json.dumps(
            {"benchmark": "compaction", "points_per_s": round(options.points / seconds),
             "ingest_share": round(statistics.median(ratios), 3), "ingest_alone_and_beside": rates}
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
