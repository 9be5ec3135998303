"""`fp8scope advise`: say how a recorded training could be faster."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from fp8scope.advice.advisor import advise as findings_of
from fp8scope.advice.advisor import as_text
from fp8scope.advice.record import NothingRecordedError, SeveralRunsError, read_spools
from fp8scope.recording.segments import SpoolBusyError


def advise(arguments: list[str]) -> int:
    """Say how a recorded training could be faster, from twelve practices."""
    parser = argparse.ArgumentParser(prog="fp8scope advise", description=advise.__doc__)
    parser.add_argument(
        "directory", type=Path, help="the folder of a run that was recorded with mode='offline'"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(arguments)
    try:
        run = read_spools(options.directory)
    except (NothingRecordedError, SeveralRunsError, SpoolBusyError, OSError) as error:
        print(f"fp8scope: {error}", file=sys.stderr)
        return 1
    findings = findings_of(run)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(as_text(run, findings))
    return 0
