"""Small real trainings with one growing cause of divergence each, for early_signs.py.

Every training is a GPT over the demo's text on the CPU, in float32 or with fp8scope's FP8 layers, and is
read by the agent's collector, as in any run. A cause begins at step `AT` and grows from step to step, so that
there is something to see before the loss moves. The same training without
the cause is its pair: same seed, same batches, same weights until the cause begins.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fp8scope.demo import data
from fp8scope.demo.fault import NEVER
from fp8scope.observe.collector import Collector
from fp8scope.observe.tensors import Watching
from fp8scope_kernels import (
    MXFP8,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    RowwiseScaling,
    ScalingState,
    convert,
    fp8_layers,
)

STEPS, AT = 360, 180
EVERY = 4
"""Steps between sampled ones. By default the agent samples one step in 100: of a run that is 25 times as long
this is the same number of samples."""
LONG, LONG_SEED = 2400, 9
BYTES = 256
CAPACITY = 1.25
"""Tokens that an expert takes, relative to an even load; the others pass it by."""
RECIPES: dict[str, Recipe | None] = {
    "float32": None,
    "delayed": DelayedScaling(),
    "short": DelayedScaling(history_length=1),
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "mxfp8": MXFP8(),
}
CAUSES = {
    "learning_rate": "the learning rate grows by 4 % a step, to 300 times",
    "embedding_rate": "that of the embedding alone grows by 6 % a step, to 3,000 times",
    "attention": "queries and keys grow by 3 % a step each (there is no QK norm)",
    "outlier": "one hidden feature of each MLP grows by 12 % a step, and its column of the next weight "
    "shrinks as much: only FP8 can tell",
    "gradient_underflow": "the margin of the gradients' scales grows by 1 every 3 steps: they become zero",
    "stale_scale": "the gradients' scales stay, and the loss scale doubles every 10 steps",
    "short_history": "every second batch is louder, by 6 % a step, and the amax history has one entry",
    "router": "the loss that balances the load of the experts loses weight, and rewards imbalance in the end",
    "data": "a growing share of the text is random bytes: 1 % more every 2 steps",
    "margin": "the margin of inputs and weights falls by 1 every 20 steps: they saturate",
}
PRECISION = {"embedding_rate": "float32", "router": "float32", "attention": "current", "outlier": "current"}
PRECISION |= {"short_history": "short"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training; `cause` is empty for a healthy one."""

    cause: str = ""
    seed: int = 1
    precision: str = "delayed"
    layers: int = 2
    width: int = 48
    experts: int = 0
    batch: int = 8
    context: int = 32
    learning_rate: float = 4e-3
    schedule: str = "constant"
    accumulate: int = 1
    steps: int = STEPS

    @property
    def name(self) -> str:
        values = [str(value) for value in asdict(self).values()]
        return "-".join([self.cause or "healthy", *(values[1:-1] if self.steps == STEPS else values[1:])])

    @property
    def healthy(self) -> Case:
        """The same training without the cause."""
        return replace(self, cause="")


def case_of(cause: str, seed: int) -> Case:
    """The training with this cause."""
    return Case(
        cause=cause,
        seed=seed,
        precision=PRECISION.get(cause, "delayed"),
        experts=4 if cause == "router" else 0,
    )


def varied(number: int, seed: int) -> list[Case]:
    """Healthy trainings of other shapes, rates, schedules and recipes."""
    chance = random.Random(seed)
    return [
        Case(
            seed=1000 * seed + i,
            precision=chance.choice(list(RECIPES)),
            layers=chance.choice((1, 2, 3)),
            width=chance.choice((32, 48, 64)),
            experts=chance.choice((0, 0, 4)),
            batch=chance.choice((4, 8, 16)),
            learning_rate=chance.choice((1e-3, 2e-3, 4e-3, 8e-3)),
            schedule=chance.choice(("cosine", "constant", "restarts", "linear")),
            accumulate=chance.choice((1, 1, 2)),
        )
        for i in range(number)
    ]


def long(number: int) -> list[Case]:
    """Healthy trainings of LONG steps, in which there is more time for a false alarm."""
    return [replace(case, steps=LONG) for case in varied(number, LONG_SEED)]


class Attention(nn.Module):
    """Causal self-attention without QK norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        batch, time_, width = x.shape
        q, k, v = self.qkv(x).view(batch, time_, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time_, width))
        return out


class Mlp(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same."""
        y: Tensor = self.down(functional.gelu(self.up(x)))
        return y


class Mixture(nn.Module):
    """One expert for each token, up to the expert's capacity."""

    balance: Tensor
    """The auxiliary loss of the last call: 1 if the load is even."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Mlp(width, 2 * width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        tokens = x.reshape(-1, x.shape[-1])
        weights = self.gate(tokens).softmax(-1)
        share, chosen = weights.max(-1)
        out = torch.zeros_like(tokens)
        capacity = math.ceil(CAPACITY * len(tokens) / len(self.experts))
        for index, expert in enumerate(self.experts):
            mine = (chosen == index).nonzero().squeeze(1)[:capacity]
            if len(mine):
                out = out.index_add(0, mine, expert(tokens[mine]) * share[mine, None])
        self.balance = (
            len(self.experts)
            * (weights.mean(0) * functional.one_hot(chosen, len(self.experts)).float().mean(0)).sum()
        )
        return out.view_as(x)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(case.width), nn.LayerNorm(case.width)
        self.attention = Attention(case.width, 4)
        self.mlp = Mixture(case.width, case.experts) if case.experts else Mlp(case.width, 4 * case.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Gpt(nn.Module):
    """int64 [batch, time] -> logits [batch, time, 256]."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, case.width)
        self.positions = nn.Embedding(case.context, case.width)
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.layers))
        self.norm = nn.LayerNorm(case.width)
        self.head = nn.Linear(case.width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                nn.init.normal_(parameter, std=case.width**-0.5)

    def layers(self) -> list[Block]:
        """The blocks."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Training:
    """A model with its optimizer and the cause of its case; `train` takes one step."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.corpus = data.load(case.context, 16)
        torch.manual_seed(case.seed)
        self.model = Gpt(case)
        recipe = RECIPES[case.precision]
        if recipe is not None:
            convert(self.model, recipe)
        embedding = self.model.bytes.weight
        others = [each for each in self.model.parameters() if each is not embedding]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": [embedding]}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1)

    def rate(self, step: int) -> float:
        """The learning rate of the schedule."""
        case, share = self.case, step / self.case.steps
        if case.schedule == "constant":
            factor = 1.0
        elif case.schedule == "linear":
            factor = 1.0 - 0.9 * share
        elif case.schedule == "restarts":
            factor = 0.1 + 0.45 * (1 + math.cos(math.pi * (3 * share % 1.0)))
        else:
            factor = 0.1 + 0.45 * (1 + math.cos(math.pi * share))
        return case.learning_rate * factor * min(1.0, step / 20)

    def train(self, step: int) -> tuple[float, float]:
        """Take a step; returns the loss and the gradient norm before clipping."""
        case = self.case
        grown = max(0, step - AT)
        rates = [self.rate(step)] * 2
        if case.cause == "learning_rate":
            rates = [rate * min(1.04**grown, 300.0) for rate in rates]
        elif case.cause == "embedding_rate":
            rates[1] *= min(1.06**grown, 3000.0)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if grown:
            self._spoil(grown)
        factor = self._loudness(grown)
        balance = 0.01 - (0.005 * grown if case.cause == "router" else 0.0)
        self.optimizer.zero_grad()
        total = 0.0
        for part in range(case.accumulate):
            text = self._text(step * case.accumulate + part, grown)
            logits = self.model(text[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            total += float(loss.detach()) / case.accumulate
            for block in self.model.layers():
                if isinstance(block.mlp, Mixture):
                    loss = loss + balance * block.mlp.balance
            torch.autograd.backward(loss * factor / case.accumulate)
        for parameter in self.model.parameters():
            if parameter.grad is not None and factor != 1.0:
                parameter.grad /= factor
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        return total, norm

    def _text(self, number: int, grown: int) -> Tensor:
        # Other seeds see other batches.
        text = self.corpus.batch(1_000_000 * self.case.seed + number, self.case.batch)
        if self.case.cause == "data" and grown:
            generator = torch.Generator().manual_seed(number)
            noise = torch.randint(0, BYTES, text.shape, generator=generator)
            bad = torch.rand(text.shape, generator=generator) < min(0.005 * grown, 1.0)
            text = torch.where(bad, noise, text)
        return text

    def _loudness(self, grown: int) -> float:
        """The factor of this step's loss, which is divided out of the gradients."""
        if self.case.cause == "stale_scale":
            return float(2.0 ** (grown // 10))
        if self.case.cause == "short_history" and grown % 2:
            return float(1.06**grown)
        return 1.0

    @torch.no_grad()
    def _spoil(self, grown: int) -> None:
        case = self.case
        for block in self.model.layers():
            if case.cause == "attention":
                block.attention.qkv.weight[: 2 * case.width].mul_(1.03)
                block.attention.qkv.bias[: 2 * case.width].mul_(1.03)
            elif case.cause == "outlier" and isinstance(block.mlp, Mlp):
                block.mlp.up.weight[0].mul_(1.12)
                block.mlp.up.bias[0].mul_(1.12)
                block.mlp.down.weight[:, 0].div_(1.12)
        if case.cause == "gradient_underflow" and grown % 3 == 0:
            self._set_margin(("grad_output",), grown // 3)
        elif case.cause == "margin" and grown % 20 == 0:
            self._set_margin(("input", "weight"), -(grown // 20))
        elif case.cause == "stale_scale" and grown == 1:
            for state in self._states(("grad_output",)):
                state.recipe = replace(_delayed(state), interval=NEVER)

    def _set_margin(self, roles: tuple[str, ...], margin: int) -> None:
        for state in self._states(roles):
            state.recipe = replace(_delayed(state), margin=margin)

    def _states(self, roles: tuple[str, ...]) -> list[ScalingState]:
        return [layer.state_of(role) for _, layer in fp8_layers(self.model) for role in roles]  # type: ignore[arg-type]


def _delayed(state: ScalingState) -> DelayedScaling:
    assert isinstance(state.recipe, DelayedScaling)
    return state.recipe


@dataclass(frozen=True)
class Series:
    """What was recorded of a training.

    Attributes:
        names: of n tensors.
        loss, grad_norm: float64[steps].
        statistics: float32[steps, n] by name, NaN where not observed.
    """

    names: list[str]
    loss: NDArray[np.float64]
    grad_norm: NDArray[np.float64]
    statistics: dict[str, NDArray[np.float32]]
    cpu_seconds: float


def record(case: Case) -> Series:
    """Train a case, read by the agent's collector."""
    began = time.process_time()
    training = Training(case)
    errors: list[Exception] = []
    collector = Collector(lambda kind, error: errors.append(error))
    collector.every = EVERY
    collector.watch(training.model, training.optimizer, Watching())
    names: list[str] = []
    losses, norms, rows = np.full(case.steps, np.nan), np.full(case.steps, np.nan), []
    for step in range(1, case.steps + 1):
        collector.begin(step)
        losses[step - 1], norms[step - 1] = training.train(step)
        if (grown := collector.new_tensors()) is not None:
            names += [info.name for info in grown[1]]
        snapshot = collector.snapshot({})
        assert snapshot is not None
        observed = snapshot.read()
        rows.append((observed.statistics.copy(), {k: v.copy() for k, v in observed.extras.items()}))
        snapshot.release()
    collector.close()
    for error in errors:
        raise error
    statistics = _assembled(rows, len(names))
    return Series(names, losses, norms, statistics, time.process_time() - began)


def _assembled(rows: list[tuple[Any, dict[str, Any]]], n: int) -> dict[str, NDArray[np.float32]]:
    from fp8scope_kernels import STATISTICS

    columns = {name: np.full((len(rows), n), np.nan, np.float32) for name in STATISTICS}
    for i, (matrix, extras) in enumerate(rows):
        seen = matrix[:, 0] > 0
        for j, name in enumerate(STATISTICS):
            columns[name][i, : len(matrix)][seen] = matrix[seen, j]
        for name, values in extras.items():
            columns.setdefault(name, np.full((len(rows), n), np.nan, np.float32))[i, : len(values)] = values
    return columns
