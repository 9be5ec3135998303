"""Composer's Trainer with its logger in memory, and fp8scope beside it."""

import json
from pathlib import Path

import torch

# Composer imports torchvision, which describes operators that only its build for this torch has.
OPERATORS = ("nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
library = torch.library.Library("torchvision", "FRAGMENT")
for name in (*OPERATORS, *(f"_{name}_backward" for name in OPERATORS)):
    library.define(f"{name}(Tensor x) -> Tensor")

from composer import Trainer  # noqa: E402
from composer.loggers import InMemoryLogger  # noqa: E402
from composer.models import ComposerModel  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from fp8scope.integrations.composer import Fp8scopeLogger  # noqa: E402


class Squares(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return self.layer(batch[0])

    def loss(self, outputs, batch):
        return outputs.square().mean()


torch.manual_seed(0)
model = Squares()
memory = InMemoryLogger()
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(TensorDataset(torch.randn(32, 4)), 8),
    optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
    max_duration="3ep",
    device="cpu",
    loggers=[memory, Fp8scopeLogger(name="composer")],
    progress_bar=False,
)
trainer.fit()
trainer.close()
with Path("logged.jsonl").open("w") as file:
    for name, points in memory.data.items():
        for time, value in points:
            if isinstance(value, int | float) or torch.is_tensor(value):
                file.write(json.dumps(["composer", name, int(time.batch), float(value)]) + "\n")
