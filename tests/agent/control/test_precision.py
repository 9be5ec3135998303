"""Layers to BF16 and back: by the script, by a command, at a step boundary, and shown on the run's page."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agent.helpers.commanding import begin, command, results, steps_until
from agent.helpers.models import Block, precisions, train_step
from agent.helpers.wire_server import WireServer
from helpers.waiting import wait_until
from torch import nn

import fp8scope
from fp8scope.config import Settings
from fp8scope.control.precision import WatchedLayers, find, set_precision
from fp8scope_kernels import fp8_layers


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(32, 31))
    fp8scope.convert(model, fp8scope.DelayedScaling(history_length=4))
    return model


def test_it_works(server: WireServer, settings: Settings) -> None:
    run, model = begin(settings), make_model()
    run.watch(model)
    with run.step():
        train_step(model)
        paths = run.fallback("*.down", why="it clips")
        assert paths == ("0.down", "1.down")
        assert set(precisions(model).values()) == {"fp8"}, "not in the middle of a step"
        train_step(model)
    assert precisions(model) == {"0.up": "fp8", "0.down": "bf16", "1.up": "fp8", "1.down": "bf16"}
    with run.step():
        train_step(model)
    run.fallback("*", precision="fp8")
    # Between two steps nobody is at work: it happens before the next one begins.
    with run.step():
        assert set(precisions(model).values()) == {"fp8"}
        train_step(model)
    run.finish()
    first, second = server.run.reports_of("annotation")
    assert (first["name"], first["step"], first["why"]) == ("fallback", 1, "it clips")
    assert first["layers"] == ["0.down", "1.down"] and first["text"] == "2 layers to BF16: 0.down, 1.down"
    assert second["text"] == "2 layers to FP8: 0.down, 1.down" and second["step"] == 3
    seen = server.run.rows[1]["tensors"]["numel"]
    names = [tensor["name"] for tensor in next(iter(server.run.catalogues.values()))]
    counted = {name for name, value in zip(names, seen, strict=True) if value}
    assert "0.up.input" in counted and "0.down.input" not in counted


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("0.up", {"0.up"}),
        ("0.*", {"0.up", "0.down"}),
        (["*.up", "1.down"], {"0.up", "1.up", "1.down"}),
        (re.compile(r"^[01]\.d"), {"0.down", "1.down"}),
        ("up", set()),
        (re.compile("up"), {"0.up", "1.up"}),
        ("", set()),
    ],
    ids=["path", "glob", "several", "expression", "part of a path", "expression for a part", "empty"],
)
def test_patterns(pattern: Any, found: set[str]) -> None:
    assert set(find([make_model()], pattern).paths) == found


def test_names_are_those_without_wrappers() -> None:
    model = torch.compile(make_model(), backend="eager")
    assert set(find([model], "1.*").paths) == {"1.up", "1.down"}  # type: ignore[list-item]


def test_a_command_falls_back_and_brings_back_only_that(server: WireServer, settings: Settings) -> None:
    run, model = begin(settings), make_model()
    run.watch(model)
    # The script's own choice, which nobody else may undo.
    dict(fp8_layers(model))["1.up"].precision = "bf16"
    server.commands = [command(1, "fallback", patterns=["0.*"], precision="bf16")]
    steps_until(run, lambda: len(results(server)) == 1)
    assert precisions(model) == {"0.up": "bf16", "0.down": "bf16", "1.up": "bf16", "1.down": "fp8"}
    server.commands.append(command(2, "fallback", patterns=["*"], precision="fp8"))
    steps_until(run, lambda: len(results(server)) == 2)
    assert precisions(model) == {"0.up": "fp8", "0.down": "fp8", "1.up": "bf16", "1.down": "fp8"}
    run.finish()
    assert [(state, text) for _, state, text in results(server)] == [
        ("done", "2 of 2 layers changed to BF16."),
        ("done", "2 of 4 layers changed to FP8."),
    ]
    assert [one["why"] for one in server.run.reports_of("annotation")] == ["ada: because"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patterns": ["nothing.*"]}, "No watched FP8 layer has such a name."),
        ({"patterns": ["2"]}, "2: is not FP8"),
        ({"patterns": "0.*"}, "The command names no layers."),
        ({"patterns": [3]}, "The command names no layers."),
        ({}, "The command names no layers."),
        ({"patterns": ["0.*"], "precision": "fp4"}, "There is no precision 'fp4' to change to."),
        ({"patterns": ["0.*"], "precision": "fp8"}, "None of these layers has fallen back."),
    ],
    ids=str,
)
def test_a_command_that_cannot_be_done_is_refused(
    arguments: dict[str, Any], message: str, server: WireServer, settings: Settings
) -> None:
    run, model = begin(settings), make_model()
    run.watch(model)
    server.commands = [command(1, "fallback", **arguments)]
    steps_until(run, lambda: results(server))
    run.finish()
    assert results(server) == [(1, "refused", message)]
    assert set(precisions(model).values()) == {"fp8"}


def test_a_server_cannot_keep_the_training_busy_with_a_pattern(
    server: WireServer, settings: Settings
) -> None:
    """What would take a regular expression for ever is a glob, and only a bounded part of it is read."""
    run, model = begin(settings), make_model()
    run.watch(model)
    patterns = ["*a" * 1000 + "b"] * 500
    server.commands = [command(1, "fallback", patterns=patterns)]
    steps_until(run, lambda: results(server))
    run.finish()
    assert results(server)[0][1] == "refused"


def test_an_alerts_callback_may_fall_back_at_once(server: WireServer, settings: Settings) -> None:
    run, model = begin(settings), make_model()
    run.watch(model)
    run.on_alert(lambda alert: run.fallback("1.*", why=alert.message))
    server.alerts = [{"id": 1, "kind": "saturation_rate", "severity": "warning", "message": "m", "step": 1}]

    def is_bf16_after_a_step() -> bool:
        with run.step():
            train_step(model)
        return precisions(model)["1.up"] == "bf16"

    wait_until(is_bf16_after_a_step, "the fallback")
    run.finish()
    assert server.run.reports_of("annotation")[0]["why"] == "m"


def test_nothing_to_switch_is_told_and_hurts_nobody(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    run = begin(settings)
    assert run.fallback("*") == ()
    run.watch(model := make_model())
    assert run.fallback("none.*") == ()
    assert run.fallback("2") == ()
    assert run.fallback("0.up", precision="fp4") == ()  # type: ignore[arg-type]
    with run.step():
        train_step(model)
    assert "matches no watched FP8 layer" in caplog.text and "2: is not FP8" in caplog.text
    assert "precision must be 'bf16' or 'fp8'" in caplog.text


def test_the_run_keeps_no_model_alive() -> None:
    layers = WatchedLayers()
    model = make_model()
    layers.watch(model)
    layers.watch(model)
    assert layers and len(layers.models) == 1
    layers.switch(layers.find("0.up"), "bf16")
    del model
    assert not layers and layers.find("*").paths == ()


def test_a_copy_of_a_model_is_another_model() -> None:
    model = make_model()
    layers = WatchedLayers()
    layers.watch(model)
    layers.switch(layers.find("0.up"), "bf16")
    twin = copy.deepcopy(model)
    layers.switch(layers.find("0.up"), "fp8")
    assert precisions(model)["0.up"] == "fp8" and precisions(twin)["0.up"] == "bf16"


def test_going_back_begins_with_fresh_scales() -> None:
    model = make_model()
    train_step_of(model)
    layer = dict(fp8_layers(model))["0.up"]
    assert layer.state_of("input").calls == 1
    set_precision(layer, "bf16")
    train_step_of(model)
    set_precision(layer, "fp8")
    assert layer.state_of("input").calls == 0


train_step_of: Callable[[nn.Module], torch.Tensor] = train_step
