"""What a model hands over in its forward pass reaches the server and cannot break the training."""

import pytest
import torch
from agent.helpers.wire_server import WireServer
from torch import Tensor, nn
from torch.nn import functional

import fp8scope
from fp8scope.config import Settings
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run

WIDTH = 16


class Block(nn.Module):
    """Computes attention and chooses experts by itself, so that it has to say so."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        self.run.note_attention("block", hidden, hidden, scale=1.0)
        self.run.note_experts("block", hidden.argmax(-1), WIDTH)
        out: Tensor = (hidden @ hidden.transpose(-1, -2)).softmax(-1) @ hidden
        return out


def test_it_works(server: WireServer, settings: Settings) -> None:
    torch.manual_seed(0)
    run = Run(settings, blank_registration("signs"))
    model = Block(run)
    run.watch(model, every=2)
    x = torch.randn(4, 8, WIDTH)
    for _ in range(4):
        with run.step():
            model(x).square().mean().backward()
            functional.scaled_dot_product_attention(x, x, x)
    report = run.finish()
    assert report.complete and report.errors == 0
    (catalogue,) = server.run.catalogues.values()
    places = {tensor["name"]: i for i, tensor in enumerate(catalogue)}
    assert {"block.logits", "block.load"} <= set(places)
    hidden = model.inner(x).detach()
    bound = hidden.norm(dim=-1).amax(-1).square().max()
    assert len(server.run.rows) == 4
    for row in server.run.rows:
        if row["step"] % 2 == 0:
            sampled = [row["tensors"].get(name, []) for name in ("logit_bound", "load_max", "kurtosis")]
            assert all(value is None for values in sampled for value in values)
            continue
        assert row["tensors"]["logit_bound"][places["block.logits"]] == pytest.approx(float(bound), rel=1e-5)
        shares = torch.bincount(hidden.argmax(-1).ravel(), minlength=WIDTH) / 32
        assert row["tensors"]["load_max"][places["block.load"]] == pytest.approx(float(shares.max()))
        assert row["tensors"]["kurtosis"][places["inner.input"]] is not None


def test_wrong_arguments_are_counted_and_not_raised(server: WireServer, settings: Settings) -> None:
    run = Run(settings, blank_registration("signs"))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    run.watch(model, every=1)
    with run.step():
        run.note_attention("block", None, torch.ones(2, 2))  # type: ignore[arg-type]
        run.note_experts("block", torch.ones(3), 4)
        run.note_experts("block", torch.tensor([1]), 0)
        model(torch.ones(2, WIDTH)).sum().backward()
    report = run.finish()
    assert report.complete and report.errors == 3


def test_in_a_compiled_graph_it_does_nothing(server: WireServer, settings: Settings) -> None:
    torch._dynamo.reset()
    run = Run(settings, blank_registration("signs"))
    run.watch(nn.Linear(WIDTH, WIDTH), every=1)
    x = torch.randn(2, 4, WIDTH)

    def forward(x: Tensor) -> Tensor:
        run.note_attention("block", x, x)
        run.note_experts("block", x.argmax(-1), WIDTH)
        return functional.scaled_dot_product_attention(x, x, x)

    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    with run.step():
        assert torch.equal(compiled(x), forward(x))
    with run.step():
        assert torch.equal(compiled(x), forward(x))
    assert run.finish().errors == 0


def test_a_disabled_run_does_nothing() -> None:
    with fp8scope.init(mode="disabled") as run:
        run.note_attention("block", torch.ones(1, 2), torch.ones(1, 2))
        run.note_experts("block", torch.zeros(1), -1)
    assert run.finish().errors == 0
