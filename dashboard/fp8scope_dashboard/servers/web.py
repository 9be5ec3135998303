"""The web server process: uvicorn on a socket that its parent opened, or on an address of its own.

    python -m fp8scope_dashboard.servers.web --fd N
    python -m fp8scope_dashboard.servers.web --host 0.0.0.0 --port 8000

uvicorn and granian serve Django equally fast (benchmarks/web_server.py). uvicorn is one process instead of
two, which leaves no worker behind when it is killed, and takes a listening socket from its parent: while a
web server that died is being replaced, connections wait in the socket's queue instead of being refused.
"""

from __future__ import annotations

import argparse
import socket
import sys

import uvicorn

APPLICATION = "fp8scope_dashboard.asgi:application"
BACKLOG = 1024
# Event streams never end by themselves: on a stop they are cut after this many seconds.
GRACE_SECONDS = 2


def main(argv: list[str]) -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m fp8scope_dashboard.servers.web")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fd", type=int, help="a listening socket inherited from the parent")
    where.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(argv)
    # Only here: it needs Django, and `BACKLOG` above is also for processes without.
    from django.conf import settings

    import fp8scope_dashboard.asgi  # noqa: F401
    from fp8scope_dashboard.servers import connections

    connections.registry = connections.Registry(connections.allow_many_files(), settings.TRUSTED_PROXIES)
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
    sockets = None if options.fd is None else [socket.socket(fileno=options.fd)]
    uvicorn.Server(config).run(sockets=sockets)


if __name__ == "__main__":
    main(sys.argv[1:])
