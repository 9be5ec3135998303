"""Checks the advice on 24 runs: of twelve scripts with one fault each, and of the same scripts mended.

    python benchmarks/advisor.py [--only NAME ...] [--keep FOLDER]

The scripts are in `advisor_scripts/`, one a practice, and know nothing of fp8scope: `fp8scope run` records
them, and `fp8scope advise` reads the recordings. Nine really run on the CPU, two of them with two ranks.
`copies`, `allocator` and `batch_size` cannot arise on a CPU. They run on the emulated accelerator of the
tests (which `c++` compiles): the copies are real; the figures of the allocator and the peak are set by the
script.

Prints one JSON line. `right`: scripts whose fault is found; `false`: other findings on scripts with a fault,
and all findings on the mended ones. `gains`: where both do the same work, the expected gain (`low`, `high`)
and the gained one, 1 - (time of a mended step / time of a step): the median over pairs of blocks of steps
that both scripts run in turns, without fp8scope, with a distribution-free interval of 95 % (`least`, `most`).
`agree`: gains whose interval meets the expected range.
"""

import argparse
import itertools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from advisor_blocks import ratios as block_ratios

from fp8scope.advice.advisor import advise
from fp8scope.advice.checks import CHECKS
from fp8scope.advice.finding import Gain
from fp8scope.advice.record import RunRecord, read_spools

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "advisor_scripts"
EMULATED = ("copies", "allocator", "batch_size")
RANKS = {"communication": 2, "idle_ranks": 2}
BLOCK_RUNS = 2
SAME_WORK = ("mixed_precision", "loader", "profile", "attention", "checkpoints")
"""Scripts whose mended steps compute the same."""
SECONDS = 300
PROGRAM = "from fp8scope.cli.main import main; raise SystemExit(main())"
ON_EMULATED = f"import agent.helpers.emulated_accelerator; {PROGRAM}"


def record(name: str, folder: Path, library: Path, *, mended: bool) -> RunRecord:
    """Run a script under `fp8scope run`, and return what was recorded."""
    size = RANKS.get(name, 1)
    environment = {
        **os.environ,
        "FP8SCOPE_DIR": str(folder),
        "FP8SCOPE_MODE": "offline",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "tests"),
    }
    if name in EMULATED:
        environment["EMULATED_ACCELERATOR"] = str(library)
    if size > 1:
        environment |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    program = ON_EMULATED if name in EMULATED else PROGRAM
    command = [sys.executable, "-c", program, "run", str(SCRIPTS / f"train_{name}.py")]
    command += ["--mended"] if mended else []
    processes = [
        subprocess.Popen(
            command,
            env=environment | ({"RANK": str(rank)} if size > 1 else {}),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=SECONDS)
        if process.returncode:
            raise RuntimeError(f"{name}: {errors[-2000:]}")
    return read_spools(folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gained(name: str, expected: Gain) -> dict[str, float | bool]:
    """Return the expected gain beside the measured one of a script's mended form."""
    script = str(SCRIPTS / f"train_{name}.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ratios = sorted(
        ratio
        for _ in range(BLOCK_RUNS)
        for ratio in block_ratios([script], [script, "--mended"], environment)
    )
    # The interval of a median leaves out as many of the smallest and largest values as chance allows.
    count = len(ratios)
    tails = itertools.accumulate(math.comb(count, below) / 2**count for below in range(count))
    left_out = max(0, sum(tail <= 0.025 for tail in tails) - 1)
    gain, least, most = (
        1 - ratio for ratio in (statistics.median(ratios), ratios[-1 - left_out], ratios[left_out])
    )
    numbers = {"low": expected.low, "high": expected.high, "gained": gain, "least": least, "most": most}
    agrees = most >= expected.low and least <= expected.high
    return {name: round(value, 3) for name, value in numbers.items()} | {"pairs": count, "agrees": agrees}


def build(library: Path) -> None:
    """Compile the emulated accelerator."""
    imports = "import sys; from pathlib import Path; from agent.helpers.emulated_accelerator import build"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    program = f"{imports}; build(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", program, str(library)], env=environment, check=True)


def main() -> None:
    """Run, advise and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(CHECKS), default=tuple(CHECKS), metavar="NAME")
    parser.add_argument("--keep", type=Path, help="keep the recordings in this folder")
    options = parser.parse_args()
    right, false, missed, gains = 0, [], [], {}
    with tempfile.TemporaryDirectory() as temporary:
        folder, library = options.keep or Path(temporary), Path(temporary) / "accelerator.so"
        if set(options.only) & set(EMULATED):
            build(library)
        for name in options.only:
            faulty = record(name, folder / name / "faulty", library, mended=False)
            mended = record(name, folder / name / "mended", library, mended=True)
            findings = {finding.practice: finding for finding in advise(faulty)}
            right += name in findings
            missed += [] if name in findings else [name]
            false += [f"{name}: {other}" for other in findings if other != name]
            false += [f"{name}, mended: {finding.practice}" for finding in advise(mended)]
            if name in findings and name in SAME_WORK:
                gains[name] = gained(name, findings[name].gain)
    print(
        json.dumps(
            {
                "benchmark": "advisor",
                "right": right,
                "of": len(options.only),
                "false": len(false),
                "missed": missed,
                "wrong": false,
                "gains": gains,
                "agree": sum(bool(gain["agrees"]) for gain in gains.values()),
            }
        )
    )


if __name__ == "__main__":
    main()
