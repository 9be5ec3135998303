"""What does watching cost the training, beside what other trackers cost?

    python benchmarks/agent_overhead.py [--peers-venv DIRECTORY] [--pairs 400] [--rounds 3]
                                        [--memory-steps 100000] [--only plain,bf16,step,threads,memory]

Five questions, one JSON line; `--only` asks some of them:

    plain_ratio         (plain) step time of a float32 GPT of 0.82M parameters (8 x 64 tokens) under `attach`
                        with the default budget, over the same without: medians of 4 x `--pairs`
                        steps of each, in turns of four; mean of six rounds
    plain_every_ratio   (plain) the same with every tensor read at every step: `overhead=None`
    bf16_ratio, bf16_every_ratio
                        (bf16) the same for a GPT of 10.8M parameters in BF16, `--pairs` pairs each
    ..._error, ..._mean_ratio, ..._paces
                        of each of the four its standard error, over six rounds with a pair of models each;
                        the ratio of the mean times, in which steps that are read count by their share,
                        without the longest hundredth of each; and every how many steps tensors were read at
                        the end of each round

    step_ratio          (step) step time of an FP8 GPT of 10.9M parameters on the CPU with every tensor
                        watched in every step (75 tensors, 7 statistics, and the measures), over the same
                        without: medians of `--pairs` pairs of steps, one of each, in an order that is drawn
    step_ratio_error    standard error of that, by bootstrap over the pairs
    with_threads        the same, and all that the agent's own threads compute added to its steps, as if there
                        were no other core for it: how they hold up the training, mostly in the step after,
                        may be in steps of either kind, and is less than this
    background_ms       milliseconds per step that were added for that
    sampled_ratio       the same for the sampled steps, by default one in 100; it has no part in `step_ratio`
    thread_us_per_step  (threads) microseconds of the training thread for a step of 1,002 tensors x 7
                        statistics and 10 scalars: `tight` (step after step), `paced` (10 ms apart) and `cold`
                        (after 30 ms of training); medians
    peer_us_per_step    the same for 1,000 values with wandb (offline), trackio, mlflow (asynchronous, SQLite)
                        and tensorboard
    times_less          the best of them over ours
    rss_mib             (memory) resident memory after a tenth, half and all of `--memory-steps` steps

The agent sends to a server of its own (agent_sink.py) throughout. The peers are installed into the virtual
environment `--peers-venv`, which is kept; without it they are left out.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agent_peers import COLD_STEPS, PEERS, measure
from nano_gpt import MEDIUM, SMALL, Training
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

import fp8scope
from fp8scope.demo.model import ByteGpt, Shape
from fp8scope.observe.timing.machine import resident_bytes
from fp8scope_kernels import DelayedScaling, convert, fp8_layers

HERE = Path(__file__).resolve().parent
SHAPE = Shape(layers=6, width=384, heads=6, context=128)
BATCH = 4
WARM_UP = 4
EVERY = 100
"""Steps from one sampled step to the next: the agent's default."""
RESAMPLES = 1000
SETTLING = 60
BLOCK = 4
ROUNDS = 6
"""Of `attached_ratios`: even, so that each role is taken as often by the model that was made first."""
"""Pairs of steps before the measured ones, under `attach`: the first steps are read one and all."""
QUESTIONS = ("plain", "bf16", "step", "threads", "memory")
LAYERS = 334
STEPS = 1000
MLFLOW_STEPS = 100
"""mlflow's queue grows by what it cannot write: the call's time does not depend on it."""


@contextmanager
def sink() -> Iterator[str]:
    """A server that acknowledges everything, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "agent_sink.py")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


class Gpt:
    """The model and its optimizer, one step of training at a time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = ByteGpt(SHAPE)
        convert(self.model, DelayedScaling())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.text = torch.randint(256, (BATCH, SHAPE.context + 1))

    def train(self) -> torch.Tensor:
        logits = self.model(self.text[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), self.text[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


@dataclass(frozen=True)
class Steps:
    """Seconds of single steps; those at the same place were taken one after the other."""

    plain: NDArray[np.float64]
    watched: NDArray[np.float64]
    sampled: NDArray[np.bool_]
    """Which of those that were watched were sampled."""
    background: float
    """CPU seconds of the agent's threads per step."""
    parameters: int

    def ratio(self, of: NDArray[np.int64] | NDArray[np.bool_]) -> float:
        return float(np.median(self.watched[of])) / float(np.median(self.plain[of]))

    def summary(self) -> dict[str, float]:
        """What is printed of them."""
        usual = np.flatnonzero(~self.sampled)
        draw = np.random.default_rng(0)
        with_threads = self.ratio(usual) + self.background / float(np.median(self.plain[usual]))
        drawn = [self.ratio(draw.choice(usual, len(usual))) for _ in range(RESAMPLES)]
        return {
            "step_ratio": round(self.ratio(usual), 4),
            "step_ratio_error": round(float(np.std(drawn)), 4),
            "with_threads": round(with_threads, 4),
            "background_ms": round(1000 * self.background, 3),
            "sampled_ratio": round(self.ratio(self.sampled), 3),
            "parameters": self.parameters,
        }


def steps_in_turn(pairs: int, url: str, directory: str) -> Steps:
    """Train two models that are alike, one of them watched, a step of each at a time."""
    plain, watched = Gpt(), Gpt()
    with fp8scope.init(name="overhead", url=url, token="x", directory=directory) as run:
        run.watch(watched.model, watched.optimizer, every=EVERY)

        def with_agent() -> None:
            with run.step(tokens=BATCH * SHAPE.context) as step:
                step.log(loss=watched.train())

        times: dict[Any, list[float]] = {plain.train: [], with_agent: []}
        order = list(times)
        for pair in range(-WARM_UP, pairs):
            if pair == 0:
                background = -_other_threads()
            random.shuffle(order)
            for call in order:
                began = time.perf_counter()
                call()
                times[call].append(time.perf_counter() - began)
        background += _other_threads()
    # Counted from 1, which is sampled, as is every hundredth after it.
    sampled = np.arange(pairs + WARM_UP) % EVERY == 0
    return Steps(
        plain=np.array(times[plain.train][WARM_UP:]),
        watched=np.array(times[with_agent][WARM_UP:]),
        sampled=sampled[WARM_UP:],
        background=background / pairs,
        parameters=sum(p.numel() for p in plain.model.parameters()),
    )


def attached_ratios(
    name: str, make: Callable[[], Training], pairs: int, url: str, directory: str
) -> dict[str, Any]:
    """What `attach` costs a model in high precision, with the default budget and with none."""
    results: dict[str, Any] = {}
    budgets: dict[str, dict[str, Any]] = {name: {}, f"{name}_every": {"overhead": None}}
    for label, how in budgets.items():
        rounds = [
            one_round(make, pairs // ROUNDS, index % 2 == 1, label, url, directory, how)
            for index in range(ROUNDS)
        ]
        for key, of in (("ratio", np.median), ("mean_ratio", _mean_without_longest)):
            ratios = [float(of(agent)) / float(of(without)) for without, agent, _ in rounds]
            results[f"{label}_{key}"] = round(statistics.mean(ratios), 4)
            results[f"{label}_{key}_error"] = round(statistics.stdev(ratios) / ROUNDS**0.5, 4)
        results[f"{label}_paces"] = [pace for _, _, pace in rounds]
        results[f"{label}_step_ms"] = round(1000 * float(np.median(rounds[0][0])), 2)
    return results


def one_round(
    make: Callable[[], Training],
    pairs: int,
    swapped: bool,
    label: str,
    url: str,
    directory: str,
    how: dict[str, Any],
) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Seconds of steps without and with the agent, and its pace at the end.

    Steps are taken in turns of BLOCK: the time between two steps of the watched model counts as its step, of
    which the budget is a share. Two models that are alike differ by up to 0.7 %, by where their memory lies:
    so each round has a pair of its own, and in every other round (`swapped`) the first made is watched.
    """
    models = [make(), make()]
    plain, watched = reversed(models) if swapped else models
    run = fp8scope.attach(
        watched.model, watched.optimizer, name=label, url=url, token="x", directory=directory, **how
    )
    times: dict[Any, list[float]] = {plain.train: [], watched.train: []}
    order = list(times)
    for call in order:
        for _ in range(SETTLING):
            call()
    for _ in range(pairs // BLOCK):
        random.shuffle(order)
        for call in order:
            for _ in range(BLOCK):
                began = time.perf_counter()
                call()
                times[call].append(time.perf_counter() - began)
    every = run.session.steps.budget.every
    run.finish()
    without, with_agent = (np.array(taken) for taken in times.values())
    return without, with_agent, every


def _mean_without_longest(seconds: NDArray[np.float64]) -> float:
    """Without the longest hundredth: the machine does other things as well."""
    return float(np.sort(seconds)[: -max(1, len(seconds) // 100)].mean())


def _other_threads() -> float:
    """CPU seconds of this process's threads but this one, which trains."""
    return time.process_time() - time.thread_time()


def thread_times(url: str, directory: str) -> dict[str, float]:
    """Ours: 1,002 tensors, and 10 scalars of which two are tensors."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(LAYERS)))
    convert(model, DelayedScaling())
    with fp8scope.init(name="overhead", url=url, token="x", directory=directory) as run:
        tensors = run.watch(model)
        assert tensors == 3 * LAYERS
        (first, *_) = fp8_layers(model)
        slot = first[1].slots["input"]
        seen = torch.rand(tensors, slot.row.numel(), dtype=torch.float64) + 1
        scalars = [
            {
                **{f"s{j}": float(i * j) for j in range(8)},
                "loss": torch.tensor(1.5),
                "norm": torch.tensor(2.5),
            }
            for i in range(16)
        ]

        def observe(step: int) -> None:
            # As the layers would have, while they quantise.
            slot.buffer.data.copy_(seen)

        def log(step: int) -> None:
            with run.step(tokens=4096) as taken:
                taken.log(scalars[step % 16])

        return measure(log, STEPS, before=observe)


def memory_growth(steps: int, url: str, directory: str) -> dict[str, float]:
    """MiB resident after a tenth, half and all of the steps."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    convert(model, DelayedScaling())
    marks: dict[str, float] = {}
    x = torch.ones(4, 16)
    with fp8scope.init(name="memory", url=url, token="x", directory=directory) as run:
        run.watch(model)
        for step in range(1, steps + 1):
            with run.step(tokens=64) as taken:
                if step % 10 == 0:
                    model(x).sum().backward()
                taken.log(loss=1.0, other=float(step))
            if step in (steps // 10, steps // 2, steps):
                marks[str(step)] = round((resident_bytes() or 0) / 2**20, 1)
    report = run.finish()
    marks["sent"], marks["dropped"] = report.rows_sent, report.rows_dropped
    return marks


def install(directory: Path) -> Path:
    """The interpreter of a virtual environment with the peers; torch is this one's."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PEERS], check=True)
    (site,) = (directory / "lib").glob("python*/site-packages")
    # After its own packages: what both have is the peers'.
    site.joinpath("torch_of_the_benchmark.pth").write_text(str(Path(torch.__file__).parents[1]))
    return python


def peer_times(name: str, python: Path) -> dict[str, float]:
    """What agent_peers.py measures of one of them, in a process of its own."""
    steps = MLFLOW_STEPS if name == "mlflow" else STEPS // 4
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        command = [str(python), str(HERE / "agent_peers.py"), name, directory, str(steps)]
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=900, check=False
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"tight"')]
    if not lines:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return dict(json.loads(lines[-1]))


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {
        kind: round(statistics.median(run[kind] for run in runs), 1) for kind in ("tight", "paced", "cold")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--peers-venv", type=Path)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-steps", type=int, default=100_000)
    parser.add_argument("--only", default=",".join(QUESTIONS), help=f"some of {','.join(QUESTIONS)}")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    if unknown := set(only) - set(QUESTIONS):
        parser.error(f"--only takes {', '.join(QUESTIONS)}; got {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    python = install(arguments.peers_venv.absolute()) if arguments.peers_venv else None
    found: dict[str, Any] = {}
    ours: list[dict[str, float]] = []
    theirs: dict[str, list[dict[str, float]]] = {name: [] for name in PEERS} if python else {}
    with sink() as url, tempfile.TemporaryDirectory() as directory:
        if "plain" in only:
            found |= attached_ratios("plain", lambda: Training(SMALL), 4 * arguments.pairs, url, directory)
        if "bf16" in only:
            found |= attached_ratios(
                "bf16", lambda: Training(MEDIUM, torch.bfloat16), arguments.pairs, url, directory
            )
        for _ in range(arguments.rounds if "threads" in only else 0):
            ours.append(thread_times(url, directory))
            for name, runs in theirs.items():
                assert python is not None
                runs.append(peer_times(name, python))
        if "step" in only:
            found |= steps_in_turn(arguments.pairs, url, directory).summary()
        if ours:
            found["thread_us_per_step"] = medians(ours)
            found["peer_us_per_step"] = {name: medians(runs) for name, runs in theirs.items()}
            found["cold_steps"] = COLD_STEPS
        if ours and theirs:
            found["times_less"] = {
                kind: round(
                    min(peer[kind] for peer in found["peer_us_per_step"].values())
                    / found["thread_us_per_step"][kind],
                    1,
                )
                for kind in ("tight", "paced", "cold")
            }
        if "memory" in only:
            found["rss_mib"] = memory_growth(arguments.memory_steps, url, directory)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
