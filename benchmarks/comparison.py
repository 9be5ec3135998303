"""Measure the comparison of two long runs. Prints one JSON line per case.

Two runs of `--steps` steps are stored in a private PostgreSQL, with the loss, tokens, gradient norm,
throughput and memory of each step. `first_s` is the time until the first result. Then the FP8 run sends one
chunk after the other; `per_chunk_ms` is the median time of the update that follows each, `p95_ms` the 95th
percentile and `cpu_ms` the median processor time of the worker. Updates are not postponed here, as they are
in production (analysis/services.py). Compaction runs when it is due and is not part of the times.

Cases: `compacted`, where both runs are rolled up but for the newest steps, as during training; `resumed`,
where the FP8 run was resumed from an earlier step; `uploaded`, where nothing is compacted yet.

    python benchmarks/comparison.py [--steps 1000000] [--chunks 40] [--rows 20]
"""

from __future__ import annotations

import argparse
import json
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
from numpy.typing import NDArray

TOKENS_PER_STEP = 65_536.0
# The history arrives in chunks of this many rows, one block each. Without compaction, in chunks of the most
# rows that an agent sends at once.
HISTORY_ROWS, MAX_ROWS = 8_192, 4_096
# Of an FP8 run in training, so many of the newest rows are not rolled up, and so many not even in a block.
NOT_ROLLED, NOT_IN_A_BLOCK = 8_000, 1_000


class Sender:
    """Stores the chunks of one writer of a run, as ingest does."""

    def __init__(self, run: Any, *, attempt: int, first: int) -> None:
        from fp8scope_dashboard.runs.models import Writer

        self.run, self.step, self.seq, self._first = run, first, 0, first
        self.writer = Writer.objects.create(
            run=run, uuid=uuid.uuid4(), attempt=attempt, first_step=first, last_step=first
        )

    def send(self, until: int, rows: int) -> None:
        """Send the steps up to `until`, in chunks of so many rows."""
        from django.db import transaction

        from fp8scope_dashboard.receipts.models import Receipt
        from fp8scope_dashboard.runs.models import Run, Writer
        from fp8scope_dashboard.telemetry.codec import ChunkData, encode
        from fp8scope_dashboard.telemetry.models import Chunk

        while self.step < until:
            steps = np.arange(self.step, min(until, self.step + rows))
            times = (1_767_225_600_000_000 + steps * 100_000).view("datetime64[us]")
            scalars = scalars_of(steps, is_fp8=self.run.precision == "fp8")
            logged = {name: np.ones(len(steps), bool) for name in scalars}
            with transaction.atomic():
                Receipt.objects.create(
                    run=self.run, writer=self.writer.uuid, seq=self.seq, kind="batch", digest=b"0" * 32
                )
                Chunk.objects.create(
                    run=self.run,
                    writer=self.writer.uuid,
                    seq=self.seq,
                    last_seq=self.seq,
                    body=encode(
                        ChunkData(steps=steps, times=times, scalars=scalars, logged=logged, statistics={})
                    ),
                    first_step=int(steps[0]),
                    last_step=int(steps[-1]),
                    rows=len(steps),
                    points=len(steps) * len(scalars),
                )
                last = int(steps[-1])
                Writer.objects.filter(pk=self.writer.pk).update(last_step=last)
                self.run.rows_stored += len(steps)
                self.run.last_scalars = {name: float(values[-1]) for name, values in scalars.items()}
                Run.objects.filter(pk=self.run.pk).update(
                    rows_stored=self.run.rows_stored, last_step=last, last_scalars=self.run.last_scalars
                )
            self.step, self.seq = int(steps[-1]) + 1, self.seq + 1


def scalars_of(steps: NDArray[np.int64], *, is_fp8: bool) -> dict[str, NDArray[np.float64]]:
    """The scalars of these steps; the noise of the batches is that of both runs."""
    batches = np.random.default_rng(int(steps[0])).normal(0.0, 0.05, len(steps))
    own = np.random.default_rng([int(steps[0]), is_fp8]).normal(0.0, 0.01, (3, len(steps)))
    reached = (steps + 1.0) / (1.004 if is_fp8 else 1.0)
    rate = (1.31e6 if is_fp8 else 1e6) * np.exp(own[0])
    return {
        "loss": 1.7 + 12.0 * (reached + 100.0) ** -0.2 + batches + own[1],
        "tokens": TOKENS_PER_STEP * (steps + 1.0),
        "grad_norm": np.exp(batches + own[2]),
        "tokens_per_second": rate,
        "step_seconds": TOKENS_PER_STEP / rate,
        "memory_peak": np.full(len(steps), 60e9 if is_fp8 else 75e9),
        "memory_reserved": np.full(len(steps), 64e9 if is_fp8 else 79e9),
    }


def make_runs(case: str, steps: int) -> tuple[Any, Sender]:
    """Store the baseline and most of the FP8 run."""
    from fp8scope_dashboard.accounts.models import Project
    from fp8scope_dashboard.runs.models import Run, RunState

    project = Project.objects.get_or_create(slug="default", defaults={"name": "Default"})[0]
    group = f"bf16 {case}"
    baseline = Run.objects.create(project=project, name=group, group=group, precision="bf16")
    Sender(baseline, attempt=0, first=0).send(steps, MAX_ROWS if case == "uploaded" else HISTORY_ROWS)
    Run.objects.filter(pk=baseline.pk).update(state=RunState.FINISHED)
    run = Run.objects.create(project=project, name=case, precision="fp8", baseline=group, total_steps=steps)
    sender = Sender(run, attempt=0, first=0)
    if case == "uploaded":
        sender.send(steps, MAX_ROWS)
        return run, sender
    if case == "resumed":
        sender.send(3 * steps // 4, HISTORY_ROWS)
        compact(run.id)
        sender = Sender(run, attempt=1, first=steps // 2)
    sender.send(steps - NOT_ROLLED - NOT_IN_A_BLOCK, HISTORY_ROWS)
    compact(run.id)
    compact(baseline.id)
    sender.send(steps - NOT_IN_A_BLOCK, 500)
    compact(run.id)
    return run, sender


def compact(run_id: uuid.UUID) -> None:
    from fp8scope_dashboard.telemetry import compaction

    while compaction.compact_run(run_id):
        pass


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Compare for the first time, and after each of some chunks."""
    from fp8scope_dashboard.analysis.loss_comparisons import compare
    from fp8scope_dashboard.analysis.models import Comparison
    from fp8scope_dashboard.telemetry.compaction import runs_to_compact

    run, sender = make_runs(case, options.steps)
    if case != "uploaded":
        sender.send(options.steps, options.rows)
    begin = time.perf_counter()
    compare(run.id)
    first = time.perf_counter() - begin
    walls, cpus = [], []
    for chunk in range(options.chunks if case != "uploaded" else 0):
        sender.send(options.steps + (chunk + 1) * options.rows, options.rows)
        if run.id in runs_to_compact():
            compact(run.id)
        wall, cpu = time.perf_counter(), time.process_time()
        compare(run.id)
        walls.append(1e3 * (time.perf_counter() - wall))
        cpus.append(1e3 * (time.process_time() - cpu))
    result = Comparison.objects.get(run=run).result
    line: dict[str, Any] = {
        "benchmark": "comparison", "case": case, "steps": options.steps, "first_s": round(first, 2)
    }  # fmt: skip
    if walls:
        line |= {
            "rows_per_chunk": options.rows,
            "per_chunk_ms": round(statistics.median(walls), 1),
            "p95_ms": round(float(np.percentile(walls, 95)), 1),
            "cpu_ms": round(statistics.median(cpus), 1),
        }
    return {**line, "verdict": result["verdict"], "headline": result["quantities"]["headline"]}


def in_child(options: argparse.Namespace) -> None:
    import django

    django.setup()
    for case in options.cases:
        print(json.dumps(measure(case, options)), flush=True)


def main() -> None:
    """Start the servers, and measure in a process with their addresses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--chunks", type=int, default=40, help="updates that are timed")
    parser.add_argument("--rows", type=int, default=20, help="rows per chunk")
    cases = ["compacted", "resumed", "uploaded"]
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        in_child(options)
        return
    from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres
    from fp8scope_dashboard.embedded.redis import EmbeddedRedis
    from fp8scope_dashboard.servers import configuration
    from fp8scope_dashboard.servers.configuration import DataDir

    with (
        tempfile.TemporaryDirectory() as scratch,
        EmbeddedPostgres(Path(scratch) / "postgres") as database,
        EmbeddedRedis(Path(scratch) / "redis") as redis,
    ):
        data, url = DataDir(Path(scratch) / "data"), "http://127.0.0.1:1"
        data.make()
        environment = configuration.child_environment(data, url, "127.0.0.1", database, redis)
        prepare = [sys.executable, "-m", "fp8scope_dashboard.servers.prepare", url, "1"]
        subprocess.run(prepare, env=environment, check=True, capture_output=True)
        subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--child"],
            env={**os.environ, **environment},
            check=True,
        )


if __name__ == "__main__":
    main()
