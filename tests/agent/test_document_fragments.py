"""Blocks of README.md and docs/ that leave out a model, an optimizer or a loader run with these put in.

Each runs in a process of its own: what a reader's script has before the block, the block, and what shows
that it did something.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from agent.helpers.documents import run_block
from agent.helpers.wire_server import WireServer
from helpers.code_blocks import texts_of

ROOT = Path(__file__).parents[2]
MODEL = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
STEPS = """
for _ in range(3):
    loss = model(torch.randn(16, 32)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ONE_PROCESS = """
import os
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from fp8scope_kernels import CurrentScaling, DelayedScaling, StatisticsBuffer, convert, fp8_layers
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
"""
BLOCKS_OF_A_MODEL = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
    def forward(self, x):
        return self.down(self.up(x).relu())
class Model(nn.Sequential):
    @property
    def blocks(self):
        return list(self)
model = Model(Block(), Block())
"""
FORWARD = """
model(torch.randn(16, 32)).square().mean().backward()
print(len(list(fp8_layers(model))), "layers")
"""
TELEMETRY = """
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
import torch
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
loader, loss = range(3), torch.tensor(2.5)
"""
POINTS = """
for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics:
    print(metric.name, [point.value for point in metric.data.data_points])
"""
TEXTS = """
from types import SimpleNamespace
held_out = [SimpleNamespace(id=f"text {index}", x=torch.randn(16, 32)) for index in range(6)]
def loss(model, text):
    with torch.no_grad():
        return float(model(text.x).square().mean())
"""
# By document and a word of the block: what goes before it, what after it, and what is printed.
FRAGMENTS = {
    ("README.md", "attach"): (MODEL, STEPS + "print(run.finish().complete)", r"True"),
    ("docs/capture.md", "compat"): ("", "print(wandb.init(mode='disabled') is not None)", "True"),
    ("docs/channels.md", "hmac"): (
        "",
        "body, now = b'{}', str(int(time.time()))\n"
        "sign = lambda secret: hmac.new(secret, now.encode() + b'.' + body, hashlib.sha256).hexdigest()\n"
        "print([is_genuine(f't={now},v1={sign(key)}', body, 'secret') for key in (b'secret', b'other')])",
        r"\[True, False\]",
    ),
    ("docs/distributed.md", "sync_amaxes_after"): (
        ONE_PROCESS + MODEL,
        STEPS + "print(len(list(fp8_layers(model))), 'layers')",
        "2 layers",
    ),
    ("docs/distributed.md", "ColwiseParallel"): (
        ONE_PROCESS
        + BLOCKS_OF_A_MODEL
        + "recipe = DelayedScaling()\n"
        + "mesh = init_device_mesh('cpu', (1, 1), mesh_dim_names=('data', 'tensor'))",
        FORWARD,
        "4 layers",
    ),
    ("docs/distributed.md", "gather_weights_in_fp8"): (
        ONE_PROCESS
        + BLOCKS_OF_A_MODEL
        + "mesh = init_device_mesh('cpu', (1,))\npolicy = MixedPrecisionPolicy()",
        FORWARD,
        "4 layers",
    ),
    ("docs/distributed.md", "ScalingLoadPlanner"): (
        ONE_PROCESS
        + MODEL
        + "import tempfile, torch.distributed.checkpoint\n"
        + "convert(model, DelayedScaling())\n"
        + "folder, state = tempfile.mkdtemp(), {'model': model.state_dict()}\n"
        + "torch.distributed.checkpoint.save(state, checkpoint_id=folder)\n",
        "print('loaded')",
        "loaded",
    ),
    ("docs/distributed.md", "Fp8GradientReducer"): (
        ONE_PROCESS
        + MODEL
        + "buffer = StatisticsBuffer()\nbefore = model[0].weight.detach().clone()\n"
        + "loss = model(torch.randn(16, 32)).square().mean()\n",
        "print(bool((model[0].weight != before).any()))",
        "True",
    ),
    ("docs/distributed.md", "Fp6Linear"): (
        MODEL + "linear = model[0]\n",
        "x = torch.randn(4, 32)\nprint(float((layer(x) - linear(x)).norm() / linear(x).norm()) < 0.1)",
        "True",
    ),
    ("docs/evaluations.md", "evaluate_matrix"): (MODEL + TEXTS, "", r"bf16 +held-out nll +0\.\d+"),
    ("docs/otlp.md", "create_gauge"): (TELEMETRY, POINTS, r"step \[2\]\nloss \[2.5\]"),
}


def test_it_works() -> None:
    """The table has each block of these documents, and nothing that is no longer there."""
    for document in {name for name, _ in FRAGMENTS}:
        words = [word for name, word in FRAGMENTS if name == document]
        matched = [[word for word in words if word in block] for block in texts_of(document)]
        assert all(len(each) == 1 for each in matched), (document, matched)
        assert sorted(sum(matched, [])) == sorted(words)


@pytest.mark.parametrize(("document", "word"), FRAGMENTS)
def test_every_fragment_runs(document: str, word: str, server: WireServer, tmp_path: Path) -> None:
    before, after, printed = FRAGMENTS[document, word]
    (block,) = [block for block in texts_of(document) if word in block]
    output = run_block("\n".join((before, block, after)), server, tmp_path)
    assert re.search(printed, output), output
