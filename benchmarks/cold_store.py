"""Measure moving a run into the cold store, and reading it there. Prints one JSON line.

The run has 256 tensors x 2 statistics x 32,768 steps of noise, in blocks as after compaction. Its tiles move
into an S3 server on this machine (moto, one Python process). Then one series and a heat map are read: cold
(from the server), cached (from the cache on the disk) and warm (from PostgreSQL, before the run was moved).
`ratios` are the medians against warm ones of the same process. Sizes are those of all tables of telemetry
after a full vacuum.

    python benchmarks/cold_store.py [--steps 32768]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORK = """
import django; django.setup()
import json, shutil, sys, time, uuid
from statistics import median
import numpy as np
from django.conf import settings
from django.db import connection
from django.utils import timezone
from pyarrow.fs import FileSystem
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.runs.models import Run, Tensor, Writer
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.cold import moving
from fp8scope_dashboard.telemetry.models import Block, ColdFile, Rolling, Tile
from fp8scope_dashboard.telemetry.tile_codec import WIDTH, encode_integers, encode_matrix, encode_tile

STEPS, TENSORS, ROWS, REPEATS = int(sys.argv[1]), 256, 8192, 5
TABLES = ("telemetry_block", "telemetry_tile", "telemetry_histogram", "telemetry_rollup")

def fill():
    project = Project.objects.get(slug="default")
    run = Run.objects.create(project=project, name="old", state="finished", statistics=["amax", "rms"])
    Tensor.objects.bulk_create(
        Tensor(run=run, index=index, name=f"t{index}.input", module=f"t{index}", role="input", format="e4m3")
        for index in range(TENSORS))
    writer = Writer.objects.create(
        run=run, uuid=uuid.uuid4(), rank=0, catalogue=list(range(TENSORS)), first_step=0, last_step=STEPS - 1)
    noise = np.random.default_rng(0)
    for seq in range(0, STEPS, ROWS):
        rows = min(ROWS, STEPS - seq)
        fields = {"run": run, "writer": writer.uuid, "seq": seq}
        Block.objects.create(**fields, last_seq=seq + rows - 1, first_step=seq, last_step=seq + rows - 1,
                             rows=rows, points=rows * TENSORS * 2, received_at=timezone.now())
        axis = np.arange(seq, seq + rows, dtype=np.int64)
        offsets, body = encode_tile([encode_integers(axis) for _ in range(3)])
        Tile.objects.create(**fields, name="axis", tile=0, offsets=offsets, body=body)
        for name in ("tensor:amax", "tensor:rms"):
            for tile in range(TENSORS // WIDTH):
                values = np.exp(noise.normal(size=(WIDTH, rows))).astype(np.float32).astype(np.float64)
                offsets, body = encode_matrix(values)
                Tile.objects.create(**fields, name=name, tile=tile, offsets=offsets, body=body)
    Rolling.objects.create(run=run, pending=False)
    return run

def size():
    with connection.cursor() as cursor:
        total = 0
        for table in TABLES:
            cursor.execute(f"VACUUM FULL {table}")
            cursor.execute(
                "SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree(%s)", [table])
            total += int(cursor.fetchone()[0])
    return total

def series():
    return queries.tensor_series(run.pk, 77, "amax").values

def heat_map():
    return queries.heatmap(run.pk, "rms", columns=400).values

def measured(read, before=lambda: None):
    times = []
    for _ in range(REPEATS):
        before()
        begin = time.perf_counter()
        result = read()
        times.append(time.perf_counter() - begin)
    return median(times), result

def forget():
    shutil.rmtree(settings.COLD_STORE.folder / "cache", ignore_errors=True)

FileSystem.from_uri(settings.COLD_STORE.url + "&allow_bucket_creation=true")[0].create_dir("bench")
run = fill()
reads = {"series": series, "heat_map": heat_map}
for read in reads.values():
    read()
warm = {name: measured(read) for name, read in reads.items()}
before = size()
begin = time.perf_counter()
moved = moving.move_run(run.pk, float("inf"))
seconds = time.perf_counter() - begin
after = size()
ratios, equal = {}, True
for name, read in reads.items():
    cold, there = measured(read, forget)
    cached, again = measured(read)
    equal &= np.array_equal(there, warm[name][1], equal_nan=True)
    equal &= np.array_equal(again, warm[name][1], equal_nan=True)
    ratios[name] = {"cold": round(cold / warm[name][0], 2), "cached": round(cached / warm[name][0], 2)}
print(json.dumps({
    "points": STEPS * TENSORS * 2, "bodies": moved.bodies, "files": ColdFile.objects.count(),
    "postgres_mb": {"before": round(before / 1e6, 1), "after": round(after / 1e6, 1)},
    "cold_mb": round(sum(ColdFile.objects.values_list("bytes", flat=True)) / 1e6, 1),
    "move_s": round(seconds, 2),
    "warm_ms": {name: round(1e3 * value, 1) for name, (value, _) in warm.items()},
    "ratios": ratios, "equal": bool(equal),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=32_768)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from chaos import make_token

    from fp8scope_dashboard.servers.supervisor import Supervisor

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    server = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    with (
        tempfile.TemporaryDirectory() as directory,
        subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as s3,
    ):
        try:
            _wait_for(port)
            with Supervisor(Path(directory) / "up", port=0) as supervisor:
                make_token(supervisor)
                query = f"endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
                environment = {
                    **os.environ,
                    **supervisor.environment,
                    "FP8SCOPE_DATA_DIR": directory,
                    "FP8SCOPE_COLD_STORE": f"s3://benchmark:benchmark@bench/old?{query}",
                }
                command = [sys.executable, "-c", WORK, str(options.steps)]
                done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        finally:
            s3.kill()
    print(json.dumps({"benchmark": "cold_store", **json.loads(done.stdout.splitlines()[-1])}))


def _wait_for(port: int, seconds: float = 60.0) -> None:
    """Wait until something listens on a port of this machine."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit("The S3 server did not start: pip install 'moto[s3]' flask-cors")


if __name__ == "__main__":
    main()
