"""Record telemetry of a real FP8 training run once, for the benchmarks of the store.

A byte-level GPT of nine blocks is trained in FP8 with delayed scaling and the kernels of fp8scope. The agent
watches every tensor of every linear layer at every step (108 tensors x 7 statistics), offline: its spool in
DIRECTORY is the recording, which `fp8scope sync` can send and `read_recording` reads.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LAYERS, WIDTH, CONTEXT, BATCH = 9, 128, 64, 8
DONE = "steps"
RECORDING = Path(__file__).parents[1] / ".benchmarks" / "recording"
"""The default directory of the recording."""


@dataclass(frozen=True)
class Recording:
    """N steps of T tensors.

    Attributes:
        steps: int64[N].
        times: int64[N], microseconds since 1970.
        names: the names of the tensors.
        scalars: float64[N] by name.
        statistics: float64[N, T] by name.
    """

    steps: NDArray[np.int64]
    times: NDArray[np.int64]
    names: list[str]
    scalars: dict[str, NDArray[np.float64]]
    statistics: dict[str, NDArray[np.float64]]


def record(directory: Path, steps: int) -> None:
    """Train for `steps` steps unless DIRECTORY holds such a recording."""
    done = directory / DONE
    if done.exists() and int(done.read_text()) >= steps:
        return
    import torch
    from torch.nn import functional

    import fp8scope
    from fp8scope.demo.data import load
    from fp8scope.demo.model import ByteGpt, Shape

    torch.manual_seed(1)
    model = ByteGpt(Shape(layers=LAYERS, width=WIDTH, context=CONTEXT))
    corpus = load(CONTEXT, windows=64)
    fp8scope.convert(model, fp8scope.DelayedScaling())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps)
    run = fp8scope.init(
        name="recording", precision="fp8", directory=directory, mode="offline", total_steps=steps
    )
    run.watch(model)
    for number in range(1, steps + 1):
        with run.step(tokens=BATCH * CONTEXT) as step:
            text = corpus.batch(number, BATCH)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(text[:, :-1])
            loss = functional.cross_entropy(logits.float().transpose(1, 2), text[:, 1:])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step.log(loss=loss, grad_norm=norm, learning_rate=schedule.get_last_lr()[0])
        if number % 100 == 0:
            print(f"recorded {number} of {steps} steps", file=sys.stderr, flush=True)
    report = run.finish()
    assert not report.rows_dropped, report
    done.write_text(str(steps))


def read_recording(directory: Path) -> Recording:
    """Read all rows of a recording into memory."""
    from fp8scope.recording.records import RecordKind, Row, load_json
    from fp8scope.recording.spool import Spool
    from fp8scope_kernels.statistics import STATISTICS

    spool = Spool(spool_of(directory))
    rows: list[Row] = []
    names: list[str] = []
    position = 0
    while (record := spool.read(position)) is not None:
        if record.kind is RecordKind.ROW:
            rows.append(Row.decode(record.payload))
        elif record.kind is RecordKind.TENSORS and not names:
            names = [str(tensor["name"]) for tensor in load_json(record.payload)["tensors"]]
        position = record.end
    spool.close()
    matrix = np.stack([row.statistics for row in rows])
    every = set.intersection(*(set(row.scalars) for row in rows))
    return Recording(
        np.array([row.step for row in rows]),
        np.array([row.time_us for row in rows]),
        names,
        {name: np.array([row.scalars[name] for row in rows]) for name in sorted(every)},
        {name: matrix[:, :, i] for i, name in enumerate(STATISTICS)},
    )


def synthetic_recording(steps: int = 2_400, tensors: int = 108) -> Recording:
    """Random walks in place of a recording, for benchmarks of what does not depend on the values."""
    random = np.random.default_rng(1)
    roles = ("input", "weight", "grad_output")
    names = [f"blocks.{i // 12}.part{i // 3 % 4}.{roles[i % 3]}" for i in range(tensors)]
    amax = np.exp(random.normal(0, 0.05, (steps, tensors)).cumsum(0)).astype(np.float32).astype(np.float64)
    numel = np.full((steps, tensors), 65_536.0)
    rare = random.poisson(0.02, (steps, tensors)).astype(np.float64)
    loss = 2.0 + 8.0 * np.exp(-np.arange(steps) / 400.0) + random.normal(0, 0.02, steps)
    counts = {"saturated": rare, "underflow": 9.0 * rare, "nonfinite": np.zeros_like(rare), "numel": numel}
    return Recording(
        np.arange(steps),
        np.arange(steps) * 100_000,
        names,
        {"loss": loss},
        {"amax": amax, "scale": 448.0 / amax} | counts,
    )


def spool_of(directory: Path) -> Path:
    """The directory of the writer in a recording."""
    return next(directory.rglob("cursor")).parent
