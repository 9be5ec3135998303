"""torchao's layers fall back as ours do; Transformer Engine's are another matter."""

from typing import Any

import pytest
import torch
from agent.helpers.models import Block, precisions
from torch import nn

from fp8scope.control.precision import WatchedLayers, find, set_products
from fp8scope_kernels import PRODUCTS


def torchao_model(**options: Any) -> nn.Module:
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    config = float8.Float8LinearConfig(emulate=True, **options)
    return float8.convert_to_float8_training(model, config=config)  # type: ignore[no-any-return]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(16, 32, generator=generator, requires_grad=True)
    model(x).backward(torch.randn(16, 32, generator=generator))
    assert x.grad is not None
    return [
        x.grad,
        *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None),
    ]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(a, b, strict=True))


def test_it_works() -> None:
    model = torchao_model()
    torch.manual_seed(0)
    plain = gradients(nn.Sequential(Block(), Block()))
    fp8 = gradients(model)
    found = find([model], "*")
    assert set(found.paths) == {"0.up", "0.down", "1.up", "1.down"}
    layers = WatchedLayers()
    layers.watch(model)
    assert len(layers.switch(found, "bf16")) == 4 and set(precisions(model).values()) == {"bf16"}
    assert not same(plain, fp8) and same(gradients(model), plain), "in the precision of its operands"
    assert len(layers.switch(found, "fp8", only_fallen=True)) == 4
    assert same(gradients(model), fp8), "as before, bit for bit"


@pytest.mark.parametrize("product", PRODUCTS)
def test_torchaos_products_are_switched_one_by_one(product: Any) -> None:
    """As our own layers do it: each product of a layer alone changes just what it computes."""
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    model = float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True))
    layer: Any = next(iter(model.children()))
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    upstream = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))

    def passes(products: Any) -> list[torch.Tensor]:
        set_products(layer, products)
        model.zero_grad()
        x.grad = None
        output = model(x)
        output.backward(upstream)
        assert x.grad is not None
        return [output.detach(), x.grad.clone(), layer.weight.grad.clone()]

    fp8, exact, one = passes(PRODUCTS), passes(()), passes((product,))
    for index, name in enumerate(PRODUCTS):
        assert not torch.equal(fp8[index], exact[index])
        assert torch.equal(one[index], (fp8 if name == product else exact)[index])


def test_what_cannot_be_switched_is_said_clearly() -> None:
    model = torchao_model()
    layer: Any = dict(model.named_modules())["0.up"]
    object.__setattr__(layer.config, "enable_fsdp_float8_all_gather", True)
    assert any("gathered in FP8" in problem for problem in find([model], "0.up").problems)


class FakeModule(nn.Module):
    """Laid out as Transformer Engine's modules are."""

    fp8_meta: dict[str, Any] = {}


FakeModule.__module__ = "transformer_engine.pytorch.module.linear"


def test_transformer_engine_is_told_to_be_another_matter() -> None:
    found = find([nn.Sequential(FakeModule())], "0")
    assert not found.layers and "autocast applies" in found.problems[0]
