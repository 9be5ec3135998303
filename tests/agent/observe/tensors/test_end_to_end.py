"""Sampled statistics of a watched model reach the server exactly once, despite failures."""

import subprocess
import sys
from dataclasses import replace
from os import environ
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent.helpers.faulty_http import Fault
from agent.helpers.models import tiny_model, train_step
from agent.helpers.wire_messages import EXPONENT_BINS
from agent.helpers.wire_server import WireServer
from helpers.code_blocks import texts_of
from torch import nn

import fp8scope
from fp8scope.config import Settings
from fp8scope.delivery.resend import send_spool
from fp8scope.recording.records import ExponentHistograms, TornRecordError
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run
from fp8scope_kernels import exponent_histogram

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "watching.md"


def train(run: Run, model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        with run.step():
            train_step(model)


def test_it_works(server: WireServer, settings: Settings) -> None:
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = Run(settings, blank_registration("sampled"))
    assert run.watch(model, optimizer, every=2) == 6 + 2 * 2
    inputs: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda layer, given, out: inputs.append(given[0].clone()))  # type: ignore[index]
    for _ in range(3):
        with run.step():
            train_step(model)
            optimizer.step()
            optimizer.zero_grad()
    report = run.finish()
    assert report.complete and report.errors == 0 and report.points_sent == server.run.points
    found = {(each["step"], each["name"]): each["counts"] for each in server.run.histograms}
    assert {step for step, _ in found} == {1, 3} and len(found) == 12
    for step, x in ((1, inputs[0]), (3, inputs[2])):
        assert found[step, "0.input"] == exponent_histogram(x).tolist()
    names = [tensor["name"] for tensor in next(iter(server.run.catalogues.values()))]
    for row in server.run.rows:
        sampled = row["step"] in (1, 3)
        ratio = row["tensors"].get("update_ratio", [])
        known = {name for name, value in zip(names, ratio, strict=False) if value is not None}
        assert known == ({"0.weight.update", "2.weight.update"} if sampled else set())
        moments = row["tensors"]["amax"][names.index("0.weight.exp_avg")]
        assert (moments is not None) == sampled
        # A tensor that is not quantised has no scale.
        assert row["tensors"]["scale"][names.index("0.weight.exp_avg")] is None


def test_init_accepts_only_a_recipe_for_shadow() -> None:
    with fp8scope.init(name="x", mode="disabled", shadow=fp8scope.MXFP8()) as run:
        assert run.watch(tiny_model()) == 0
    with fp8scope.init(name="x", mode="offline", shadow=fp8scope.RowwiseScaling()) as run:
        assert run.shadow == fp8scope.RowwiseScaling()
    with pytest.raises(fp8scope.ConfigurationError, match="DelayedScaling"):
        fp8scope.init(name="x", mode="offline", shadow="delayed")  # type: ignore[arg-type]


def test_shadow_mode_is_recorded_and_can_be_set_in_init(server: WireServer, settings: Settings) -> None:
    run = Run(replace(settings, introduce_seconds=60), blank_registration("shadow"))
    run.shadow = fp8scope.DelayedScaling()
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    assert run.watch(model) == 6
    train(run, model, 2)
    assert run.finish().complete
    recipe = server.run.registration["recipe"]
    assert recipe["shadow"]["recipe"] == "DelayedScaling"
    # Its products are in float32: the recipe is only of the shadow.
    assert server.run.registration["precision"] == "fp32"
    assert {h["step"] for h in server.run.histograms} == {1}
    scales = [row["tensors"]["scale"][0] for row in server.run.rows]
    assert scales[0] is not None and scales[1] is None


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=503, code="unavailable"),
        Fault(drop=True),
        Fault(drop=True, after=True),
        Fault(twice=True),
    ],
    ids=["unavailable", "dropped before", "dropped after", "twice"],
)
def test_histograms_arrive_once(fault: Fault, server: WireServer, settings: Settings) -> None:
    server.times(2, fault, "/histograms")
    run = Run(settings, blank_registration("trouble"))
    run.watch(model := tiny_model(), every=1)
    train(run, model, 3)
    assert run.finish().complete
    assert sorted((h["step"], h["name"]) for h in server.run.histograms) == sorted(
        (step, f"{layer}.{role}")
        for step in (1, 2, 3)
        for layer in (0, 2)
        for role in ("input", "weight", "grad_output")
    )


def test_a_refused_histogram_does_not_stop_the_rows(server: WireServer, settings: Settings) -> None:
    server.times(1, Fault(status=422, code="invalid"), "/histograms")
    run = Run(settings, blank_registration("refused"))
    run.watch(model := tiny_model(), every=2)
    train(run, model, 4)
    report = run.finish()
    assert report.messages_refused == 1 and server.run.steps == [1, 2, 3, 4]
    assert {h["step"] for h in server.run.histograms} == {3}
    assert report.directory is not None and list((report.directory / "refused").glob("*.arrow"))


def test_histograms_are_kept_offline_and_sent_by_sync(server: WireServer, settings: Settings) -> None:
    run = Run(replace(settings, mode="offline"), blank_registration("offline"))
    run.watch(model := tiny_model(), every=2)
    train(run, model, 5)
    directory = run.directory
    run.finish()
    report = send_spool(directory, settings, 60.0)
    assert not report.problem and not report.refused and report.rows == 5
    assert {h["step"] for h in server.run.histograms} == {1, 3, 5} and len(server.run.histograms) == 18


def test_records_survive_the_spool_and_torn_ones_are_reported() -> None:
    counts = np.zeros((3, EXPONENT_BINS))
    counts[1, 7], counts[2, -1] = 5.0, 2.0**40
    record = ExponentHistograms(7, 1_700_000_000_000_000, np.array([4, 0, 9], np.int32), counts)
    payload = record.encode()
    again = ExponentHistograms.decode(payload)
    assert (again.step, again.time_us) == (record.step, record.time_us)
    assert np.array_equal(again.tensors, record.tensors) and np.array_equal(again.counts, counts)
    assert len(payload) < counts.nbytes / 20
    for end in (0, 5, 24, 30, len(payload) - 1):
        with pytest.raises(TornRecordError):
            ExponentHistograms.decode(payload[:end])


@pytest.mark.parametrize("every", [-1, 1.5, "10", True])
def test_an_invalid_interval_is_reported_without_stopping_training(
    every: Any, server: WireServer, settings: Settings
) -> None:
    run = Run(settings, blank_registration("odd"))
    run.watch(model := tiny_model(), every=every)
    train(run, model, 1)
    report = run.finish()
    assert report.complete and report.errors == 1


def test_the_example_in_the_documentation_runs(server: WireServer, tmp_path: Path) -> None:
    (block,) = texts_of(DOCUMENT)
    settings = {"FP8SCOPE_URL": server.url, "FP8SCOPE_TOKEN": server.token, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        env={**environ, **settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert server.run.finish["errors"] == 0 and {h["step"] for h in server.run.histograms} == {1, 11}
