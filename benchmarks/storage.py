"""Measure the stored bytes per point after compaction, beside other trackers. Prints one JSON line.

The agent records a real FP8 training run (see store_data.py: 108 tensors x 7 statistics and some scalars at
every step). `fp8scope sync` sends it to an installation (`fp8scope up`: web, worker, beat, PostgreSQL), and
the worker compacts it. `bytes_per_point` is the growth of all tables of the database, including indexes,
TOAST, receipts and the catalogue, divided by the number of stored points; `tables` has both numbers. Dead
rows are vacuumed before and after, as autovacuum does, because the first vacuum of a table adds 32 KB of
maps. Nothing is rewritten. Points are the values that are not null.

The peers get the same statistics of the first `--peer-steps` steps through their own libraries on the same
machine: trackio to its SQLite, MLflow to its file store and to SQLite, TensorBoard to its event file. Their
bytes are the difference between a directory with all steps and one with a single step.

    python benchmarks/storage.py [--recording DIR] [--steps 2400] [--peer-steps 200] [--peers-venv DIR]

The recording is made if it does not exist, which takes some minutes, and is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

WAIT_SECONDS = 600
PEERS = ("trackio", "mlflow_files", "mlflow_sqlite", "tensorboard")


def ours(recording: Path) -> dict[str, Any]:
    """Store the recording in a new installation."""
    import psycopg
    from chaos import make_token

    from fp8scope_dashboard.servers.supervisor import Supervisor

    with tempfile.TemporaryDirectory() as scratch:
        spool = Path(scratch) / "spool"
        shutil.copytree(recording, spool)
        with Supervisor(Path(scratch) / "up", port=0) as supervisor:
            token = make_token(supervisor)
            with psycopg.connect(supervisor.environment["DATABASE_URL"], autocommit=True) as database:
                database.execute("VACUUM ANALYZE")
                before = table_sizes(database)
                environment = {**os.environ, "FP8SCOPE_URL": supervisor.url, "FP8SCOPE_TOKEN": token}
                command = [sys.executable, "-m", "fp8scope", "sync", str(spool)]
                subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
                wait_until_compacted(database)
                database.execute("VACUUM ANALYZE")
                after = table_sizes(database)
                stored = database.execute("SELECT sum(points_stored)::bigint FROM runs_run").fetchone()
                points = stored[0] if stored else 0
    grown = {name: after[name] - before.get(name, 0) for name in after}
    tables = {name: size for name, size in sorted(grown.items(), key=lambda item: -item[1]) if size > 0}
    return {
        "bytes_per_point": round(sum(tables.values()) / points, 3),
        "points": points,
        "tables": dict(list(tables.items())[:6]),
    }


def wait_until_compacted(database: Any) -> None:
    """Wait until the worker has nothing left to do."""
    begin = time.monotonic()
    while time.monotonic() < begin + WAIT_SECONDS:
        (chunks,) = database.execute("SELECT count(*) FROM telemetry_chunk").fetchone()
        (settled,) = database.execute("SELECT count(*) FROM telemetry_rolling WHERE NOT pending").fetchone()
        if not chunks and settled:
            return
        time.sleep(1.0)
    raise SystemExit("not compacted in time")


def table_sizes(database: Any) -> dict[str, int]:
    """Bytes of every table with indexes and TOAST; partitions count under the name of their parent."""
    rows = database.execute(
        """
        SELECT coalesce(i.inhparent::regclass::text, c.oid::regclass::text),
            sum(pg_total_relation_size(c.oid))::bigint
        FROM pg_class c LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
        WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace GROUP BY 1
        """
    )
    return dict(rows.fetchall())


def peers(recording: Path, venv: Path | None, steps: int) -> dict[str, float]:
    """Bytes per point of each peer, in the environment that ingest.py uses too."""
    import ingest_peers
    from store_data import read_recording

    recorded = read_recording(recording)
    names = [f"{statistic}/{name}" for statistic in recorded.statistics for name in recorded.names]
    values = np.stack([matrix[:steps] for matrix in recorded.statistics.values()], axis=1).reshape(steps, -1)
    assert len(names) == values.shape[1]
    with tempfile.TemporaryDirectory() as scratch:
        python = ingest_peers.install(venv or Path(scratch) / "venv")
        has = subprocess.run([str(python), "-c", "import tensorboard"], capture_output=True)
        if has.returncode:
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", "tensorboard"], check=True)
        np.savez(Path(scratch) / "values.npz", names=np.array(names), values=values)
        sizes = {}
        for peer in PEERS:
            first_step, all_steps = (log(python, peer, Path(scratch), count) for count in (1, steps))
            sizes[f"{peer}_bytes_per_point"] = round((all_steps - first_step) / (values.size - len(names)), 1)
        return sizes


def log(python: Path, peer: str, scratch: Path, steps: int) -> int:
    """Bytes on disk after a peer has logged a number of steps in a separate process."""
    directory = scratch / f"{peer}-{steps}"
    directory.mkdir()
    environment = {**os.environ, "TRACKIO_DIR": str(directory), "HF_HUB_OFFLINE": "1", "PYTHONPATH": "",
                   "GRADIO_ANALYTICS_ENABLED": "False", "MLFLOW_DISABLE_TELEMETRY": "true",
                   "MLFLOW_ALLOW_FILE_STORE": "true"}  # fmt: skip
    command = [str(python), __file__, "--log", peer, str(scratch / "values.npz"), str(directory), str(steps)]
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def log_to(peer: str, source: str, directory: str, steps: int) -> None:
    """In the process of the peer: log the values."""
    data = np.load(source)
    names = [str(name).replace("/", "_") for name in data["names"]]
    rows = data["values"][:steps]
    if peer == "trackio":
        import trackio

        trackio.init(project="storage", embed=False)
        for step, row in enumerate(rows):
            trackio.log(dict(zip(names, row.tolist(), strict=True)), step=step)
        trackio.finish()
    elif peer == "tensorboard":
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = EventFileWriter(directory)
        for step, row in enumerate(rows):
            for name, value in zip(names, row.tolist(), strict=True):
                summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
                writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        writer.close()
    else:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        kind = "sqlite:///" + directory + "/mlflow.db" if peer == "mlflow_sqlite" else "file://" + directory
        client = MlflowClient(tracking_uri=kind)
        run = client.create_run(client.create_experiment("storage")).info.run_id
        for step, row in enumerate(rows):
            metrics = [
                Metric(n, v, int(time.time() * 1000), step) for n, v in zip(names, row.tolist(), strict=True)
            ]
            for begin in range(0, len(metrics), 1000):
                client.log_batch(run, metrics=metrics[begin : begin + 1000])


def main() -> None:
    """Measure, and print one JSON line."""
    if "--log" in sys.argv:
        peer, source, directory, steps = sys.argv[2:]
        log_to(peer, source, directory, int(steps))
        return
    # PYTHONSAFEPATH, which the server processes set, leaves this folder out.
    sys.path.insert(0, str(Path(__file__).parent))
    import store_data

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--recording", type=Path, default=store_data.RECORDING, help="made when there is none"
    )
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--peer-steps", type=int, default=200)
    parser.add_argument("--peers-venv", type=Path, help="kept between runs; temporary by default")
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()

    options.recording.mkdir(parents=True, exist_ok=True)
    store_data.record(options.recording, options.steps)
    figures = ours(options.recording)
    if not options.no_peers:
        figures |= peers(options.recording, options.peers_venv, options.peer_steps)
    print(json.dumps({"benchmark": "storage", **figures}))


if __name__ == "__main__":
    main()
