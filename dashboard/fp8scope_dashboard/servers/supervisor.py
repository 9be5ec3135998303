"""One installation as one process tree: PostgreSQL, Redis, web, workers and beat below a supervisor.

    supervisor = Supervisor(Path("~/.fp8scope").expanduser())
    supervisor.start()
    supervisor.wait_ready()
    ...
    supervisor.stop()

A dedicated thread starts the children, restarts those that die, and stops them all. The kernel ends a child
when the *thread* that started it ends.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

import psutil

from fp8scope_dashboard.embedded import conversion, processes
from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres
from fp8scope_dashboard.embedded.processes import ServerError
from fp8scope_dashboard.embedded.redis import EmbeddedRedis
from fp8scope_dashboard.embedded.server import START_SECONDS, EmbeddedServer
from fp8scope_dashboard.servers import children, configuration, health
from fp8scope_dashboard.servers.children import Child, Echo, LogFile
from fp8scope_dashboard.servers.configuration import DataDir
from fp8scope_dashboard.servers.forks import ForkServer

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8265
POLL_SECONDS = 0.1
# The web server closes its event streams after 2 s; a task has this long to finish.
STOP_GRACE_SECONDS = 8.0
# The longest query of a page. The slowest that people wait for takes a few seconds.
STATEMENT_SECONDS = 60


class Stopped(Exception):
    """`stop` was called while the installation was starting."""


class Supervisor:
    """Runs an installation in `data_dir`, served at http://host:port.

    Args:
        data_dir: created if missing; holds all files of the installation.
        host: address to listen on.
        port: 0 chooses a free port, see `url`.
        echo: called with each line that a child (or the supervisor, as "up") writes to its log.
        progress: called with a short text at each stage of the start.
        durable: False trades durability for speed, for tests only.

    Attributes:
        sign_in_link: once ready, a one-time link for the administrator, until one has signed in; secret.
        environment: once ready, the environment of the children, which management commands need too; secret.
    """

    def __init__(
        self,
        data_dir: Path,
        host: str = DEFAULT_HOST,
        port: int = DEFAULT_PORT,
        *,
        echo: Echo | None = None,
        progress: Callable[[str], None] = lambda stage: None,
        durable: bool = True,
    ) -> None:
        self.data = DataDir(Path(data_dir).expanduser().absolute())
        self.host = host
        self.port = port
        self.sign_in_link: str | None = None
        self.environment: dict[str, str] = {}
        self._echo = echo
        self._progress = progress
        self._durable = durable
        self._children: list[Child] = []
        self._ready, self._stopping, self._hurry, self._ended = Event(), Event(), Event(), Event()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="fp8scope-supervisor", daemon=True)

    @property
    def url(self) -> str:
        """The address for browsers and agents. With port 0 it is known once the installation is ready."""
        return configuration.base_url(self.host, self.port)

    def start(self) -> None:
        """Start everything in the background; see `wait_ready`. A supervisor can start only once."""
        self._thread.start()

    def wait_ready(self, timeout: float = 180.0) -> None:
        """Wait until the web server answers.

        Raises:
            AlreadyRunningError: another supervisor runs on this data directory.
            ServerError: the installation did not start in `timeout` seconds; its processes are stopped.
            Stopped: `stop` was called in the meantime.
        """
        deadline = time.monotonic() + timeout
        while not self._ready.wait(POLL_SECONDS):
            if self._ended.is_set():
                raise self._error or Stopped
            if time.monotonic() > deadline:
                self.stop()
                raise ServerError(f"not ready after {timeout:.0f} s: see the logs in {self.data.logs}")

    def request_stop(self) -> None:
        """Request a stop without waiting for it. A second request cuts the grace periods short."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    def stop(self) -> None:
        """Stop everything and wait until it has ended."""
        self._stopping.set()
        self.join()

    def join(self) -> None:
        """Wait until everything has stopped. Raises the error that ended the supervisor's thread, if any."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None and not isinstance(self._error, Stopped):
            raise self._error

    def pids(self) -> dict[str, int]:
        """The pids of the running children: postgres, redis, fork_server, web, alerts, worker and beat."""
        return {child.name: child.running.pid for child in self._children if child.running is not None}

    def __enter__(self) -> Supervisor:
        self.start()
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                self._start_all(stack)
                self._ready.set()
                while not self._stopping.wait(POLL_SECONDS):
                    self._restart_ended_children()
                self._log_message("stopping")
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def _start_all(self, stack: ExitStack) -> None:
        """Start everything in order. Closing `stack` stops it in the reverse order."""
        self.data.make()
        stack.enter_context(processes.locked(self.data.root))
        self._log = stack.enter_context(closing(LogFile(self.data.logs, "up", self._echo)))
        listener = stack.enter_context(configuration.listen(self.host, self.port))
        self.port = listener.getsockname()[1]
        self.data.save_address(self.url)
        self._reap()
        conversion.finish_interrupted(self.data.root)
        servers = self._private_servers(stack)
        self.environment = configuration.child_environment(
            self.data,
            self.url,
            self.host,
            configuration.secret("DATABASE_URL") or servers["postgres"][1].url,
            configuration.secret("REDIS_URL") or servers["redis"][1].url,
        )
        if "postgres" in servers:
            self.environment["FP8SCOPE_DATABASE_DIR"] = str(servers["postgres"][1].data_dir)
            # A connection pooler before another PostgreSQL may not know them.
            self.environment.setdefault("FP8SCOPE_PREPARED_STATEMENTS", "1")
        # Half of the start time is Python imports: these run while PostgreSQL starts.
        self._forks = self._start_fork_server(stack)
        application: list[Child] = []
        stack.callback(children.stop_together, application, STOP_GRACE_SECONDS, self._hurry.is_set)
        self._start_servers(servers)
        self._prepare(stack, servers)
        application.append(self._serve(stack, listener))
        application += self._start_jobs(stack)

    def _private_servers(self, stack: ExitStack) -> dict[str, tuple[Child, EmbeddedServer]]:
        """The private PostgreSQL and Redis, not started; none if the environment names a server instead."""
        candidates: list[tuple[str, str, EmbeddedServer]] = [
            (
                "DATABASE_URL",
                "postgres",
                EmbeddedPostgres(self.data.root / "postgres", durable=self._durable),
            ),
            ("REDIS_URL", "redis", EmbeddedRedis(self.data.root / "redis", durable=self._durable)),
        ]
        servers = {}
        for variable, name, server in candidates:
            if not configuration.secret(variable):
                child = children.embedded_child(name, server, self._log_file(stack, name))
                # Registered now, so that it also runs if opening or starting fails half-way.
                stack.callback(self._stop_server, child, server)
                servers[name] = child, server
        return servers

    def _start_fork_server(self, stack: ExitStack) -> ForkServer:
        environment = dict(self.environment)
        if not configuration.secret("DATABASE_URL"):
            # Only for the private PostgreSQL: a connection pooler before another may refuse the parameter.
            environment.setdefault("FP8SCOPE_STATEMENT_SECONDS", str(STATEMENT_SECONDS))
        forks = ForkServer(self._log_file(stack, "fork_server"), self.data.run, environment)
        stack.callback(forks.close)
        stack.callback(children.stop_together, [forks.child], STOP_GRACE_SECONDS, self._hurry.is_set)
        self._children.append(forks.child)
        forks.child.launch()
        return forks

    def _start_servers(self, servers: Mapping[str, tuple[Child, EmbeddedServer]]) -> None:
        for name, (child, server) in servers.items():
            new = name == "postgres" and not server.server_dir.exists()
            self._progress("creating the database" if new else f"starting {name}")
            server.open()
            self._children.append(child)
            child.launch()

    def _stop_server(self, child: Child, server: EmbeddedServer) -> None:
        child.running = None
        server.stop()

    def _prepare(self, stack: ExitStack, servers: Mapping[str, tuple[Child, EmbeddedServer]]) -> None:
        """Collect the static files while the servers start, then migrate.

        Separate processes, so that the supervisor needs no Django.
        """
        self._wait("fork_server", self._forks.is_ready, START_SECONDS)
        read_fd, write_fd = os.pipe()
        stack.callback(os.close, read_fd)
        name = "fp8scope_dashboard.servers"
        collect = self._python(stack, "collect", [f"{name}.collect"])
        prepare = self._python(stack, "prepare", [f"{name}.prepare", self.url, "fd:0"], inherit=[write_fd])
        stack.callback(children.stop_together, [collect, prepare], STOP_GRACE_SECONDS, self._hurry.is_set)
        try:
            collect.launch()
            for server_name, (_, server) in servers.items():
                self._wait(server_name, server.is_ready, START_SECONDS)
            self._progress("migrating the database")
            prepare.launch()
        finally:
            os.close(write_fd)
        assert prepare.running is not None
        while (code := prepare.running.poll()) is None:
            self._pause()
        # Not at the end, when other processes may have their numbers.
        children.stop_together([collect, prepare], STOP_GRACE_SECONDS, self._hurry.is_set)
        if code != 0:
            raise ServerError(f"the database could not be prepared.{self._tail('prepare')}")
        self.sign_in_link = os.read(read_fd, 65536).decode() or None

    def _serve(self, stack: ExitStack, listener: socket.socket) -> Child:
        self._progress("starting the web server")
        arguments = ["fp8scope_dashboard.servers.web", "--fd", "fd:0"]
        web = self._python(stack, "web", arguments, signal.SIGTERM, inherit=[listener.fileno()])
        self._children.append(web)
        web.launch()
        self._wait("web", self._answers, START_SECONDS)
        return web

    def _start_jobs(self, stack: ExitStack) -> list[Child]:
        """Launch the workers and beat without waiting for them: their tasks wait in Redis."""
        jobs = [
            # On SIGTERM Celery finishes its tasks; on SIGQUIT it returns them to the queue.
            *(
                self._python(
                    stack, name, children.worker_arguments(name, queues), signal.SIGTERM, signal.SIGQUIT
                )
                for name, queues in (("alerts", children.ALERT_QUEUES), ("worker", children.JOB_QUEUES))
            ),
            self._python(
                stack, "beat", children.beat_arguments(self.data.run / "beat-schedule"), signal.SIGTERM
            ),
        ]
        for job in jobs:
            self._children.append(job)
            job.launch()
        return jobs

    def _python(
        self,
        stack: ExitStack,
        name: str,
        arguments: list[str],
        *signals: signal.Signals,
        inherit: Sequence[int] = (),
    ) -> Child:
        return self._forks.python_child(
            name,
            arguments,
            self._log_file(stack, name),
            stop_signals=signals or (signal.SIGTERM,),
            inherit=inherit,
        )

    def _restart_ended_children(self) -> None:
        for child in self._children:
            if message := child.restart_if_ended():
                self._log_message(message)

    def _answers(self) -> bool:
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        # 503 means that PostgreSQL is slow; wait for it as for every server.
        if (status := health.status(host, self.port)) not in (0, 200, 503):
            raise ServerError(f"the web server answers with status {status}.{self._tail('web')}")
        return status == 200

    def _wait(self, name: str, condition: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            self._pause()
            for child in self._children:
                if child.running is not None and (code := child.running.poll()) is not None:
                    if code > 0 and (message := child.recover()):
                        self._log_message(message)
                        child.launch()
                        continue
                    reason = children.describe_exit(code)
                    raise ServerError(f"{child.name} {reason} while starting.{self._tail(child.name)}")
            if time.monotonic() > deadline:
                raise ServerError(f"{name} did not answer in {timeout:.0f} s.{self._tail(name)}")

    def _pause(self) -> None:
        if self._stopping.wait(POLL_SECONDS):
            raise Stopped

    def _reap(self) -> None:
        """Stop Python children that outlived an earlier supervisor: only they run in the `run` directory."""
        directory = str(self.data.run.resolve())

        def left_behind(candidate: psutil.Process) -> bool:
            return candidate.cwd() == directory and os.path.basename(candidate.exe()).startswith("python")

        if pids := processes.reap(left_behind, signal.SIGQUIT, STOP_GRACE_SECONDS):
            self._log_message(
                f"stopped processes that an earlier start left behind: {', '.join(map(str, pids))}"
            )

    def _log_file(self, stack: ExitStack, name: str) -> LogFile:
        return stack.enter_context(closing(LogFile(self.data.logs, name, self._echo)))

    def _log_message(self, message: str) -> None:
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}")

    def _tail(self, name: str) -> str:
        # The thread that copies the child's output may still be reading its last lines.
        time.sleep(POLL_SECONDS)
        path = self.data.logs / f"{name}.log"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-12:] if path.exists() else []
        return "\n".join([f" The end of {path}:", *(f"    {line}" for line in lines)])
