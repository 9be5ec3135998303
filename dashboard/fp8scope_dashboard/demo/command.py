"""The command `fp8scope demo`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from rich.console import Console

from fp8scope_dashboard.demo.outcome import Outcome, problems
from fp8scope_dashboard.demo.plan import LEAST_STEPS, MOST_STEPS, STEPS
from fp8scope_dashboard.demo.running import Demo, DemoError
from fp8scope_dashboard.demo.screen import tables
from fp8scope_dashboard.embedded.processes import AlreadyRunningError, ServerError
from fp8scope_dashboard.servers.supervisor import DEFAULT_HOST, DEFAULT_PORT, Supervisor

INTERRUPTED = 130
"""The exit status of a program that Ctrl-C ended, by the shell's convention."""

LOG_WIDTH = 120


def demo(argv: list[str]) -> int:
    """Train five small models in BF16 and FP8 here and now, and watch them on a dashboard."""
    options = _parser().parse_args(argv)
    console = Console()
    if not console.is_terminal:
        # A log has no width of its own, and rich's 80 columns would cut the tables short.
        console.width = LOG_WIDTH
    port = _usual_or_free_port() if options.port is None else options.port
    one = Demo(Supervisor(options.data_dir, DEFAULT_HOST, port), console, options.steps)
    status = INTERRUPTED
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with ExitStack() as stack:
            status = _report(one, one.run(stack), options.json)
            if not options.exit:
                console.print("The dashboard stays up. Ctrl-C stops it.")
                one.supervisor.join()
    except KeyboardInterrupt:
        console.print("Stopped.")
    except AlreadyRunningError:
        return _fail(
            f"a demo runs in {one.supervisor.data.root} already: stop it, or choose another --data-dir"
        )
    except (ServerError, DemoError) as error:
        return _fail(str(error))
    return status


def _report(one: Demo, outcomes: Sequence[Outcome], file: Path | None) -> int:
    """Show what was found. The exit status is 0 when it is what it should be."""
    found = problems(outcomes)
    for table in tables(outcomes):
        one.console.print(table)
    summary = {
        "ok": not found,
        "problems": found,
        "ready_seconds": one.ready,
        "first_rows_seconds": one.first_rows,
        "seconds": one.elapsed(),
        "runs": [outcome.as_dict() for outcome in outcomes],
    }
    if one.first_rows is not None:
        one.console.print(
            f"First rows to draw after {one.first_rows:.0f} s, done after {one.elapsed():.0f} s."
        )
    for problem in found:
        one.console.print(f"Not as it should be: {problem}", style="bold red", highlight=False)
    if file is not None:
        file.write_text(json.dumps(summary, indent=2) + "\n")
    return 1 if found else 0


def _fail(message: str) -> int:
    print(f"fp8scope demo: {message}", file=sys.stderr)
    return 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _usual_or_free_port() -> int:
    """The port that `fp8scope up` takes, or any free one where that is taken."""
    try:
        with socket.create_server((DEFAULT_HOST, DEFAULT_PORT)):
            return DEFAULT_PORT
    except OSError:
        return 0


def _parser() -> argparse.ArgumentParser:
    root = Path(os.environ.get("FP8SCOPE_DATA_DIR") or "~/.fp8scope")
    parser = argparse.ArgumentParser(
        prog="fp8scope demo",
        description=demo.__doc__,
        epilog="Each demo gets a project of its own; the earlier ones stay in the data directory.",
    )
    parser.add_argument("--exit", action="store_true", help="stop when everything is done")
    parser.add_argument(
        "--port", type=_port, help=f"default: {DEFAULT_PORT}, or any free one; 0: any free one"
    )
    parser.add_argument(
        "--data-dir", type=Path, default=root / "demo", help="where everything is kept (default: %(default)s)"
    )
    parser.add_argument("--steps", type=_steps, default=STEPS, help="of each run (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to a file as well")
    return parser


def _port(text: str) -> int:
    return _whole(text, 0, 65535, "a port")


def _steps(text: str) -> int:
    return _whole(text, LEAST_STEPS, MOST_STEPS, "a number of steps")


def _whole(text: str, low: int, high: int, what: str) -> int:
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}: give a whole number from {low} to {high}")
    return int(text)
