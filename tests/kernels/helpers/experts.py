"""Models with experts: Transformers' own, and modules with torch's products, and a step of their training."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

EXPERTS, WIDTH, HIDDEN, CHOICES = 4, 32, 48, 2
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": CHOICES,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
TOKENS = torch.arange(32).view(2, 16) % 64


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES))


def qwen() -> Any:
    sizes = {**SIZES, "num_experts": EXPERTS, "moe_intermediate_size": HIDDEN, "head_dim": 16}
    del sizes["num_local_experts"]
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))


def gpt_oss() -> Any:
    """Transposed weights, biases, and a gate of its own."""
    config = transformers.GptOssConfig(**SIZES, head_dim=16, layer_types=["full_attention"])
    model = transformers.GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


MODELS = {"mixtral": mixtral, "qwen": qwen, "gpt_oss": gpt_oss}


def train(model: nn.Module) -> dict[str, Tensor]:
    """The loss, and the gradients by name."""
    model.zero_grad()
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


class GroupedExperts(nn.Module):
    """Experts as torchtitan writes them: w1, w2 and w3, with torch's grouped product, a loop, or bmm."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5)
        self.w3 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        if self.way == "grouped_mm":
            offsets = torch.cumsum(tokens_per_expert, 0, dtype=torch.int32)
            x16 = x.bfloat16()
            gate = functional.silu(torch._grouped_mm(x16, self.w1.bfloat16().transpose(-2, -1), offs=offsets))
            up = functional.grouped_mm(x16, self.w3.bfloat16().transpose(-2, -1), offs=offsets)
            return torch._grouped_mm(gate * up, self.w2.bfloat16().transpose(-2, -1), offs=offsets).type_as(x)
        if self.way == "loop":
            parts = torch.split(x, tokens_per_expert.tolist(), dim=0)
            outputs = []
            for expert, part in enumerate(parts):
                gate = functional.silu(torch.matmul(part, self.w1[expert].transpose(-2, -1)))
                outputs.append(functional.linear(gate * (part @ self.w3[expert].mT), self.w2[expert]))
            return torch.cat(outputs)
        if self.way == "einsum":
            grouped = x.view(EXPERTS, -1, WIDTH)
            hidden = functional.silu(torch.einsum("eti,ehi->eth", grouped, self.w1)) * (grouped @ self.w3.mT)
            return torch.bmm(hidden, self.w2.transpose(1, 2)).flatten(0, 1)
        grouped = x.view(EXPERTS, -1, WIDTH)
        hidden = functional.silu(torch.bmm(grouped, self.w1.transpose(1, 2))) * (grouped @ self.w3.mT)
        return torch.bmm(hidden, self.w2.transpose(1, 2)).flatten(0, 1)


class Block(nn.Module):
    """A block with experts; `scaling` is a factor in many blocks of others."""

    scaling = 2.0

    def __init__(self, way: str = "grouped_mm") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.experts = GroupedExperts(way)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        output: Tensor = self.experts(x, counts)
        return self.scaling * output


def run(block: nn.Module, counts: tuple[int, ...] = (10, 10, 10, 10)) -> dict[str, Tensor]:
    x = torch.randn(sum(counts), WIDTH, generator=torch.Generator().manual_seed(3)).requires_grad_()
    block.zero_grad()
    output = block(x, torch.tensor(counts))
    output.float().square().mean().backward()
    assert x.grad is not None
    gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "x": x.grad, **gradients}
