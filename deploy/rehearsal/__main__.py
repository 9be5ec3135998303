"""Rehearse faults on a deployment over several machines. Prints one JSON line for each scene.

    python deploy/rehearsal [--scene NAME]... [--seconds 6] [--ranks 4]
                            [--without-pgbouncer] [--keep DIRECTORY]

Starts PostgreSQL, pgbouncer, Redis and nginx of Debian in network namespaces of this machine, a streaming
standby, three web processes behind TLS, three workers, the worker of alerts and beat, with the commands of
docker-compose.yml. Training processes send through TLS from a namespace of their own. See docs/operating.md.

    acknowledged, lost, doubled   rows; `lost` and `doubled` must be 0, except after failover_asynchronous
    missing, complete             recorded rows that are not stored in the end; whether each agent sent all
    recovery_s                    from the moment when the fault ended (failovers: began) until every training
                                  process was acknowledged a batch again
    longest_silence_s             the longest time without an acknowledgement during the fault
    alert_s                       from the end of the run until its last loss, a NaN, has an alert
    other_alerts                  alerts that nothing in the training is the reason for
    statuses                      what nginx answered to batches, by status
    pages                         answers to a person who looks at a chart through the whole scene

The exit status is 1 if an acknowledged row was lost or doubled where it must not be. Needs root on Linux.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]

from deployment import NEW_TOKEN, Deployment  # noqa: E402
from growth import SIGN_IN  # noqa: E402
from network import NetworkError  # noqa: E402
from scenes import SCENES, play  # noqa: E402
from servers import MissingServerError, RehearsalError  # noqa: E402
from training_load import Load  # noqa: E402

# An asynchronous standby may lack what the primary acknowledged: see docs/operating.md.
MAY_LOSE = ("failover_asynchronous",)


def is_as_told(line: dict[str, Any]) -> bool:
    """Return whether a scene went as it must."""
    if "failed" in line or line["doubled"]:
        return False
    return line["scene"] in MAY_LOSE or not (line["lost"] or line["missing"])


def main() -> int:
    """Play the scenes; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python deploy/rehearsal", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--scene", action="append", choices=list(SCENES), help="default: all, in this order")
    parser.add_argument("--seconds", type=float, default=6.0, help="of load before and after each fault")
    parser.add_argument("--ranks", type=int, default=4, help="training processes")
    parser.add_argument("--without-pgbouncer", action="store_true", help="libpq finds the primary instead")
    parser.add_argument("--keep", type=Path, help="a new folder for data and logs, which stays")
    options = parser.parse_args()
    with ExitStack() as stack:
        if options.keep:
            options.keep.mkdir(parents=True)
        directory = (options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        try:
            deployment = stack.enter_context(Deployment(directory, is_pooled=not options.without_pgbouncer))
            seconds = deployment.start()
        except (NetworkError, MissingServerError, RehearsalError) as error:
            print(f"rehearsal: {error}", file=sys.stderr)
            return 2
        version = deployment.primary.version
        start = {"scene": "start", "postgresql": version, "pgbouncer": deployment.is_pooled}
        print(json.dumps({**start, "seconds": round(seconds, 1)}), flush=True)
        token, cookie = deployment.python(NEW_TOKEN), deployment.python(SIGN_IN)
        is_sound = True
        for number, name in enumerate(options.scene or SCENES):
            load = Load(deployment, directory / f"scene-{number}-{name}", token, cookie, options.ranks)
            try:
                line = play(name, deployment, load, options.seconds)
            except RehearsalError as error:
                line = {"scene": name, "failed": str(error)}
            print(json.dumps(line), flush=True)
            is_sound &= is_as_told(line)
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
