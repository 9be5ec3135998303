"""Arguments of wrong types: before a run begins ConfigurationError says which; then nothing raises."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent.helpers.loops import regression
from agent.helpers.wire_server import WireServer
from hypothesis import given
from hypothesis import strategies as st

import fp8scope
from fp8scope.arguments import plain_config, seed_in
from fp8scope.config import Settings
from fp8scope.metadata.redaction import REDACTED
from fp8scope.process.open_runs import live_runs
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run


class Unprintable:
    """Cannot even be shown as a text."""

    def __str__(self) -> str:
        raise RuntimeError("planned")


VALUES: dict[str, Any] = {
    "None": None,
    "a number": 5,
    "a negative number": -5,
    "a fraction": 2.5,
    "NaN": float("nan"),
    "True": True,
    "bytes": b"bytes",
    "a text": "text",
    "a list": [1, 2],
    "a list of lists": [[1], [2]],
    "a mapping": {"a": 1},
    "a mapping of numbers": {1: 2},
    "a set": {1},
    "a tensor": torch.ones(2, 2),
    "a tensor of one number": torch.tensor(3),
    "an array": np.ones(3),
    "a class": dict,
    "a function": lambda: None,
    "a date": datetime(2026, 1, 1, tzinfo=UTC),
    "an object": object(),
    # Under a name that is no secret's: a secret is not even read.
    "what cannot be shown": {"entry": Unprintable()},
}
INIT = list(inspect.signature(fp8scope.init).parameters)
ATTACH = ["tokens_per_step", "reduction", "every", "shadow", "include", "scaler", "readiness"]


def begun_or_refused(begin: Callable[[], Run]) -> None:
    """The run begins, and records as any other; or ConfigurationError, with nothing left behind."""
    try:
        run = begin()
    except fp8scope.ConfigurationError as error:
        assert len(str(error)) > 20 and live_runs == []
    else:
        with run.step(tokens=3) as step:
            step.log(loss=1.0)
        assert run.finish().errors == 0
        live_runs.clear()


def test_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_MODE", "offline")
    with pytest.raises(fp8scope.ConfigurationError, match="tags must be a sequence of strings, got 5"):
        fp8scope.init(tags=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config must be a mapping"):
        fp8scope.init(config=[1])  # type: ignore[arg-type]
    begun_or_refused(lambda: fp8scope.init(tags="one", config={"lr": 1}, seed=3))


def test_options_that_argparse_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option without a default is None: the run begins as if the argument had been left out."""
    monkeypatch.setenv("FP8SCOPE_MODE", "offline")
    run = fp8scope.init(name=None, tags=None, group=None, baseline=None, relation=None, seed=None)
    document = run.session.registration.document
    assert [document[name] for name in ("tags", "group", "baseline", "relation")] == [[], "", "", ""]
    run.finish()
    live_runs.clear()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_init(value: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_MODE", mode)
    for name in INIT:
        begun_or_refused(partial(fp8scope.init, **{name: VALUES[value]}))


@pytest.mark.parametrize(
    "arguments",
    [
        {"url": "http://["},
        {"url": "http://host:port"},
        {"directory": "nul\0"},
        {"directory": "~nobody-of-this-name/spool"},
        {"config": {"entry": Unprintable()}},
        {"commands": ["fallback", 5]},
        {"resume": {"run": 5}},
    ],
)
def test_init_with_values_that_cannot_be_used(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8SCOPE_MODE", "offline")
    with pytest.raises(fp8scope.ConfigurationError):
        fp8scope.init(**arguments)
    assert live_runs == []


def test_a_secret_that_cannot_be_shown_is_hidden_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_MODE", "offline")
    begun_or_refused(lambda: fp8scope.init(config={"api_key": Unprintable()}))
    assert plain_config({"api_key": Unprintable()}) == {"api_key": REDACTED}


def test_a_token_of_a_wrong_type_is_not_shown() -> None:
    with pytest.raises(fp8scope.ConfigurationError) as refused:
        fp8scope.init(token=["fp8s_secret"])  # type: ignore[arg-type]
    assert "fp8s_secret" not in str(refused.value)


@pytest.mark.parametrize("value", VALUES)
def test_attach(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_MODE", "offline")
    model, optimizer = regression()
    for name in ATTACH:
        try:
            run = fp8scope.attach(model, optimizer, **{name: VALUES[value]})
        except fp8scope.ConfigurationError:
            assert live_runs == []
        else:
            assert run.finish().errors == 0, (name, value)
    for given_model, given_optimizer in ((VALUES[value], optimizer), (model, VALUES[value])):
        with pytest.raises(fp8scope.ConfigurationError):
            fp8scope.attach(given_model, given_optimizer)
    assert live_runs == []


def test_attach_to_models_whose_names_are_none() -> None:
    model, optimizer = regression()
    with pytest.raises(fp8scope.ConfigurationError, match="names of models must be texts"):
        fp8scope.attach({1: model}, {1: optimizer})  # type: ignore[dict-item]


@pytest.mark.parametrize("field", [field.name for field in fields(Settings)])
@pytest.mark.parametrize("value", VALUES)
def test_settings(field: str, value: str) -> None:
    try:
        made = Settings(**{field: VALUES[value]})
    except fp8scope.ConfigurationError:
        return
    stored = getattr(made, field)
    # Without a limit, and without a file.
    assert type(stored) in (str, int, float, bool, type(Path())) or (
        value == "None" and field in ("overhead", "device_file")
    )


CALLS: dict[str, Callable[[Run, Any], object]] = {
    "step(value)": lambda run, value: run.step(value).__enter__().__exit__(None, None, None),
    "step(number=value)": lambda run, value: run.step(number=value).__enter__().__exit__(None, None, None),
    "log(value)": lambda run, value: run.log(value),
    "log(loss=value)": lambda run, value: run.log(loss=value),
    "log(tokens=value)": lambda run, value: run.log(tokens=value),
    "log({value: 1})": lambda run, value: run.log({str(type(value)): 1}),
    "log_config(value)": lambda run, value: run.log_config(value),
    "log_eval(value, ...)": lambda run, value: run.log_eval(value, "accuracy", [0, 1]),
    "log_eval(..., value)": lambda run, value: run.log_eval("heldout", "accuracy", value),
    "log_eval(metric=value)": lambda run, value: run.log_eval("heldout", value, [0, 1]),
    "log_eval(kind=value)": lambda run, value: run.log_eval("heldout", "accuracy", [0, 1], kind=value),
    "log_eval(step=value)": lambda run, value: run.log_eval("heldout", "accuracy", [0, 1], step=value),
    "log_eval(item_ids=value)": lambda run, value: run.log_eval("h", "accuracy", [0, 1], item_ids=value),
    "log_eval(clusters=value)": lambda run, value: run.log_eval("h", "accuracy", [0, 1], clusters=value),
    "log_eval(precision=value)": lambda run, value: run.log_eval("h", "accuracy", [0, 1], precision=value),
    "log_eval(margin=value)": lambda run, value: run.log_eval("h", "accuracy", [0, 1], margin=value),
    "watch(value)": lambda run, value: run.watch(value),
    "watch(every=value)": lambda run, value: run.watch(regression()[0], every=value),
    "watch(optimizer=value)": lambda run, value: run.watch(regression()[0], value),
    "watch(shadow=value)": lambda run, value: run.watch(regression()[0], shadow=value),
    "watch(include=value)": lambda run, value: run.watch(regression()[0], include=value),
    "watch(scaler=value)": lambda run, value: run.watch(regression()[0], scaler=value),
    "fp8scope.watch(value)": lambda run, value: fp8scope.watch(value),
    "annotate(value)": lambda run, value: run.annotate(value, value),
    "fallback(value)": lambda run, value: run.fallback(value),
    "fallback(precision=value)": lambda run, value: run.fallback("*", value),
    "load_state_dict(value)": lambda run, value: run.load_state_dict(value),
}


@pytest.mark.parametrize("value", VALUES)
def test_nothing_raises_once_a_run_has_begun(value: str, server: WireServer, settings: Settings) -> None:
    for name, call in CALLS.items():
        run = Run(settings, blank_registration("begun"))
        with run.step() as step:
            step.log(VALUES[value])
        call(run, VALUES[value])
        run.guard.warn_once("the call is named where a test fails", "%s with %s", name, value)
        with run.step() as step:
            step.log(loss=1.0)
        run.finish(20)
        assert run.finished, name
        server.runs.clear()


@pytest.mark.parametrize("value", VALUES)
def test_finish_ends_the_run_whatever_it_is_given(value: str, server: WireServer, settings: Settings) -> None:
    run = Run(settings, blank_registration("ends"))
    with run.step() as step:
        step.log(loss=1.0)
    report = run.finish(VALUES[value])
    assert run.finished
    usable = isinstance(VALUES[value], int | float) and not isinstance(VALUES[value], bool)
    if not usable or not VALUES[value] >= 0:
        assert report.complete and report.errors == 1
        assert server.run.steps == [1]


@pytest.mark.parametrize("value", [value for value in VALUES if value not in ("a function", "a class")])
def test_what_is_asked_for_at_once_is_refused_at_once(value: str) -> None:
    run = fp8scope.init(name="disabled", mode="disabled")
    with pytest.raises(fp8scope.ConfigurationError):
        run.on_alert(VALUES[value])
    with pytest.raises(fp8scope.ConfigurationError):
        run.on_command("checkpoint", VALUES[value])
    if value != "a text":
        with pytest.raises(fp8scope.ConfigurationError):
            run.on_command(VALUES[value], print)
    if value not in ("a number", "a fraction", "True"):
        with pytest.raises(fp8scope.ConfigurationError):
            run.allow_pause(VALUES[value])


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([name for name in INIT if name not in ("directory", "mode")]), anything)
def test_init_with_anything(name: str, value: Any) -> None:
    begun_or_refused(lambda: fp8scope.init(mode="disabled", **{name: value}))


@pytest.mark.parametrize(
    ("config", "seed"),
    [
        ({}, None),
        ({"seed": 3}, 3),
        ({"SEED": 3, "lr": 1}, 3),
        ({"seed": 3, "random_seed": 3}, 3),
        ({"seed": 3, "random_seed": 4}, None),
        ({"seed": True}, None),
        ({"seed": "3"}, None),
        ({"seed": 2**64}, None),
        ({"data": {"seed": 3}}, None),
    ],
)
def test_the_seed_of_a_configuration(config: dict[str, Any], seed: int | None) -> None:
    assert seed_in(config) == seed


def test_a_given_seed_is_the_runs(tmp_path: Path) -> None:
    for argument, seed in ((None, 3), (0, 0)):
        run = fp8scope.init(mode="offline", directory=tmp_path, config={"seed": 3}, seed=argument)
        assert run.session.registration.document["seed"] == seed
        run.finish()
