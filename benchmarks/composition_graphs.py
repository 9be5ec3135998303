"""Part of compositions.py: FP8 layers in graphs, compared with eager code bit for bit."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from fp8scope_kernels import Recipe, StatisticsBuffer, convert, observe

STEPS, WIDTH = 3, 128
Run = Callable[[Tensor], Tensor]


class Mlp(nn.Module):
    """ReLU and sums round alike in every graph."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(x).relu())
        return y


def make(recipe: Recipe) -> tuple[nn.Sequential, StatisticsBuffer]:
    torch.manual_seed(0)
    model, rows = nn.Sequential(Mlp(), Mlp()), StatisticsBuffer()
    convert(model, recipe)
    observe(model, rows)
    return model, rows


def batch(step: int) -> Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step))


def tensors_of(model: nn.Module, rows: StatisticsBuffer) -> dict[str, Tensor]:
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**model.state_dict(), **gradients, "counters": rows.data, "block counters": rows.block_data}


def train(run: Run, model: nn.Module) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = run(batch(step).requires_grad_()).square().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def whole(model: nn.Sequential) -> Run:
    run: Run = torch.compile(model, backend="aot_eager", fullgraph=True)
    return run


def by_blocks(model: nn.Sequential) -> Run:
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def default_backend(model: nn.Sequential) -> Run:
    run: Run = torch.compile(model, fullgraph=True)
    return run


def checkpointed(model: nn.Sequential) -> Run:
    def run(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(model, x, use_reentrant=False)
        return y

    compiled: Run = torch.compile(run, backend="aot_eager", fullgraph=True)
    return compiled


TRAINED: dict[str, Callable[[nn.Sequential], Run]] = {
    "fullgraph": whole,
    "fullgraph by blocks": by_blocks,
    "fullgraph with the default backend": default_backend,
    "fullgraph with checkpointing": checkpointed,
}


def trained(recipe: Recipe, how: str) -> list[str]:
    (eager, expected), (model, rows) = make(recipe), make(recipe)
    losses = train(eager, eager), train(TRAINED[how](model), model)
    return _different(
        {**tensors_of(eager, expected), "losses": losses[0]},
        {**tensors_of(model, rows), "losses": losses[1]},
    )


def exported(recipe: Recipe) -> list[str]:
    model, rows = make(recipe)
    train(model, model)
    before = {name: value.clone() for name, value in tensors_of(model, rows).items()}
    program = torch.export.export(model, (batch(0),)).module()
    differences = _different(before, tensors_of(model, rows))
    model.eval()
    return differences + _different({"output": model(batch(9))}, {"output": program(batch(9))})


def recorded(recipe: Recipe) -> list[str]:
    """make_fx; tracing is a call, too."""
    (eager, expected), (model, rows) = make(recipe), make(recipe)
    graph = make_fx(model)(batch(0))
    eager(batch(0))
    outputs = {"output": eager(batch(1))}, {"output": graph(batch(1))}
    return _different(
        {**tensors_of(eager, expected), **outputs[0]}, {**tensors_of(model, rows), **outputs[1]}
    )


def abstract(recipe: Recipe) -> list[str]:
    with FakeTensorMode():
        model, _ = make(recipe)
        x = torch.randn(64, WIDTH, requires_grad=True)
        torch.autograd.backward(whole(model)(x).sum())
        tensors = {"x": x, **dict(model.named_parameters())}
        return [
            f"{name} has no gradient of its shape"
            for name, tensor in tensors.items()
            if tensor.grad is None or tensor.grad.shape != tensor.shape
        ]


def functional(recipe: Recipe) -> list[str]:
    (eager, expected), (model, rows) = make(recipe), make(recipe)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(model, parameters, (x,))
        return y.square().mean()

    gradients = torch.func.grad(loss)(dict(model.named_parameters()), batch(0))
    torch.autograd.backward(eager(batch(0)).square().mean())
    own = {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}
    return _different({**own, "counters": expected.data}, {**gradients, "counters": rows.data})


def mapped(recipe: Recipe) -> list[str]:
    (eager, expected), (model, rows) = make(recipe), make(recipe)
    outputs = eager(batch(0)), torch.vmap(model)(batch(0).view(4, 16, WIDTH)).flatten(0, 1)
    for output in outputs:
        torch.autograd.backward(output.square().sum())
    return _different(
        {**tensors_of(eager, expected), "output": outputs[0]},
        {**tensors_of(model, rows), "output": outputs[1]},
    )


GRAPHS: dict[str, Callable[[Recipe], list[str]]] = {
    **{name: lambda recipe, name=name: trained(recipe, name) for name in TRAINED},  # type: ignore[misc]
    "torch.export": exported,
    "make_fx": recorded,
    "FakeTensorMode": abstract,
    "torch.func.grad": functional,
    "torch.vmap over inputs": mapped,
}


def _different(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> list[str]:
    return [f"{name} differs" for name in expected if not torch.equal(expected[name], actual[name])]
