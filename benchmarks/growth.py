"""Kill one process of each kind in a deployment of several machines, and check for lost data.

Sets up what docs/operating.md describes, on one machine: three web processes on their own addresses behind a
round-robin proxy, three Celery workers, a primary and a streaming replica made by pg_basebackup, and Redis
with an append-only file. Senders load it through the proxy, while the figure of a page is requested
continuously. Then a web process, a worker and the replica are killed (SIGKILL) one after the other and stay
dead. At the end, every stored row is compared with the acknowledged messages. Prints one JSON line.

    python benchmarks/growth.py [--seconds 30] [--senders 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
WORKERS = 3

# Prints the cookie of a signed-in user.
SIGN_IN = """
import django; django.setup()
from importlib import import_module
from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from fp8scope_dashboard.accounts.models import User
user = User.objects.create_user("visitor", is_superuser=True)
session = import_module(settings.SESSION_ENGINE).SessionStore()
session[SESSION_KEY], session[BACKEND_SESSION_KEY] = str(user.pk), settings.AUTHENTICATION_BACKENDS[0]
session[HASH_SESSION_KEY] = user.get_session_auth_hash()
session.save()
print(f"{settings.SESSION_COOKIE_NAME}={session.session_key}")
"""


class Balancer:
    """A round-robin TCP proxy that skips servers which refuse connections."""

    def __init__(self, servers: list[tuple[str, int]]) -> None:
        self._servers = servers
        self._turn = 0
        self.port = 0
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        self._ready.wait()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await server.serve_forever()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in self._servers:
            self._turn = (self._turn + 1) % len(self._servers)
            try:
                server_reader, server_writer = await asyncio.open_connection(*self._servers[self._turn])
            except OSError:
                continue
            await asyncio.gather(self._carry(reader, server_writer), self._carry(server_reader, writer))
            return
        writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


def free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


def start(
    stack: ExitStack, arguments: list[str], environment: dict[str, str], log: Path
) -> subprocess.Popen[bytes]:
    output = stack.enter_context(log.open("wb"))
    child = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=environment,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    stack.callback(end, child)
    return child


def end(child: subprocess.Popen[bytes] | None) -> None:
    """SIGKILL a process and its children."""
    assert child is not None
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def python(script: str, environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def transactions(url: str) -> int:
    """The number of committed transactions of a database."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
        return int(row[0]) if row else 0


class Visitor(threading.Thread):
    """Requests a figure continuously and counts the responses by status."""

    def __init__(self, address: str, cookie: str) -> None:
        super().__init__(daemon=True)
        self.address, self.cookie = address, cookie
        self.answers: Counter[str] = Counter()
        self.stop = False

    def run(self) -> None:
        import urllib3

        while not self.stop:
            try:
                # One retry, as a load balancer retries a GET whose server died.
                answer = urllib3.request(
                    "GET",
                    self.address,
                    headers={"Cookie": self.cookie},
                    timeout=30,
                    redirect=False,
                    retries=urllib3.Retry(1, backoff_factor=0.2),
                )
                self.answers[str(answer.status)] += 1
            except urllib3.exceptions.HTTPError as error:
                self.answers[type(error).__name__] += 1
            time.sleep(0.1)


def measure(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    import crash
    from chaos import make_token
    from helpers.postgres_standby import standby_of

    from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres
    from fp8scope_dashboard.embedded.redis import EmbeddedRedis
    from fp8scope_dashboard.servers import configuration
    from fp8scope_dashboard.servers.configuration import DataDir

    with ExitStack() as stack:
        primary = EmbeddedPostgres(directory / "primary")
        database = stack.enter_context(primary)
        redis = stack.enter_context(EmbeddedRedis(directory / "redis"))
        servers = [(host, free_port(host)) for host in HOSTS]
        balancer = Balancer(servers)
        data = DataDir(directory / "data")
        data.make()
        url = f"http://127.0.0.1:{balancer.port}"
        environment = configuration.child_environment(data, url, "127.0.0.1", database, redis)
        subprocess.run(
            [sys.executable, "-m", "fp8scope_dashboard.servers.prepare", url, "2"],
            env=environment,
            check=True,
            capture_output=True,
        )
        replica = standby_of(primary, directory / "replica")
        replica_url = stack.enter_context(replica)
        environment["FP8SCOPE_REPLICA_URL"] = replica_url
        webs = [
            start(
                stack,
                ["fp8scope_dashboard.servers.web", "--host", host, "--port", str(port)],
                environment,
                directory / f"web-{host}.log",
            )
            for host, port in servers
        ]
        workers = [
            start(
                stack,
                [
                    "celery",
                    "--app",
                    "fp8scope_dashboard.celery:app",
                    "worker",
                    "--pool",
                    "prefork",
                    "--concurrency",
                    "1",
                    "--hostname",
                    f"worker{i}@%h",
                ],
                environment,
                directory / f"worker-{i}.log",
            )
            for i in range(WORKERS)
        ]
        start(
            stack,
            [
                "celery",
                "--app",
                "fp8scope_dashboard.celery:app",
                "beat",
                "--schedule",
                str(directory / "beat"),
            ],
            environment,
            directory / "beat.log",
        )
        installation: Any = SimpleNamespace(environment=environment, url=url)
        token, cookie = make_token(installation), python(SIGN_IN, environment)
        run = str(uuid.uuid4())
        context = multiprocessing.get_context("spawn")
        stop = context.Event()
        files = [directory / f"acknowledged-{rank}" for rank in range(options.senders)]
        senders = [
            context.Process(target=crash.send, args=(url, token, run, rank, stop, file))
            for rank, file in enumerate(files)
        ]
        for sender in senders:
            sender.start()
        wait_for_lines(files)
        visitor = Visitor(f"{url}/p/default/runs/{run}/figures/loss.json", cookie)
        visitor.start()
        before = transactions(replica_url)
        deaths = {}
        replica_transactions = 0
        for name, victim in (("web", webs[0]), ("worker", workers[0]), ("replica", replica.child)):
            time.sleep(options.seconds / 4)
            if name == "replica":
                replica_transactions = transactions(replica_url) - before
            deaths[name] = sum(map(crash.lines, files))
            end(victim)
        time.sleep(options.seconds / 4)
        stop.set()
        visitor.stop = True
        visitor.join()
        for sender in senders:
            sender.join(300)
        sent = {rank: crash.lines(file) for rank, file in enumerate(files)}
        figures = crash.compare(crash.read(installation, run, "compacted"), run, sent)
    return {
        "webs": len(webs),
        "workers": len(workers),
        "messages": sum(sent.values()),
        "messages_before_each_death": deaths,
        "replica_transactions": replica_transactions,
        "page_answers": dict(visitor.answers),
        **figures,
    }


def wait_for_lines(files: list[Path]) -> None:
    deadline = time.monotonic() + 120
    while not all(file.exists() and file.read_text() for file in files):
        if time.monotonic() > deadline:
            raise SystemExit("nothing was acknowledged within 120 s")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--senders", type=int, default=3)
    options = parser.parse_args()
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps({"benchmark": "growth", **measure(Path(directory), options)}))


if __name__ == "__main__":
    main()
