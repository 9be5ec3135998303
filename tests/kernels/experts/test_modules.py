"""Experts of other libraries, whose weights are 3-D parameters: their products in FP8 by `convert`."""

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernels.helpers.experts import (
    CHOICES,
    EXPERTS,
    HIDDEN,
    MODELS,
    WIDTH,
    Block,
    GroupedExperts,
    gpt_oss,
    mixtral,
    run,
    train,
)
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import JetMoeConfig, Llama4TextConfig
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoE
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from fp8scope_kernels import (
    MXFP8,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    convert,
    fp8_experts,
    observe,
    plain_state_dict,
    revert,
    scaling_status,
)
from fp8scope_kernels.experts.modules import Fp8Experts
from fp8scope_kernels.recipes import ROLES

RECIPES = (DelayedScaling(), CurrentScaling(), RowwiseScaling(), BlockScaling(), MXFP8())
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.kind)
ROUNDING = 2**-4 * (8 / 3) ** 0.5
"""Of a gradient, relative: eight casts to E4M3 lie on the longest way, each with errors spread up to 2^-4."""


def deviation(own: Tensor, exact: Tensor) -> float:
    return float((own - exact).detach().norm() / exact.detach().norm())


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("implementation", ("grouped_mm", "eager", "batched_mm"))
def test_it_works(make: Callable[[], Any], implementation: str, one_thread: None) -> None:
    torch.manual_seed(0)
    model = make()
    model.set_experts_implementation(implementation)
    plain = copy.deepcopy(model)
    names = list(model.state_dict())
    report = convert(model, MXFP8(), include="*.experts")
    assert report.converted == ("model.layers.0.mlp.experts",)
    assert list(model.state_dict()) == names
    own, exact = train(model), train(plain)
    assert own.keys() == exact.keys()
    assert deviation(own["loss"], exact["loss"]) < 1e-3
    for name, gradient in own.items():
        assert deviation(gradient, exact[name]) < ROUNDING, name
    assert not torch.equal(
        own["model.layers.0.mlp.experts.down_proj"], exact["model.layers.0.mlp.experts.down_proj"]
    )
    report = revert(model)
    assert report.converted == ("model.layers.0.mlp.experts",)
    again = train(model)
    assert all(torch.equal(again[name], exact[name]) for name in exact)


class Recorded:
    """A hook that keeps the arguments of a module's calls."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.args = tuple(arg.detach().clone() for arg in args)


@recipes
@pytest.mark.parametrize("make", (mixtral, gpt_oss), ids=("mixtral", "gpt_oss"))
def test_counters_are_those_of_each_matrix_alone(make: Callable[[], Any], recipe: Recipe) -> None:
    torch.manual_seed(0)
    model = make()
    convert(model, recipe, include="*.experts")
    buffer, recorded = StatisticsBuffer(), Recorded()
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(recorded)
    observe(model, buffer)
    train(model)
    hidden, chosen, _ = recorded.args
    names = [info.name for info in buffer.catalogue]
    path = "model.layers.0.mlp.experts.gate_up_proj"
    for expert in range(EXPERTS):
        weight = experts.gate_up_proj[expert].detach()
        weight = weight.t() if make is gpt_oss else weight
        linear = Fp8Linear(WIDTH, 2 * HIDDEN, bias=False, recipe=recipe)
        linear.weight.data = weight
        alone = StatisticsBuffer()
        observe(linear, alone)
        linear(hidden[(chosen == expert).any(1)])
        for role in ("input", "weight"):
            row = names.index(f"{path}.expert_{expert}.{role}")
            other = [info.name for info in alone.catalogue].index(role)
            assert torch.equal(buffer.data[row], alone.data[other])
            assert torch.equal(buffer.block_data[row], alone.block_data[other])
    numel = [int(buffer.data[names.index(f"{path}.expert_{n}.grad_output"), 0]) for n in range(EXPERTS)]
    assert numel == [int((chosen == expert).sum()) * 2 * HIDDEN for expert in range(EXPERTS)]
    assert buffer.catalogue[names.index(f"{path}.input")].shape == (-1, WIDTH)


@recipes
@pytest.mark.parametrize("way", ("grouped_mm", "loop", "bmm"))
def test_experts_by_torchs_own_products(way: str, recipe: Recipe) -> None:
    block, plain = Block(way), Block(way)
    assert convert(block, recipe).converted == ("experts",)
    assert [path for path, _ in fp8_experts(block)] == ["experts.w1", "experts.w2", "experts.w3"]
    buffer = StatisticsBuffer()
    assert observe(block, buffer) == len(buffer) == 3 * len(ROLES) * (1 + EXPERTS)
    own, exact = run(block), run(plain)
    assert own["output"].dtype == exact["output"].dtype
    for name, value in own.items():
        # Gradients in E5M2 are rounded by 2^-3 at most.
        assert deviation(value, exact[name]) < 2**-3, name
    assert (buffer.data[:, 0] > 0).all()
    for info, row in zip(buffer.catalogue, buffer.data, strict=True):
        if info.name.endswith(".weight") and "expert_" not in info.name:
            assert row[0] == EXPERTS * WIDTH * HIDDEN
            assert row[1] == block.get_parameter(info.module).abs().amax().to(
                torch.bfloat16 if way == "grouped_mm" else torch.float32
            )


def test_the_ways_to_multiply_agree() -> None:
    results = []
    for way in ("loop", "bmm"):
        block = Block(way)
        convert(block, DelayedScaling())
        results.append([run(block) for _ in range(2)][1])
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_uneven_tokens() -> None:
    block = Block()
    convert(block, CurrentScaling())
    own = run(block, (0, 30, 1, 0))
    assert not own["experts.w1"][0].any() and own["experts.w1"][1].any() and not own["experts.w1"][3].any()


def test_another_use_of_a_weight_is_named() -> None:
    block = Block("einsum")
    convert(block, CurrentScaling())
    with pytest.warns(UserWarning, match=r"GroupedExperts uses w1 by einsum, which is not in FP8"):
        own = run(block)
    exact = run(Block("einsum"))
    assert all(deviation(own[name], exact[name]) < 2**-3 for name in own)


class Hidden(torch.autograd.Function):
    """A product that torch does not show, as those of Triton kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.new_tensor(x.detach().numpy() @ weight.detach().numpy()[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class HiddenExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = Hidden.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return product


def test_products_that_nobody_sees_are_named() -> None:
    model = nn.Sequential(HiddenExperts())
    convert(model, CurrentScaling(), include="0")
    with pytest.warns(UserWarning, match="uses none of its weights in a product"):
        model(torch.randn(8, WIDTH))


class Other(nn.Module):
    """3-D parameters that may be anything."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.expand(len(self.w), -1, -1), self.w)


def test_what_is_left_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(32, 32),
            "lookup": Other(4, 32, 32),
            "position": Other(1, 32, 32),
            "conv": nn.Conv1d(32, 32, 16),
            "experts": Other(4, 32, 24),
            "fp8_experts": Other(4, 32, 32).to(torch.float8_e4m3fn),
            "several": nn.ParameterList([torch.randn(4, 32, 32)]),
        }
    )
    warns = pytest.warns(UserWarning, match="fp8_experts; its weight is quantised already: float8_e4m3fn")
    with caplog.at_level(logging.INFO, logger="fp8scope_kernels.convert"), warns:
        report = convert(model, MXFP8())
    reasons = {entry.name: entry.reason for entry in report.entries}
    assert report.converted == ("linear",)
    assert "not known to be those of experts" in reasons["lookup"] and "lookup" in caplog.text
    assert "w: 32 x 24 is not in multiples of 16" in reasons["experts"] and "experts" in caplog.text
    assert "in a list" in reasons["several"] and "several" in caplog.text
    assert reasons["position"] == reasons["conv"] == "not a linear layer"
    del model["fp8_experts"]
    assert convert(model, MXFP8(), include="lookup").converted == ("lookup",)
    assert {entry.name: entry.reason for entry in convert(model, MXFP8(), include="lookup").entries}[
        "lookup"
    ] == ("already FP8")
    x = torch.randn(5, 32)
    assert (
        deviation(model["lookup"](x), torch.bmm(x.expand(4, -1, -1), model.get_parameter("lookup.w"))) < 2**-3
    )


def test_a_selection_applies_to_experts() -> None:
    block = Block()
    with pytest.warns(UserWarning, match="No layer was converted"):
        assert convert(block, MXFP8(), exclude="experts").entries[0].reason == "excluded"
    with pytest.warns(UserWarning, match="No layer was converted"):
        assert not convert(block, MXFP8(), include=lambda name, module: False).converted
    block.experts.forward = block.experts.forward  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="No layer was converted"):
        assert convert(block, MXFP8()).entries[0].reason == "its forward was replaced"


class Llama4(nn.Module):
    """Experts of Transformers outside of its interface: bmm over all experts."""

    def __init__(self) -> None:
        super().__init__()
        config = Llama4TextConfig(
            hidden_size=WIDTH,
            intermediate_size=HIDDEN,
            num_local_experts=EXPERTS,
            num_experts_per_tok=CHOICES,
        )
        self.moe = Llama4TextMoe(config)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.moe(x)[0]
        return output


class JetMoe(nn.Module):
    """Experts of Transformers outside of its interface: a loop over linear."""

    def __init__(self) -> None:
        super().__init__()
        config = JetMoeConfig(
            hidden_size=WIDTH,
            intermediate_size=HIDDEN,
            num_local_experts=EXPERTS,
            num_experts_per_tok=CHOICES,
        )
        self.moe = JetMoeMoE(config)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.moe(x)[0]
        return output


@pytest.mark.parametrize(
    ("make", "paths"),
    (
        (Llama4, ["moe.experts.gate_up_proj", "moe.experts.down_proj"]),
        (JetMoe, ["moe.input_linear.weight", "moe.output_linear.weight"]),
    ),
)
def test_experts_of_transformers_by_their_own_products(
    make: Callable[[], nn.Module], paths: list[str]
) -> None:
    torch.manual_seed(0)
    model = make()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    plain = copy.deepcopy(model)
    convert(model, MXFP8(), include=lambda name, module: "shared" not in name)
    assert [path for path, _ in fp8_experts(model)] == paths
    x = torch.randn(2, 16, WIDTH)
    for side in (model, plain):
        side(x).square().sum().backward()
    # Not that of a router, in which most of two large sums cancels.
    for name in paths:
        own, exact = model.get_parameter(name).grad, plain.get_parameter(name).grad
        assert own is not None and exact is not None
        assert deviation(own, exact) < ROUNDING, name


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def test_experts_are_gathered_by_fsdp(one_rank: None) -> None:
    block, sharded, late = Block(), Block(), Block()
    for side in (block, sharded):
        convert(side, DelayedScaling())
    fully_shard(sharded.experts)
    fully_shard(late.experts)
    with pytest.warns(UserWarning, match="convert before fully_shard"):
        assert "sharded" in convert(late, MXFP8()).entries[0].reason
    for _ in range(2):
        expected, own = run(block), run(sharded)
        for name, value in expected.items():
            part: Any = own[name]
            assert torch.equal(part.full_tensor() if isinstance(part, DTensor) else part, value)
    assert revert(sharded).converted == ("experts",)
    assert not any(isinstance(module, Fp8Experts) for module in sharded.modules())
    run(sharded)


def test_experts_divided_among_ranks_are_refused() -> None:
    block = Block()
    convert(block, MXFP8())
    for name in ("w1", "w2", "w3"):
        setattr(block.experts, name, nn.Parameter(getattr(block.experts, name).detach()[:2]))
    with pytest.raises(RuntimeError, match="divided among ranks"):
        run(block, (10, 10))


def test_checkpoints_and_copies() -> None:
    block, plain = Block(), Block()
    convert(block, DelayedScaling())
    run(block)
    with pytest.warns(RuntimeWarning, match="no scaling state"):
        block.load_state_dict(plain.state_dict())
    assert set(scaling_status(block).values()) == {"missing"}
    assert "experts.w1.input" in scaling_status(block)
    run(block)
    saved = block.state_dict()
    plain.load_state_dict(plain_state_dict(saved))
    resumed = Block()
    convert(resumed, DelayedScaling())
    resumed.load_state_dict(copy.deepcopy(saved))
    twins = copy.deepcopy(block), pickle.loads(pickle.dumps(block)), resumed
    expected = run(block)
    for twin in twins:
        assert isinstance(twin.experts, GroupedExperts) and isinstance(twin.experts, Fp8Experts)
        own = run(twin)
        assert all(torch.equal(own[name], expected[name]) for name in expected)
    assert revert(block).converted == ("experts",) and type(block.experts) is GroupedExperts
    assert list(block.state_dict()) == ["experts.w1", "experts.w2", "experts.w3"]
    assert vars(block.experts).keys() == vars(plain.experts).keys()


def test_a_compiled_model_breaks_at_the_experts() -> None:
    block, compiled = Block("bmm"), Block("bmm")
    for side in (block, compiled):
        convert(side, DelayedScaling())
    compiled.compile(backend="eager")
    expected, own = run(block), run(compiled)
    assert all(torch.equal(own[name], expected[name]) for name in expected)
