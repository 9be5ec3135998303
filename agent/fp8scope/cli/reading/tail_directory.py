"""`fp8scope tail DIR`: send the TensorBoard event files below a directory while a training writes them."""

import argparse
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Final

from fp8scope.cli.reading.common import OK, REFUSED, WRONG_USE, write_json
from fp8scope.cli.server import server_settings
from fp8scope.client.plain_text import printable
from fp8scope.config import ConfigurationError
from fp8scope.delivery.transport import Transport
from fp8scope.event_files.follower import DirectoryFollower, FollowOptions
from fp8scope.event_files.log_directory import TooManyRunsError
from fp8scope.event_files.upload import SendingRefusedError

PRECISIONS: Final = ("bf16", "fp8", "fp16", "fp32", "unknown")
ENDED_AFTER: Final = 3_600.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for directories."""
    group = parser.add_argument_group("for a directory")
    group.add_argument("--once", action="store_true", help="send what is there, and end")
    group.add_argument("--name", help="begins the names of the runs (default: their paths)")
    group.add_argument("--precision", choices=PRECISIONS, help="of the training")
    group.add_argument(
        "--ended-after",
        type=float,
        metavar="SECONDS",
        help=f"a run that nothing was written to for so long has ended (default: {ENDED_AFTER:g})",
    )


def is_asked_for(options: argparse.Namespace) -> bool:
    """Return whether an option was given that needs a directory."""
    return bool(options.once or options.name or options.precision or options.ended_after is not None)


def send(options: argparse.Namespace) -> int:
    """Send until the command is interrupted, or with `--once` what is there; returns the exit status."""
    try:
        settings = server_settings(options.url, options.project)
    except ConfigurationError as error:
        return _failed(str(error), WRONG_USE)
    root, transport = Path(options.run), Transport(settings)
    follower = DirectoryFollower(
        root, transport, _options_of(options), say=lambda message: _say(message, as_json=options.json)
    )
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _follow(follower, once=options.once, every=options.every)
    except (SendingRefusedError, TooManyRunsError) as error:
        return _failed(str(error), REFUSED)
    except KeyboardInterrupt:
        # What was not sent yet is sent by the next `fp8scope tail` of this directory.
        pass
    finally:
        transport.close()
    return _ended(follower, root, as_json=options.json)


def _options_of(options: argparse.Namespace) -> FollowOptions:
    return FollowOptions(
        name=(options.name or "").strip("/"),
        precision=options.precision or "unknown",
        project=options.project or "",
        ended_after=ENDED_AFTER if options.ended_after is None else options.ended_after,
    )


def _follow(follower: DirectoryFollower, *, once: bool, every: float) -> None:
    follower.turn()
    while not once:
        time.sleep(every)
        follower.turn()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(message: str, *, as_json: bool) -> None:
    if as_json:
        write_json({"type": "message", "message": message})
        sys.stdout.flush()
    else:
        print(f"fp8scope tail: {printable(message)}", file=sys.stderr, flush=True)


def _ended(follower: DirectoryFollower, root: Path, *, as_json: bool) -> int:
    runs = len(follower.runs)
    refused = sum(run.is_over for run in follower.runs.values())
    if as_json:
        write_json({"type": "end", "runs": runs, "refused": refused, "values": follower.sent})
    elif not runs:
        print(f"fp8scope tail: {printable(root)} has no event files.", file=sys.stderr)
    else:
        media = f", and {follower.sent_media:,} images or texts" if follower.sent_media else ""
        print(f"{follower.sent:,} values of {runs:,} {'run' if runs == 1 else 'runs'} sent{media}.")
    return REFUSED if refused or not runs else OK


def _failed(message: str, status: int) -> int:
    print(f"fp8scope tail: {printable(message)}", file=sys.stderr)
    return status
