"""Attention writes its matrix to memory. `--mended`: it is fused."""

import math
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

MENDED = "--mended" in sys.argv


class Attention(nn.Module):
    """Causal attention of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        if MENDED:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            logits = query @ key.transpose(-2, -1) / math.sqrt(key.shape[-1])
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            mixed = logits.masked_fill(~mask, -math.inf).softmax(-1) @ value
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + y


model = nn.Sequential(Attention(), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), Attention())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(4, 256, 128)
for _ in range(40):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
