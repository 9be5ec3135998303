"""Does the web server answer, and PostgreSQL behind it? For the supervisor and for containers' checks.

python -m fp8scope_dashboard.servers.health [--host 127.0.0.1] [--port 8000]
"""

from __future__ import annotations

import argparse
import http.client
import sys
from contextlib import closing

PATH = "/healthz"
# /healthz itself answers within two seconds.
TIMEOUT_SECONDS = 5.0


def status(host: str, port: int) -> int:
    """The status of a GET of /healthz, or 0 where nothing answers in time. The host name does not matter."""
    with closing(http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)) as connection:
        try:
            connection.request("GET", PATH)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0


def main(argv: list[str]) -> int:
    """Exit status 0 if the server answers, and its database."""
    parser = argparse.ArgumentParser(prog="python -m fp8scope_dashboard.servers.health")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(argv)
    answer = status(options.host, options.port)
    print(f"http://{options.host}:{options.port}{PATH} answers {answer or 'nothing'}")
    return 0 if answer == 200 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
