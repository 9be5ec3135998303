"""Measure the deletion of a run of 600 million points and the disk space that it frees. Prints one JSON line.

The run is stored as after compaction: 1,000 tensors x 6 statistics x 100,000 steps in tiles of about one byte
per point, and a receipt for each of 20,000 messages. The tiles hold random bytes, which a deletion does not
read. A second, small run is in the same tables and must stay. `peak_mb` is the growth of the memory of the
deleting process.

    python benchmarks/deletion.py [--points 600000000]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

WORK = """
import django; django.setup()
import json, os, resource, sys, time, uuid
from django.db import connection
from django.utils import timezone
from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.receipts.models import Receipt
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import deletion
from fp8scope_dashboard.telemetry.models import Block, Tile

STATISTICS, TENSORS, ROWS, WIDTH = 6, 1000, 8192, 128

def make(steps):
    project = Project.objects.get(slug="default")
    run = Run.objects.create(project=project, name="large", points_stored=steps * TENSORS * STATISTICS)
    writer = uuid.uuid4()
    for seq in range(0, steps, ROWS):
        rows = min(ROWS, steps - seq)
        last = seq + rows - 1
        Block.objects.create(run=run, writer=writer, seq=seq, last_seq=last, first_step=seq, last_step=last,
                             rows=rows, points=rows * TENSORS * STATISTICS, received_at=timezone.now())
        for statistic in range(STATISTICS):
            for tile in range(-(-TENSORS // WIDTH)):
                body = os.urandom(rows * min(WIDTH, TENSORS - tile * WIDTH))
                Tile.objects.create(run=run, name=f"tensor:s{statistic}", tile=tile, writer=writer, seq=seq,
                                    offsets=list(range(WIDTH)), body=body)
    fields = {"run": run, "writer": writer, "kind": "batch", "digest": os.urandom(32)}
    receipts = (Receipt(seq=seq, **fields) for seq in range(20_000))
    Receipt.objects.bulk_create(receipts, batch_size=1000)
    return run

def bytes_on_disk():
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_database_size(current_database())")
        return cursor.fetchone()[0]

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

kept = make(1000)
empty = bytes_on_disk()
run = make(int(sys.argv[1]) // (TENSORS * STATISTICS))
full, at_first = bytes_on_disk(), peak()
begin = time.perf_counter()
deletion.begin(run)
hidden = time.perf_counter() - begin
rows = deletion.delete_run(run.pk)
gone = time.perf_counter() - begin
print(json.dumps({
    "points": run.points_stored, "rows": rows, "hidden_s": round(hidden, 2), "gone_s": round(gone, 2),
    "peak_mb": round(peak() - at_first, 1),
    "disk_mb": {"before": round((full - empty) / 1e6), "after": round((bytes_on_disk() - empty) / 1e6)},
    "other_run_kept": Tile.objects.filter(run=kept).count() == STATISTICS * -(-TENSORS // WIDTH),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--points", type=int, default=600_000_000)
    parser.add_argument("--directory", type=Path, help="the directory of the temporary database")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from chaos import make_token

    from fp8scope_dashboard.servers.supervisor import Supervisor

    with (
        tempfile.TemporaryDirectory(dir=options.directory) as directory,
        Supervisor(Path(directory) / "up", port=0) as supervisor,
    ):
        make_token(supervisor)
        # Without this, the worker of the installation would delete the run at the same time.
        environment = {**os.environ, **supervisor.environment, "REDIS_URL": "redis://127.0.0.1:1/0"}
        command = [sys.executable, "-c", WORK, str(options.points)]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    print(json.dumps({"benchmark": "deletion", **json.loads(done.stdout.splitlines()[-1])}))


if __name__ == "__main__":
    main()
