"""A small GPT, as people write it: embeddings, blocks of causal attention and MLP, a head."""

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, HEADS, LENGTH = 40, 32, 2, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        query, key, value = self.qkv(self.attention_norm(x)).view(heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden: Tensor = self.down(functional.gelu(self.up(self.mlp_norm(x))))
        return x + hidden


class Gpt(nn.Module):
    """Words [batch, LENGTH] in, the mean loss of predicting the next one out."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.positions.weight[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def some_words(seed: int, batch: int = 4) -> Tensor:
    return torch.randint(WORDS, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))
