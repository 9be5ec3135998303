"""The dashboard's subcommands of `fp8scope`, registered in the entry-point group `fp8scope.commands`.

Each is a function of its arguments that returns an exit status; the first line of its docstring is its help
text. This module does not import Django: only the server processes need it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from fp8scope_dashboard.embedded.processes import ServerError
from fp8scope_dashboard.servers.configuration import default_data_dir
from fp8scope_dashboard.servers.supervisor import DEFAULT_HOST, DEFAULT_PORT, Stopped, Supervisor

CLEAR_LINE = "\x1b[K"
LONGEST_NAME = len("postgres")
# Log lines of the servers that are also printed on the terminal.
ALARMING = re.compile(r"\b(ERROR|CRITICAL|FATAL|PANIC)\b")
# Expected when two processes create the same row: the second then uses the row of the first.
EXPECTED = re.compile(r"\bERROR:\s+duplicate key value violates unique constraint\b")


def up(argv: list[str]) -> int:
    """Run the dashboard on this machine until Ctrl-C: database, queue, web server and workers."""
    options = _up_parser().parse_args(argv)
    # Rewriting a line needs a terminal and no log lines in between.
    progress = StageLine(sys.stdout, rewrites=sys.stdout.isatty() and not options.verbose)
    supervisor = Supervisor(
        options.data_dir,
        options.host,
        options.port,
        echo=echo if options.verbose else echo_alarms,
        progress=progress.show,
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop_on_signal(supervisor))
    try:
        progress.show("PostgreSQL, Redis, migrations, web server, workers")
        try:
            supervisor.start()
            supervisor.wait_ready()
        finally:
            progress.end()
        _print_ready(supervisor)
        supervisor.join()
    except Stopped:
        supervisor.join()
    except ServerError as error:
        print(f"fp8scope up: {error}", file=sys.stderr)
        return 1
    return 0


def demo(argv: list[str]) -> int:
    """Train five small models in BF16 and FP8 on this machine and show them on a dashboard."""
    command: int = importlib.import_module("fp8scope_dashboard.demo.command").demo(argv)
    return command


def admin(argv: list[str]) -> int:
    """Create a sign-in link, set a password or invite a user, on the server's machine."""
    command: int = importlib.import_module("fp8scope_dashboard.administration.command").admin(argv)
    return command


def upgrade(argv: list[str]) -> int:
    """Change an installation for the installed version: PostgreSQL's files and the tables."""
    command: int = importlib.import_module("fp8scope_dashboard.administration.upgrade").upgrade(argv)
    return command


def backup(argv: list[str]) -> int:
    """Save the database and the secret key to a file, while the server runs or not."""
    command: int = importlib.import_module("fp8scope_dashboard.administration.backup").backup(argv)
    return command


def restore(argv: list[str]) -> int:
    """Make an installation of a file that `fp8scope backup` wrote, in a directory that has none."""
    command: int = importlib.import_module("fp8scope_dashboard.administration.backup").restore(argv)
    return command


def verify(argv: list[str]) -> int:
    """Check a certificate without a server: its signature, and the verdict computed again from its curves."""
    command: int = importlib.import_module("fp8scope_dashboard.certification").verify(argv)
    return command


def certify_file(argv: list[str]) -> int:
    """Certify runs whose losses are in a CSV or Parquet file, signed with a key of your own."""
    command: int = importlib.import_module("fp8scope_dashboard.certification").certify_file(argv)
    return command


class StageLine:
    """The stage of the start: a line rewritten on a terminal; elsewhere only the first stage is printed."""

    def __init__(self, stream: TextIO, *, rewrites: bool) -> None:
        self._stream = stream
        self._rewrites = rewrites
        self._written = False

    def show(self, stage: str) -> None:
        """Show a stage."""
        if self._rewrites:
            self._write(f"\r{CLEAR_LINE}fp8scope is starting: {stage} ...")
        elif not self._written:
            self._write(f"fp8scope is starting: {stage}\n")
        self._written = True

    def end(self) -> None:
        """Clear the line."""
        if self._rewrites:
            self._write(f"\r{CLEAR_LINE}")

    def _write(self, text: str) -> None:
        # The terminal may be closed: see `echo`.
        with suppress(OSError):
            self._stream.write(text)
            self._stream.flush()


def echo(name: str, line: str) -> None:
    """Print a line of a server's log after its name. A closed terminal is not an error."""
    if not line:
        return
    try:
        # One write per line, because several threads share the terminal.
        sys.stdout.write(f"{name:<{LONGEST_NAME}} | {line}\n")
        sys.stdout.flush()
    except OSError:
        # Discard all further output: the interpreter would otherwise fail to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def echo_alarms(name: str, line: str) -> None:
    """`echo` all lines of the supervisor, and the servers' lines that report an unexpected error."""
    expected = name == "postgres" and EXPECTED.search(line)
    if name == "up" or (ALARMING.search(line) and not expected):
        echo(name, line)


def _up_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp8scope up",
        description=up.__doc__,
        epilog="Set DATABASE_URL or REDIS_URL to use existing servers instead of private ones.",
    )
    parser.add_argument("--host", default=DEFAULT_HOST, help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=_port,
        default=DEFAULT_PORT,
        help="0 chooses a free port (default: %(default)s)",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=default_data_dir(),
        help="directory for all data (default: FP8SCOPE_DATA_DIR, else ~/.fp8scope)",
    )
    parser.add_argument("--verbose", action="store_true", help="print every line of the servers' logs")
    return parser


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: use a number from 0 to 65535")
    return int(text)


def _stop_on_signal(supervisor: Supervisor) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        supervisor.request_stop()

    return handle


def _print_ready(supervisor: Supervisor) -> None:
    lines = [
        f"fp8scope is ready: {supervisor.url}",
        f"data: {supervisor.data.root}, logs: {supervisor.data.logs}",
    ]
    if supervisor.sign_in_link:
        lines += ["sign in as administrator with this one-time link:", f"    {supervisor.sign_in_link}"]
    print("\n".join(["", *lines, "Ctrl-C stops it.", ""]), flush=True)


COMMANDS = {
    "up": up,
    "demo": demo,
    "admin": admin,
    "backup": backup,
    "restore": restore,
    "upgrade": upgrade,
    "verify": verify,
    "certify-file": certify_file,
}


def main(argv: list[str]) -> int:
    """`python -m fp8scope_dashboard.cli NAME ...`: the commands without the agent's `fp8scope`."""
    if not argv or argv[0] not in COMMANDS:
        print(f"usage: python -m fp8scope_dashboard.cli {{{','.join(COMMANDS)}}} ...", file=sys.stderr)
        return 2
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
