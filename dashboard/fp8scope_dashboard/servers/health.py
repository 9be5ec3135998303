"""Does the web server answer? For the supervisor, and for a container's health check.

python -m fp8scope_dashboard.servers.health [--host 127.0.0.1] [--port 8000]
"""

from __future__ import annotations

import argparse
import http.client
import sys
from contextlib import closing

TIMEOUT_SECONDS = 10.0


def status(host: str, port: int) -> int:
    """The status of a GET of the start page, or 0 where nothing answers in time.

    It asks as a reverse proxy on the same machine would, so that no redirect to https hides an error.
    """
    headers = {"Host": f"localhost:{port}", "X-Forwarded-Proto": "https"}
    with closing(http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)) as connection:
        try:
            connection.request("GET", "/", headers=headers)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0


def main(argv: list[str]) -> int:
    """Exit status 0 if the server answers with anything but an error of its own."""
    parser = argparse.ArgumentParser(prog="python -m fp8scope_dashboard.servers.health")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(argv)
    answer = status(options.host, options.port)
    print(f"http://{options.host}:{options.port}/ answers {answer or 'nothing'}")
    return 0 if 0 < answer < 500 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
