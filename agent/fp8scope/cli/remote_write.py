"""`fp8scope remote-write`: send the latest values of runs to Prometheus."""

import argparse
import sys
from pathlib import Path

from fp8scope.cli.reading.common import OK, REFUSED, answered, client_of
from fp8scope.client.plain_text import printable
from fp8scope.exporting.remote_write.samples import MAX_SCALARS, QUERY, SCALARS
from fp8scope.exporting.remote_write.sender import (
    RemoteWriteError,
    RemoteWriter,
    WriteReceiver,
    authorization_of,
)


def remote_write(arguments: list[str]) -> int:
    """Send the latest values of runs to Prometheus, again and again, until it is interrupted."""
    parser = argparse.ArgumentParser(
        prog="fp8scope remote-write",
        description=remote_write.__doc__,
        epilog="docs/exporting.md has the metrics and their labels.",
    )
    parser.add_argument("receiver", type=_address, help="such as http://prometheus:9090/api/v1/write")
    parser.add_argument("--bearer-file", type=Path, metavar="FILE", help="a file with the receiver's token")
    parser.add_argument("--basic-file", type=Path, metavar="FILE", help="a file with user:password")
    parser.add_argument("--query", default=QUERY, help="a search for runs (%(default)s)")
    parser.add_argument(
        "--scalar", action="append", metavar="NAME", help=f"repeated; by default {', '.join(SCALARS)}"
    )
    parser.add_argument("--every", type=_seconds, default=15.0, help="seconds (%(default)g)")
    parser.add_argument("--url", help="the server's address (default: FP8SCOPE_URL, or `fp8scope login`)")
    parser.add_argument("--project", help="the project whose login to use")
    options = parser.parse_args(arguments)
    if options.bearer_file and options.basic_file:
        parser.error("name --bearer-file or --basic-file, not both")
    if len(options.scalar or ()) > MAX_SCALARS:
        parser.error(f"at most {MAX_SCALARS} scalars: Prometheus keeps a series for each and each run")
    return answered("remote-write", lambda: _sent(options))


def _sent(options: argparse.Namespace) -> int:
    client = client_of(options)
    try:
        receiver = WriteReceiver(
            url=options.receiver, authorization=authorization_of(options.bearer_file, options.basic_file)
        )
        writer = RemoteWriter(
            client,
            receiver,
            project=str(client.project()["slug"]),
            query=options.query,
            scalars=options.scalar or list(SCALARS),
            say=_say,
        )
        writer.run(options.every)
    except (RemoteWriteError, OSError) as error:
        _say(str(error))
        return REFUSED
    return OK


def _say(text: str) -> None:
    print(f"fp8scope remote-write: {printable(text)}", file=sys.stderr, flush=True)


def _address(text: str) -> str:
    if not text.startswith(("http://", "https://")) or not text.isprintable() or len(text) > 2_000:
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} is not an address that begins with http:// or https://"
        )
    if "@" in text.partition("://")[2].partition("/")[0]:
        raise argparse.ArgumentTypeError("credentials belong into a file: see --basic-file")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 3_600.0:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a number of seconds from 1 to 3600")
    return seconds
