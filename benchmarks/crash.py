"""Kill processes of the server at random under load and check that every acknowledged row is stored once.

`--senders` processes send messages to one run, as ranks do. Each repeats a message until it is acknowledged
and records its seq. `--kills` times, at random moments, the web process, the worker or PostgreSQL gets
SIGKILL; the supervisor starts it again. Another process keeps queueing compaction jobs, so that kills also
hit compaction. At the end, every stored row is compared with the acknowledged messages. Prints one JSON line.

    python benchmarks/crash.py [--kills 200] [--senders 4] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

VICTIMS = ("web", "worker", "postgres")
ROWS, TENSORS = 5, 40
STATISTICS = ("numel", "amax")
# Before each kill, wait for BETWEEN further acknowledged messages and then a random number of seconds.
PAUSE = (0.0, 0.5)
BETWEEN = 8

COMPACT = """
import django; django.setup()
import time
from fp8scope_dashboard.telemetry.tasks import sweep_compaction
while True:
    try:
        sweep_compaction.delay()
    except Exception:
        pass
    time.sleep(1)
"""

# Prints every stored row of the run as "writer seq step amax-of-tensor-0 loss", compacted or not.
READ = """
import django; django.setup()
import sys
from uuid import UUID
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.compaction import compact_run
run = UUID(sys.argv[1])
if sys.argv[2] == "compacted":
    while compact_run(run):
        pass
for writer in queries.writers(run):
    seq = 0
    while pieces := queries.stream(run, writer, seq, 16):
        for last, data in pieces:
            for i, step in enumerate(data.steps):
                number = last if data.seqs is None else data.seqs[i]
                print(writer, number, step, data.statistics["amax"][i, 0], data.scalars["loss"][i])
            seq = last + 1
counted = Run.objects.values_list("rows_stored", "points_stored").get(pk=run)
print("counted", *counted)
"""


def send(url: str, token: str, run: str, rank: int, stop: Any, acknowledged: Path) -> None:
    """Send until `stop` is set. Appends the seq of each acknowledged message to a file."""
    import numpy as np

    from fp8scope.config import Settings
    from fp8scope.delivery.arrow_encoding import CONTENT_TYPE, encode_batch
    from fp8scope.delivery.transport import NextAction, Transport
    from fp8scope.recording.records import Row, dump_json

    transport = Transport(Settings(url=url, token=token, read_timeout=10))
    writer = str(uuid.uuid5(uuid.UUID(run), str(rank)))

    def repeat(method: str, path: str, body: bytes, kind: str = "application/json") -> Any:
        while (outcome := transport.send(method, path, body, kind)).action is not NextAction.DONE:
            if outcome.action not in (NextAction.WAIT, NextAction.RETRY):
                raise SystemExit(f"refused: {outcome}")
            time.sleep(random.uniform(0.01, 0.3))
        return outcome.answer

    repeat("PUT", f"/runs/{run}", dump_json({"name": "crash"}))
    tensors = [{"name": f"t{i}.weight", "numel": 1} for i in range(TENSORS)]
    repeat(
        "POST",
        f"/runs/{run}/writers/{writer}/tensors",
        dump_json({"rank": rank, "offset": 0, "tensors": tensors}),
    )
    seq = 0
    with acknowledged.open("w", buffering=1) as file:
        while not stop.is_set():
            steps = range(seq * ROWS, (seq + 1) * ROWS)
            rows = [
                Row(
                    step=step,
                    time_us=1_767_225_600_000_000 + step,
                    dropped=0,
                    scalars={"loss": loss_at(rank, step)},
                    statistics=np.full((TENSORS, len(STATISTICS)), amax_at(rank, step)),
                )
                for step in steps
            ]
            body = encode_batch(rows, STATISTICS, run=run, writer=writer, seq=seq).body
            answer = repeat("POST", f"/runs/{run}/batches", body, CONTENT_TYPE)
            assert answer["seq"] == seq, answer
            file.write(f"{seq}\n")
            seq += 1


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n")


def amax_at(rank: int, step: int) -> float:
    return float((step % 1024) + 1024 * rank + 1)


def loss_at(rank: int, step: int) -> float:
    return 1.0 / (1 + step) + rank


def kill_often(supervisor: Any, kills: int, chance: random.Random, acknowledged: Any) -> Counter[str]:
    """SIGKILL processes at random moments with messages in between. Returns the number of kills by name."""
    done: Counter[str] = Counter()
    while done.total() < kills:
        enough = acknowledged() + BETWEEN
        deadline = time.monotonic() + 120
        while acknowledged() < enough:
            if time.monotonic() > deadline:
                raise SystemExit("nothing was acknowledged for 120 s")
            time.sleep(0.02)
        time.sleep(chance.uniform(*PAUSE))
        name = chance.choice(VICTIMS)
        if (pid := supervisor.pids().get(name)) is not None:
            os.kill(pid, signal.SIGKILL)
            done[name] += 1
    return done


def compare(text: str, run: str, sent: dict[int, int]) -> dict[str, int]:
    """Compare stored rows with acknowledged ones. A row that differs counts as lost."""
    *lines, last = text.splitlines()
    stored = Counter(lines)
    expected = set()
    for rank, messages in sent.items():
        writer = uuid.uuid5(uuid.UUID(run), str(rank))
        for step in range(messages * ROWS):
            expected.add(f"{writer} {step // ROWS} {step} {amax_at(rank, step)} {loss_at(rank, step)}")
    points = TENSORS * len(STATISTICS) + 1
    return {
        "lost": sum(1 for row in expected if not stored[row]) * points,
        "doubled": sum(count - 1 for count in stored.values()) * points,
        "unexpected": sum(1 for row in stored if row not in expected) * points,
        "miscounted": abs(int(last.split()[2]) - len(expected) * points),
    }


def read(supervisor: Any, run: str, how: str) -> str:
    environment = {**os.environ, **supervisor.environment}
    command = [sys.executable, "-c", READ, run, how]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def measure(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    from chaos import make_token

    from fp8scope_dashboard.servers import children
    from fp8scope_dashboard.servers.supervisor import Supervisor

    # The processes are healthy: without this, the delay before a restart would grow to 30 s.
    children.LONGEST_DELAY = children.FIRST_DELAY
    chance, run = random.Random(options.seed), str(uuid.uuid4())
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with Supervisor(directory / "up", port=0) as supervisor:
        token = make_token(supervisor)
        environment = {**os.environ, **supervisor.environment}
        files = [directory / f"acknowledged-{rank}" for rank in range(options.senders)]
        senders = [
            context.Process(target=send, args=(supervisor.url, token, run, rank, stop, file))
            for rank, file in enumerate(files)
        ]
        compactor = subprocess.Popen([sys.executable, "-c", COMPACT], env=environment)
        try:
            for sender in senders:
                sender.start()
            began = time.monotonic()
            while not all(file.exists() and file.read_text() for file in files):
                time.sleep(0.1)
            done = kill_often(supervisor, options.kills, chance, lambda: sum(map(lines, files)))
            seconds = time.monotonic() - began
            stop.set()
            for sender in senders:
                sender.join(300)
        finally:
            compactor.kill()
            compactor.wait()
        if any(sender.exitcode for sender in senders):
            raise SystemExit("a sender failed")
        sent = {rank: len(file.read_text().split()) for rank, file in enumerate(files)}
        figures = compare(read(supervisor, run, "as it is"), run, sent)
        compacted = compare(read(supervisor, run, "compacted"), run, sent)
    return {
        "kills": dict(done),
        "seconds": round(seconds),
        "messages": sum(sent.values()),
        "points_acknowledged": sum(sent.values()) * ROWS * (TENSORS * len(STATISTICS) + 1),
        **figures,
        **{f"{name}_after_compaction": value for name, value in compacted.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--senders", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps({"benchmark": "crash", **measure(Path(directory), options)}))


if __name__ == "__main__":
    main()
