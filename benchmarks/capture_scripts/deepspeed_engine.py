"""DeepSpeed's engine with its CSV monitor, and fp8scope's beside it."""

import json
from pathlib import Path

import deepspeed
import torch

from fp8scope.integrations.deepspeed import record

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "job"},
}
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
monitor = record(engine, name="deepspeed")
for _ in range(24):
    loss = engine(torch.randn(4, 8)).square().mean()
    engine.backward(loss)
    engine.step()
monitor.values.finish()
# DeepSpeed's files have samples in place of steps.
with Path("logged.jsonl").open("w") as file:
    for path in sorted(Path("csv", "job").glob("*.csv")):
        name = path.stem.replace("_", "/", 2)
        for line in path.read_text().splitlines()[1:]:
            samples, value = line.split(",")
            file.write(json.dumps(["deepspeed", name, int(samples) // 8, float(value)]) + "\n")
torch.distributed.destroy_process_group()
