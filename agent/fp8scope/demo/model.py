"""A small byte-level GPT: pre-norm blocks, learned positions, GELU, an untied output head."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of the model. `width` must be a multiple of `heads`, and of 16 for FP8.

    `earlier`: so many earlier bytes have an embedding at each position, besides the byte itself. A model with
    them knows words within a hundred steps, and its loss is nearly level after some hundred more.
    """

    layers: int = 3
    width: int = 96
    heads: int = 4
    context: int = 64
    earlier: int = 0


class Attention(nn.Module):
    """Causal self-attention."""

    future: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        future = torch.ones(shape.context, shape.context, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        # Not scaled_dot_product_attention, which is slower on a CPU in BF16 at this size.
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        weights = scores.masked_fill(self.future[:time, :time], -torch.inf).softmax(-1).to(v.dtype)
        mixed: Tensor = self.out((weights @ v).transpose(1, 2).reshape(batch, time, width))
        return mixed


class Mlp(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        y: Tensor = self.down(functional.gelu(self.up(x)))
        return y


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class ByteGpt(nn.Module):
    """Predicts the next byte. Its initial weights depend on torch's global random seed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, shape.width)
        self.earlier = nn.ModuleList(nn.Embedding(BYTES, shape.width) for _ in range(shape.earlier))
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(TransformerBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                # As in GPT-2, layers that write to the residual stream start smaller in deeper models.
                writers = 2 * shape.layers if name.endswith(("out.weight", "down.weight")) else 1
                nn.init.normal_(parameter, std=(shape.width * writers) ** -0.5)

    def forward(self, text: Tensor) -> Tensor:
        """int64 [batch, time] -> logits [batch, time, 256]; time is at most the context."""
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        for distance, embedding in enumerate(self.earlier, 1):
            x = x + functional.pad(embedding(text[:, :-distance]), (0, 0, distance, 0))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
