"""The action `cold` of `fp8scope admin`: check the cold store, move runs into it, bring them back."""

from __future__ import annotations

import argparse
import sys
from typing import Any
from uuid import UUID

from fp8scope_dashboard.administration.errors import AdminError
from fp8scope_dashboard.servers.configuration import DataDir

MAX_NAMED = 20


def add_parser(actions: Any) -> None:
    """Add the action to the parsers of `fp8scope admin`."""
    cold = actions.add_parser("cold", help="check the cold store, move runs into it, or bring them back")
    steps = cold.add_subparsers(dest="cold_action", required=True, metavar="{check,move,return}")
    steps.add_parser("check", help="read everything in the cold store, and count what is missing or damaged")
    move = steps.add_parser("move", help="move runs now, however old they are")
    move.add_argument("run", metavar="RUN", type=UUID, nargs="+", help="the id of an ended run")
    back = steps.add_parser("return", help="bring runs back; they stay until they get new values")
    back.add_argument("run", metavar="RUN", type=UUID, nargs="*", help="the id of a run")
    back.add_argument("--all", action="store_true", help="all runs in the cold store")


def change(options: argparse.Namespace, data: DataDir) -> None:
    """Carry out the action."""
    # Settings must be set up before models are imported; this also applies below.
    from fp8scope_dashboard.cold_store.errors import ColdStoreError

    try:
        {"check": _check, "move": _move, "return": _return}[options.cold_action](options)
    except ColdStoreError as error:
        raise AdminError(str(error).removesuffix(".")) from error


def _check(options: argparse.Namespace) -> None:
    from fp8scope_dashboard.telemetry.cold.checking import check_store

    result = check_store()
    print(f"{result.bodies:,} blocks in {result.files:,} files, {result.bytes / 1e6:,.1f} MB, can be read.")
    if result.unknown:
        size = f"{result.unknown_bytes / 1e6:,.1f} MB"
        print(f"{result.unknown:,} files, {size}, belong to no run of this database.")
    if not result.lost:
        return
    missing = set(result.missing)
    for name, count in sorted(result.lost.items())[:MAX_NAMED]:
        state = "are missing, with their file" if name in missing else "are damaged"
        print(f"{name}: {count:,} blocks {state}.")
    raise AdminError(
        f"{sum(result.lost.values()):,} blocks of {len(result.lost):,} files cannot be read, and "
        f"{len(missing):,} of these files are missing: restore the files from a backup of the object store"
    )


def _move(options: argparse.Namespace) -> None:
    from fp8scope_dashboard.runs.models import Run
    from fp8scope_dashboard.telemetry.cold.moving import move_run
    from fp8scope_dashboard.telemetry.compaction import is_over

    for run_id in options.run:
        run = Run.objects.filter(pk=run_id).first()
        if run is None:
            raise AdminError(f"there is no run {run_id}")
        if not is_over(run):
            raise AdminError(f"the run {run_id} has not ended")
        moved = move_run(run_id, float("inf"))
        print(f"{run_id}: moved {moved.bodies:,} blocks.", file=sys.stderr, flush=True)


def _return(options: argparse.Namespace) -> None:
    from fp8scope_dashboard.telemetry.cold.returning import bring_back, runs_in_store

    if bool(options.run) == options.all:
        raise AdminError("name the runs to bring back, or give --all")
    for run_id in options.run or runs_in_store():
        count = bring_back(run_id)
        print(f"{run_id}: brought {count:,} blocks back.", file=sys.stderr, flush=True)
