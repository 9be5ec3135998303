"""A script that saves, copies and exports what it trains, and prints a digest of each.

FP8SCOPE_ATTACH=1 attaches the training to a run.
"""

import copy
import hashlib
import io
import os
from typing import Any

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """A layer for each kind of observer. It pickles its attributes itself, as models of Lightning do."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 32)
        self.router = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 4) for _ in range(4))
        self.body = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.rnn(x)[0]
        out: Tensor = self.body(hidden) + self.router(hidden)
        for expert in self.experts:
            out = out + expert(hidden)
        return out

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


def show_shapes(module: nn.Module, inputs: Any, output: Any = None) -> None:
    """A hook of the script."""


def digest(value: bytes | str) -> str:
    """A short digest."""
    return hashlib.sha256(value if isinstance(value, bytes) else value.encode()).hexdigest()[:16]


def saved(value: Any) -> bytes:
    """What `torch.save` writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


torch.manual_seed(0)
model = Model()
handle = model.body.register_forward_hook(show_shapes)
model.body[0].register_forward_hook(show_shapes, prepend=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
optimizer.register_step_post_hook(lambda *_: None)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
if os.environ.get("FP8SCOPE_ATTACH"):
    import fp8scope

    fp8scope.attach(model, optimizer, data_hash=True)
for step in range(4):
    loss = model(torch.randn(5, 8, 16)).square().mean()
    scaled = scaler.scale(loss)
    optimizer.zero_grad()
    scaled.backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    if step == 2:
        # Registered in the middle: its number would be another one if the agent's hooks counted.
        model.body.register_forward_pre_hook(show_shapes)
        handle.remove()
model(torch.randn(5, 8, 16))
x = torch.ones(3, 2, 16)
print("loss", loss.item())
print("model", digest(saved(model)))
print("part", digest(saved({"a": model, "b": model.body, "epoch": 3})))
print("optimizer", digest(saved(optimizer)), digest(saved(scheduler)), digest(saved(scaler)))
print("state", digest(saved((model.state_dict(), optimizer.state_dict()))))
print("copies", digest(saved(copy.deepcopy(model))), digest(saved(copy.copy(model))))
print("output", digest(saved(model(x))), digest(saved(scaled)))
print("copied hooks", digest(str([list(m._forward_hooks) for m in copy.deepcopy(model).modules()])))
for strict in (False, True):
    exported = torch.export.export(model.body, (torch.ones(2, 32),), strict=strict)
    print("export", digest(str(exported.graph)))
print("script", digest(str(torch.jit.script(model.experts[0]).code)))
print("trace", digest(str(torch.jit.trace(model, (x,)).inlined_graph)))  # type: ignore[no-untyped-call]
print("fx", digest(str(torch.fx.symbolic_trace(model.body).code)))
torch.save(model, os.environ["SAVED"])
