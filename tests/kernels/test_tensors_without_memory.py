"""Tensors that kernels cannot read from memory are computed in eager torch, or refused."""

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from fp8scope_kernels import (
    E4M3,
    MXFP8,
    NVFP4,
    SAMPLE_SIZE,
    STATISTICS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    accumulate_sample,
    convert,
    exponent_histogram,
    measure,
    quantize,
    quantize_blocks,
    quantize_fp6,
    quantize_values,
    round_stochastically,
    set_backend,
)

RECIPES = (DelayedScaling(), CurrentScaling(), RowwiseScaling(), BlockScaling(), MXFP8(), NVFP4())
ONE = torch.ones(())


def row() -> Tensor:
    return torch.zeros(len(STATISTICS), dtype=torch.float64)


USES: dict[str, Callable[[Tensor], Any]] = {
    "measure": measure,
    "quantize": lambda x: quantize(x, ONE, E4M3).data,
    "quantize with a row": lambda x: quantize(x, ONE, E4M3, row()).data,
    "quantize_values": lambda x: quantize_values(x, ONE, E4M3),
    "stochastic": lambda x: quantize(x, ONE, E4M3, stochastic=True).data,
    "quantize_blocks": lambda x: quantize_blocks(x, E4M3, (1, 32), MXFP8()).values,
    "exponent_histogram": exponent_histogram,
    "accumulate_sample": lambda x: accumulate_sample(
        torch.zeros(SAMPLE_SIZE, dtype=torch.float64), x, x.detach(), ONE
    ),
}
uses = pytest.mark.parametrize("use", USES.values(), ids=USES)


@pytest.fixture(params=["auto", "reference"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    set_backend(request.param)
    yield
    set_backend("auto")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    file: Path = tmp_path_factory.mktemp("store") / "store"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@uses
def test_it_works(use: Callable[[Tensor], Any], mesh: Any) -> None:
    sharded = distribute_tensor(torch.randn(32, 64), mesh)
    with pytest.raises(TypeError, match=r"DTensor has no memory of its own.*to_local\(\).*full_tensor\(\)"):
        use(sharded)
    use(sharded.to_local())


def test_an_input_that_is_no_dtensor_is_refused(mesh: Any) -> None:
    """Before it changes the state. With BF16 products torch decides."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    convert(model, DelayedScaling())
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    layer, other = model[0], model[2]
    assert isinstance(layer, Fp8Linear)
    for call in (
        lambda: layer.forward(torch.randn(4, 32)),
        lambda: other(distribute_tensor(torch.randn(4, 64), mesh)),
    ):
        with pytest.raises(
            TypeError, match=r"a DTensor, and the other is not.*parallelize_module.*fully_shard"
        ):
            call()
    assert not any(buffer.any() for buffer in layer.buffers())
    layer.precision = "bf16"
    assert layer(torch.randn(4, 32)).shape == (4, 64)


def test_scaling_state_stays_with_its_rank(mesh: Any) -> None:
    """`distribute_module` makes DTensors of all that it finds in a model."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    convert(model, DelayedScaling())
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert all(type(buffer) is Tensor for buffer in model.buffers())
    names = [name for name, _ in model.named_modules()]
    assert names[:5] == ["", "0", "0.scaling", "0.scaling.input", "0.scaling.weight"]
    # The second time, weights are DTensors already, and nothing says that buffers are about to be replaced.
    distribute_module(model, mesh)
    assert not any(type(buffer) is Tensor for buffer in model.buffers())
    twin = copy.deepcopy(model)
    x = torch.randn(4, 32)
    assert torch.equal(twin(x), model(x))
    model(x).sum().backward()
    assert all(type(buffer) is Tensor for buffer in model.buffers())


def test_a_model_of_fsdp_keeps_its_layers(mesh: Any) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    fully_shard(model, mesh=mesh)
    with pytest.warns(UserWarning, match="its weight is held by FSDP: convert before fully_shard"):
        report = convert(model, DelayedScaling())
    assert report.converted == ()


@uses
def test_a_result_under_way_is_awaited(use: Callable[[Tensor], Any]) -> None:
    x = torch.randn(32, 64)
    waited, plain = use(AsyncCollectiveTensor(x)), use(x)
    if isinstance(plain, Tensor) and plain.dtype != torch.float8_e4m3fn:
        assert torch.equal(waited, plain)


@uses
def test_fake_tensors(use: Callable[[Tensor], Any]) -> None:
    x = torch.randn(32, 64)
    expected = use(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = use(mode.from_tensor(x)) if use is not USES["quantize with a row"] else None
    if isinstance(expected, Tensor) and fake is not None:
        assert (fake.shape, fake.dtype) == (expected.shape, expected.dtype)
    again = use(x)
    if isinstance(expected, Tensor) and use is not USES["stochastic"]:
        assert torch.equal(again.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.kind)
@pytest.mark.parametrize("training", [True, False])
def test_a_fake_model_has_shapes(recipe: Recipe, training: bool) -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        convert(model, recipe)
        model.train(training)
        x = torch.randn(4, 32, requires_grad=True)
        y = model(x)
        y.sum().backward()
        assert y.shape == (4, 32) and x.grad is not None
        assert [parameter.grad is not None for parameter in model.parameters()] == [True] * 4
    # What this thread has kept is usable.
    set_backend("reference")
    assert measure(quantize(torch.full((9, 9), 3.0), ONE, E4M3).data.float()).amax == 3


def test_a_real_tensor_in_fake_mode_is_refused() -> None:
    x = torch.randn(32, 64)
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            result = quantize_values(x, ONE, E4M3)
        except TypeError as error:
            assert "FakeTensorMode" in str(error)
        else:
            assert type(result) is not Tensor


@uses
def test_meta_tensors(use: Callable[[Tensor], Any]) -> None:
    x = torch.randn(32, 64, device="meta")
    if use is USES["accumulate_sample"] or use is USES["quantize with a row"]:
        with pytest.raises(ValueError, match="is on cpu and its tensor on meta"):
            use(x)
        return
    result = use(x)
    assert all(part.is_meta for part in (result if isinstance(result, tuple) else (result,)))


@uses
@pytest.mark.parametrize(("offset", "left"), [(0, 0), (7, 0), (7, 4 * 32 * 64), (0, 4 * 32 * 64 - 1)])
def test_freed_memory_is_refused(use: Callable[[Tensor], Any], offset: int, left: int) -> None:
    x = torch.randn(32 * 64 + offset)[offset:].view(32, 64)
    x.untyped_storage().resize_(left)
    with pytest.raises(RuntimeError, match="has been freed"):
        use(x)


@uses
def test_freed_memory_between_the_elements_is_refused(use: Callable[[Tensor], Any]) -> None:
    x = torch.randn(64, 128)[::2, ::2]
    x.untyped_storage().resize_(4 * 63 * 128)
    use(x)
    x.untyped_storage().resize_(4 * (62 * 128 + 126))
    with pytest.raises(RuntimeError, match="has been freed"):
        use(x)


def test_a_freed_weight_is_refused() -> None:
    layer = Fp8Linear(32, 64, recipe=DelayedScaling())
    layer.weight.data.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has been freed"):
        layer(torch.randn(4, 32))


@uses
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    "make",
    [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_mkldnn],
    ids=["coo", "csr", "mkldnn"],
)
def test_other_layouts_are_refused(use: Callable[[Tensor], Any], make: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TypeError, match=r"Only dense tensors.*to_dense\(\)"):
        use(make(torch.randn(32, 64)))


@uses
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(use: Callable[[Tensor], Any], layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 32), torch.randn(3, 32)], layout=layout)
    with pytest.raises(TypeError, match="nested tensor cannot be quantised"):
        use(nested)


@pytest.mark.parametrize("name", [name for name in USES if name[0] in "mqs"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_and_complex_tensors_are_refused(name: str) -> None:
    use = USES[name]
    for x in (torch.randn(4, 32, dtype=torch.complex64), torch.ones(4, 32, dtype=torch.int8)):
        with pytest.raises(TypeError, match="Only floating-point"):
            use(x)
        with pytest.raises(TypeError, match="Only floating-point"):
            use(torch.conj(x))
    with pytest.raises(TypeError, match="Only floating-point"):
        use(torch.quantize_per_tensor(torch.randn(4, 32), 0.1, 0, torch.qint8))


class Named(Tensor):
    """A subclass without memory of another kind."""


@uses
def test_a_subclass_is_computed_in_eager_torch(use: Callable[[Tensor], Any]) -> None:
    x = torch.randn(32, 64)
    expected, actual = use(x), use(x.as_subclass(Named))
    if isinstance(expected, Tensor) and use is not USES["stochastic"]:
        plain = actual.as_subclass(Tensor)
        assert torch.equal(plain.view(torch.uint8), expected.view(torch.uint8))


def test_a_quantised_layer_of_torchao_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, path: path == "0")
    with pytest.warns(UserWarning, match="Left in high precision: 0"):
        report = convert(model, DelayedScaling())
    assert report.converted == ("2",)
    with torch.no_grad():
        model(torch.randn(4, 32))


def test_negated_views_keep_their_sign() -> None:
    x = torch.randn(32, 64)
    negated = torch._neg_view(x)
    assert negated.is_neg() and negated.is_contiguous()
    assert torch.equal(quantize_values(negated, ONE, E4M3), -quantize_values(x, ONE, E4M3))
    assert torch.equal(quantize(negated, ONE, E4M3).data.float(), -quantize(x, ONE, E4M3).data.float())
    blocks = quantize_blocks(negated, E4M3, (1, 32), MXFP8()).values
    assert torch.equal(blocks, -quantize_blocks(x, E4M3, (1, 32), MXFP8()).values)
    samples = [torch.zeros(SAMPLE_SIZE, dtype=torch.float64) for _ in range(2)]
    accumulate_sample(samples[0], negated, quantize_values(negated, ONE, E4M3), ONE)
    accumulate_sample(samples[1], -x, quantize_values(-x, ONE, E4M3), ONE)
    assert torch.equal(*samples)
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    rounded = [round_stochastically(y, E4M3, g) for y, g in zip((negated, -x), generators, strict=True)]
    assert torch.equal(*rounded)
    imaginary = torch.complex(x, x).conj().imag
    assert imaginary.is_neg()
    assert torch.equal(quantize_values(imaginary, ONE, E4M3), -quantize_values(x, ONE, E4M3))


def test_a_layer_takes_negated_views() -> None:
    layer = Fp8Linear(64, 32, bias=False, recipe=CurrentScaling())
    x = torch.randn(32, 64)
    assert torch.equal(layer(torch._neg_view(x)), -layer(x))


@pytest.mark.parametrize("shape", [(0,), (0, 64), (4, 0)])
def test_empty_and_overlapping_tensors(shape: tuple[int, ...]) -> None:
    target = row()
    assert quantize(torch.empty(shape), ONE, E4M3, target).data.shape == shape
    assert target.tolist() == [0, 0, 1, 0, 0, 0, 0]
    expanded = torch.full((1,), 3.0).expand(40)
    assert quantize_values(expanded, ONE, E4M3, target).tolist() == [3.0] * 40
    overlapping = torch.arange(6.0).as_strided((4, 3), (1, 1))
    assert quantize_values(overlapping, ONE, E4M3, target)[3, 2] == 5
    assert target[0] == 52 and target[1] == 5


@uses
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_functorch_wrappers_do_not_end_the_process(use: Callable[[Tensor], Any]) -> None:
    x = torch.randn(3, 32, 64)
    expected = [use(part) for part in x]
    try:
        result = torch.func.vmap(use, randomness="different")(x)
    except (RuntimeError, ValueError, TypeError) as error:
        assert str(error)
    else:
        for part, own in zip(result if isinstance(result, Tensor) else result[0], expected, strict=True):
            random = use is USES["stochastic"]
            assert random or torch.equal(part, own if isinstance(own, Tensor) else own[0])


@uses
def test_functionalised_tensors_do_not_end_the_process(use: Callable[[Tensor], Any]) -> None:
    """They have the type Tensor, and no memory."""
    x = torch.randn(32, 64)
    wrapper = torch._to_functional_tensor(x)
    assert type(wrapper) is Tensor
    functionalised = torch.func.functionalize(use)
    calls: list[Callable[[], Any]] = [lambda: use(wrapper), lambda: functionalised(x)]
    for call in calls:
        try:
            result = call()
        except (RuntimeError, TypeError) as error:
            # Not all that torch wraps so can be computed with outside of its own modes.
            assert str(error)
        else:
            assert result is None or len(result if isinstance(result, tuple) else (result,))


@pytest.mark.parametrize("name", sorted(USES.keys() - {"accumulate_sample", "stochastic"}))
def test_fp8_numbers_are_numbers(name: str) -> None:
    x, use = torch.randn(32, 64).to(torch.float8_e4m3fn), USES[name]
    assert quantize(x, ONE, E4M3, stochastic=True).data.shape == x.shape
    result, expected = use(x), use(x.float())
    for part, own in zip(*((r if isinstance(r, tuple) else (r,)) for r in (result, expected)), strict=True):
        assert torch.equal(part, own)


def test_fp6_takes_what_blocks_take(mesh: Any) -> None:
    with pytest.raises(TypeError, match="DTensor"):
        quantize_fp6(distribute_tensor(torch.randn(32, 64), mesh))
