"""verl's `Tracking` with its file logger and fp8scope, as its trainers make it; values as of a PPO step."""

import json
import math
from pathlib import Path

from verl.utils.tracking import Tracking

config = {"trainer": {"project_name": "gsm8k", "experiment_name": "ppo", "total_epochs": 1}}
tracking = Tracking("gsm8k", "ppo", ["file", "fp8scope"], config)
if Path("gsm8k/ppo.jsonl").stat().st_size:
    raise SystemExit("the file exists already")
tracking.log({"val-core/reward": 0.25}, step=0)
for step in range(1, 13):
    values = {
        "actor/pg_loss": math.sin(step),
        "critic/score/mean": step / 7,
        "response_length/mean": 100 - step,
    }
    tracking.log({**values, "training/global_step": step}, step=step)
    if step % 4 == 0:
        tracking.log({"val-core/reward": step / 16}, step=step)
tracking.finish()
with Path("logged.jsonl").open("w") as file:
    for line in Path("gsm8k/ppo.jsonl").read_text().splitlines():
        entry = json.loads(line)
        for name, value in entry["data"].items():
            file.write(json.dumps(["verl", name, entry["step"], value]) + "\n")
