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

# rich is a dependency of the dashboard, and only this package uses it.
from rich.console import Console

from fp8scope_dashboard.demo.outcome import RunOutcome, problems, surprises
from fp8scope_dashboard.demo.plan import MAX_STEPS, MIN_STEPS, STEPS
from fp8scope_dashboard.demo.running import Demo, DemoError
from fp8scope_dashboard.demo.screen import tables
from fp8scope_dashboard.embedded.processes import AlreadyRunningError, ServerError
from fp8scope_dashboard.servers.supervisor import DEFAULT_HOST, DEFAULT_PORT, Supervisor

INTERRUPTED = 130
"""The shell's exit status of a program that Ctrl-C ended."""

LOG_WIDTH = 120

ROUNDING = (
    "Processors and versions of torch round differently, which has the effect of another seed. "
    "The runs' pages say what the verdicts rest on."
)


def demo(argv: list[str]) -> int:
    """Train five small models in BF16 and FP8 on this machine and show them on a dashboard."""
    options = _parser().parse_args(argv)
    console = Console()
    if not console.is_terminal:
        # Without a terminal, rich would cut the tables at 80 columns.
        console.width = LOG_WIDTH
    port = default_or_free_port() if options.port is None else options.port
    session = Demo(
        supervisor=Supervisor(options.data_dir, DEFAULT_HOST, port), console=console, steps=options.steps
    )
    status = INTERRUPTED
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with ExitStack() as stack:
            status = _report(session, session.run(stack), options.json)
            if not options.exit:
                console.print("The dashboard is still running. Press Ctrl-C to stop it.")
                session.supervisor.join()
    except KeyboardInterrupt:
        console.print("Stopped.")
    except AlreadyRunningError:
        return _fail(
            f"a demo is already running in {session.supervisor.data.root}: stop it or use another --data-dir"
        )
    except (ServerError, DemoError) as error:
        return _fail(str(error))
    return status


def _report(session: Demo, outcomes: Sequence[RunOutcome], file: Path | None) -> int:
    """Print the results. Returns exit status 0 if everything that was sent is stored."""
    errors, unusual = problems(outcomes), surprises(outcomes)
    for table in tables(outcomes):
        session.console.print(table)
    summary = {
        "ok": not errors,
        "problems": errors,
        "surprises": unusual,
        "ready_seconds": session.ready,
        "first_rows_seconds": session.first_rows,
        "seconds": session.elapsed(),
        "runs": [outcome.as_dict() for outcome in outcomes],
    }
    if session.first_rows is not None:
        session.console.print(
            f"First data stored after {session.first_rows:.0f} s, finished after {session.elapsed():.0f} s."
        )
    for sentence in unusual:
        session.console.print(sentence, style="yellow", highlight=False)
    if unusual:
        session.console.print(ROUNDING, highlight=False)
    for error in errors:
        session.console.print(f"Error: {error}", style="bold red", highlight=False)
    if file is not None:
        file.write_text(json.dumps(summary, indent=2) + "\n")
    return 1 if errors else 0


def _fail(message: str) -> int:
    print(f"fp8scope demo: {message}", file=sys.stderr)
    return 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def default_or_free_port() -> int:
    """The default port of `fp8scope up`, or 0 for a free port if it is in use."""
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
        epilog="Each demo creates a new project; earlier projects stay in the data directory.",
    )
    parser.add_argument("--exit", action="store_true", help="stop the dashboard when all runs are finished")
    parser.add_argument("--port", type=_port, help=f"default: {DEFAULT_PORT}, or a free port if it is in use")
    parser.add_argument(
        "--data-dir", type=Path, default=root / "demo", help="directory for all data (default: %(default)s)"
    )
    parser.add_argument("--steps", type=_steps, default=STEPS, help="steps per run (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to a JSON file")
    return parser


def _port(text: str) -> int:
    return _whole(text, 0, 65535, "a port")


def _steps(text: str) -> int:
    return _whole(text, MIN_STEPS, MAX_STEPS, "a number of steps")


def _whole(text: str, low: int, high: int, what: str) -> int:
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}: use a whole number from {low} to {high}")
    return int(text)
