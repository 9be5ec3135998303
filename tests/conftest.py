"""Fixtures shared by all tests: a real PostgreSQL and Redis, and a real web server and worker on them.

The controlling process starts PostgreSQL and Redis once per session, and only if the selected tests need
them. Set DATABASE_URL and REDIS_URL to use others. Django is imported only inside the fixtures, because the
tests of kernels and agent run without it.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from helpers.run_order import in_parts

if TYPE_CHECKING:
    import pytest_django
    from helpers.live_servers import Server, Worker

TESTS = Path(__file__).parent
# Tests that need no servers: their code does not use the dashboard.
WITHOUT_SERVERS = tuple(TESTS / name for name in ("kernels", "agent", "gpu"))

# nohup and similar programs ignore SIGINT, and the programs that the tests start would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine any example may take long; that says nothing about the code.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")

SERVERS = pytest.StashKey[ExitStack]()


def pytest_configure(config: pytest.Config) -> None:
    """Start the servers at the addresses that settings/test.py has chosen."""
    directory = os.environ.get("FP8SCOPE_TEST_SERVERS")
    is_worker = hasattr(config, "workerinput")
    if directory is None or is_worker or config.option.collectonly or not _needs_servers(config):
        return
    from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres
    from fp8scope_dashboard.embedded.redis import EmbeddedRedis

    config.stash[SERVERS] = stack = ExitStack()
    root = Path(directory)
    # mkdir fails if the folder exists, so nobody else can have created it in advance.
    root.mkdir(mode=0o700)
    stack.callback(shutil.rmtree, root, ignore_errors=True)
    stack.enter_context(EmbeddedPostgres(root / "postgres", durable=False))
    stack.enter_context(EmbeddedRedis(root / "redis", durable=False))


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # Modules that count their objects report those that are left when the process ends.
    if stack := config.stash.get(SERVERS, None):
        stack.close()


def _needs_servers(config: pytest.Config) -> bool:
    chosen = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return not all(any(path.is_relative_to(known) for known in WITHOUT_SERVERS) for path in chosen)


@pytest.fixture(scope="session")
def django_db_setup(
    django_db_setup: None, django_db_blocker: pytest_django.DjangoDbBlocker
) -> Iterator[None]:
    """The test database; tests that commit are followed by a faster flush than Django's.

    With FP8SCOPE_TEST_NODES it is distributed over servers with Citus; see helpers/distributed_database.py.
    """
    from django.test import TransactionTestCase
    from helpers.distributed_database import distributed
    from helpers.empty_database import empty_databases

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(TransactionTestCase, "_fixture_teardown", empty_databases)
        with django_db_blocker.unblock():
            stack.enter_context(distributed())
        yield


@pytest.fixture(scope="session")
def web_process(
    django_db_setup: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    """The real ASGI server, started once per session: its URL, its process and its log."""
    from helpers.live_servers import web_server

    log = tmp_path_factory.mktemp("web") / "web.log"
    with web_server(log) as (url, process):
        yield url, process, log


@pytest.fixture
def server(transactional_db: None, web_process: tuple[str, subprocess.Popen[bytes], Path]) -> Server:
    """A running web server with a project 'default' and a token for it that may do everything."""
    from helpers.live_servers import Server

    from fp8scope_dashboard.accounts.models import Scope
    from fp8scope_dashboard.accounts.services import create_project
    from fp8scope_dashboard.accounts.tokens import create_token

    url, process, log = web_process
    project = create_project("default", "Default")
    return Server(url, create_token(project, "tests", scopes=list(Scope))[1], project, process, log)


@pytest.fixture
def worker(transactional_db: None, tmp_path: Path) -> Iterator[Worker]:
    """A running Celery worker with an empty queue."""
    import redis
    from django.conf import settings
    from helpers.live_servers import Worker, celery_worker

    with redis.Redis.from_url(settings.REDIS_URL) as client:
        client.flushdb()
    log = tmp_path / "worker.log"
    with celery_worker(log) as process:
        yield Worker(process, log)


@pytest.fixture
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Fills a new data directory of `fp8scope up`, so that its first start has little to do; returns it."""
    from dashboard.helpers.prepared_installation import fill

    folder = tmp_path_factory.getbasetemp()
    # That of a worker of pytest-xdist is in that of the session.
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    return lambda data_dir: fill(data_dir, shared)


LONGEST = (
    "e2e/test_demo.py",
    "e2e/test_every_page.py::test_it_works",
    "e2e/test_fourteen_tasks.py",
    "kernels/triton/test_triton.py::test_it_works",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which would search all tests and modules again and again.

    They are there until the end, so that it does not search them while the tests run either.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest tests first, then the other slow ones and those of the browser; see `run_order`."""
    processes = int(getattr(config, "workerinput", {}).get("workercount", 1))
    items.sort(
        key=lambda item: (
            not any(name in item.nodeid for name in LONGEST),
            item.get_closest_marker("slow") is None,
        )
    )
    items[:] = in_parts(
        items,
        processes,
        file_of=lambda item: item.nodeid.partition("::")[0],
        browser=lambda item: item.nodeid.startswith("tests/e2e/"),
        long=lambda item: item.get_closest_marker("slow") is not None or "tests/contract/" in item.nodeid,
    )
