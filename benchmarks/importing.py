"""Imports of other tools' files: points per second by format, and damaged files that end no import.

python benchmarks/importing.py [--rows 100000] [--fuzz 100000] [--formats csv,wandb] [--processes 2]

For each format one line of JSON. A file of `--rows` rows is read and encoded for the wire, without a server:
`points_per_s` (by the processor's time), and `of_plain_write`, as a ratio to the agent's own code, which
encodes as many metrics from memory. Then `--fuzz` damaged files are read in processes of bounded memory:
`fuzzed`, `failures` (exceptions that are no refusal with a reason), `refused`, and by how much the largest
process has grown (`grown_mib`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import numpy as np  # noqa: E402
from agent.helpers import import_files  # noqa: E402
from agent.helpers.fuzzed_files import fuzz  # noqa: E402

from fp8scope.delivery.arrow_encoding import encode_batch  # noqa: E402
from fp8scope.importing.encoding import encode, in_parts  # noqa: E402
from fp8scope.importing.model import ValueTable  # noqa: E402
from fp8scope.importing.registry import format_named, sources_of  # noqa: E402
from fp8scope.importing.source import ImportSource  # noqa: E402
from fp8scope.recording.records import Row  # noqa: E402

MEMORY = 3 << 30
METRICS = 10
LARGE: dict[str, Callable[[Path, int], Path]] = {
    "csv": lambda folder, rows: import_files.write_csv(folder, rows, METRICS),
    "jsonl": lambda folder, rows: import_files.write_jsonl(folder, rows, METRICS),
    "parquet": import_files.write_parquet,
    "wandb": lambda folder, rows: import_files.write_wandb(folder, rows, METRICS),
    "mlflow": import_files.write_mlflow_files,
    "mlflow-sqlite": import_files.write_mlflow_sqlite,
    "trackio": lambda folder, rows: import_files.write_trackio(folder, rows, METRICS),
    "te-inspect": lambda folder, rows: import_files.write_inspect_log(folder, rows // 20),
    "megatron": import_files.write_megatron,
    "neptune": import_files.write_neptune,
    "aim": import_files.write_aim,
}
"""Writers of files with many rows; results of evaluations have few."""
EVALUATIONS = ("lm-eval", "lighteval", "opencompass")


def points_per_second(name: str, rows: int, folder: Path) -> float:
    """Read a file and encode its rows; returns points per second, the best of three."""
    LARGE[name](folder, rows)
    path = next(path for path, form in sources_of(folder) if form.name == name)
    best = 0.0
    for _ in range(3):
        began, points = time.process_time(), 0
        for run in format_named(name).read(ImportSource(path=path)):
            for part in run.parts:
                if isinstance(part, ValueTable):
                    for table in in_parts(part):
                        batch = encode(table, 0)
                        batch.body("run", "writer", 0)
                        points += batch.points
        best = max(best, points / (time.process_time() - began))
    return best


def plain_write() -> float:
    """Points per second of the agent's encoder, with as many metrics from memory."""
    generator = np.random.default_rng(0)
    rows = [
        Row(
            step=step,
            time_us=0,
            scalars={f"m{i}": float(value) for i, value in enumerate(generator.standard_normal(METRICS))},
            statistics=np.zeros((0, 1)),
            dropped=0,
        )
        for step in range(5_000)
    ]
    best = 0.0
    for _ in range(3):
        began = time.process_time()
        batch = encode_batch(rows, (), run="run", writer="writer", seq=0)
        best = max(best, batch.points / (time.process_time() - began))
    return best


def fuzz_part(job: tuple[str, int, int]) -> dict[str, Any]:
    """Fuzz a format in this process, whose memory is bounded."""
    name, inputs, seed = job
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    folder = Path(tempfile.mkdtemp(prefix="importing-", dir=shared_memory()))
    try:
        fuzz(name, min(inputs, 200), seed + 10_000, folder)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = fuzz(name, inputs, seed, folder)
    finally:
        shutil.rmtree(folder)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {**vars(result), "grown_mib": grown / 1024}


def shared_memory() -> str | None:
    """A folder in memory, if there is one: each input is a file."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def main() -> None:
    """Print one line of JSON for each format."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--fuzz", type=int, default=100_000)
    parser.add_argument("--formats", default=",".join((*LARGE, *EVALUATIONS)))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    plain = plain_write()
    for name in options.formats.split(","):
        line: dict[str, Any] = {"format": name}
        if name in LARGE and options.rows:
            with tempfile.TemporaryDirectory() as folder:
                speed = points_per_second(name, options.rows, Path(folder))
            line |= {"points_per_s": round(speed), "of_plain_write": round(speed / plain, 2)}
        if options.fuzz:
            share = -(-options.fuzz // options.processes)
            jobs = [(name, share, seed) for seed in range(options.processes)]
            with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
                parts = pool.map(fuzz_part, jobs, chunksize=1)
            line |= {
                "fuzzed": sum(part["inputs"] for part in parts),
                "failures": sum(len(part["failures"]) for part in parts),
                "refused": sum(part["refused"] for part in parts),
                "grown_mib": round(max(part["grown_mib"] for part in parts), 1),
            }
            for part in parts:
                for failure in part["failures"][:3]:
                    print(failure, file=sys.stderr)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
