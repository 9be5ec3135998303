"""One training process of the rehearsal: the agent, and a record of what the server acknowledged.

    python training.py ACKNOWLEDGED STOP SECONDS [--last-loss nan]

Records a step every SECONDS until the file STOP exists, then ends the run. Each acknowledged batch is a line
of the file ACKNOWLEDGED: when (CLOCK_MONOTONIC, which all processes share), writer, seq, steps and losses.
The last line of standard output is how the run ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

FINISH_SECONDS = 120.0


def record_acknowledgements(file: Any) -> None:
    """Write a line for each batch that the server acknowledges from now on."""
    import pyarrow.ipc

    from fp8scope.delivery.transport import NextAction, SendOutcome, Transport

    send = Transport.send

    def recorded(
        self: Transport, method: str, path: str, body: bytes, content_type: str = "application/json"
    ) -> SendOutcome:
        outcome = send(self, method, path, body, content_type)
        if outcome.action is NextAction.DONE and "/batches" in path:
            table = pyarrow.ipc.open_stream(body).read_all()
            told = {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()}
            line = {
                "at": time.monotonic(),
                "writer": told["fp8scope.writer"],
                "seq": int(told["fp8scope.seq"]),
                "status": outcome.answer.get("status"),
                "steps": table.column("step").to_pylist(),
                "losses": [repr(value) for value in table.column("scalar:loss").to_pylist()],
            }
            file.write(json.dumps(line) + "\n")
        return outcome

    Transport.send = recorded  # type: ignore[method-assign]


def main() -> None:
    """Train until told to stop."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("acknowledged", type=Path)
    parser.add_argument("stop", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--last-loss", type=float, help="the loss of one last step, such as nan")
    options = parser.parse_args()
    import fp8scope

    step = 0
    with options.acknowledged.open("w", buffering=1) as file:
        record_acknowledgements(file)
        run = fp8scope.init(name="rehearsal", total_steps=1_000_000, console="off")
        while not options.stop.exists():
            with run.step() as current:
                current.log(loss=1.0 / (1 + step))
            step += 1
            time.sleep(options.seconds)
        if options.last_loss is not None:
            with run.step() as current:
                current.log(loss=options.last_loss)
            step += 1
        report = run.finish(FINISH_SECONDS)
    ended = {
        "steps": step,
        "complete": report.complete,
        "dropped": report.rows_dropped,
        "errors": report.errors,
    }
    print(json.dumps(ended))
    sys.exit(0 if report.complete else 1)


if __name__ == "__main__":
    main()
