"""Ray Train with two workers, whose first one writes down what it reports."""

import json
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from fp8scope.integrations.ray import Fp8scopeCallback


def loop(config):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rank = ray.train.get_context().get_world_rank()
    for step in range(12):
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values = {"loss": loss.item(), "worker": rank}
        if rank == 0:
            with open(config["file"], "a") as file:
                for name, value in values.items():
                    file.write(json.dumps(["ray", name, step, value]) + "\n")
        ray.train.report({**values, "step": step})


ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
TorchTrainer(
    loop,
    train_loop_config={"file": str(Path("logged.jsonl").absolute())},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        name="reports", storage_path=str(Path("ray").absolute()), callbacks=[Fp8scopeCallback()]
    ),
).fit()
