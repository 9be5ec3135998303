"""Random runs, sent over HTTP by the protocol of docs/wire.md, and judged as the jobs would."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.helpers.wire_client import WireClient
from hypothesis import strategies as st

from fp8scope_dashboard.alerts.services import evaluate
from fp8scope_dashboard.analysis.loss_comparisons import compare
from fp8scope_dashboard.analysis.score_comparisons import compare_evaluations

Values = Mapping[str, Sequence[float | None]]
ITEMS = 60
SCALARS = ("grad_norm", "eval/ppl", "a.b-c/../d", "__class__")
# Names are data: they may look like markup, an address or a command.
TENSORS = ("blocks.0.mlp.input", "blocks.1.mlp é.weight", "a&b#c.input", "x y.grad_output")
EVERY_FLOAT = st.floats(width=64) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 5e-324, 1.8e308])


@dataclass(frozen=True, kw_only=True)
class RandomRun:
    """A run as it is sent. `tensors` are [rows][tensors] per statistic; None for no value."""

    name: str
    group: str
    baseline: str
    precision: str
    seed: int
    steps: list[int]
    scalars: Values
    tensors: Mapping[str, list[list[float | None]]]
    items: list[int]
    state: str

    def expected(self, values: Sequence[float | None]) -> tuple[list[int], list[float]]:
        """The steps and values of a series, without those that were not logged."""
        pairs = [(step, value) for step, value in zip(self.steps, values, strict=True) if value is not None]
        return [step for step, _ in pairs], [value for _, value in pairs]


@st.composite
def losses(draw: st.DrawFn, count: int) -> list[float | None]:
    """A loss that falls, and is not finite now and then."""
    level = draw(st.floats(0.5, 8.0))
    noise = draw(st.lists(st.floats(-0.05, 0.05), min_size=count, max_size=count))
    values: list[float | None] = [level * (1.0 + 2.0 / (i + 1)) + noise[i] for i in range(count)]
    for i in draw(st.lists(st.integers(0, count - 1), max_size=2)):
        values[i] = draw(st.sampled_from([math.nan, math.inf, None]))
    return values


@st.composite
def random_runs(draw: st.DrawFn) -> list[RandomRun]:
    """Two seeds of a BF16 group and an FP8 run or two that are compared with it."""
    steps = sorted(draw(st.sets(st.integers(0, 400), min_size=4, max_size=60)))
    count, runs = len(steps), []
    arms = [("bf16", "", seed) for seed in range(2)]
    arms += [("fp8", "bf16", seed) for seed in range(draw(st.integers(1, 2)))]
    for group, baseline, seed in arms:
        names = draw(st.lists(st.sampled_from(SCALARS), unique=True, max_size=3))
        cells = st.lists(st.none() | EVERY_FLOAT, min_size=count, max_size=count)
        amax = st.lists(
            st.lists(st.none() | st.floats(0.0, 1e4), min_size=4, max_size=4), min_size=count, max_size=count
        )
        counts = st.lists(st.lists(st.sampled_from([0.0, 0.0, 1.0, 9.0, 64.0]), min_size=4, max_size=4),
                          min_size=count, max_size=count)  # fmt: skip
        numel: list[list[float | None]] = [[64.0] * 4 for _ in steps]
        has_tensors = group == "fp8"
        runs.append(
            RandomRun(
                name=f"{group} {draw(st.sampled_from(['<b>', 'ü', '𝛼', 'run']))} {seed}",
                group=group,
                baseline=baseline,
                precision=group,
                seed=seed,
                steps=steps,
                scalars={"loss": draw(losses(count)), **{name: draw(cells) for name in names}},
                tensors={
                    "amax": draw(amax),
                    "saturated": [list(row) for row in draw(counts)],
                    "numel": numel,
                }
                if has_tensors
                else {},
                items=draw(st.lists(st.integers(0, 1), min_size=ITEMS, max_size=ITEMS)),
                state=draw(st.sampled_from(["finished", "failed"])),
            )
        )
    return runs


def send(url: str, token: str, run: RandomRun) -> uuid.UUID:
    """Send a run over HTTP, and return its id."""
    client = WireClient(url, token)
    fields: dict[str, Any] = {
        "name": run.name,
        "group": run.group,
        "baseline": run.baseline,
        "seed": run.seed,
    }
    config = {"seed": run.seed, "steps": len(run.steps)}
    assert client.register(precision=run.precision, config=config, tags=["random"], **fields).status == 201
    assert client.catalogue(TENSORS if run.tensors else ()).status == 200
    half, seq = max(1, len(run.steps) // 2), 0
    for part in (slice(0, half), slice(half, None)):
        if not run.steps[part]:
            continue
        scalars = {name: values[part] for name, values in run.scalars.items()}
        tensors = {name: rows[part] for name, rows in run.tensors.items()}
        answer = client.send(client.batch(seq, run.steps[part], scalars=scalars, tensors=tensors))
        assert answer.status == 201, answer.body
        seq += 1
    message = {"writer": str(client.writer), "step": run.steps[-1], "kind": "proportion", "seq": seq}
    evaluation = {**message, "name": "held <out>", "metric": "accuracy", "items": run.items}
    assert client.request("POST", "/evaluations", json=evaluation).status == 201
    finish = {
        "writer": str(client.writer),
        "seq": seq + 1,
        "state": run.state,
        "error": "x" * (run.state == "failed"),
    }
    counts = {"rows_sent": len(run.steps), "points_sent": 0, "dropped": 0, "errors": 0}
    assert client.request("POST", "/finish", json={**finish, **counts}).status == 201
    return client.run


def judge(ids: Sequence[uuid.UUID]) -> None:
    """Compare the runs and look for alerts, as the worker does."""
    for run in ids:
        compare(run)
        compare_evaluations(run)
        evaluate(run)
