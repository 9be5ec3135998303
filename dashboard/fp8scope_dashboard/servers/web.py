"""The web server process: uvicorn on a socket inherited from the parent, or on an address.

    python -m fp8scope_dashboard.servers.web --fd N
    python -m fp8scope_dashboard.servers.web --host 0.0.0.0 --port 8000

uvicorn and granian serve Django equally fast (benchmarks/web_server.py). uvicorn is one process instead of
two, so killing it leaves no worker behind. It accepts a listening socket from its parent: while a web server
that died is being replaced, connections wait in the socket's queue instead of being refused.
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import sys
import threading

import django
import uvicorn

from fp8scope_dashboard.process_setup import keep_freed_memory
from fp8scope_dashboard.servers.children import wait_at_gate
from fp8scope_dashboard.servers.configuration import BACKLOG

APPLICATION = "fp8scope_dashboard.asgi:application"
WARM_UP_SECONDS = 3.0
LAZILY_IMPORTED = ("scipy.stats", "scipy.optimize", "pyarrow.parquet")
# Event streams never end by themselves; on a stop they are closed after this many seconds.
GRACE_SECONDS = 2


def main(argv: list[str]) -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m fp8scope_dashboard.servers.web")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fd", type=int, help="a listening socket inherited from the parent")
    where.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--after-fd", type=int, help="a gate of the supervisor: serve once it is open")
    options = parser.parse_args(argv)
    preload()
    # Imported here because these need Django to be set up.
    from django.conf import settings

    from fp8scope_dashboard.servers import connections

    connections.registry = connections.Registry(connections.allow_many_files(), settings.TRUSTED_PROXIES)
    if options.after_fd is not None:
        wait_at_gate(options.after_fd)
    config = uvicorn.Config(
        APPLICATION,
        host=options.host or "",
        port=options.port,
        interface="asgi3",
        lifespan="off",
        ws="none",
        http=connections.BoundedProtocol,
        # Forwarded headers are trusted from these proxies only; by default uvicorn trusts all local clients.
        proxy_headers=bool(settings.TRUSTED_PROXIES),
        forwarded_allow_ips=settings.TRUSTED_PROXIES,
        backlog=BACKLOG,
        timeout_graceful_shutdown=GRACE_SECONDS,
        # Django's logging settings cover uvicorn's loggers. No access log: addresses can contain secrets.
        log_config=None,
        access_log=False,
        server_header=False,
    )
    # These imports take a second and few pages need them, so they follow the first requests.
    warm_up = threading.Timer(WARM_UP_SECONDS, import_lazily_imported)
    warm_up.daemon = True
    warm_up.start()
    sockets = None if options.fd is None else [socket.socket(fileno=options.fd)]
    uvicorn.Server(config).run(sockets=sockets)


def preload() -> None:
    """Import all views and middleware, so that the first request does not wait for them.

    Does not import the application: it lists the static files when it is built, and the supervisor's
    `prepare` collects them meanwhile. Its pages would have no styles, or fail, until the next start.
    """
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "fp8scope_dashboard.settings.base")
    keep_freed_memory()
    django.setup(set_prefix=False)
    from django.conf import settings

    for module in (settings.ROOT_URLCONF, *(path.rpartition(".")[0] for path in settings.MIDDLEWARE)):
        importlib.import_module(module)


def import_lazily_imported() -> None:
    """Import the modules that functions import, so that no request waits for them."""
    for name in LAZILY_IMPORTED:
        importlib.import_module(name)


if __name__ == "__main__":
    main(sys.argv[1:])
