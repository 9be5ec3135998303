"""torchtune's DiskLogger and fp8scope's logger, as a recipe makes them from its configuration."""

import json
import re
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torchtune import config

settings = OmegaConf.create(
    {
        "output_dir": "out",
        "lr": 0.01,
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "disk"},
    }
)
chosen = OmegaConf.create({**settings, "metric_logger": {**settings.metric_logger}})
# As `tune run ... metric_logger._component_=fp8scope.integrations.torchtune.Fp8scopeLogger` does.
chosen.metric_logger._component_ = "fp8scope.integrations.torchtune.Fp8scopeLogger"
loggers = [config.instantiate(settings.metric_logger), config.instantiate(chosen.metric_logger)]
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
for logger in loggers:
    logger.log_config(chosen)
for step in range(1, 21):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for logger in loggers:
        logger.log_dict(
            {"loss": loss.item(), "lr": settings.lr, "tokens_per_second_per_gpu": 100 / step}, step=step
        )
    if step % 5 == 0:
        for logger in loggers:
            logger.log("val_loss", loss.item() / 2, step=step)
for logger in loggers:
    logger.close()
with Path("logged.jsonl").open("w") as file:
    (path,) = Path("disk").glob("*.txt")
    for line in path.read_text().splitlines():
        number, _, values = line.removeprefix("Step ").partition("|")
        for name, value in re.findall(r"(\w+):(\S+)", values):
            file.write(json.dumps(["torchtune", name, int(number), float(value)]) + "\n")
