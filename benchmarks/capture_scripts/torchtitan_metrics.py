"""torchtitan's metrics processor with fp8scope beside TensorBoard, as its trainer makes it.

The processor itself needs a GPU, whose memory it measures: only the loggers are torchtitan's own here.
"""

import torch
from torch import distributed

from fp8scope.integrations.torchtitan import Fp8scopeMetrics


class Alone:
    """The dimensions of a job of one rank."""

    pp_enabled = False


distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:29533", rank=0, world_size=1)
config = Fp8scopeMetrics.Config(log_freq=1, enable_tensorboard=True, fp8scope_name="titan")
processor = object.__new__(Fp8scopeMetrics)
loggers = processor._build_metric_logger(
    config=config,
    parallel_dims=Alone(),
    dump_folder="outputs",
    pp_schedule="1F1B",
    config_dict={"training": {"steps": 20}},
)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 21):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    values = {
        "loss_metrics/global_avg_loss": loss.item(),
        "grad_norm": norm.item(),
        "throughput(tps)": 8.0 / step,
    }
    loggers.log(values, step)
    if step % 5 == 0:
        loggers.log({"validation_metrics/loss": loss.item() / 2}, step)
loggers.close()
distributed.destroy_process_group()
