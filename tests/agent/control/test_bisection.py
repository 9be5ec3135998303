"""Bisection: the product that hurts comes first, and nothing of the training is changed."""

import copy
import time
from typing import Any

import pytest
import torch
from agent.helpers.reference_training import Training, begin, equal
from agent.helpers.wire_server import WireServer
from torch import nn

import fp8scope
from fp8scope.config import Settings
from fp8scope.control.bisection import Bisection, ProductDeviation, bisect
from fp8scope.recording.records import wire_number
from fp8scope_kernels import PRODUCTS, Fp8Linear, Recipe, fp8_layers


def make_model(recipe: Recipe | None = None, depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(64, 31))
    fp8scope.convert(model, recipe or fp8scope.DelayedScaling(history_length=4))
    return model


def batch_of(seed: int = 1) -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module) -> Any:
    return lambda batch: model(batch).square().mean()


def warm_up(model: nn.Module, steps: int = 3) -> None:
    for seed in range(steps):
        loss_of(model)(batch_of(seed)).backward()


def layer_of(model: nn.Module, path: str) -> Fp8Linear:
    return dict(fp8_layers(model))[path]


def plant(layer: Fp8Linear, factor: float) -> None:
    """Force the scale of the layer's gradient: as if its history had seen amax `factor` times too large."""
    state = layer.state_of("grad_output")
    state.amax_history.mul_(factor)


def test_it_works(server: WireServer, settings: Settings) -> None:
    run, model = begin(settings), make_model()
    run.watch(model)
    with run.step():
        warm_up(model)
    plant(layer_of(model, "3"), 2.0**40)
    found = run.bisect(batch_of(), loss_of(model))
    assert found.worst.layer == "3" and found.worst.product in ("dgrad", "wgrad")
    assert len(found.products) == 9 and {one.product for one in found.products} == set(PRODUCTS)
    errors = [one.relative_error for one in found.products]
    assert errors == sorted(errors, reverse=True) and errors[0] > 2 * errors[2]
    assert found.products[0].cosine < found.products[-1].cosine <= 1 + 1e-9
    assert found.total.relative_error > errors[0] and found.loss_bf16 == pytest.approx(
        found.loss_fp8, rel=0.05
    )
    run.finish()
    (report,) = server.run.reports_of("bisect")
    assert report["step"] == 1 and report["measured"] == 9
    assert report["products"][0] == {
        "layer": found.worst.layer,
        "product": found.worst.product,
        "relative_error": found.worst.relative_error,
        "cosine": found.worst.cosine,
    }


@pytest.mark.parametrize("path", ["0", "3", "6"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_errors_are_those_of_the_definition(path: str, product: Any) -> None:
    """Against gradients that are computed here, one product at a time, in the simplest way."""
    model = make_model(fp8scope.CurrentScaling())

    def gradient(chosen: bool) -> torch.Tensor:
        twin = copy.deepcopy(model)
        for name, layer in fp8_layers(twin):
            layer.products = (product,) if chosen and name == path else ()
        torch.manual_seed(5)
        loss_of(twin)(batch_of()).backward()
        parts = [parameter.grad for parameter in twin.parameters()]
        return torch.cat([part.reshape(-1).double() for part in parts if part is not None])

    torch.manual_seed(5)
    found = {
        (one.layer, one.product): one for one in bisect([model], lambda: loss_of(model)(batch_of())).products
    }
    reference, mine = gradient(False), gradient(True)
    one = found[path, product]
    assert one.relative_error == pytest.approx(
        ((mine - reference).norm() / reference.norm()).item(), rel=1e-9
    )
    cosine = torch.nn.functional.cosine_similarity(mine, reference, dim=0).item()
    assert one.cosine == pytest.approx(cosine, rel=1e-9)


def test_the_training_goes_on_bit_for_bit(settings: Settings) -> None:
    def train(bisecting: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        training, run = Training(), begin(settings)
        run.watch(training.model, training.optimizer)
        losses = []
        for index, batch in enumerate(training.batches(8)):
            with run.step():
                losses.append(training.step(batch))
            if bisecting and index % 3 == 1:
                run.bisect(torch.ones(16, 32), loss_of(training.model))
        return losses, training.state()

    losses, state = train(False)
    others, other_state = train(True)
    assert equal(losses, others) and equal(state, other_state)


def test_everything_is_left_as_it_was() -> None:
    training = Training()
    for batch in training.batches(3):
        training.step(batch)
    (training.model(torch.ones(16, 32)).sum()).backward()
    gradients = [(p.grad, None if p.grad is None else p.grad.clone()) for p in training.model.parameters()]
    random_state = torch.get_rng_state()
    before = [value.clone() for value in (*training.model.parameters(), *training.model.buffers())]
    calls = [state.calls for _, layer in fp8_layers(training.model) for state in layer.scaling.values()]
    slots = {path: layer.slots for path, layer in fp8_layers(training.model)}
    bisect([training.model], lambda: training.model(torch.rand(16, 32)).square().mean())
    after = [value.clone() for value in (*training.model.parameters(), *training.model.buffers())]
    assert equal(before, after) and torch.equal(random_state, torch.get_rng_state())
    assert all(p.grad is own for p, (own, _) in zip(training.model.parameters(), gradients, strict=True))
    assert all(own is None or (kept is not None and torch.equal(own, kept)) for own, kept in gradients)
    assert calls == [s.calls for _, layer in fp8_layers(training.model) for s in layer.scaling.values()]
    assert slots == {path: layer.slots for path, layer in fp8_layers(training.model)}
    assert all(layer.products is None for _, layer in fp8_layers(training.model))
    assert training.model.calls == 4


def test_what_the_loss_raises_passes_through_and_all_is_put_back(settings: Settings) -> None:
    run, model = begin(settings), make_model()
    run.watch(model)
    calls = [0]

    def failing(batch: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 4:
            raise ZeroDivisionError
        return loss_of(model)(batch)  # type: ignore[no-any-return]

    random_state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        run.bisect(batch_of(), failing)
    assert all(layer.products is None and layer.slots for _, layer in fp8_layers(model))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random_state, torch.get_rng_state())


def test_nothing_of_it_is_counted(server: WireServer, settings: Settings) -> None:
    run, model = begin(settings), make_model()
    run.watch(model)
    for index in range(3):
        with run.step():
            loss_of(model)(batch_of()).backward()
        if index == 1:
            run.bisect(batch_of(2), loss_of(model))
    run.finish()
    assert server.run.steps == [1, 2, 3]
    first, _, last = server.run.rows
    assert first["tensors"]["numel"] == last["tensors"]["numel"]


def test_layers_that_are_bf16_already_are_left_alone() -> None:
    model = make_model()
    layer_of(model, "3").precision = "bf16"
    found = bisect([model], lambda: loss_of(model)(batch_of()))
    assert {one.layer for one in found.products} == {"0", "6"} and layer_of(model, "3").precision == "bf16"


def test_torchaos_layers_are_bisected_too() -> None:
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    config = float8.Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    object.__setattr__(config, "emulate", True)
    model = float8.convert_to_float8_training(model, config=config)
    configs = [module.config for module in model if hasattr(module, "config")]
    batch = torch.randn(16, 32)
    found = bisect([model], lambda: model(batch).square().mean())
    # Its weights' gradients are in high precision already: there is nothing to switch.
    assert {(one.layer, one.product) for one in found.products} == {
        (layer, product) for layer in ("0", "2") for product in ("fprop", "dgrad")
    }
    assert [module.config for module in model if hasattr(module, "config")] == configs
    assert found.total.relative_error > 0


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (nn.Linear(4, 4), lambda x: x.sum(), "no FP8 layer"),
        (make_model(), lambda x: 3.0, "a tensor of one element"),
        (make_model(), lambda x: x, "a tensor of one element"),
    ],
    ids=["no layer", "a number", "a matrix"],
)
def test_what_cannot_be_bisected_is_said(
    model: nn.Module, loss: Any, message: str, settings: Settings
) -> None:
    run = begin(settings)
    with pytest.raises(ValueError, match=message):
        run.bisect(batch_of(), loss, model)


def test_a_gradient_that_is_zero_is_said() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="zero or not finite"):
        bisect([model], lambda: (model(batch_of()) * 0).sum())


def test_a_gradient_that_is_not_finite_is_the_worst() -> None:
    recipe = fp8scope.DelayedScaling(history_length=4, saturate=False, fp8_format="E4M3")
    model = make_model(recipe)
    warm_up(model)
    plant(layer_of(model, "3"), 2.0**-20)
    found = bisect([model], lambda: loss_of(model)(batch_of()))
    assert found.worst.layer == "3" and found.worst.relative_error != found.worst.relative_error
    assert wire_number(found.worst.relative_error) == "NaN"
    assert "nan" in str(found)


def test_the_table_and_the_document_are_bounded() -> None:
    many = tuple(ProductDeviation(f"layer.{i}", "dgrad", 1.0 / (i + 1), 0.5) for i in range(3000))
    found = Bisection(
        products=many,
        total=ProductDeviation("*", "fprop", 0.5, 0.9),
        loss_bf16=1.0,
        loss_fp8=float("inf"),
        seconds=2.0,
    )
    document = found.document()
    assert len(document["products"]) == 2000 and document["measured"] == 3000
    assert document["loss_fp8"] == "Infinity"
    text = str(found)
    assert "layer.0" in text and "2980 more" in text and "layer.20" not in text


def test_in_a_run_that_records_nothing_it_still_answers() -> None:
    run, model = fp8scope.init(mode="disabled"), make_model()
    began = time.monotonic()
    assert run.bisect(batch_of(), loss_of(model), model).products
    assert run.finish().complete and time.monotonic() > began
