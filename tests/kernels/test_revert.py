"""`revert` gives back the model from before `convert`, whatever was done with it since."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from helpers.process_group import run_ranks
from kernels.helpers.scaling_ranks import batch, make_model, train
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fp8scope_kernels import (
    MXFP8,
    DelayedScaling,
    Fp8Linear,
    StatisticsBuffer,
    convert,
    fp8_layers,
    observe,
    revert,
    scaling_status,
)


class Tied(nn.Module):
    """Two layers, one of them at two paths, and one frozen; the head is not converted."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.again = self.first
        self.frozen = nn.Linear(32, 32, bias=False).requires_grad_(False)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.again(self.first(x).relu())))  # type: ignore[no-any-return]


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied()


def step(model: nn.Module, seed: int = 1) -> list[Tensor]:
    """The output and the gradients of one step."""
    model.zero_grad()
    output: Tensor = model(batch(seed, 0))
    output.square().mean().backward()  # type: ignore[no-untyped-call]
    return [output, *(p.grad for p in model.parameters() if p.grad is not None)]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("recipe", [DelayedScaling(), MXFP8()], ids=lambda recipe: recipe.kind)
def test_it_works(recipe: DelayedScaling | MXFP8) -> None:
    model, plain = tied(), tied()
    parameters = dict(model.named_parameters())
    seen: list[str] = []
    model.first.register_forward_hook(lambda *args: seen.append("before"))
    convert(model, recipe, exclude="head")
    model.frozen.register_forward_hook(lambda *args: seen.append("after"))
    step(model)
    model.frozen.eval()
    layer, frozen = model.first, model.frozen
    assert isinstance(layer, Fp8Linear)
    layer.precision, layer.products = "bf16", ["fprop"]
    report = revert(model)
    assert report.converted == ("first", "frozen") and report.left == ()
    assert "Fp8Linear" not in str(model) and "high" in str(report)
    # The same objects: what refers to a layer goes on with it.
    assert model.first is model.again is layer and model.frozen is frozen
    assert type(layer) is nn.Linear and layer.__dict__.keys() == plain.first.__dict__.keys()
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == list(plain.state_dict()) and scaling_status(model) == {}
    assert not model.frozen.training and model.first.training and not model.frozen.weight.requires_grad
    seen.clear()
    assert same(step(model), step(plain))
    assert seen == ["before", "before", "after"]
    assert revert(model).entries == ()


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_reverted_by_themselves(way: Callable[[Tied], Tied]) -> None:
    model, plain = tied(), tied()
    convert(model, DelayedScaling(), exclude="head")
    step(model)
    other = way(model)
    revert(other)
    assert same(step(other), step(plain))
    assert len(list(fp8_layers(model))) == 2 and isinstance(other.first, nn.Linear)
    # And back: as if it had been converted for the first time.
    convert(other, DelayedScaling(), exclude="head")
    convert(plain, DelayedScaling(), exclude="head")
    assert same(step(other), step(plain)) and same(step(other, 2), step(plain, 2))


def test_a_selection_and_a_subclass() -> None:
    class Other(Fp8Linear):
        pass

    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    convert(model, DelayedScaling())
    model[2] = Other.from_linear(nn.Linear(32, 32), DelayedScaling())
    report = revert(model, include=["0", "2"])
    assert (report.converted, report.left) == (("0",), ("1", "2"))
    assert [entry.reason.split(",")[0] for entry in report.entries] == [
        "", "not included", "a subclass of Fp8Linear"
    ]  # fmt: skip
    layer = Fp8Linear(32, 32, recipe=MXFP8())
    assert revert(layer).converted == ("",)
    assert layer.__class__.__name__ == "Linear"


def test_leaves_its_statistics_buffer() -> None:
    model = tied()
    convert(model, DelayedScaling(), exclude="head")
    buffer = StatisticsBuffer()
    observe(model, buffer)
    step(model)
    revert(model)
    before = buffer.storage.clone()
    step(model)
    assert torch.equal(buffer.storage, before)
    # Watched again, its tensors have their rows, as those of a model in high precision.
    names = [tensor.name for tensor in buffer.catalogue]
    observe(model, buffer)
    step(model)
    assert [tensor.name for tensor in buffer.catalogue] == names
    assert not torch.equal(buffer.storage, before)


def test_encoders_take_their_fast_path_again() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    flags = [model.use_nested_tensor, *(block.activation_relu_or_gelu for block in model.layers)]
    for _ in range(2):
        with pytest.warns(UserWarning, match="out_proj"):
            convert(model, DelayedScaling())
        assert not model.use_nested_tensor and not model.layers[0].activation_relu_or_gelu
    revert(model, include="layers.0.*")
    assert [bool(block.activation_relu_or_gelu) for block in model.layers] == [True, False]
    assert not model.use_nested_tensor
    revert(model)
    assert [model.use_nested_tensor, *(block.activation_relu_or_gelu for block in model.layers)] == flags


def test_a_compiled_block_is_compiled_again() -> None:
    model, plain = tied(), tied()
    convert(model, DelayedScaling(), exclude="head")
    model.compile(backend="eager")
    step(model)
    revert(model)
    assert same(step(model), step(plain))


def job_sharded(rank: int, size: int) -> list[float]:
    losses = []
    for recipe in (None, DelayedScaling()):
        model = make_model(recipe)
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
        if recipe is not None:
            model(batch(0, rank))
            assert revert(model).converted == ("0", "2")
            assert not list(fp8_layers(model))
        losses.append(train(model, [rank], torch.optim.SGD(model.parameters(), lr=0.1))[-1])
    return losses


def test_a_sharded_model_goes_on_in_high_precision() -> None:
    for plain, reverted in run_ranks(job_sharded, 2):
        assert plain == reverted
