"""`fp8scope replay`: run a step of an incident again, in FP8 and in BF16, or go on without its batches."""

import argparse
import json
import logging
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fp8scope import config
from fp8scope.cli.progress import ProgressLine
from fp8scope.cli.script import ProgramNotFoundError, find_module, find_script
from fp8scope.control.bisection import SHOWN
from fp8scope.guard import configure_logging
from fp8scope.incidents import batches
from fp8scope.incidents.folder import IncidentError, StoredIncident
from fp8scope.process.open_runs import live_runs
from fp8scope.replay import limits
from fp8scope.replay.continuation import Continuation
from fp8scope.replay.engine import EndScript, Engine

UNEQUAL = 3
"""The exit status if the loss differs from the recorded one."""
UNREPEATABLE = 4
"""The exit status if two passes of the step differ, so that there is no verdict."""


def main(arguments: Sequence[str]) -> int:
    """Replay an incident with a script; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(list(arguments))
    configure_logging()
    if refusal := limits.refusal(os.environ):
        print(f"fp8scope replay: {refusal}", file=sys.stderr)
        return 2
    try:
        incident = StoredIncident(options.incident, trust=options.trust)
        step = incident.target if options.step is None else options.step
        if incident.row(step) is None:
            begin, end = incident.document["steps"]
            raise IncidentError(f"step {step} is not among the steps {begin} to {end} of the incident.")
        first, last = options.skip or (step, step)
        if incident.group_of(first) is None and options.skip is not None:
            raise IncidentError(f"the batches of step {first} are not in the incident.")
        snapshots = [] if options.from_start else _snapshots_before(incident, min(first, step))
        script = _Script(options.command)
    except (IncidentError, ProgramNotFoundError) as error:
        print(f"fp8scope replay: {error}", file=sys.stderr)
        return 2
    if options.skip is not None:
        return _go_on(Continuation(incident, first, last, snapshots[-1] if snapshots else None), script)
    return _replay(incident, step, snapshots, script, options)


class _Script:
    """The script or module to run, and its arguments. Raises ProgramNotFoundError if there is none."""

    def __init__(self, command: Sequence[str]) -> None:
        self._module = command[1] if command[:1] == ["-m"] and len(command) > 1 else ""
        if not command or command == ["-m"]:
            raise ProgramNotFoundError("no script given; for example: fp8scope replay INCIDENT train.py")
        program = find_module(self._module) if self._module else find_script(command[0])
        self._path = program.argv0
        self._arguments = command[2:] if self._module else command[1:]

    def run(self, driver: Any) -> None:
        """Run it as `__main__`, with `driver` handing out the batches, until it ends or is ended."""
        before = sys.argv, sys.path[0]
        directory = str(Path.cwd()) if self._module else str(Path(self._path).resolve().parent)
        sys.argv, sys.path[0] = [self._path, *self._arguments], directory
        batches.driver = driver
        try:
            if self._module:
                runpy.run_module(self._module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self._path, run_name="__main__")
        except EndScript:
            pass
        finally:
            runs = list(live_runs)
            for run in runs:
                run.session.drop_callbacks()
                # The last step may end only now, and with it the replay, in the middle of finishing.
                with suppress(EndScript):
                    run.finish()
            batches.driver = None
            for run in runs:
                run.finish()
            sys.argv, sys.path[0] = before


def _replay(
    incident: StoredIncident, step: int, snapshots: list[int], script: _Script, options: argparse.Namespace
) -> int:
    # What the agent says about the run of a replay, such as where it is kept, is of no use.
    logging.getLogger("fp8scope").setLevel(logging.WARNING)
    for note in limits.notes(incident.document):
        print(f"fp8scope replay: {note}", file=sys.stderr)
    line = ProgressLine("replaying")
    if options.step is not None:
        # The latest is the shortest way.
        snapshots = snapshots[-1:]
    engine = Engine(incident, options.step, snapshots, on_progress=line.update)
    began = f"after step {snapshots[0]}" if snapshots else "at the beginning of the script"
    what = f"step {step}" if options.step is not None else f"steps up to {incident.last_step}"
    print(f"Replaying {what}; it begins {began}.", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="fp8scope-replay-") as directory:
        # Nothing of a replay is sent, whatever the script passes to `init`.
        config.forced = {"mode": "offline", "directory": directory}
        try:
            script.run(engine)
        except Exception:
            # The failure of the run, after the step.
            if engine.finding is None:
                raise
        finally:
            config.forced = {}
            line.end()
    finding = engine.finding
    if finding is None:
        problem = engine.problem or f"the script ended before step {step}."
        print(f"fp8scope replay: {problem}", file=sys.stderr)
        return 1
    document = finding.document()
    (incident.folder / "replay.json").write_text(json.dumps(document, indent=1))
    if options.json:
        print(json.dumps(document))
    else:
        print("\n".join(finding.sentences()))
        if finding.bisection is not None:
            print(f"\n{finding.bisection.table(options.top)}")
    if finding.repeatable is False:
        return UNREPEATABLE
    return UNEQUAL if finding.equal is False else 0


def _go_on(continuation: Continuation, script: _Script) -> int:
    script.run(continuation)
    if continuation.problem:
        print(f"fp8scope replay: {continuation.problem}", file=sys.stderr)
        return 1
    count = continuation.skipped
    print(f"{count} batch{'' if count == 1 else 'es'} left out.", file=sys.stderr)
    return 0 if count else 1


def _snapshots_before(incident: StoredIncident, step: int) -> list[int]:
    """The snapshots from which the step can be reached, and the latest before it in any case."""
    before = sorted(after for after in incident.snapshots if after < step)
    needed = [int(group["after_step"]) for group in incident.groups if group["after_step"] < step]
    return [
        after
        for after in before
        if after == before[-1] or all(incident.has_batches(other) for other in needed if other >= after)
    ]


def _steps(text: str) -> tuple[int, int]:
    """Parse `--skip A` or `--skip A:B`."""
    first, _, last = text.partition(":")
    try:
        begin, end = int(first), int(last or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a step, or steps as in 120:125, got {text!r}") from None
    if not 0 < begin <= end:
        raise argparse.ArgumentTypeError(f"the steps must be above 0 and in order, got {text!r}")
    return begin, end


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp8scope replay",
        description="Run a step of an incident again with its training script, in FP8 and in BF16.",
        usage="fp8scope replay [OPTIONS] INCIDENT (SCRIPT | -m MODULE) [SCRIPT ARGUMENTS]",
        epilog="docs/incidents.md says what the script must do.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--step",
        type=int,
        help="the step to replay alone (default: the first in which FP8 and BF16 diverge)",
    )
    parser.add_argument(
        "--from-start", action="store_true", help="begin with the script, even if there is a snapshot"
    )
    parser.add_argument(
        "--skip",
        type=_steps,
        metavar="STEP[:LAST]",
        help="train on from the snapshot without the batches of these steps, as a new run",
    )
    parser.add_argument("--json", action="store_true", help="print the result as a line of JSON")
    parser.add_argument("--top", type=int, default=SHOWN, help="rows of the table (default: %(default)s)")
    parser.add_argument(
        "--trust", action="store_true", help="load objects of Python from the incident; they may run code"
    )
    parser.add_argument("incident", type=Path, metavar="INCIDENT", help="the folder of the incident")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the training script and its arguments"
    )
    return parser
