"""A training script that does not use fp8scope. Record it unchanged, or convert it to FP8:

fp8scope run examples/unmodified.py --steps 300
fp8scope run --convert delayed --name "gpt fp8" examples/unmodified.py --steps 300
torchrun --nproc-per-node 2 -m fp8scope run examples/unmodified.py
"""

import argparse
import os

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

TEXT = "The quick brown fox jumps over the lazy dog. " * 200
WIDTH, CONTEXT, BATCH = 48, 32, 8


class TinyGpt(nn.Module):
    """Bytes [batch, time] to logits [batch, time, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits: torch.Tensor = self.head(x + self.mlp(x))
        return logits


def main() -> None:
    """Train in one process, or in several started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    torch.manual_seed(0)
    model: nn.Module = TinyGpt()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
        torch.manual_seed(torch.distributed.get_rank())
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.tensor(list(TEXT.encode()))
    for _ in range(options.steps):
        starts = torch.randint(0, len(data) - CONTEXT - 1, (BATCH,)).tolist()
        text = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
        loss = functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
