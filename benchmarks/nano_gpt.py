"""A GPT in the style of small training scripts: tied embeddings, fused attention, no biases or dropout.

Part of agent_overhead.py. The linear layers stay in high precision; `fp8scope.attach` reads three tensors of
each.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class GptShape:
    """SMALL has 0.82M parameters without the position embedding, MEDIUM 10.8M."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int


SMALL = GptShape(layers=4, heads=4, width=128, context=64, batch=8)
MEDIUM = GptShape(layers=6, heads=6, width=384, context=128, batch=4)


class SelfAttention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.c_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(width, 2)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width, bias=False)
        self.attn = SelfAttention(shape)
        self.ln_2 = nn.LayerNorm(shape.width, bias=False)
        self.c_fc = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.c_proj = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        x = x + self.attn(self.ln_1(x))
        y: Tensor = x + self.c_proj(functional.gelu(self.c_fc(self.ln_2(x))))
        return y


class NanoGpt(nn.Module):
    """int64 [batch, time] -> logits [batch, time, VOCABULARY]."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, shape.width)
        self.wpe = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width, bias=False)
        self.lm_head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.wte(text) + self.wpe(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


class Training:
    """A model with its optimizer; `train` takes one step."""

    def __init__(
        self, shape: GptShape, dtype: torch.dtype = torch.float32, *, compiled: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = NanoGpt(shape).to(dtype)
        if compiled:
            self.model = torch.compile(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.text = torch.randint(VOCABULARY, (shape.batch, shape.context + 1))

    def train(self) -> None:
        logits = self.model(self.text[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), self.text[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
