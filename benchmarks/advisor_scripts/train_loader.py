"""Each sample waits for slow storage, in the training process. `--mended`: in eight workers."""

import sys
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WORKERS = 8 if "--mended" in sys.argv else 0


class Stored(Dataset[Tensor]):
    """Samples that take half a millisecond each."""

    def __len__(self) -> int:
        return 64 * 40

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.0005)
        return torch.full((1024,), float(index % 7))


model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
loader = DataLoader(Stored(), batch_size=64, num_workers=WORKERS, persistent_workers=WORKERS > 0)
for batch in loader:
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
