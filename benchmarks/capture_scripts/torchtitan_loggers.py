"""A loop that logs by torchtitan's own loggers, to TensorBoard and W&B at once."""

from typing import Any

import torch
from torch import nn
from torchtitan.components.metrics import LoggerContainer, TensorBoardLogger

torch.manual_seed(11)
loggers: Any = LoggerContainer()
loggers.add_logger(TensorBoardLogger("tb", tag="titan"))
model = nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, 31):
    loss = (model(torch.randn(8, 16)) ** 2).mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step == 1 or step % 10 == 0:
        loggers.log(
            {
                "loss_metrics/global_avg_loss": loss.item(),
                "grad_norm": norm.item(),
                "n_tokens_seen": 128 * step,
            },
            step,
        )
loggers.close()
