"""One checkpoint in several precisions: paired scores, packed bytes, and the model as it was."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agent.helpers.wire_server import WireServer
from torch import Tensor, nn
from torch.nn import functional

from fp8scope import EvaluationError, ItemScores, evaluate_matrix
from fp8scope.config import Settings
from fp8scope.evaluation.columns import PRECISIONS, fp8_bytes
from fp8scope.evaluation.layers import THREE_DIMENSIONS
from fp8scope.evaluation.matrix import EvaluationMatrix
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run
from fp8scope_kernels import (
    MXFP8,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8GroupedLinear,
    Fp8Linear,
    convert,
    quantize_fp6,
    quantize_int4,
    quantize_int8,
    quantize_nvfp4,
)

WEIGHT_ONLY: dict[str, Callable[[Tensor], Any]] = {
    "fp6": quantize_fp6,
    "int8": quantize_int8,
    "int4": quantize_int4,
    "nvfp4": quantize_nvfp4,
}


class Tiny(nn.Module):
    """An embedding tied to the head, norms, dropout, two layers that share a weight, and 3-D weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.again = nn.Linear(64, 32, bias=False)
        self.again.weight = self.down.weight
        self.norm = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(0.5)
        self.experts = nn.ParameterList([nn.Parameter(torch.randn(2, 32, 32) / 8)])
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        hidden = functional.gelu(self.up(x))
        x = self.norm((x + self.dropout(self.down(hidden)) + self.again(hidden)).transpose(1, 2))
        x = x.transpose(1, 2).to(self.experts[0].dtype)
        output: Tensor = self.head(x + torch.einsum("bti,eij->btj", x, self.experts[0]))
        return output


def tiny(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


TOKENS = torch.randint(0, 40, (12, 9), generator=torch.Generator().manual_seed(1))


def losses(model: nn.Module) -> Tensor:
    """The loss of each of twelve texts."""
    logits = model(TOKENS[:, :-1]).float().transpose(1, 2)
    return functional.cross_entropy(logits, TOKENS[:, 1:], reduction="none").mean(1)


def bits_of(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def test_it_works() -> None:
    model = tiny()
    before, modes = bits_of(model), [module.training for module in model.modules()]
    parameters, random = list(model.parameters()), torch.get_rng_state()

    matrix = evaluate_matrix(model, losses, name="texts", metric="nll", higher_is_better=False)

    assert [column.precision for column in matrix.columns] == [p for p in PRECISIONS if p != "fp8-delayed"]
    assert not matrix.errors and matrix.repeatable
    for column in matrix.columns:
        (result,) = column.scores.values()
        assert (result.name, result.metric, result.kind, len(result.items)) == ("texts", "nll", "mean", 12)
    # Precisions differ, by little; four bits differ more than eight.
    apart = {name: abs(matrix.difference("texts", name).mean) for name in ("int8", "int4", "fp6", "nvfp4")}
    assert 0 < apart["int8"] < 0.1 and apart["int8"] < apart["int4"]
    # The model is as before, bit for bit, in the same objects and modes; so is the random state.
    assert all(torch.equal(a, b) for a, b in zip(before, bits_of(model), strict=True))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert not any("forward" in vars(module) for module in model.modules())


def test_each_column_computes_with_the_dequantised_weights() -> None:
    """Against a copy whose weights were quantised and written back, in BF16, by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).bfloat16()
    x = torch.randn(10, 32).bfloat16()
    matrix = evaluate_matrix(model, lambda m: m(x).float().sum(1), precisions=list(WEIGHT_ONLY))
    for column in matrix.columns[1:]:
        twin = copy.deepcopy(model)
        size = 0
        for layer in (twin[0], twin[2]):
            assert isinstance(layer, nn.Linear)
            packed: Any = WEIGHT_ONLY[column.precision](layer.weight.detach())
            layer.weight.data = packed.dequantize(torch.bfloat16)
            size += packed.nbytes
        with torch.no_grad():
            expected = twin(x).float().sum(1)
        assert column.scores["evaluation"].items == tuple(expected.double().tolist())
        assert column.weight_bytes == size


def test_fp8_columns_are_those_of_the_layers_of_a_conversion() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).bfloat16()
    x = torch.randn(10, 32).bfloat16()
    matrix = evaluate_matrix(model, lambda m: m(x).float().sum(1), precisions=["fp8-current", "mxfp8"])
    for column, recipe in zip(matrix.columns[1:], (CurrentScaling(), MXFP8()), strict=True):
        twin = copy.deepcopy(model).eval()
        convert(twin, recipe, include="*")
        with torch.no_grad():
            assert column.scores["evaluation"].items == tuple(twin(x).float().sum(1).double().tolist())


def test_bytes_are_those_of_the_packed_weights() -> None:
    model = tiny()
    columns = {column.precision: column for column in evaluate_matrix(model, losses).columns}
    # `down` and `again` share their weight, which is packed once; the tied embedding is not quantised.
    weights = 2 * 32 * 64
    assert columns["bf16"].weight_bytes == 2 * weights
    assert columns["int8"].weight_bytes == weights + 4 * (64 + 32)
    assert columns["int4"].weight_bytes == weights // 2 + 4 * (64 + 32)
    assert columns["fp6"].weight_bytes == weights * 6 // 8 + 4 * (64 + 32)
    assert columns["nvfp4"].weight_bytes == weights // 2 + weights // 16 + 2 * 4
    assert columns["fp8-current"].weight_bytes == weights + 2 * 4
    assert columns["mxfp8"].weight_bytes == weights + weights // 32
    whole = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    for column in columns.values():
        assert column.model_bytes == whole - 4 * weights + column.weight_bytes
    assert fp8_bytes(torch.ones(256, 130), BlockScaling()) == 256 * 130 + 4 * 2 * 2


def test_what_stays_is_counted_with_its_reason() -> None:
    model = tiny()
    with torch.no_grad():
        model.up.weight[0, 0] = torch.nan
    plan = evaluate_matrix(model, lambda m: torch.arange(3.0), precisions=["int8"]).plan
    assert list(plan.layers) == ["down", "again"]
    left = {reason: (modules, elements) for reason, modules, elements in map(facts, plan.left)}
    assert left["its weight has NaN or Inf elements"] == (1, 32 * 64 + 64)
    assert left["its weights have three dimensions, as those of experts do"] == (1, 2 * 32 * 32)
    assert left["output head, by its name"] == (1, 48 * 32)


class Mixture(nn.Module):
    """A linear layer, and experts in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)
        self.experts = Fp8GroupedLinear(2, 32, 32, recipe=DelayedScaling())

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.experts(self.up(x), torch.tensor([3, 8]))
        return output


def test_experts_in_fp8_are_evaluated_in_bf16() -> None:
    torch.manual_seed(0)
    model, x = Mixture(), torch.randn(8, 32)
    model(x)
    twin, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    twin.experts.precision = "bf16"
    own, expected = (
        evaluate_matrix(m, lambda m: m(x).float().sum(1), precisions=["mxfp8"]) for m in (model, twin)
    )
    assert [group.reason for group in own.plan.left] == [THREE_DIMENSIONS]
    for column, other in zip(own.columns, expected.columns, strict=True):
        assert column.scores["evaluation"].items == other.scores["evaluation"].items
    assert model.experts.precision == "fp8"
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def facts(group: Any) -> tuple[str, int, int]:
    return group.reason, group.modules, group.elements


class Foreign(Tensor):
    """A tensor of another library, whose bits cannot be read."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.view:
            raise NotImplementedError("view")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_weights_of_other_libraries_stay() -> None:
    model = tiny()
    model.up.weight = nn.Parameter(model.up.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    model.norm.weight = nn.Parameter(torch.ones(32).as_subclass(Foreign), requires_grad=False)
    matrix = evaluate_matrix(model, lambda m: torch.arange(3.0), precisions=["int8"])
    assert list(matrix.plan.layers) == ["down", "again"] and not matrix.errors
    reasons = {group.reason for group in matrix.plan.left}
    assert "its weight is quantised already: torch.float8_e4m3fn" in reasons


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_models_of_other_dtypes(dtype: torch.dtype) -> None:
    model = tiny().to(dtype)
    seen: set[torch.dtype] = set()
    model.up.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    matrix = evaluate_matrix(model, losses)
    assert not matrix.errors and seen == {dtype}


def test_under_autocast_and_compiled() -> None:
    model = tiny()

    def evaluate(compiled: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return losses(compiled)

    compiled: Any = torch.compile(model, backend="eager")
    plain = evaluate_matrix(model, evaluate, precisions=["fp8-current", "int4"])
    same = evaluate_matrix(compiled, evaluate, precisions=["fp8-current", "int4"])
    assert not plain.errors
    for first, second in zip(plain.columns, same.columns, strict=True):
        assert first.scores == second.scores


def test_a_torch_encoder_calls_its_layers() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
    x = torch.randn(6, 5, 32)
    matrix = evaluate_matrix(encoder, lambda m: m(x).sum((1, 2)), precisions=["int4"])
    assert matrix.difference("evaluation", "int4").error > 0
    assert torch.backends.mha.get_fastpath_enabled()
    reasons = {group.reason for group in matrix.plan.left}
    assert "its parent reads its weight and never calls it" in reasons


def test_a_model_trained_in_fp8_has_the_column_of_its_own_scales() -> None:
    model = tiny()
    convert(model, DelayedScaling())
    losses(model)
    layer = model.up
    assert isinstance(layer, Fp8Linear)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    matrix = evaluate_matrix(model, losses)
    assert "fp8-delayed" in [column.precision for column in matrix.columns] and not matrix.errors
    with torch.no_grad():
        expected = losses(model.eval())
    assert matrix.difference("evaluation", "fp8-delayed").error > 0
    # Inputs are rounded to BF16 before they are quantised; otherwise it is the model as it was trained.
    distances = {
        column.precision: (torch.tensor(column.scores["evaluation"].items) - expected).abs().max()
        for column in matrix.columns
    }
    assert distances["fp8-delayed"] < min(distances["bf16"], distances["fp8-block"])
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    with pytest.raises(ValueError, match="trained under DelayedScaling"):
        evaluate_matrix(tiny(), losses, precisions=["fp8-delayed"])


def scores_of(returned: Any, **arguments: Any) -> EvaluationMatrix:
    return evaluate_matrix(tiny(), lambda model: returned, precisions=["int8"], **arguments)


def test_what_an_evaluation_function_may_return() -> None:
    (result,) = scores_of([1, 0, 1]).reference.scores.values()
    assert (result.kind, result.items, result.item_ids) == ("proportion", (1.0, 0.0, 1.0), None)
    (result,) = scores_of({"a": 0.5, "b": torch.tensor(2.0)}, name="one").reference.scores.values()
    assert (result.name, result.items, result.item_ids) == ("one", (0.5, 2.0), ("a", "b"))
    tasks = scores_of({"x": ItemScores(items=[1, 2], margin=0.5, metric="nll"), "y": {"a": 1.0}}, metric="f1")
    assert [(r.name, r.metric, r.margin) for r in tasks.reference.scores.values()] == [
        ("x", "nll", 0.5),
        ("y", "f1", None),
    ]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned None; it must return a score for each item"),
        ({}, "empty mapping"),
        ([], "no items"),
        (0.5, "a single number"),
        (torch.tensor(0.5), "a single number"),
        ("good", "must return a score"),
        ([1.0, float("nan")], "1 of 2 items scored NaN"),
        ({"task": {"a": "b"}}, "task: the evaluation function must return"),
        (ItemScores(items=[1, 2], item_ids=["a", "a"]), "must be unique"),
    ],
)
def test_what_it_may_not_return(returned: Any, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        scores_of(returned)


def failing_in(number: int, failure: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """An evaluation that fails in its nth call."""
    calls: list[int] = []

    def evaluate(model: nn.Module) -> Any:
        calls.append(1)
        return failure(model) if len(calls) == number else losses(model)

    return evaluate


def raising(model: nn.Module) -> Any:
    raise RuntimeError("out of words")


def test_a_column_that_fails_leaves_the_others() -> None:
    model = tiny()
    for failure, message in (
        (raising, "RuntimeError: out of words"),
        (lambda model: losses(model) * torch.nan, "12 of 12 items scored NaN"),
        (lambda model: None, "returned None"),
        (lambda model: {"other": losses(model)}, "returned the tasks other here, and evaluation in BF16"),
    ):
        matrix = evaluate_matrix(model, failing_in(2, failure), precisions=["fp6", "int8"])
        assert list(matrix.errors) == ["fp6"] and message in matrix.errors["fp6"]
        assert matrix.columns[2].scores and f"fp6 failed: {matrix.errors['fp6']}" in str(matrix)
    with pytest.raises(EvaluationError, match="The evaluation in BF16 failed. RuntimeError: out of words"):
        evaluate_matrix(model, raising)
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_evaluation_that_changes_the_model() -> None:
    model = tiny()
    running = model.norm.running_mean
    assert running is not None
    before = running.clone()

    def in_training_mode(model: nn.Module) -> Tensor:
        model.train()
        return losses(model)

    matrix = evaluate_matrix(model, in_training_mode, precisions=["int8"])
    # Dropout and the running mean are the same in each column.
    assert matrix.repeatable and torch.equal(running, before)

    def training(model: nn.Module) -> Tensor:
        next(model.parameters()).data.mul_(1.5)
        return losses(model)

    with pytest.raises(EvaluationError, match="changed the model's parameters .embedding.weight"):
        evaluate_matrix(model, training)


def test_a_random_evaluation_is_pointed_out() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = evaluate_matrix(
        tiny(), lambda m: losses(m) + torch.rand(12, generator=generator), precisions=["int8"]
    )
    assert not matrix.repeatable and "not repeatable" in str(matrix)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="precisions must be among bf16, .* got fp7"):
        evaluate_matrix(tiny(), losses, precisions=["fp7"])
    with pytest.raises(ValueError, match=r"torch\.nn\.Module, got dict"):
        evaluate_matrix({}, losses)  # type: ignore[arg-type]
    with pytest.raises(EvaluationError, match="the model itself cannot be replaced"):
        evaluate_matrix(nn.Linear(16, 16), losses)
    with pytest.raises(EvaluationError, match="meta device"):
        evaluate_matrix(nn.Sequential(nn.Linear(16, 16, device="meta"), nn.ReLU()), losses)
    with pytest.raises(ValueError, match="matches no module"):
        evaluate_matrix(tiny(), losses, include="nothing.*")


def begin(settings: Settings) -> Run:
    return Run(settings, blank_registration("a run"))


def test_the_run_gets_each_cell(server: WireServer, settings: Settings) -> None:
    server.accepts = ["evaluation_matrix"]
    run = begin(settings)
    matrix = evaluate_matrix(
        tiny(), lambda m: {"a": losses(m), "b": losses(m) < 4}, precisions=["fp6"], step=7, metric="nll"
    )
    assert run.finish().complete
    stored = server.run.evaluations
    assert [(cell["precision"], cell["name"], cell["kind"]) for cell in stored] == [
        ("bf16", "a", "mean"),
        ("bf16", "b", "proportion"),
        ("fp6", "a", "mean"),
        ("fp6", "b", "proportion"),
    ]
    assert {cell["step"] for cell in stored} == {7}
    sizes = stored[2]["matrix"]
    assert sizes["weight_bytes"] == matrix.columns[1].weight_bytes and sizes["layers"] == 3
    assert stored[2]["items"] == list(matrix.columns[1].scores["a"].items)


def test_a_server_that_does_not_know_the_matrix_gets_no_cell(server: WireServer, settings: Settings) -> None:
    run = begin(settings)
    evaluate_matrix(tiny(), losses, precisions=["fp6"])
    run.log_eval("own", "nll", [1.0, 2.0], kind="mean")
    assert run.finish().complete
    assert [score["name"] for score in server.run.evaluations] == ["own"]
