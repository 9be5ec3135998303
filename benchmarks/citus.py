"""Run fp8scope on Citus: its tests, an ingest, a killed worker, and 1, 2 and 4 workers. Prints JSON lines.

    python benchmarks/citus.py SOURCES [--parts tests statements ingest kill growth] [--tensors 1000]
        [--steps 20000] [--runs 8] [--seconds 3600] [--binaries FOLDER]

SOURCES is a source tree of Citus, which is built into a copy of the embedded PostgreSQL (`citus_cluster.py`);
`--binaries` are the programs of an earlier build instead. Each part has a coordinator and two workers on this
machine, which share its cores: figures are counts and processor time, not speeds of several machines.

    tests       contract, ingest, query, deletion and alert tests with the test database on the coordinator
    statements  of one message to the web server, by node
    ingest      one large ingest over HTTP; then rows and bytes by node, before and after `rebalance`
    kill        a worker is killed while agents send, and started again: rows lost, seconds until both send
    growth      processor milliseconds of a message by node, with 1, 2 and 4 workers

The last line has `failures` of the tests, `balance` (the rows of the largest node over the mean, after
rebalancing) and `statements` (of one message, by node).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
from citus_cluster import BuildError, Cluster, Node, build, check_sources

ROOT = Path(__file__).parents[1]
PARTS = ("tests", "statements", "ingest", "kill", "growth")
TESTS = (
    "tests/contract/test_ingest.py",
    "tests/contract/test_exactly_once.py",
    "tests/contract/test_histograms.py",
    "tests/contract/test_attempts.py",
    "tests/contract/test_ranks_at_once.py",
    "tests/contract/test_console.py",
    "tests/contract/test_alert_in_the_training.py",
    "tests/contract/test_alerts_come_back.py",
    "tests/dashboard/ingest",
    "tests/dashboard/telemetry/test_compaction.py",
    "tests/dashboard/telemetry/test_deletion.py",
    "tests/dashboard/telemetry/test_queries.py",
    "tests/dashboard/telemetry/test_retention.py",
    "tests/dashboard/telemetry/test_new_rows.py",
    "tests/dashboard/alerts/test_evaluator.py",
    "tests/dashboard/alerts/test_lifecycle.py",
    "tests/dashboard/alerts/test_outbox.py",
    "tests/dashboard/alerts/test_run_detection.py",
)
# It checks that a server vacuums its partitions; on nodes that is left to autovacuum (telemetry/deletion.py).
NOT_FOR_NODES = ("tests/dashboard/telemetry/test_deletion.py::test_vacuums_after_a_large_deletion",)
# Nothing is asked of the disk where no node is killed.
VOLATILE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
STATEMENT = re.compile(r"LOG:  (?:statement|execute [^:]*): (.*)")
# Of a connection or a transaction, not of a message.
OVERHEAD = re.compile(
    r"(?i)BEGIN|COMMIT|ROLLBACK|SET |SHOW |SELECT set_config|DISCARD|SELECT 1$|SELECT waiting_pid|SELECT gid|"
    r"SELECT pg_reload_conf"
)
INSIDE = re.compile(r"(?:INSERT INTO|UPDATE) public\.\w+_\d{6}\b")
MESSAGES = 100
STEPS_OF_MESSAGE = 100
BETWEEN_KILLS = 40
RECOVERY_SECONDS = 180.0

READ_NODES = """
import django; django.setup()
import json, sys
from django.db import connection
from fp8scope_dashboard.distribution import nodes
if sys.argv[1:] == ["rebalance"]:
    nodes.rebalance()
rows = {}
with connection.cursor() as cursor:
    cursor.execute("SELECT id, rows_stored FROM runs_run")
    for run, stored in cursor.fetchall():
        cursor.execute(
            "SELECT nodeport FROM citus_shards WHERE table_name = 'runs_run'::regclass"
            " AND shardid = get_shard_id_for_distribution_column('runs_run', %s::uuid)", [run])
        ((port,),) = cursor.fetchall()
        rows[port] = rows.get(port, 0) + stored
workers = [node for node in nodes.nodes() if node.has_shards]
print(json.dumps({
    "rows": {str(node.address): rows.get(node.address.port, 0) for node in workers},
    "mb": {str(node.address): round(node.bytes / 1e6) for node in workers},
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("sources", type=Path, nargs="?", help="a source tree of Citus")
    parser.add_argument("--binaries", type=Path, help="the programs of an earlier build, in place of SOURCES")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tensors", type=int, default=1_000)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3600.0, help="the ingest ends after this time")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="other tests than those of the list")
    options = parser.parse_args()
    sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests")]
    try:
        if options.binaries is None:
            if options.sources is None:
                raise BuildError(
                    "give the folder of a source tree of Citus (https://github.com/citusdata/citus)"
                )
            check_sources(options.sources)
    except BuildError as error:
        raise SystemExit(f"citus: {error}") from error
    with tempfile.TemporaryDirectory(prefix="fp8scope-citus-") as directory:
        folder = Path(directory)
        folder.chmod(0o755)
        if options.binaries is None:
            began = time.monotonic()
            try:
                options.binaries = build(options.sources.resolve(), folder / "build")
            except BuildError as error:
                raise SystemExit(f"citus: {error}") from error
            show({"part": "build", "seconds": round(time.monotonic() - began, 1)})
        summary: dict[str, Any] = {}
        for part in options.parts:
            summary |= MEASURES[part](folder / part, options) or {}
        show({"benchmark": "citus", **summary})


def show(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def run_tests(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run tests of the suite with their database on the coordinator."""
    from fp8scope_dashboard.embedded.redis import EmbeddedRedis

    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(options.binaries, folder / "nodes", 2, settings=VOLATILE))
        redis = stack.enter_context(EmbeddedRedis(folder / "redis", durable=False))
        environment = {
            **os.environ,
            "DATABASE_URL": cluster.coordinator.url,
            "REDIS_URL": redis,
            "FP8SCOPE_TEST_NODES": ",".join(node.address for node in cluster.nodes),
        }
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider"]
        command += [*options.tests, *(f"--deselect={test}" for test in NOT_FOR_NODES)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    passed = re.search(r"(\d+) passed", done.stdout)
    failures = sorted(set(failed)) or ([] if done.returncode == 0 else [done.stdout[-500:]])
    show(
        {
            "part": "tests",
            "passed": int(passed[1]) if passed else 0,
            "left_out": len(NOT_FOR_NODES),
            "failures": failures,
            "seconds": round(time.monotonic() - began),
        }
    )
    return {"failures": len(failures)}


@contextmanager
def installation(
    folder: Path,
    options: argparse.Namespace,
    workers: int,
    *,
    settings: dict[str, str] | None,
    web_only: bool,
) -> Iterator[tuple[Cluster, Any]]:
    """A distributed store, and the processes of fp8scope on it: all, or the web server alone."""
    import growth

    from fp8scope_dashboard.embedded.redis import EmbeddedRedis
    from fp8scope_dashboard.servers import configuration
    from fp8scope_dashboard.servers.configuration import DataDir

    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(options.binaries, folder / "nodes", workers, settings=settings))
        redis = stack.enter_context(EmbeddedRedis(folder / "redis"))
        data = DataDir(folder / "data")
        data.make()
        port = growth.free_port("127.0.0.1")
        url = f"http://127.0.0.1:{port}"
        environment = configuration.child_environment(data, url, "127.0.0.1", cluster.coordinator.url, redis)
        python = [sys.executable, "-m"]
        prepare = [*python, "fp8scope_dashboard.servers.prepare", url, "2"]
        subprocess.run(prepare, env=environment, check=True, capture_output=True)
        nodes = [part for worker in cluster.workers for part in ("--node", worker.address)]
        command = [*python, "fp8scope_dashboard.cli", "admin", "distribute", *nodes]
        command += ["--coordinator", cluster.coordinator.address]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        web = ["fp8scope_dashboard.servers.web", "--host", "127.0.0.1", "--port", str(port)]
        growth.start(stack, web, environment, folder / "web.log")
        celery = ["celery", "--app", "fp8scope_dashboard.celery:app"]
        if not web_only:
            growth.start(stack, [*celery, "worker", "--concurrency", "1"], environment, folder / "worker.log")
            beat = [*celery, "beat", "--schedule", str(folder / "beat")]
            growth.start(stack, beat, environment, folder / "beat.log")
        yield cluster, SimpleNamespace(environment=environment, url=url, folder=folder)


class Sender:
    """One run with one writer; each message has some steps of one statistic of all tensors."""

    def __init__(self, url: str, token: str, tensors: int) -> None:
        from fp8scope.config import Settings
        from fp8scope.delivery.transport import Transport

        self.transport = Transport(Settings(url=url, token=token, read_timeout=60))
        self.run, self.writer, self.tensors = str(uuid.uuid4()), str(uuid.uuid4()), tensors
        self.seq = self.step = 0

    def register(self) -> None:
        names = [f"layers.{i}.weight" for i in range(self.tensors)]
        described = [{"name": name, "numel": 1} for name in names]
        self._send("PUT", f"/runs/{self.run}", json.dumps({"name": "citus"}).encode(), "application/json")
        catalogue = json.dumps({"rank": 0, "offset": 0, "tensors": described}).encode()
        self._send("POST", f"/runs/{self.run}/writers/{self.writer}/tensors", catalogue, "application/json")

    def send(self, steps: int) -> None:
        """Send the next message, again until it is acknowledged."""
        import numpy as np

        from fp8scope.delivery.arrow_encoding import CONTENT_TYPE, encode_batch
        from fp8scope.recording.records import Row

        random = np.random.default_rng(self.seq)
        level = random.standard_normal(self.tensors).astype(np.float32)
        rows = [
            Row(
                step=step,
                time_us=1_767_225_600_000_000 + step,
                dropped=0,
                scalars={"loss": 1.0 / (1 + step)},
                statistics=(level + np.float32(step % 8))[:, None].astype(float),
            )
            for step in range(self.step, self.step + steps)
        ]
        body = encode_batch(rows, ("amax",), run=self.run, writer=self.writer, seq=self.seq).body
        self._send("POST", f"/runs/{self.run}/batches", body, CONTENT_TYPE)
        self.seq, self.step = self.seq + 1, self.step + steps

    def _send(self, method: str, path: str, body: bytes, kind: str) -> None:
        from fp8scope.delivery.transport import NextAction

        deadline = time.monotonic() + 120
        while (outcome := self.transport.send(method, path, body, kind)).action is not NextAction.DONE:
            if outcome.action not in (NextAction.WAIT, NextAction.RETRY) or time.monotonic() > deadline:
                raise SystemExit(f"{method} {path}: {outcome}")
            time.sleep(0.2)


def count_statements(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Let every node log its statements while MESSAGES arrive one after the other."""
    from chaos import make_token

    with installation(folder, options, 2, settings=VOLATILE, web_only=True) as (cluster, site):
        sender = Sender(site.url, make_token(site), 100)
        sender.register()
        for _ in range(10):
            sender.send(1)
        for node in cluster.nodes:
            _execute(node, "ALTER SYSTEM SET log_statement = 'all'", "SELECT pg_reload_conf()")
        time.sleep(1)
        before = {node.address: len(node.log()) for node in cluster.nodes}
        for _ in range(MESSAGES):
            sender.send(1)
        logged = {node.address: node.log()[before[node.address] :] for node in cluster.nodes}
    counts = {address: _sorted_statements(text) for address, text in logged.items()}
    line = {
        address: {kind: round(number / MESSAGES, 2) for kind, number in kinds.items()}
        for address, kinds in counts.items()
    }
    show({"part": "statements", "messages": MESSAGES, "of_one_message": line})
    coordinator, *workers = line.values()
    workers.sort(key=lambda kinds: -kinds["arriving"])
    return {
        "statements": {
            "coordinator": coordinator["arriving"],
            "node_of_run": workers[0]["arriving"],
            "inside_of_node_of_run": workers[0]["inside"],
            "other_nodes": workers[-1]["arriving"],
        }
    }


def _sorted_statements(text: str) -> dict[str, int]:
    """The statements that arrive at a node, and those that a function runs there on shards."""
    listed = [line for line in STATEMENT.findall(text) if not OVERHEAD.match(line)]
    inside = sum(1 for line in listed if INSIDE.match(line))
    return {"arriving": len(listed) - inside, "inside": inside}


def measure_ingest(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One ingest of runs in turn over HTTP, then the balance of the nodes."""
    from chaos import make_token

    with installation(folder, options, 2, settings=VOLATILE, web_only=False) as (_, site):
        token = make_token(site)
        senders = [Sender(site.url, token, options.tensors) for _ in range(options.runs)]
        for sender in senders:
            sender.register()
        began = time.monotonic()
        while senders[0].step < options.steps and time.monotonic() - began < options.seconds:
            for sender in senders:
                sender.send(STEPS_OF_MESSAGE)
        seconds = time.monotonic() - began
        at_first, began = _nodes(site), time.monotonic()
        balanced = _nodes(site, "rebalance")
        rebalancing = time.monotonic() - began
    line = {
        "part": "ingest",
        "tensors": options.tensors,
        "steps": senders[0].step,
        "steps_wanted": options.steps,
        "runs": options.runs,
        "seconds": round(seconds, 1),
        "rows_stored": sum(balanced["rows"].values()),
        "rows_sent": options.runs * senders[0].step,
        "at_first": at_first,
        "after_rebalance": balanced,
        "rebalance_s": round(rebalancing, 1),
    }
    show(line)
    rows = list(balanced["rows"].values())
    return {"balance": round(max(rows) * len(rows) / sum(rows), 3)}


def measure_kill(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Kill one worker while four runs are sent; start it again, and compare all rows with what was sent."""
    import crash
    from chaos import make_token

    with installation(folder, options, 2, settings=None, web_only=False) as (cluster, site):
        token, context = make_token(site), multiprocessing.get_context("spawn")
        stop = context.Event()
        runs = [str(uuid.uuid4()) for _ in range(4)]
        files = [folder / f"acknowledged-{rank}" for rank in range(len(runs))]
        processes = [
            context.Process(target=crash.send, args=(site.url, token, run, rank, stop, file))
            for rank, (run, file) in enumerate(zip(runs, files, strict=True))
        ]
        for process in processes:
            process.start()
        _wait_for(files, BETWEEN_KILLS)
        counts = [crash.lines(file) for file in files]
        victim = cluster.workers[0]
        victim.kill()
        time.sleep(10)
        during = [crash.lines(file) - count for file, count in zip(files, counts, strict=True)]
        began = time.monotonic()
        victim.start()
        answered = time.monotonic()
        _wait_for(files, 5, since=[crash.lines(file) for file in files])
        recovered = time.monotonic()
        _wait_for(files, BETWEEN_KILLS, since=[crash.lines(file) for file in files])
        stop.set()
        for process in processes:
            process.join(300)
        compared = [
            crash.compare(crash.read(site, run, "compacted"), run, {rank: crash.lines(file)})
            for rank, (run, file) in enumerate(zip(runs, files, strict=True))
        ]
        in_doubt = sum(_count(node, "SELECT count(*) FROM pg_prepared_xacts") for node in cluster.nodes)
    lost = {name: sum(figures[name] for figures in compared) for name in compared[0]}
    line = {
        "part": "kill",
        "messages": sum(map(crash.lines, files)),
        "messages_by_run_while_down": during,
        "start_s": round(answered - began, 1),
        "all_send_again_s": round(recovered - answered, 1),
        "transactions_in_doubt": in_doubt,
        **lost,
    }
    show(line)
    return {"lost": lost["lost"], "doubled": lost["doubled"]}


def measure_growth(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The same messages of 16 runs to stores of 1, 2 and 4 workers: the work of each node."""
    from chaos import make_token

    for workers in (1, 2, 4):
        with installation(folder / str(workers), options, workers, settings=VOLATILE, web_only=True) as (
            cluster,
            site,
        ):
            token = make_token(site)
            senders = [Sender(site.url, token, 100) for _ in range(16)]
            for sender in senders:
                sender.register()
                sender.send(10)
            before = [_cpu(node) for node in cluster.nodes]
            for _ in range(20):
                for sender in senders:
                    sender.send(10)
            messages = 20 * len(senders)
            spent = [_cpu(node) - first for node, first in zip(cluster.nodes, before, strict=True)]
            rows = _nodes(site)["rows"]
        per_message = [round(1000 * seconds / messages, 2) for seconds in spent]
        show(
            {
                "part": "growth",
                "workers": workers,
                "messages": messages,
                "coordinator_ms": per_message[0],
                "workers_ms": per_message[1:],
                "most_loaded_worker_ms": max(per_message[1:]),
                "rows": rows,
            }
        )
    return {}


MEASURES = {
    "tests": run_tests,
    "statements": count_statements,
    "ingest": measure_ingest,
    "kill": measure_kill,
    "growth": measure_growth,
}


def _nodes(site: Any, *arguments: str) -> dict[str, dict[str, int]]:
    command = [sys.executable, "-c", READ_NODES, *arguments]
    done = subprocess.run(command, env=site.environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    nodes: dict[str, dict[str, int]] = json.loads(done.stdout)
    return nodes


def _wait_for(files: Sequence[Path], more: int, since: Sequence[int] | None = None) -> None:
    """Wait until each file has so many more lines."""
    import crash

    since = since or [0] * len(files)
    deadline = time.monotonic() + RECOVERY_SECONDS
    while any(
        not file.exists() or crash.lines(file) < first + more
        for file, first in zip(files, since, strict=True)
    ):
        if time.monotonic() > deadline:
            raise SystemExit(f"not every run was stored within {RECOVERY_SECONDS:.0f} s")
        time.sleep(0.1)


def _cpu(node: Node) -> float:
    """CPU seconds of a node's processes, living and ended."""
    import psutil

    assert node.process is not None
    server = psutil.Process(node.process.pid)
    times = server.cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in server.children(recursive=True):
        try:
            total += sum(child.cpu_times()[:2])
        except psutil.Error:
            continue
    return float(total)


def _execute(node: Node, *statements: str) -> None:
    with psycopg.connect(node.url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def _count(node: Node, statement: str) -> int:
    with psycopg.connect(node.url, autocommit=True) as connection:
        row = connection.execute(statement).fetchone()
        return int(row[0]) if row else 0


if __name__ == "__main__":
    main()
