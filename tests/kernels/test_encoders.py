"""Models that read a layer's weight instead of calling it: torch's encoders, attention, tied heads."""

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8scope_kernels import (
    MXFP8,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    Recipe,
    candidate_layers,
    convert,
    fp8_layers,
)

RECIPES: tuple[Recipe, ...] = (DelayedScaling(), CurrentScaling(), MXFP8())
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.kind)
pytestmark = pytest.mark.filterwarnings("ignore:Left in high precision:UserWarning")

Evaluation = Callable[[], AbstractContextManager[object]]
evaluations = pytest.mark.parametrize(
    "evaluation",
    [nullcontext, torch.no_grad, torch.inference_mode],
    ids=["grad", "no_grad", "inference_mode"],
)


def encoder(layers: int = 2, **options: object) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, **options)  # type: ignore[arg-type]
    return nn.TransformerEncoder(layer, layers).eval()


def words(rows: int = 4) -> Tensor:
    return torch.randn(rows, 10, 32, generator=torch.Generator().manual_seed(1))


def slowly(model: nn.Module, *args: Tensor, **options: Tensor) -> Tensor:
    """The output of encoder layers that take no fast path, because a hook is there.

    Attention has a fast path of its own, which reads nothing that is FP8, and whose rounding differs.
    """
    handles = [
        module.norm1.register_forward_hook(lambda *args: None)
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoderLayer)
    ]
    with torch.no_grad():
        output: Tensor = model(*args, **options)
    for handle in handles:
        handle.remove()
    return output


@evaluations
@recipes
@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
def test_it_works(recipe: Recipe, evaluation: Evaluation, norm_first: bool) -> None:
    """An evaluation is FP8's, whichever mode it is taken in."""
    model = encoder(activation="gelu", norm_first=norm_first)
    plain = copy.deepcopy(model)
    assert len(convert(model, recipe).converted) == 4
    model.train()
    model(words())
    model.eval()
    with evaluation():
        output = model(words())
        original = plain(words())
    # With gradients attention takes another path, in which it rounds otherwise.
    assert output.requires_grad or torch.equal(output, slowly(model, words()))
    assert (output - original).abs().max() > 1e-3


@evaluations
def test_padded_words(evaluation: Evaluation) -> None:
    """Here the fast path of the whole encoder would make nested tensors."""
    model = encoder()
    padding = torch.arange(10)[None] >= torch.tensor([10, 7, 4, 1])[:, None]
    with torch.no_grad():
        plain = model(words(), src_key_padding_mask=padding)
    convert(model, CurrentScaling())
    with evaluation():
        output = model(words(), src_key_padding_mask=padding)
    assert torch.equal(output, slowly(model, words(), src_key_padding_mask=padding))
    assert (output - plain)[~padding].abs().max() > 1e-3


@evaluations
def test_a_manually_inserted_layer(evaluation: Evaluation) -> None:
    """And in copies of it, and after loading a pickled one."""
    layer = encoder(1).layers[0]
    assert isinstance(layer, nn.TransformerEncoderLayer)
    plain = slowly(layer, words())
    layer.linear1 = Fp8Linear.from_linear(layer.linear1, CurrentScaling())
    for model in (layer, copy.deepcopy(layer)):
        with evaluation():
            output = model(words())
        assert output.requires_grad or torch.equal(output, slowly(model, words()))
        assert (output - plain).abs().max() > 1e-3


def test_nested_tensors_are_refused() -> None:
    layer = Fp8Linear(32, 32, recipe=CurrentScaling())
    nested = torch.nested.nested_tensor([torch.ones(2, 32), torch.ones(3, 32)])
    with pytest.raises(TypeError, match="use_nested_tensor = False"):
        layer(nested)


def test_an_encoder_without_fp8_keeps_its_fast_path() -> None:
    model = encoder()
    convert(model, CurrentScaling(), exclude="*")
    assert model.use_nested_tensor
    assert all(layer.activation_relu_or_gelu for layer in model.layers)


class Attention(nn.MultiheadAttention):
    """One of its own kind, with an ordinary projection."""

    def __init__(self) -> None:
        super().__init__(32, 4, batch_first=True)
        self.out_proj = nn.Linear(32, 32)  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Attention, lambda: nn.MultiheadAttention(32, 4, batch_first=True)])
@pytest.mark.parametrize("include", [None, "*"])
def test_projections_that_are_never_called_are_left_out(
    kind: Callable[[], nn.Module], include: str | None
) -> None:
    model = nn.ModuleDict({"attention": kind(), "up": nn.Linear(32, 64)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = convert(model, CurrentScaling(), include=include)
    assert report.converted == ("up",)
    reasons = {entry.name: entry.reason for entry in report.entries}
    assert reasons["attention.out_proj"] == "its parent reads its weight and never calls it"
    assert [str(w.message).split(".")[0] for w in caught] == ["Left in high precision: attention"]
    assert list(candidate_layers(model)) == []


def test_every_converted_layer_is_called() -> None:
    """In training and in evaluation, of torch's whole transformer."""
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
    convert(model, CurrentScaling(), include="*")
    called: set[str] = set()
    for name, layer in fp8_layers(model):
        layer.quantize = _noting(called, name, layer.quantize)  # type: ignore[assignment, method-assign]
    assert len(list(fp8_layers(model))) == 8
    for training in (True, False):
        called.clear()
        with torch.set_grad_enabled(training):
            model.train(training)(words(), words())
        assert called == {name for name, _ in fp8_layers(model)}


def _noting(called: set[str], name: str, quantize: Callable[..., object]) -> Callable[..., object]:
    def noting(*args: object, **options: object) -> object:
        called.add(name)
        return quantize(*args, **options)

    return noting


class Tied(nn.Module):
    """Its head's weight is the embedding's; `called` says whether the head is called or its weight taken."""

    def __init__(self, called: bool) -> None:
        super().__init__()
        self.called = called
        self.embed = nn.Embedding(48, 32)
        self.up = nn.Linear(32, 32)
        self.project = nn.Linear(32, 48, bias=False)
        self.project.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.up(self.embed(tokens))
        logits: Tensor = self.project(x) if self.called else functional.linear(x, self.embed.weight)
        return logits


@pytest.mark.parametrize("called", [True, False])
def test_tied_heads_are_left_out(called: bool) -> None:
    torch.manual_seed(0)
    model = Tied(called)
    plain = model(torch.arange(48))
    assert convert(model, CurrentScaling()).converted == ("up",)
    assert model.project.weight is model.embed.weight
    assert not torch.equal(model(torch.arange(48)), plain)


def test_an_included_tied_head_is_fp8_where_it_is_called() -> None:
    torch.manual_seed(0)
    model = Tied(called=True)
    plain = model(torch.arange(48))
    assert convert(model, CurrentScaling(), include="project").converted == ("project",)
    assert model.project.weight is model.embed.weight
    assert not torch.equal(model(torch.arange(48)), plain)
