"""Fp8GroupedLinear: each expert is an Fp8Linear of its own, in bits, state and counters."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8scope_kernels import (
    MXFP4,
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8GroupedLinear,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    keep_weights,
    observe,
    plain_state_dict,
    scaling_status,
    unobserve,
)
from fp8scope_kernels.random_stream import stream_of
from fp8scope_kernels.recipes import ROLES

EXPERTS, TOKENS, INPUTS, OUTPUTS = 4, 40, 64, 32
ENDS = (7, 7, 39, 40)
"""The second expert has no tokens, the last one has one."""
NUMEL, AMAX, SCALE = 0, 1, 2

RECIPES: tuple[Recipe, ...] = (
    DelayedScaling(history_length=2),
    CurrentScaling(),
    RowwiseScaling(),
    BlockScaling(),
    MXFP8(),
    MXFP4(),
    NVFP4(stochastic_gradients=False),
)
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.kind)


def make(recipe: Recipe, bias: bool = True) -> Fp8GroupedLinear:
    torch.manual_seed(0)
    return Fp8GroupedLinear(EXPERTS, INPUTS, OUTPUTS, bias, recipe=recipe)


def alone(layer: Fp8GroupedLinear) -> nn.ModuleList:
    """Each expert as an `Fp8Linear`."""
    layers = nn.ModuleList()
    for expert in range(EXPERTS):
        linear = Fp8Linear(INPUTS, OUTPUTS, layer.bias is not None, recipe=layer.recipe)
        with torch.no_grad():
            linear.weight.copy_(layer.weight[expert])
            if layer.bias is not None:
                linear.bias.copy_(layer.bias[expert])
        layers.append(linear)
    return layers


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    scale = torch.logspace(-3, 3, TOKENS)[:, None]
    return (torch.randn(TOKENS, INPUTS, generator=generator) * scale * (step + 1)).requires_grad_()


def train(layer: Fp8GroupedLinear, step: int, ends: tuple[int, ...] = ENDS) -> tuple[Tensor, Tensor]:
    """The output and the gradient of the input, after a forward and a backward pass."""
    x = batch(step)
    output = layer(x, torch.tensor(ends, dtype=torch.int32))
    loss: Tensor = output.square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return output.detach(), x.grad


@recipes
def test_it_works(recipe: Recipe) -> None:
    layer = make(recipe)
    linears = alone(layer)
    buffer, expected = StatisticsBuffer(), StatisticsBuffer()
    assert observe(layer, buffer) == len(ROLES) * (1 + EXPERTS)
    observe(linears, expected)
    for step in range(3):
        output, gradient = train(layer, step)
        x = batch(step)
        parts = [
            linear(x[start:end])
            for linear, start, end in zip(linears, (0, *ENDS), ENDS, strict=False)
            if end > start
        ]
        torch.cat(parts).square().sum().backward()  # type: ignore[no-untyped-call]
        assert torch.equal(output, torch.cat(parts))
        assert x.grad is not None and torch.equal(gradient, x.grad)
    assert layer.bias is not None
    for expert, linear in enumerate(linears):
        assert isinstance(linear, Fp8Linear)
        has_tokens = linear.weight.grad is not None
        assert has_tokens == (expert != 1)
        for whole, single in ((layer.weight, linear.weight), (layer.bias, linear.bias)):
            assert whole.grad is not None
            expected_gradient = torch.zeros_like(single) if single.grad is None else single.grad
            assert torch.equal(whole.grad[expert], expected_gradient)
        for role in ROLES:
            own, state = layer.state_of(role).of(expert), linear.state_of(role)
            assert all(torch.equal(value, own.get_buffer(name)) for name, value in state.named_buffers())
            row = rows(buffer, f"expert_{expert}.{role}")
            assert torch.equal(row, rows(expected, f"{expert}.{role}"))
    for role in ROLES:
        singles = torch.stack([rows(buffer, f"expert_{expert}.{role}") for expert in (0, 2, 3)])
        row, width = rows(buffer, role), 7
        counts = [NUMEL, *range(SCALE + 1, width)]
        assert torch.equal(row[counts], singles[:, counts].sum(0))
        assert row[AMAX] == singles[:, AMAX].amax()
        if recipe.block_of(role) is None:
            # Scales of delayed scaling follow other calls.
            assert (
                row[SCALE].isnan()
                if recipe.kind == "DelayedScaling"
                else row[SCALE] <= singles[:, SCALE].amin()
            )
        else:
            assert torch.equal(row[width : width + 2], singles[:, width : width + 2].sum(0))
            assert row[SCALE] == singles[:, SCALE].median()
            assert row[width + 2] == singles[:, width + 2].amin()


def same(left: Tensor, right: Tensor) -> bool:
    """Return whether the rows are equal; unknown scales are NaN."""
    return torch.equal(left.nan_to_num(-1.0), right.nan_to_num(-1.0))


def rows(buffer: StatisticsBuffer, name: str) -> Tensor:
    """The statistics of a tensor, and those of its blocks."""
    index = [info.name for info in buffer.catalogue].index(name)
    return torch.cat((buffer.data[index], buffer.block_data[index]))


def test_the_scale_of_the_layer_is_that_of_its_largest_amax() -> None:
    layer, buffer = make(CurrentScaling()), StatisticsBuffer()
    observe(layer, buffer)
    # The second expert gets zeros, whose scale is 1.
    x = torch.cat((batch(0)[:20].detach(), torch.zeros(20, INPUTS)))
    layer(x, torch.tensor([20, 40, 40, 40]))
    row = rows(buffer, "input")
    assert row[SCALE] == torch.tensor(448.0) / x.abs().amax()
    layer(x, torch.tensor([0, 20, 40, 40]))
    assert rows(buffer, "input")[SCALE] == row[SCALE]


def test_few_rows_for_many_experts() -> None:
    layer, buffer = make(MXFP8()), StatisticsBuffer()
    assert observe(layer, buffer, expert_tensors=len(ROLES) * EXPERTS - 1) == len(ROLES)
    train(layer, 0)
    assert [info.name for info in buffer.catalogue] == list(ROLES)
    assert rows(buffer, "weight")[NUMEL] == 3 * INPUTS * OUTPUTS
    buffer.zero_()
    unobserve(layer)
    train(layer, 0)
    assert not buffer.data.any()


def test_samples_add_up() -> None:
    layer, buffer, expected = make(DelayedScaling()), StatisticsBuffer(), StatisticsBuffer()
    linears = alone(layer)
    observe(layer, buffer)
    observe(linears, expected)
    buffer.sampling = expected.sampling = True
    train(layer, 0)
    for expert, (start, end) in enumerate(zip((0, *ENDS), ENDS, strict=False)):
        if end > start:
            linears[expert](batch(0)[start:end])
    assert buffer.sample_data is not None and expected.sample_data is not None
    names, others = ([info.name for info in side.catalogue] for side in (buffer, expected))
    for role in ("input", "weight"):
        singles = torch.stack([expected.sample_data[others.index(f"{n}.{role}")] for n in range(EXPERTS)])
        own = torch.stack([buffer.sample_data[names.index(f"expert_{n}.{role}")] for n in range(EXPERTS)])
        assert torch.equal(own, singles)
        assert torch.equal(buffer.sample_data[names.index(role)], singles.sum(0))


def test_an_expert_without_tokens_keeps_its_history() -> None:
    layer = make(DelayedScaling())
    train(layer, 0, (10, 20, 30, 40))
    before = {role: layer.state_of(role).of(1).amax_history.clone() for role in ROLES}
    train(layer, 1)
    for role in ROLES:
        assert torch.equal(layer.state_of(role).of(1).amax_history, before[role])
        assert layer.state_of(role).calls.tolist() == [2, 1, 2, 2]


@pytest.mark.parametrize("tokens", (0, TOKENS))
@pytest.mark.parametrize("precision", ("fp8", "bf16"))
def test_without_any_tokens(tokens: int, precision: str) -> None:
    layer = make(DelayedScaling())
    layer.precision = precision  # type: ignore[assignment]
    x = batch(0)[:tokens].detach().requires_grad_()
    output = layer(x, torch.zeros(EXPERTS, dtype=torch.int64))
    output.sum().backward()
    assert output.shape == (tokens, OUTPUTS) and not output.any()
    assert x.grad is not None and not x.grad.any()
    assert layer.weight.grad is not None and not layer.weight.grad.any()
    assert not layer.state_of("weight").calls.any()


def test_tokens_behind_the_last_expert_are_left_out() -> None:
    layer, shorter = make(CurrentScaling()), make(CurrentScaling())
    output, gradient = train(layer, 0, (5, 10, 20, 30))
    x = batch(0)[:30].detach().requires_grad_()
    expected = shorter(x, torch.tensor([5, 10, 20, 30]))
    expected.square().sum().backward()
    assert torch.equal(output[:30], expected) and not output[30:].any() and not gradient[30:].any()
    assert layer.weight.grad is not None and shorter.weight.grad is not None
    assert torch.equal(layer.weight.grad, shorter.weight.grad)


@pytest.mark.parametrize(
    ("ends", "error"),
    (((7, 7, 39), "4"), ((7, 6, 39, 40), "decrease"), ((7, 7, 39, 41), "40"), ((-1, 7, 8, 9), "decrease")),
)
def test_offsets_must_fit(ends: tuple[int, ...], error: str) -> None:
    layer = make(DelayedScaling())
    with pytest.raises(ValueError, match=error):
        layer(batch(0), torch.tensor(ends))
    with pytest.raises(RuntimeError, match="64"):
        layer(torch.zeros(TOKENS, INPUTS + 16), torch.tensor(ENDS))
    assert not layer.state_of("input").calls.any()


def test_random_rounding_takes_the_words_of_one_stream() -> None:
    recipe = CurrentScaling(stochastic_gradients=True)
    layer = make(recipe)
    first, second = copy.deepcopy(layer), copy.deepcopy(layer)
    assert torch.equal(train(first, 0)[1], train(second, 0)[1])
    assert first.scaling.rounding.state[1] == 3
    linear = alone(layer)[0]
    stream_of(linear).state.copy_(layer.scaling.rounding.state)
    x = batch(0)[: ENDS[0]].detach().requires_grad_()
    linear(x).square().sum().backward()
    assert x.grad is not None and torch.equal(x.grad, train(layer, 0)[1][: ENDS[0]])
    assert not torch.equal(train(first, 0)[1], train(make(CurrentScaling()), 0)[1])


def test_evaluation_changes_nothing() -> None:
    layer, buffer = make(DelayedScaling()), StatisticsBuffer()
    observe(layer, buffer)
    train(layer, 0)
    before = copy.deepcopy(layer.state_dict()), buffer.data.clone()
    layer.eval()
    with torch.no_grad():
        layer(batch(1), torch.tensor(ENDS))
    assert all(torch.equal(value, layer.state_dict()[name]) for name, value in before[0].items())
    assert same(buffer.data, before[1])


@pytest.mark.parametrize("reentrant", (False, True))
def test_recomputation_takes_the_scales_of_its_call(reentrant: bool) -> None:
    plain, checkpointed = make(DelayedScaling()), make(DelayedScaling())
    buffers = StatisticsBuffer(), StatisticsBuffer()
    observe(plain, buffers[0])
    observe(checkpointed, buffers[1])
    offsets = torch.tensor(ENDS)
    inputs = [[batch(step) for step in range(3)] for _ in range(2)]
    # All forward passes come before the first backward pass.
    losses = [plain(x, offsets).square().sum() for x in inputs[0]]
    others = [checkpoint(checkpointed, x, offsets, use_reentrant=reentrant).square().sum() for x in inputs[1]]
    for loss in (*losses, *others):
        loss.backward()
    for x, other in zip(*inputs, strict=True):
        assert x.grad is not None and other.grad is not None and torch.equal(x.grad, other.grad)
    assert same(buffers[0].data, buffers[1].data)


def test_second_derivatives_are_refused() -> None:
    layer = make(CurrentScaling())
    x = batch(0)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(layer(x, torch.tensor(ENDS)).square().sum(), x, create_graph=True)
    layer.precision = "bf16"
    (gradient,) = torch.autograd.grad(layer(x, torch.tensor(ENDS)).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and x.grad.any()


@pytest.mark.parametrize("products", (("fprop",), ("dgrad",), ("wgrad",), ()))
def test_products_are_chosen_as_in_a_linear_layer(products: tuple[str, ...]) -> None:
    layer = make(CurrentScaling())
    linear = alone(layer)[0]
    for side in (layer, linear):
        side.products = products  # type: ignore[assignment]
    output, gradient = train(layer, 0)
    x = batch(0)[: ENDS[0]].detach().requires_grad_()
    expected = linear(x)
    expected.square().sum().backward()
    assert torch.equal(output[: ENDS[0]], expected)
    assert x.grad is not None and torch.equal(gradient[: ENDS[0]], x.grad)
    with pytest.raises(ValueError, match="fprop"):
        layer.products = ("forward",)  # type: ignore[assignment]


def test_checkpoints_load_strictly_both_ways() -> None:
    layer, plain = make(DelayedScaling()), make(CurrentScaling())
    train(layer, 0)
    saved = layer.state_dict()
    assert saved["scaling.input.amax_history"].shape == (EXPERTS, 16)
    plain.load_state_dict(plain_state_dict(saved))
    plain.load_state_dict(saved)
    resumed = make(DelayedScaling())
    resumed.load_state_dict(copy.deepcopy(saved), assign=True)
    assert scaling_status(resumed) == dict.fromkeys(ROLES, "restored")
    assert all(torch.equal(*pair) for pair in zip(train(layer, 1), train(resumed, 1), strict=True))
    with pytest.warns(RuntimeWarning, match="no scaling state"):
        layer.load_state_dict(plain.state_dict())
    assert scaling_status(layer)["input"] == "missing"
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="amax_history"):
        layer.load_state_dict({name: value for name, value in saved.items() if "weight.amax" not in name})


def test_a_checkpoint_of_other_weights_is_stale_for_their_expert() -> None:
    layer = make(DelayedScaling())
    train(layer, 0)
    saved = copy.deepcopy(layer.state_dict())
    saved["scaling.input.amax_history"][2] *= 1e4
    saved["scaling.input.scale"][2] /= 1e4
    resumed = make(DelayedScaling())
    resumed.load_state_dict(saved)
    with pytest.warns(RuntimeWarning, match="does not fit"):
        train(resumed, 0)
    status = [state.status for state in resumed.state_of("input").states()]
    assert status == ["restored", "fresh", "stale", "restored"]
    assert scaling_status(resumed) == {"input": "stale", "weight": "restored", "grad_output": "restored"}


def reloaded(layer: Fp8GroupedLinear) -> Fp8GroupedLinear:
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    loaded: Fp8GroupedLinear = torch.load(stream, weights_only=False)
    return loaded


@pytest.mark.parametrize("way", (copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), reloaded))
def test_copies_go_on_by_themselves(way: Callable[[Fp8GroupedLinear], Fp8GroupedLinear]) -> None:
    layer, buffer = make(DelayedScaling()), StatisticsBuffer()
    observe(layer, buffer)
    train(layer, 0)
    twin, counted = way(layer), buffer.data.clone()
    twin.zero_grad()
    layer.zero_grad()
    results = train(twin, 1)
    assert same(buffer.data, counted)
    assert all(torch.equal(*pair) for pair in zip(results, train(layer, 1), strict=True))
    assert not same(buffer.data, counted)
    assert (
        twin.state_of("input").of(0).amax_history.data_ptr() == twin.state_of("input").amax_history.data_ptr()
    )


def test_initialised_on_the_meta_device_and_moved() -> None:
    expected = make(DelayedScaling())
    layer = Fp8GroupedLinear(EXPERTS, INPUTS, OUTPUTS, True, device="meta", recipe=DelayedScaling())
    layer.to_empty(device="cpu")
    layer.load_state_dict(expected.state_dict())
    for step in range(2):
        assert all(torch.equal(*pair) for pair in zip(train(layer, step), train(expected, step), strict=True))
        for side in (layer, expected):
            side.to(torch.bfloat16).to(torch.float32)
    assert layer.state_of("input").amax_history.dtype == torch.float32


def test_a_graph_breaks_at_the_layer() -> None:
    layer, compiled = make(DelayedScaling()), make(DelayedScaling())

    def double(x: Tensor, offsets: Tensor) -> Tensor:
        output: Tensor = compiled(2 * x, offsets)
        return 2 * output

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(2):
            x = batch(step).detach()
            expected = 2 * layer(2 * x, torch.tensor(ENDS))
            assert torch.equal(torch.compile(double, backend="eager")(x, torch.tensor(ENDS)), expected)
    with pytest.raises(RuntimeError, match="graph"):
        torch.jit.trace(layer, (batch(0).detach(), torch.tensor(ENDS)))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("recipe", [CurrentScaling(), BlockScaling()], ids=str)
def test_a_weight_is_quantised_once_for_micro_batches(recipe: Recipe) -> None:
    layer, other = make(recipe), make(recipe)
    buffer, others = StatisticsBuffer(), StatisticsBuffer()
    observe(nn.ModuleDict({"own": layer}), buffer)
    observe(nn.ModuleDict({"own": other}), others)
    outputs: list[Tensor] = []
    with keep_weights(layer):
        for seed in range(3):
            x = torch.randn(TOKENS, INPUTS, generator=torch.Generator().manual_seed(seed))
            for experts in (layer, other):
                outputs.append(experts(x, torch.tensor(ENDS)))
                outputs[-1].square().sum().backward()  # type: ignore[no-untyped-call]
            assert torch.equal(*outputs[-2:])
        with torch.no_grad():
            layer.weight[2].mul_(2.0)
        assert not torch.equal(layer(x, torch.tensor(ENDS)), outputs[-1])
    assert layer.weight.grad is not None and other.weight.grad is not None
    assert torch.equal(layer.weight.grad, other.weight.grad)
    names = [tensor.name for tensor in buffer.catalogue]
    for expert in (0, 2, 3):
        row = names.index(f"own.expert_{expert}.weight")
        # The change has all experts quantised again: they share the version of one tensor.
        assert buffer.data[row, NUMEL] == 2 * INPUTS * OUTPUTS
        assert others.data[row, NUMEL] == 3 * INPUTS * OUTPUTS
    assert layer.scaling.kept_weight is None
