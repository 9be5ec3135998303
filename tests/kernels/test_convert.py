"""`convert`: which layers become FP8, which do not, and the reported reasons."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from fp8scope_kernels import (
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    StatisticsBuffer,
    candidate_layers,
    convert,
    fp8_layers,
    observe,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, 32)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.unaligned = nn.Linear(32, 20)
        self.lm_head = nn.Linear(32, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)  # type: ignore[no-any-return]


BLOCKS = ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down")


def test_it_works() -> None:
    model = Language()
    report = convert(model, DelayedScaling())
    assert report.converted == BLOCKS
    assert tuple(name for name, _ in fp8_layers(model)) == BLOCKS
    reasons = {entry.name: entry.reason for entry in report.entries if not entry.converted}
    assert reasons == {
        "embedding": "not a linear layer",
        "blocks.0.norm": "not a linear layer",
        "blocks.1.norm": "not a linear layer",
        "unaligned": "32 -> 20 is not in multiples of 16",
        "lm_head": "output head, by its name",
    }
    assert report.left == tuple(reasons)
    assert model(torch.arange(16)).shape == (16, 256)


def test_the_report_is_a_table() -> None:
    lines = str(convert(Language(), DelayedScaling())).splitlines()
    assert lines[0].split() == ["module", "kind", "precision", "reason"]
    assert lines[1].split(maxsplit=3) == ["embedding", "Embedding", "left", "not a linear layer"]
    assert lines[3].split() == ["blocks.0.up", "Linear", "fp8"]
    assert len(lines) == 10
    assert {line.find("Linear") for line in lines if "Linear" in line} == {lines[0].find("kind")}


def test_parameters_stay_the_same_objects() -> None:
    model = Language()
    before = dict(model.named_parameters())
    plain_keys = set(model.state_dict())
    convert(model, DelayedScaling())
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert plain_keys <= set(model.state_dict())


def test_an_optimizer_made_before_trains_the_model() -> None:
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    convert(model, CurrentScaling())
    tokens = torch.randint(0, 8, (64,), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_hooks_and_mode_move_along() -> None:
    model = Language().eval()
    calls: list[str] = []
    model.blocks[0].up.register_forward_hook(lambda *_: calls.append("called"))  # type: ignore[union-attr]
    convert(model, DelayedScaling())
    model(torch.arange(4))
    assert calls == ["called"]
    assert not any(layer.training for _, layer in fp8_layers(model))


def test_include_names_what_to_convert() -> None:
    model = Language()
    report = convert(model, DelayedScaling(), include=["*.up", "lm_head"])
    assert report.converted == ("blocks.0.up", "blocks.1.up", "lm_head")
    assert {e.name: e.reason for e in report.entries}["blocks.0.down"] == "not included"


def test_exclude_applies_to_default_and_include() -> None:
    assert convert(Language(), DelayedScaling(), exclude="blocks.0.*").converted == BLOCKS[2:]
    report = convert(Language(), DelayedScaling(), include="blocks.*", exclude="*.down")
    assert report.converted == ("blocks.0.up", "blocks.1.up")
    assert {e.name: e.reason for e in report.entries}["blocks.0.down"] == "excluded"


def test_a_function_selects() -> None:
    report = convert(
        Language(),
        DelayedScaling(),
        include=lambda name, module: isinstance(module, nn.Linear) and module.in_features == 64,
    )
    assert report.converted == ("blocks.0.down", "blocks.1.down")


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_an_error(argument: str) -> None:
    model = Language()
    with pytest.raises(ValueError, match=r"'blocks\.0\.upp' matches no module"):
        convert(model, DelayedScaling(), **{argument: ["blocks.0.up", "blocks.0.upp"]})
    assert not list(fp8_layers(model))


def test_recognises_heads_without_a_typical_name() -> None:
    model = Language()
    model.last = nn.Linear(32, 256)
    model.tied = nn.Linear(32, 512)
    model.other = nn.Embedding(512, 32)
    model.tied.weight = model.other.weight
    reasons = {e.name: e.reason for e in convert(model, DelayedScaling()).entries}
    assert reasons["last"] == "output head: as wide as the vocabulary"
    assert reasons["tied"] == "output head: shares the embedding's weight"


def test_layers_of_blocks_are_no_heads_by_their_width() -> None:
    """A context as long as the model is wide, or bytes and an MLP of 256: the layers are converted."""
    model = Language()
    block = Block()
    model.positions = nn.Embedding(block.down.out_features, 32)
    model.bytes = nn.Embedding(block.up.out_features, 32)
    converted = convert(model, DelayedScaling()).converted
    assert set(converted) >= {f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(32, 32)
        self.output = nn.Linear(32, 32)


class Layer(nn.Module):
    """A block whose layers have the names of heads, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.output = nn.Linear(32, 32)
        self.score = nn.Linear(32, 32)


class Encoder(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.head = nn.Module()
        self.head.output = nn.Linear(32, 32)
        self.classifier = nn.Linear(32, 32)


BLOCK_LISTS = {
    "list": lambda: nn.ModuleList([Layer(), Layer()]),
    "list of one": lambda: nn.ModuleList([Layer()]),
    "sequential": lambda: nn.Sequential(Layer(), Layer()),
    "dict": lambda: nn.ModuleDict({"first": Layer(), "second": Layer()}),
    "stages": lambda: nn.Sequential(nn.Sequential(Layer(), Layer()), nn.Sequential(Layer())),
}


@pytest.mark.parametrize("blocks", BLOCK_LISTS.values(), ids=BLOCK_LISTS)
def test_a_name_is_that_of_a_head_only_outside_of_blocks(
    blocks: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = Encoder(blocks())
    inside = {name for name, m in model.layers.named_modules(prefix="layers") if isinstance(m, nn.Linear)}
    twin = copy.deepcopy(model)
    with caplog.at_level("INFO", logger="fp8scope_kernels"):
        report = convert(model, DelayedScaling())
    assert set(report.converted) == inside
    reasons = {e.name: e.reason for e in report.entries if isinstance(twin.get_submodule(e.name), nn.Linear)}
    assert reasons["head.output"] == reasons["classifier"] == "output head, by its name"
    assert caplog.messages == ["Left in high precision: head.output, classifier (output head, by its name)."]
    # The BF16 run of this model observes the same layers.
    assert {name for name, _ in candidate_layers(twin)} == inside


def test_a_list_of_heads_is_not_one_of_blocks() -> None:
    model = nn.ModuleDict(
        {
            "body": nn.Linear(32, 32),
            "heads": nn.ModuleList([nn.ModuleDict({"output": nn.Linear(32, 32)}) for _ in range(2)]),
            "lm_heads": nn.ModuleList([nn.ModuleDict({"score": nn.Linear(32, 32)}) for _ in range(2)]),
            "steps": nn.ModuleList(
                [nn.Embedding(8, 32), Attention(), nn.ModuleDict({"head": nn.Linear(32, 32)})]
            ),
        }
    )
    assert convert(model, DelayedScaling()).converted == ("body", "steps.1.query")


def test_does_not_convert_modules_that_resemble_linear_layers() -> None:
    model = nn.Sequential(nn.MultiheadAttention(32, 2), weight_norm(nn.Linear(32, 32)), nn.Linear(32, 32))
    patched = model[2]
    patched.forward = nn.Linear.forward.__get__(patched)
    report = convert(model, DelayedScaling())
    reasons = {e.name: e.reason for e in report.entries}
    assert report.converted == ()
    assert reasons["0"] == "not a linear layer"
    assert reasons["0.out_proj"] == "its parent reads its weight and never calls it"
    assert reasons["1"] == "a subclass of Linear, which may compute something else"
    assert reasons["2"] == "its forward was replaced"


def test_a_module_in_two_places_stays_one() -> None:
    shared = nn.Linear(32, 32)
    inner = nn.Sequential(shared, nn.ReLU(), shared)
    model = nn.ModuleDict({"a": shared, "b": inner})
    report = convert(model, DelayedScaling())
    assert report.converted == ("a",)
    assert isinstance(model["a"], Fp8Linear)
    assert inner[0] is inner[2] is model["a"]
    buffer = StatisticsBuffer()
    assert observe(model, buffer) == 3


def test_converting_twice_changes_nothing_more() -> None:
    model = Language()
    convert(model, DelayedScaling())
    layers = dict(fp8_layers(model))
    report = convert(model, CurrentScaling())
    assert report.converted == ()
    assert {e.name: e.reason for e in report.entries}["blocks.0.up"] == "already FP8"
    assert dict(fp8_layers(model)) == layers


def test_the_model_itself_cannot_be_replaced() -> None:
    linear = nn.Linear(32, 32)
    (entry,) = convert(linear, DelayedScaling()).entries
    assert "use Fp8Linear.from_linear" in entry.reason
    layer = Fp8Linear.from_linear(linear, DelayedScaling())
    assert layer.weight is linear.weight
    assert not hasattr(linear, "scaling")
    buffer = StatisticsBuffer()
    observe(layer, buffer)
    assert [info.name for info in buffer.catalogue] == ["input", "weight", "grad_output"]


def test_a_converted_model_can_be_copied() -> None:
    model = Language()
    convert(model, DelayedScaling())
    twin = copy.deepcopy(model)
    assert torch.equal(twin(torch.arange(8)), model(torch.arange(8)))
    assert tuple(name for name, _ in fp8_layers(twin)) == BLOCKS


def test_warns_if_the_model_has_no_fp8_layer_afterwards() -> None:
    small = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    with pytest.warns(
        UserWarning, match=r"No layer was converted.* 0: 8 -> 64 is not in multiples of 16; 2: 64"
    ):
        convert(small, DelayedScaling())
    with pytest.warns(UserWarning, match="It has no linear layer"):
        convert(nn.Sequential(nn.Conv2d(3, 8, 3)), DelayedScaling())
    model = Language()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(model, DelayedScaling())
        convert(model, DelayedScaling())
