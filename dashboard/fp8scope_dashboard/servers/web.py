"""The web server process: uvicorn on a socket inherited from the parent, or on an address.

    python -m fp8scope_dashboard.servers.web --fd N
    python -m fp8scope_dashboard.servers.web --host 0.0.0.0 --port 8000

uvicorn and granian serve Django equally fast (benchmarks/web_server.py). uvicorn is one process instead of
two, so killing it leaves no worker behind. It accepts a listening socket from its parent: while a web server
that died is being replaced, connections wait in the socket's queue instead of being refused.
"""

from __future__ import annotations

import argparse
import socket
import sys
import threading

import uvicorn

from fp8scope_dashboard import preload
from fp8scope_dashboard.servers.configuration import BACKLOG

APPLICATION = "fp8scope_dashboard.asgi:application"
WARM_UP_SECONDS = 3.0
# A thread that computes lets another one have the interpreter after so long. A small message needs it several
# times; with Python's default of 5 ms it would wait that long each time beside one large request.
SWITCH_SECONDS = 0.0005
# Event streams never end by themselves; on a stop they are closed after this many seconds.
GRACE_SECONDS = 2


def main(argv: list[str]) -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m fp8scope_dashboard.servers.web")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fd", type=int, help="a listening socket inherited from the parent")
    where.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(argv)
    sys.setswitchinterval(SWITCH_SECONDS)
    preload.import_views()
    # Imported here because these need Django to be set up.
    from django.conf import settings

    from fp8scope_dashboard.servers import connections

    connections.registry = connections.ConnectionRegistry(
        connections.allow_many_files(), settings.TRUSTED_PROXIES
    )
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
    warm_up = threading.Timer(WARM_UP_SECONDS, preload.import_lazily_imported)
    warm_up.daemon = True
    warm_up.start()
    sockets = None if options.fd is None else [socket.socket(fileno=options.fd)]
    uvicorn.Server(config).run(sockets=sockets)


if __name__ == "__main__":
    main(sys.argv[1:])
