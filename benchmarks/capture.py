"""What scripts give to other trackers, beside what fp8scope has recorded of it.

Each script is run by `fp8scope run` with the real tracker, or by Python if it has fp8scope's logger for a
framework. Then every value that the tracker has stored is read back from its own files, and looked for in the
recorded run: at the tracker's step, equal, once.

    python benchmarks/capture.py [SCRIPT ...] [--sources DIR] [--without-cost]

The scripts of this folder are in `capture_scripts`. `--sources` names a folder with checkouts of other
projects (nanoGPT, cleanrl, litgpt, torchtitan), whose scripts are then run unmodified as well.

Prints one line of JSON for each script: `values` (stored by its trackers), `lost_or_doubled`,
`without_own_step` (recorded, but not beside the step that the tracker gave it), and `call_ratio`: the time of
a call of its tracker while it is captured, as a ratio to the call alone.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from capture_stores import READERS, Stored, key, recorded

from fp8scope.capture.names import recorded_name
from fp8scope.recording.records import Row

SCRIPTS = Path(__file__).parent / "capture_scripts"
ROOT = Path(__file__).parents[1]
SECONDS = 900
Recorded = tuple[str, int | None, float | str]
"""A name, the tracker's step beside it, and a value."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script, the trackers that it uses, and the one whose calls are timed."""

    trackers: tuple[str, ...]
    cost: str = ""
    script: str = ""
    """The script of `capture_scripts`, if its name is not that of the case."""
    alone: bool = False
    """Run by Python, without `fp8scope run`."""
    environment: tuple[tuple[str, str], ...] = ()
    arguments: tuple[str, ...] = ()
    source: str = ""
    """The script, or a package, in the folder of `--sources`; else it is one of `capture_scripts`."""
    prepare: Callable[[Path], None] | None = None
    """Makes the data that the script reads, in its working folder."""
    has_callback: bool = False
    """Whether fp8scope follows the script by a trainer's callback, which records values of its own."""


def tokens(folder: Path) -> None:
    """Random tokens in the form of nanoGPT's data sets."""
    where = folder / "data" / "random"
    where.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name in ("train", "val"):
        draw.integers(0, 64, 20_000, dtype=np.uint16).tofile(where / f"{name}.bin")


NANO = (
    *(
        "--wandb_log=True",
        "--dataset=random",
        "--device=cpu",
        "--compile=False",
        "--eval_iters=2",
        "--dropout=0.0",
    ),
    *("--log_interval=1", "--block_size=32", "--batch_size=4", "--n_layer=1", "--n_head=2", "--n_embd=32"),
    *("--max_iters=60", "--lr_decay_iters=60", "--eval_interval=5", "--gradient_accumulation_steps=2"),
)
LITGPT = (
    *("pretrain", "pythia-14m", "--data", "random_tokens.RandomTokens", "--logger_name", "tensorboard"),
    *("--out_dir", "out", "--devices", "1", "--precision", "32-true", "--train.max_seq_length", "16"),
    *("--train.global_batch_size", "8", "--train.micro_batch_size", "4", "--train.max_tokens", "1024"),
    *("--train.log_interval", "1", "--eval.interval", "3", "--eval.max_iters", "2"),
)
CASES = {
    "wandb_offline": Case(trackers=("wandb",), cost="wandb"),
    "tensorboard_classifier": Case(trackers=("tensorboard",), cost="tensorboard"),
    "mlflow_store": Case(trackers=("mlflow",), cost="mlflow"),
    "mlflow_autolog": Case(trackers=("mlflow",), cost="mlflow", has_callback=True),
    "trackio_local": Case(trackers=("trackio",), cost="trackio"),
    "lightning_loggers": Case(trackers=("lightning", "tensorboard"), cost="lightning", has_callback=True),
    "transformers_trainer": Case(trackers=("tensorboard", "wandb"), cost="tensorboard", has_callback=True),
    "accelerate_trackers": Case(trackers=("tensorboard", "wandb"), cost="accelerate"),
    "reinforcement": Case(trackers=("tensorboard",), cost="tensorboard"),
    "jax_loop": Case(trackers=("tensorboard",), cost="tensorboard"),
    "torchtitan_loggers": Case(trackers=("tensorboard",), cost="tensorboard"),
    # Loggers of fp8scope. They need the frameworks, which no extra installs.
    "torchtitan_metrics": Case(trackers=("tensorboard",)),
    "torchtune_loggers": Case(trackers=("torchtune",), alone=True),
    "composer_trainer": Case(trackers=("composer",), alone=True),
    "deepspeed_engine": Case(
        trackers=("deepspeed",),
        alone=True,
        environment=(
            *(("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("DS_ACCELERATOR", "cpu")),
            *(("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511")),
        ),
    ),
    "verl_tracking": Case(trackers=("verl",), alone=True),
    "ray_reports": Case(trackers=("ray",), alone=True),
    "litgpt_choice": Case(trackers=("lightning",)),
    "trl_sft": Case(trackers=("tensorboard",), script="trl_trainers", arguments=("sft",), has_callback=True),
    "trl_dpo": Case(trackers=("tensorboard",), script="trl_trainers", arguments=("dpo",), has_callback=True),
    "trl_grpo": Case(
        trackers=("tensorboard",), script="trl_trainers", arguments=("grpo",), has_callback=True
    ),
}
FOREIGN = {
    "nanoGPT": Case(
        trackers=("wandb",), cost="wandb", source="nanoGPT/train.py", arguments=NANO, prepare=tokens
    ),
    "cleanrl_ppo": Case(
        trackers=("tensorboard",),
        cost="tensorboard",
        source="cleanrl/cleanrl/ppo.py",
        arguments=("--total-timesteps", "4000", "--num-steps", "64", "--num-envs", "4"),
    ),
    "litgpt": Case(trackers=("tensorboard",), cost="lightning", source="litgpt", arguments=LITGPT),
    "cleanrl_dqn": Case(
        trackers=("tensorboard",),
        cost="tensorboard",
        source="cleanrl/cleanrl/dqn.py",
        arguments=("--total-timesteps", "3000", "--learning-starts", "1000", "--buffer-size", "2000"),
    ),
}


def run_case(case: Case, program: Sequence[str], folder: Path) -> str:
    """Run the script, or a module by `-m`, in `folder`. Returns its output if it failed."""
    if case.prepare is not None:
        case.prepare(folder)
    environment = {
        **os.environ,
        "FP8SCOPE_DIR": str(folder / "spool"),
        "FP8SCOPE_MODE": "offline",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HOME": str(folder / "hf"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join((str(folder), str(SCRIPTS), os.environ.get("PYTHONPATH", ""))),
        **dict(case.environment),
    }
    by = [] if case.alone else ["-m", "fp8scope", "run"]
    done = subprocess.run(
        [sys.executable, *by, *program, *case.arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return "" if done.returncode == 0 else f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def compare(case: Case, stored: Sequence[Stored], rows: Sequence[Row]) -> tuple[int, int, int]:
    """Count the stored values that were not recorded, those without the tracker's step, and doubled ones.

    Of several trackers each has all of its values in the run; the run has as many of a value as the tracker
    that stored most.
    """
    lost = elsewhere = 0
    for tracker in {value.tracker for value in stored}:
        mine = [value for value in stored if value.tracker == tracker]
        left = Counter(at_steps(rows, tracker, single=mine[0].single))
        for value in mine:
            number = key(value.value, single=value.single)
            names = names_of(value.name)
            choices: list[Recorded] = [(name, value.step, number) for name in names]
            match = next((choice for choice in choices if left[choice] > 0), None)
            if match is None:
                anywhere = (other for other, n in left.items() if n > 0 and other[0] in names)
                match = next((other for other in anywhere if other[2] == number), None)
                if match is not None:
                    elsewhere += 1
                    print("without its own step", value, file=sys.stderr)
            if match is None:
                lost += 1
                print("lost", value, file=sys.stderr)
            else:
                left[match] -= 1
    return lost, elsewhere, doubled(case, stored, rows)


def names_of(name: str) -> tuple[str, ...]:
    """The names under which a value may be recorded; its own is that of the agent where both are equal."""
    return tuple(dict.fromkeys((recorded_name(name, follows=True), recorded_name(name, follows=False))))


def at_steps(rows: Sequence[Row], tracker: str, *, single: bool) -> list[Recorded]:
    """The recorded values with the tracker's step that is beside them."""
    return [
        (
            name,
            None if (step := row.scalars.get(f"tracker_step/{tracker}")) is None else int(step),
            key(value, single=single),
        )
        for row in rows
        for name, value in row.scalars.items()
    ]


def doubled(case: Case, stored: Sequence[Stored], rows: Sequence[Row]) -> int:
    """Count the recorded values beyond those that one tracker has stored, of the names that trackers have.

    Where fp8scope's own callback records values as well, at more steps, only those twice in a step count.
    """
    most: Counter[tuple[str, float | str]] = Counter()
    for tracker in {value.tracker for value in stored}:
        most |= Counter(
            (recorded_name(value.name, follows=True), key(value.value, single=True))
            for value in stored
            if value.tracker == tracker
        )
    names = {name for name, _ in most}
    found = Counter(
        (row.step if case.has_callback else None, name, key(value, single=True))
        for row in rows
        for name, value in row.scalars.items()
        if name in names
    )
    more = {what: count - max(most[what[1:]], case.has_callback) for what, count in found.items()}
    for what, count in more.items():
        if count > 0:
            print("doubled", what, count, file=sys.stderr)
    return sum(count for count in more.values() if count > 0)


def call_ratio(tracker: str) -> float:
    """The time of a captured call as a ratio to the call alone."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).parent / "capture_cost.py"), tracker],
            cwd=folder,
            env={
                **os.environ,
                "WANDB_MODE": "offline",
                "WANDB_SILENT": "true",
                "TRACKIO_DIR": f"{folder}/trackio",
            },
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
    return float(json.loads(line)["ratio"])


def reason_of(output: str) -> str:
    """The exception that ended a script, after which others may have printed; else the last line."""
    lines = output.strip().splitlines()
    exceptions = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (exceptions or lines)[-1][:300]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scripts", nargs="*", help="scripts to run (default: all)")
    parser.add_argument("--sources", type=Path, help="a folder with checkouts of other projects")
    parser.add_argument("--without-cost", action="store_true", help="do not time calls")
    arguments = parser.parse_args()
    cases = CASES | (FOREIGN if arguments.sources is not None else {})
    ratios: dict[str, float] = {}
    for name in arguments.scripts or cases:
        case = cases[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "work"
            if case.source:
                # Some scripts read their neighbours from the working folder.
                project, *script = Path(case.source).parts
                shutil.copytree(arguments.sources / project, folder, ignore=shutil.ignore_patterns(".git"))
                program = [str(folder.joinpath(*script))] if script else ["-m", project]
                failure = run_case(case, program, folder)
            else:
                folder.mkdir()
                failure = run_case(case, [str(SCRIPTS / f"{case.script or name}.py")], folder)
            if failure:
                print(json.dumps({"script": name, "failed": reason_of(failure)}))
                print(failure, file=sys.stderr)
                continue
            stored = [value for tracker in case.trackers for value in READERS[tracker](folder)]
            lost, elsewhere, more = compare(case, stored, recorded(folder / "spool"))
        if case.cost and not arguments.without_cost and case.cost not in ratios:
            ratios[case.cost] = call_ratio(case.cost)
        print(
            json.dumps(
                {
                    "script": name,
                    "trackers": list(case.trackers),
                    "values": len(stored),
                    "lost_or_doubled": lost + more,
                    "without_own_step": elsewhere,
                    "call_ratio": ratios.get(case.cost),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
