"""The web server process: uvicorn on a socket that its parent opened, or on an address of its own.

    python -m fp8scope_dashboard.servers.web --fd N
    python -m fp8scope_dashboard.servers.web --host 0.0.0.0 --port 8000

uvicorn and granian serve Django equally fast (benchmarks/web_server.py). uvicorn is one process instead of
two, which leaves no worker behind when it is killed, and takes a listening socket from its parent: while a
web server that died is being replaced, connections wait in the socket's queue instead of being refused.
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

from fp8scope_dashboard.servers import gate
from fp8scope_dashboard.servers.configuration import BACKLOG
from fp8scope_dashboard.servers.malloc import keep_freed_memory

APPLICATION = "fp8scope_dashboard.asgi:application"
WARM_UP_SECONDS = 3.0
RARELY_USED = ("scipy.stats", "scipy.optimize", "pyarrow.parquet")
# Event streams never end by themselves: on a stop they are cut after this many seconds.
GRACE_SECONDS = 2


def main(argv: list[str]) -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m fp8scope_dashboard.servers.web")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fd", type=int, help="a listening socket inherited from the parent")
    where.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--after-fd", type=int, help="a gate (servers/gate.py): serve once it is open")
    options = parser.parse_args(argv)
    preload()
    # Only here: it needs Django's settings, and modules that the preparation has set up.
    from django.conf import settings

    import fp8scope_dashboard.asgi  # noqa: F401
    from fp8scope_dashboard.servers import connections

    connections.registry = connections.Registry(connections.allow_many_files(), settings.TRUSTED_PROXIES)
    if options.after_fd is not None:
        gate.wait(options.after_fd)
    config = uvicorn.Config(
        APPLICATION,
        host=options.host or "",
        port=options.port,
        interface="asgi3",
        lifespan="off",
        ws="none",
        http=connections.BoundedProtocol,
        # Only what these proxies say of a client is believed; by default uvicorn believes everybody on this
        # machine.
        proxy_headers=bool(settings.TRUSTED_PROXIES),
        forwarded_allow_ips=settings.TRUSTED_PROXIES,
        backlog=BACKLOG,
        timeout_graceful_shutdown=GRACE_SECONDS,
        # Django's logging settings serve uvicorn's loggers too. No access log: addresses can hold secrets.
        log_config=None,
        access_log=False,
        server_header=False,
    )
    # Statistics and Parquet are needed on few pages and take a second: not before the first requests.
    warm_up = threading.Timer(WARM_UP_SECONDS, load_rarely_used)
    warm_up.daemon = True
    warm_up.start()
    sockets = None if options.fd is None else [socket.socket(fileno=options.fd)]
    uvicorn.Server(config).run(sockets=sockets)


def preload() -> None:
    """Import every page, so that the first request does not wait for it."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "fp8scope_dashboard.settings.base")
    keep_freed_memory()
    django.setup(set_prefix=False)
    from django.conf import settings

    importlib.import_module(settings.ROOT_URLCONF)


def load_rarely_used() -> None:
    """Import what modules import inside of functions, so that no request waits for it."""
    for name in RARELY_USED:
        importlib.import_module(name)


if __name__ == "__main__":
    main(sys.argv[1:])
