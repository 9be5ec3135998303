"""BF16 reference windows: they see what there is to see, and the run does not notice them."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from agent.wire_server import WireServer
from torch import nn

import fp8scope
from fp8scope.config import ConfigurationError, Settings
from fp8scope.keeping import TrainingState, clone_batch
from fp8scope.quiet import without_hooks
from fp8scope.reference import ReferenceWindow, compare
from fp8scope.registration import blank_registration
from fp8scope.run import Run
from fp8scope_kernels import Fp8AdamW, fp8_layers

STEPS = 24
EVERY, WINDOW = 8, 4


class Model(nn.Module):
    """With everything that a step may change: dropout, running statistics, scales, a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.norm = nn.BatchNorm1d(64)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(64, 32)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        noise = random.random() + float(np.random.rand())
        y: torch.Tensor = self.down(self.dropout(self.norm(self.up(x)))) * (1 + 0.01 * noise)
        return y


class Training:
    """One training as a script would have it, each part of its state included."""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer] | None = None) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = Model()
        fp8scope.convert(self.model, fp8scope.DelayedScaling(history_length=4))
        make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
        self.optimizer = make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.seen: list[torch.Tensor] = []

    def batches(self, count: int = STEPS) -> Iterator[torch.Tensor]:
        """Drawn while training, from the same random numbers as dropout's; into the same memory again."""
        memory = torch.empty(16, 32)
        for _ in range(count):
            yield memory.normal_()

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = (self.model(batch) - batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        detached: torch.Tensor = loss.detach()
        return detached

    def state(self) -> list[torch.Tensor]:
        """Every number that the next step depends on."""
        scaling = [
            torch.as_tensor(state.calls).double()
            for _, layer in fp8_layers(self.model)
            for state in layer.scaling.values()
        ]
        tensors = [value for values in self.optimizer.state.values() for value in values.values()]
        rate = torch.as_tensor(self.optimizer.param_groups[0]["lr"])
        numbers = [torch.as_tensor(value) for value in tensors]
        return [
            *[one.detach().clone() for one in (*self.model.parameters(), *self.model.buffers())],
            *scaling, *[one.clone() for one in numbers], rate,
            torch.tensor(self.model.calls), torch.get_rng_state(),
            torch.tensor(random.random()), torch.tensor(float(np.random.rand())),
        ]  # fmt: skip


Loop = Callable[[Training, Run, Any], list[torch.Tensor]]


def explicit(training: Training, run: Run, train_step: Any) -> list[torch.Tensor]:
    losses = []
    for batch in training.batches():
        with run.step(tokens=16) as step:
            losses.append(train_step(batch))
            step.log(loss=losses[-1])
    return losses


def without_steps(training: Training, run: Run, train_step: Any) -> list[torch.Tensor]:
    return [train_step(batch) for batch in training.batches()]


def steps_inside(training: Training, run: Run, train_step: Any) -> list[torch.Tensor]:
    return [train_step(batch) for batch in training.batches()]


def begin(settings: Settings) -> Run:
    return Run(settings, blank_registration("reference"))


def plain(settings: Settings) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    training = Training()
    losses = [training.step(batch) for batch in training.batches()]
    return losses, training.state()


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(left, right) for left, right in zip(a, b, strict=True))


def window(run: Run, training: Training, **more: Any) -> Any:
    arguments = {"every": EVERY, "steps": WINDOW, "scheduler": training.scheduler, **more}
    return run.reference_window(training.step, training.model, training.optimizer, **arguments)


def test_it_works(server: WireServer, settings: Settings) -> None:
    """Two windows; and losses and state are those of a training without any, bit for bit."""
    training, run = Training(), begin(settings)
    run.watch(training.model)
    losses = explicit(training, run, window(run, training))
    state = training.state()
    run.finish()
    expected_losses, expected_state = plain(settings)
    assert equal(losses, expected_losses), "not the losses of a training without windows"
    assert equal(state, expected_state), "not the state of a training without windows"
    reports = server.run.reports_of("reference")
    assert [(one["step"], len(one["bf16"]), len(one["fp8"])) for one in reports] == [(9, 4, 4), (17, 4, 4)]
    for report, first in zip(reports, (8, 16), strict=True):
        assert report["fp8"] == [float(loss) for loss in losses[first : first + WINDOW]], (
            "the run's own losses"
        )
        assert report["bf16"] != report["fp8"]
        assert report["bf16"][0] == pytest.approx(report["fp8"][0], rel=0.05), "from the same state"
        verdict = compare(report["fp8"], report["bf16"], report["tolerance"])
        assert report["delta"] == verdict.delta and report["noise"] == verdict.noise
        assert report["verdict"] == ("within" if verdict.within else "over")
        assert (report["policy"], report["action"], report["layers"]) == ("report", "", 2)
        size = sum(p.numel() for p in training.model.parameters()) * 4
        assert report["kept_bytes"] > 2 * 3 * size, "weights and two moments, twice"


@pytest.mark.parametrize("loop", [without_steps, steps_inside])
def test_bit_for_bit_in_other_loops(loop: Loop, server: WireServer, settings: Settings) -> None:
    training, run = Training(), begin(settings)
    step = training.step
    if loop is steps_inside:

        def with_step(batch: torch.Tensor) -> torch.Tensor:
            with run.step() as open_step:
                loss = Training.step(training, batch)
                open_step.log(loss=loss)
            return loss

        training.step = with_step  # type: ignore[method-assign]
    losses = loop(training, run, window(run, training))
    training.step = step  # type: ignore[method-assign]
    state = training.state()
    run.finish()
    expected_losses, expected_state = plain(settings)
    assert equal(losses, expected_losses) and equal(state, expected_state)
    assert len(server.run.reports_of("reference")) == 2


@pytest.mark.parametrize("place", ["cpu", "device"])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Fp8AdamW", "LBFGS-like"])
def test_bit_for_bit_with_every_optimizer(name: str, place: str, settings: Settings) -> None:
    optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
        "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False),
        "Fp8AdamW": lambda parameters: Fp8AdamW(parameters, lr=1e-2),
        "LBFGS-like": lambda parameters: torch.optim.Rprop(parameters, lr=1e-2),
    }
    expected = Training(optimizers[name])
    expected_losses = [expected.step(batch) for batch in expected.batches()]
    expected_state = expected.state()
    training, run = Training(optimizers[name]), begin(settings)
    losses = explicit(training, run, window(run, training, keep_on=place))
    assert equal(losses, expected_losses) and equal(training.state(), expected_state)


def test_nothing_of_a_window_is_recorded(server: WireServer, settings: Settings) -> None:
    def record(with_windows: bool) -> list[dict[str, Any]]:
        training, run = Training(), begin(settings)
        run.watch(training.model, training.optimizer)
        explicit(training, run, window(run, training) if with_windows else training.step)
        assert run.finish().complete
        rows = server.runs[run.id].rows
        keep = ("loss", "tokens", "learning_rate", "grad_norm")
        return [
            {"step": row["step"], **{name: row["scalars"].get(name) for name in keep}, **row["tensors"]}
            for row in rows
        ]

    quiet, loud = record(False), record(True)
    assert [row["step"] for row in loud] == list(range(1, STEPS + 1))
    assert repr(quiet) == repr(loud)


def test_dropout_is_the_same_in_both_arms(settings: Settings, server: WireServer) -> None:
    """What depends on random numbers alone is equal in both, step by step."""
    training, run = Training(), begin(settings)

    def step(batch: torch.Tensor) -> torch.Tensor:
        dropped = torch.nn.functional.dropout(torch.ones(1000), 0.5).sum()
        return dropped + random.random() + float(np.random.rand())

    train_step = run.reference_window(step, training.model, training.optimizer, every=EVERY, steps=WINDOW)
    for batch in training.batches():
        with run.step():
            train_step(batch)
    run.finish()
    for report in server.run.reports_of("reference"):
        assert report["bf16"] == report["fp8"] and len(set(report["fp8"])) == WINDOW
        assert report["delta"] == 0.0 and report["verdict"] == "within"


def test_a_policy_falls_back_until_the_next_window(server: WireServer, settings: Settings) -> None:
    training, run = Training(), begin(settings)
    run.watch(training.model)

    def harmed(batch: torch.Tensor) -> torch.Tensor:
        harm = sum(layer.precision == "fp8" for _, layer in fp8_layers(training.model))
        return Training.step(training, batch) + 0.1 * harm

    training.step = harmed  # type: ignore[method-assign]
    train_step = window(run, training, policy="fallback")
    precisions = []
    for batch in training.batches(22):
        with run.step() as step:
            step.log(loss=train_step(batch))
        precisions.append({layer.precision for _, layer in fp8_layers(training.model)})
    run.finish()
    first, second = server.run.reports_of("reference")
    assert first["verdict"] == second["verdict"] == "over" and first["action"] == "fallback"
    # FP8 to the first window's end (after step 12); then BF16 until the second begins (with step 17).
    expected = [{"fp8"}] * 11 + [{"bf16"}] * 5 + [{"fp8"}] * 3 + [{"bf16"}] * 3
    assert precisions == expected
    texts = [one["text"] for one in server.run.reports_of("annotation")]
    assert [text[:16] for text in texts] == ["2 layers to BF16", "2 layers to FP8:", "2 layers to BF16"]


def test_the_projects_margin_is_the_tolerance(server: WireServer, settings: Settings) -> None:
    original = WireServer._register

    def register(self: WireServer, *arguments: Any) -> Any:
        status, answer = original(self, *arguments)
        return status, {**answer, "margin": 0.5}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WireServer, "_register", register)
        training, run = Training(), begin(settings)
        deadline = time.monotonic() + 60
        while run.margin is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        explicit(training, run, window(run, training))
        run.finish()
    assert {one["tolerance"] for one in server.run.reports_of("reference")} == {0.5}
    assert {one["verdict"] for one in server.run.reports_of("reference")} == {"within"}


def test_a_window_that_fails_leaves_no_trace(
    settings: Settings, server: WireServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The arm runs out of memory, say. The training goes on as it would have, and windows are given up."""
    training, run = Training(), begin(settings)

    def step(batch: torch.Tensor) -> torch.Tensor:
        if any(layer.precision == "bf16" for _, layer in fp8_layers(training.model)):
            training.model.up.weight.data.add_(1.0)
            raise RuntimeError("out of memory")
        return training.step(batch)

    train_step = run.reference_window(
        step, training.model, training.optimizer, every=4, steps=2, scheduler=training.scheduler
    )
    losses = explicit(training, run, train_step)
    state = training.state()
    run.finish()
    expected_losses, expected_state = plain(settings)
    assert equal(losses, expected_losses) and equal(state, expected_state)
    assert server.run.reports_of("reference") == [] and "out of memory" in caplog.text
    assert run.guard.counts()[1] == 3, "after three it is not tried again"


def test_an_interruption_passes_through_and_all_is_put_back(settings: Settings) -> None:
    training, run = Training(), begin(settings)
    before: list[list[torch.Tensor]] = []

    def step(batch: torch.Tensor) -> torch.Tensor:
        if any(layer.precision == "bf16" for _, layer in fp8_layers(training.model)):
            raise KeyboardInterrupt
        loss = training.step(batch)
        before.append([parameter.detach().clone() for parameter in training.model.parameters()])
        return loss

    train_step = run.reference_window(step, training.model, training.optimizer, every=4, steps=2)
    with pytest.raises(KeyboardInterrupt):
        explicit(training, run, train_step)
    assert equal([parameter.detach() for parameter in training.model.parameters()], before[-1])
    assert {layer.precision for _, layer in fp8_layers(training.model)} == {"fp8"}


def test_what_the_scripts_step_raises_is_the_scripts(settings: Settings) -> None:
    training, run = Training(), begin(settings)

    def step(batch: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    train_step = run.reference_window(step, training.model, training.optimizer, every=4, steps=2)
    with pytest.raises(ZeroDivisionError):
        train_step(torch.zeros(1))


def test_a_step_without_a_loss_is_told(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    training, run = Training(), begin(settings)

    def step(batch: torch.Tensor) -> None:
        training.step(batch)

    explicit_step = run.reference_window(step, training.model, training.optimizer, every=2, steps=2)
    for batch in training.batches():
        explicit_step(batch)
    assert "train_step must return the loss" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"every": 1}, "every must be"),
        ({"every": 2.5}, "every must be"),
        ({"steps": 1}, "steps must be"),
        ({"steps": 9, "every": 8}, "at most every"),
        ({"steps": 1001, "every": 5000}, "at most 1000"),
        ({"policy": "panic"}, "policy must be"),
        ({"tolerance": 0}, "tolerance must be"),
        ({"tolerance": float("nan")}, "tolerance must be"),
        ({"keep_on": "moon"}, "keep_on must be"),
        ({"also": [object()]}, "has no state_dict"),
        ({"optimizer": None}, "torch.optim.Optimizer"),
        ({"train_step": 3}, "one training step"),
    ],
    ids=[
        *("every 1", "every 2.5", "steps 1", "steps 9 every 8", "steps 1001", "policy", "tolerance 0"),
        *("tolerance nan", "keep_on", "also", "optimizer", "train_step"),
    ],
)
def test_arguments_are_checked_at_once(change: dict[str, Any], message: str, settings: Settings) -> None:
    training, run = Training(), begin(settings)
    arguments: dict[str, Any] = {
        "train_step": training.step,
        "model": training.model,
        "optimizer": training.optimizer,
        "every": 8,
        "steps": 4,
        **change,
    }
    if arguments["optimizer"] is None:
        arguments["optimizer"] = [object()]
    with pytest.raises(ConfigurationError, match=message):
        run.reference_window(**arguments)


def test_a_run_that_records_nothing_changes_nothing(settings: Settings) -> None:
    run, training = fp8scope.init(mode="disabled"), Training()
    step = training.step
    assert run.reference_window(step, training.model, training.optimizer, every=8, steps=4) is step
    live = begin(settings)
    train_step = live.reference_window(step, training.model, training.optimizer, every=2, steps=2)
    live.finish()
    assert isinstance(train_step, ReferenceWindow)
    for batch in training.batches(6):
        train_step(batch)


def test_without_fp8_there_is_nothing_to_compare(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    run, model = begin(settings), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step = run.reference_window(lambda x: model(x).sum(), model, optimizer, every=2, steps=2)
    for _ in range(8):
        train_step(torch.zeros(1, 4))
    assert caplog.text.count("no layer in FP8") == 1


@pytest.mark.parametrize(
    ("fp8", "bf16", "delta", "within"),
    [
        ([1.0, 1.0], [1.0, 1.0], 0.0, True),
        ([2.002, 2.004], [2.0, 2.0], 0.0015, True),
        ([2.01, 2.01], [2.0, 2.0], 0.005, False),
        ([1.99, 1.99], [2.0, 2.0], -0.005, False),
        ([-1.0, -1.0], [-2.0, -2.0], 0.5, False),
        ([float("nan"), 1.0], [1.0, 1.0], float("nan"), False),
        ([1.0, 1.0], [float("inf"), 1.0], float("nan"), False),
        ([0.0, 0.0], [0.0, 0.0], float("nan"), False),
    ],
    ids=str,
)
def test_the_verdict(fp8: list[float], bf16: list[float], delta: float, within: bool) -> None:
    verdict = compare(fp8, bf16, 0.0025)
    assert verdict.delta == pytest.approx(delta, nan_ok=True) and verdict.within is within


def test_noise_is_the_standard_error_of_the_paired_difference() -> None:
    generator = np.random.default_rng(0)
    level = generator.normal(2.0, 0.5, 50)
    difference = generator.normal(0.01, 0.02, 50)
    verdict = compare((level + difference).tolist(), level.tolist(), 0.0025)
    expected = difference.std(ddof=1) / np.sqrt(50) / level.mean()
    assert verdict.noise == pytest.approx(expected, rel=1e-9)
    assert verdict.delta == pytest.approx(difference.mean() / level.mean(), rel=1e-9)


def test_a_batch_has_memory_of_its_own() -> None:
    from collections import namedtuple

    Pair = namedtuple("Pair", "x y")
    x = torch.zeros(2, requires_grad=True)
    batch = {"a": [x, (1, "text")], "b": Pair(torch.ones(2), None)}
    copied = clone_batch(batch)
    with torch.no_grad():
        x.fill_(7)
    assert copied["a"][0].tolist() == [0, 0] and copied["a"][0].requires_grad
    assert copied["a"][1] == (1, "text") and isinstance(copied["b"], Pair) and copied["b"].y is None


def test_hooks_of_others_stay_in_their_order(settings: Settings) -> None:
    called: list[str] = []
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *arguments: called.append("first"))
    run = begin(settings)
    run.watch(model)
    model.register_forward_hook(lambda *arguments: called.append("last"))
    before = list(model._forward_hooks)
    with without_hooks([model]):
        assert len(model._forward_hooks) < len(before)
        model(torch.zeros(1, 2))
        model.register_forward_hook(lambda *arguments: called.append("new"))
    assert list(model._forward_hooks)[: len(before)] == before and called == ["first", "last"]
    called.clear()
    model(torch.zeros(1, 2))
    assert called == ["first", "last", "new"]


def test_a_kept_state_can_be_taken_back_more_than_once() -> None:
    training = Training()
    for batch in training.batches(3):
        training.step(batch)
    kept = TrainingState(training.model, [training.optimizer], [training.scheduler])
    expected = None
    for _ in range(2):
        for batch in training.batches(3):
            training.step(batch)
        kept.restore()
        state = training.state()
        assert expected is None or equal(state, expected)
        expected = state
    assert kept.nbytes > 0


def test_bit_for_bit_where_steps_are_found_by_themselves(server: WireServer, settings: Settings) -> None:
    """The attachment's step is still open while the window's other arm trains."""
    from fp8scope.attachment import attach_run

    def train(with_windows: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]:
        training, run = Training(), begin(settings)
        attach_run(run, training.model, training.optimizer, reduction="mean", tokens_per_step=0)
        train_step = window(run, training) if with_windows else training.step
        losses = [train_step(batch) for batch in training.batches()]
        state = training.state()
        run.finish()
        rows = server.runs[run.id].rows
        return losses, state, [(row["step"], row["scalars"]["loss"], row["tensors"]["amax"]) for row in rows]

    losses, state, rows = train(False)
    windowed_losses, windowed_state, windowed_rows = train(True)
    assert equal(losses, windowed_losses) and equal(state, windowed_state)
    assert rows == windowed_rows and [row[0] for row in rows] == list(range(1, STEPS + 1))
    reports = list(server.runs.values())[-1].reports_of("reference")
    assert [report["step"] for report in reports] == [9, 17]
