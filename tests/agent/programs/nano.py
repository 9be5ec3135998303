"""A training in one file, its settings at module level, and nothing of fp8scope. Losses go to stdout."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

# settings
out_dir = "out"
eval_interval = 5
eval_only = False
dataset = "topics"
gradient_accumulation_steps = 1
batch_size = 4
block_size = 32
n_layer = 2
n_head = 2
n_embd = 32
dropout = 0.0
learning_rate = 1e-2
max_iters = 6
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0
warmup_iters = 2
min_lr = 1e-3
device = "cpu"
dtype = "bfloat16" if torch.cuda.is_available() else "float32"
api_key = ""
settings_names = [k for k, v in globals().items() if k[0] != "_" and isinstance(v, int | float | bool | str)]
exec((Path(__file__).parent / "nano_overrides.py").read_text())
config = {k: globals()[k] for k in settings_names}


@dataclass
class ModelConfig:
    """The shape of the model."""

    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int


class Block(nn.Module):
    """Attention, then a feed-forward layer, each beside the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
        )

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.ln_1(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    """A small transformer that returns logits and loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(1337)
tokens_per_iter = gradient_accumulation_steps * batch_size * block_size
print(f"tokens per iteration: {tokens_per_iter}")
text = "\n".join(topics.values())
data = torch.tensor(list(text.encode()), dtype=torch.uint8)
ctx = nullcontext()


def get_batch() -> tuple[Tensor, Tensor]:
    """Texts, and the same one byte later."""
    starts = torch.randint(len(data) - block_size, (batch_size,))
    rows = torch.stack([data[i : i + block_size + 1].long() for i in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def estimate_loss() -> float:
    """Of a few batches, in evaluation mode."""
    model.eval()
    losses: list[float] = [model(*get_batch())[1].item() for _ in range(2)]
    model.train()
    return sum(losses) / len(losses)


def get_lr(it: int) -> float:
    """Warm-up, then a cosine."""
    if it < warmup_iters:
        return float(learning_rate * (it + 1) / (warmup_iters + 1))
    ratio = (it - warmup_iters) / max(1, max_iters - warmup_iters)
    return float(min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr))


iter_num, best_val_loss = 0, 1e9
model = Model(ModelConfig(block_size, 256, n_layer, n_head, n_embd))
scaler = torch.amp.GradScaler("cpu", enabled=dtype == "float16")
optimizer = torch.optim.AdamW(
    model.parameters(), lr=learning_rate, betas=(beta1, beta2), weight_decay=weight_decay
)
X, Y = get_batch()
while iter_num < max_iters:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        print(f"step {iter_num}: val {estimate_loss():.4f}")
    for _ in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.9g}")
    iter_num += 1
