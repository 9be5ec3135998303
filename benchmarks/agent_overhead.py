"""What watching costs the training, and what other trackers cost. Prints one JSON line.

    python benchmarks/agent_overhead.py [--peers-venv DIRECTORY] [--pairs 400] [--rounds 3]
                                        [--attach-rounds 6] [--memory-steps 100000]
                                        [--only plain,bf16,compiled,step,threads,memory,tiny] [--cpu]

The agent sends to a sink (agent_sink.py) all the time. `--peers-venv` is a virtual environment, kept between
runs, into which the other trackers are installed; without it they are left out. `--only` selects questions.
On a busy machine, `--cpu` measures steps in CPU time of the training thread instead of elapsed time.

plain: a float32 GPT of 0.82M parameters (8 x 64 tokens) under `attach`, `--attach-rounds` rounds with a new
pair of models each, steps taken in turns of four.

    plain_ratio         step time with the default budget over step time without the agent, medians
    plain_every_ratio   the same if every tensor is read at every step (`overhead=None`)
    ..._error           standard error over the rounds
    ..._mean_ratio      ratio of the mean times, without the longest hundredth of the steps
    ..._paces           steps between two readings of plain tensors, at the end of each round
    ..._step_ms         median step time without the agent

bf16: the same for a GPT of 10.8M parameters in BF16 (`bf16_ratio`, `bf16_every_ratio`, ...).

compiled: the same for the GPT of `plain` under torch.compile (`compiled_ratio`, ...), against the compiled
model without the agent.

step: an FP8 GPT of 10.9M parameters with every tensor watched at every step (75 tensors, 7 statistics).

    step_ratio          step time watched over unwatched, medians of `--pairs` pairs of steps in random order
    step_ratio_error    its standard error, by bootstrap over the pairs
    background_ms       CPU milliseconds per step of the agent's own threads
    with_threads        step_ratio if the training also waited for background_ms: an upper bound
    sampled_ratio       the ratio of sampled steps, one in 100 by default; not part of step_ratio

threads: a step of 1,002 tensors x 7 statistics and 10 scalars.

    thread_us_per_step  microseconds of the training thread, medians: `tight` (step after step), `paced`
                        (10 ms apart), `cold` (after 30 ms of training)
    peer_us_per_step    the same for 1,000 values with wandb (offline), trackio, mlflow (asynchronous, SQLite)
                        and tensorboard
    times_less          the fastest of these over the agent

tiny: steps of about a millisecond under `attach`, in CPU time; see tiny_steps.py.

    tiny_ratio, tiny_us                  of the training thread: ratio, and microseconds more for a step
    tiny_process_ratio, tiny_process_us  with the agent's own threads

memory: `rss_mib`, resident memory after a tenth, half and all of `--memory-steps` steps.
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
from tiny_steps import tiny_ratios
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
"""Steps between two sampled steps: the agent's default."""
RESAMPLES = 1000
SETTLING = 60
"""Steps of each model before the measured ones, under `attach`: it reads all of the first steps."""
BLOCK = 4
"""Steps in a row of one model, under `attach`."""
QUESTIONS = ("plain", "bf16", "compiled", "step", "threads", "memory", "tiny")
LAYERS = 334
STEPS = 1000
Timer = Callable[[], float]
MLFLOW_STEPS = 100
"""mlflow's queue grows without bound; the time of a call does not depend on its length."""


@contextmanager
def sink() -> Iterator[str]:
    """A server in another process that acknowledges everything; yields its address."""
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
    """Seconds of each step. Steps with the same index were taken one after the other."""

    plain: NDArray[np.float64]
    watched: NDArray[np.float64]
    sampled: NDArray[np.bool_]
    """Which of the watched steps were sampled."""
    background: float
    """CPU seconds of the agent's threads, per step."""
    parameters: int

    def ratio(self, steps: NDArray[np.int64] | NDArray[np.bool_]) -> float:
        """Watched over plain, medians of the selected steps."""
        return float(np.median(self.watched[steps])) / float(np.median(self.plain[steps]))

    def summary(self) -> dict[str, float]:
        """The figures of the JSON line."""
        usual = np.flatnonzero(~self.sampled)
        random_state = np.random.default_rng(0)
        with_threads = self.ratio(usual) + self.background / float(np.median(self.plain[usual]))
        resampled = [self.ratio(random_state.choice(usual, len(usual))) for _ in range(RESAMPLES)]
        # A short run may have no sampled step.
        sampled = {"sampled_ratio": round(self.ratio(self.sampled), 3)} if self.sampled.any() else {}
        return {
            **sampled,
            "step_ratio": round(self.ratio(usual), 4),
            "step_ratio_error": round(float(np.std(resampled)), 4),
            "with_threads": round(with_threads, 4),
            "background_ms": round(1000 * self.background, 3),
            "parameters": self.parameters,
        }


def steps_in_turn(pairs: int, clock: Timer, url: str, directory: str) -> Steps:
    """Train two equal models, one of them watched, a step of each in turn."""
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
                began = clock()
                call()
                times[call].append(clock() - began)
        background += _other_threads()
    # Step 1 is sampled, and every hundredth after it.
    sampled = np.arange(pairs + WARM_UP) % EVERY == 0
    return Steps(
        plain=np.array(times[plain.train][WARM_UP:]),
        watched=np.array(times[with_agent][WARM_UP:]),
        sampled=sampled[WARM_UP:],
        background=background / pairs,
        parameters=sum(p.numel() for p in plain.model.parameters()),
    )


def attached_ratios(
    name: str, make: Callable[[], Training], pairs: int, count: int, clock: Timer, url: str, directory: str
) -> dict[str, Any]:
    """The cost of `attach` for a model in high precision, with the default budget and without a limit.

    `count`: rounds. Even: in half of them the model that was made first is the watched one.
    """
    results: dict[str, Any] = {}
    budgets: dict[str, dict[str, Any]] = {name: {}, f"{name}_every": {"overhead": None}}
    for label, how in budgets.items():
        rounds = [
            one_round(make, pairs // count, index % 2 == 1, label, clock, url, directory, how)
            for index in range(count)
        ]
        for key, average in (("ratio", np.median), ("mean_ratio", _mean_without_longest)):
            ratios = [float(average(agent)) / float(average(without)) for without, agent, _ in rounds]
            results[f"{label}_{key}"] = round(statistics.mean(ratios), 4)
            results[f"{label}_{key}_error"] = round(statistics.stdev(ratios) / count**0.5, 4)
        results[f"{label}_paces"] = [pace for _, _, pace in rounds]
        results[f"{label}_step_ms"] = round(1000 * float(np.median(rounds[0][0])), 2)
    return results


def one_round(
    make: Callable[[], Training],
    pairs: int,
    swapped: bool,
    label: str,
    clock: Timer,
    url: str,
    directory: str,
    how: dict[str, Any],
) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Seconds of steps without the agent, of steps with it, and its interval between readings at the end.

    Steps are taken in turns of BLOCK, because the budget is a share of the time between two steps of the
    watched model. Equal models differ by up to 0.7 % with the position of their memory, so each round makes a
    new pair, and every other round (`swapped`) watches the model that was made first.
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
                began = clock()
                call()
                times[call].append(clock() - began)
    every = run.session.steps.budget.every
    run.finish()
    without, with_agent = (np.array(seconds) for seconds in times.values())
    return without, with_agent, every


def _mean_without_longest(seconds: NDArray[np.float64]) -> float:
    """The mean without the longest hundredth, in which the machine did other work."""
    return float(np.sort(seconds)[: -max(1, len(seconds) // 100)].mean())


def _other_threads() -> float:
    """CPU seconds of all threads of this process except the training thread."""
    return time.process_time() - time.thread_time()


def thread_times(url: str, directory: str) -> dict[str, float]:
    """The agent: 1,002 tensors and 10 scalars, two of them tensors."""
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
            # The layers would write these while they quantise.
            slot.buffer.data.copy_(seen)

        def log(step: int) -> None:
            with run.step(tokens=4096) as current:
                current.log(scalars[step % 16])

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
            with run.step(tokens=64) as current:
                if step % 10 == 0:
                    model(x).sum().backward()
                current.log(loss=1.0, other=float(step))
            if step in (steps // 10, steps // 2, steps):
                marks[str(step)] = round((resident_bytes() or 0) / 2**20, 1)
    report = run.finish()
    marks["sent"], marks["dropped"] = report.rows_sent, report.rows_dropped
    return marks


def install(directory: Path) -> Path:
    """The Python of a virtual environment with the other trackers; it shares this one's torch."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PEERS], check=True)
    (site,) = (directory / "lib").glob("python*/site-packages")
    # Appended to sys.path, so that the environment's own packages win.
    site.joinpath("torch_of_the_benchmark.pth").write_text(str(Path(torch.__file__).parents[1]))
    return python


def peer_times(name: str, python: Path) -> dict[str, float]:
    """The line that agent_peers.py prints for one tracker, in another process."""
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
    parser.add_argument("--attach-rounds", type=int, default=6, choices=range(2, 101, 2), metavar="EVEN")
    parser.add_argument("--memory-steps", type=int, default=100_000)
    parser.add_argument("--cpu", action="store_true", help="measure CPU time of the training thread")
    parser.add_argument("--only", default=",".join(QUESTIONS), help=f"some of {','.join(QUESTIONS)}")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    clock = time.thread_time if arguments.cpu else time.perf_counter
    if unknown := set(only) - set(QUESTIONS):
        parser.error(f"--only takes {', '.join(QUESTIONS)}; got {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    python = install(arguments.peers_venv.absolute()) if arguments.peers_venv else None
    figures: dict[str, Any] = {}
    ours: list[dict[str, float]] = []
    theirs: dict[str, list[dict[str, float]]] = {name: [] for name in PEERS} if python else {}
    with sink() as url, tempfile.TemporaryDirectory() as directory:
        if "plain" in only:
            figures |= attached_ratios(
                "plain",
                lambda: Training(SMALL),
                4 * arguments.pairs,
                arguments.attach_rounds,
                clock,
                url,
                directory,
            )
        if "compiled" in only:
            figures |= attached_ratios(
                "compiled",
                lambda: Training(SMALL, compiled=True),
                4 * arguments.pairs,
                arguments.attach_rounds,
                clock,
                url,
                directory,
            )
        if "bf16" in only:
            figures |= attached_ratios(
                "bf16",
                lambda: Training(MEDIUM, torch.bfloat16),
                arguments.pairs,
                arguments.attach_rounds,
                clock,
                url,
                directory,
            )
        for _ in range(arguments.rounds if "threads" in only else 0):
            ours.append(thread_times(url, directory))
            for name, runs in theirs.items():
                assert python is not None
                runs.append(peer_times(name, python))
        if "step" in only:
            figures |= steps_in_turn(arguments.pairs, clock, url, directory).summary()
        if ours:
            figures["thread_us_per_step"] = medians(ours)
            figures["peer_us_per_step"] = {name: medians(runs) for name, runs in theirs.items()}
            figures["cold_steps"] = COLD_STEPS
        if ours and theirs:
            figures["times_less"] = {
                kind: round(
                    min(peer[kind] for peer in figures["peer_us_per_step"].values())
                    / figures["thread_us_per_step"][kind],
                    1,
                )
                for kind in ("tight", "paced", "cold")
            }
        if "tiny" in only:
            figures |= tiny_ratios(arguments.pairs // 4, url, directory)
        if "memory" in only:
            figures["rss_mib"] = memory_growth(arguments.memory_steps, url, directory)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
