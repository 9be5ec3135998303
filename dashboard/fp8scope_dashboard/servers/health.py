"""Check that the web server and PostgreSQL answer, for the supervisor and for container health checks.

python -m fp8scope_dashboard.servers.health [--host 127.0.0.1] [--port 8000]
"""

from __future__ import annotations

import argparse
import http.client
import sys
from contextlib import closing

PATH = "/healthz"
# /healthz answers within two seconds.
TIMEOUT_SECONDS = 5.0


def status(host: str, port: int) -> int:
    """The HTTP status of GET /healthz, or 0 if there is no answer in time. Any host name is allowed there."""
    with closing(http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)) as connection:
        try:
            connection.request("GET", PATH)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0


def main(argv: list[str]) -> int:
    """Exit with status 0 if the web server and its database answer."""
    parser = argparse.ArgumentParser(prog="python -m fp8scope_dashboard.servers.health")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(argv)
    answer = status(options.host, options.port)
    print(
        f"http://{options.host}:{options.port}{PATH} {f'answers {answer}' if answer else 'does not answer'}"
    )
    return 0 if answer == 200 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
