"""Frozen, stale and jumped scales, and amaxes that grow late, among healthy scales of the usual recipes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.tensors import detected
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detectors import ConditionChange, State, TensorFacts, scale_disagreement
from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.alerts.services import evaluate
from fp8scope_dashboard.runs.models import Tensor

NAMES = [f"blocks.{i}.mlp.{part}.input" for i in range(6) for part in ("up", "down")]
KINDS = ("scale_frozen", "scale_stale", "scale_jump", "amax_growth")
HISTORY = 16


def amaxes(rows: int, n: int = 12, seed: int = 0, spread: float = 0.3) -> np.ndarray:
    """Log-normal amaxes about 10."""
    noise: np.ndarray = np.random.default_rng(seed).normal(0.0, spread, (rows, n))
    levels: np.ndarray = 10.0 * np.exp(noise)
    return levels


def delayed(amax: np.ndarray, history: int = HISTORY) -> np.ndarray:
    """The scales of a working delayed recipe."""
    padded = np.concatenate([np.repeat(amax[:1], history, axis=0), amax])
    windows = np.lib.stride_tricks.sliding_window_view(padded[:-1], history, axis=0)
    scales: np.ndarray = (448.0 / windows.max(axis=-1)).astype(np.float32).astype(float)
    return scales


def facts(n: int = 12, patience: int = 4 * HISTORY + 64) -> TensorFacts:
    return replace(TensorFacts.unknown(NAMES[:n]), patience=np.full(n, patience))


def found(kind: str, amax: np.ndarray, scale: np.ndarray, **parameters: Any) -> list[ConditionChange]:
    return detected(kind, {"amax": amax, "scale": scale}, facts=facts(amax.shape[1]), **parameters)


def test_it_works() -> None:
    amax = amaxes(600)
    scale = delayed(amax)
    scale[300:, 3] = scale[300, 3]
    amax[320:, 3] *= 8.0
    (opened,) = found("scale_frozen", amax, scale)
    # Since the first step with the scale that stays: here the largest amax of the history stayed before, too.
    assert 300 - HISTORY <= opened.onset_step <= 300 and 340 <= opened.step < 360
    assert scale[opened.onset_step, 3] == scale[300, 3] != scale[opened.onset_step - 1, 3]
    assert opened.evidence["first"]["after_step"] == opened.onset_step - 1
    assert opened.evidence["tensors"][0]["name"] == NAMES[3]
    assert opened.message.startswith(f"{NAMES[3]} keeps its scale while its amax moves since step")


def test_the_factor_is_that_by_which_the_amax_left_its_scale() -> None:
    """Also if the amax had left before the scale froze, and hardly moves since."""
    amax = amaxes(400, spread=0.01)
    scale = delayed(amax)
    scale[300:, 3] = scale[299, 3] * 4096.0
    (opened,) = found("scale_frozen", amax, scale)
    factor = float(re.findall(r"by a factor of ([\d,.]+)", opened.message)[0].strip(".").replace(",", ""))
    assert 3500.0 < factor < 4800.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "recipe", ["delayed", "long history", "current", "power of two", "growing", "outliers"]
)
def test_a_healthy_scale_is_no_alarm(kind: str, recipe: str) -> None:
    amax = amaxes(3_000)
    if recipe == "growing":
        amax *= np.exp(np.linspace(0.0, 6.0, 3_000))[:, None]
    if recipe == "outliers":
        amax[np.random.default_rng(1).random(amax.shape) < 0.002] *= 30.0
    scale = delayed(amax, 1_024 if recipe == "long history" else HISTORY)
    if recipe == "current":
        scale = np.float32(448.0 / amax).astype(float)
    if recipe == "power of two":
        scale = 2.0 ** np.floor(np.log2(448.0 / amax))
    patience = 1_100 if recipe == "long history" else 4 * HISTORY + 64
    known = facts(patience=patience)
    assert detected(kind, {"amax": amax, "scale": scale}, facts=known) == []


def test_a_scale_that_stays_while_the_amax_falls_and_rises_is_frozen() -> None:
    amax = amaxes(1_000)
    amax[:, 5] *= np.exp(2.0 * np.sin(np.arange(1_000) / 50.0) - 2.0)
    scale = delayed(amax)
    scale[200:, 5] = 448.0 / amax.max()
    (opened,) = found("scale_frozen", amax, scale)
    assert opened.evidence["tensors"][0]["name"] == NAMES[5]
    assert opened.onset_step == 200 and 200 + 4 * HISTORY + 64 <= opened.step <= 400


@pytest.mark.parametrize("spread", [0.1, 0.3, 0.5])
def test_the_median_scale_of_blocks_may_stay(spread: float) -> None:
    amax = amaxes(3_000, spread=spread)
    blocks = replace(facts(), per_tensor=np.zeros(12, bool), patience=np.full(12, 1_100))
    scale = np.full(amax.shape, 32.0)
    assert detected("scale_frozen", {"amax": amax, "scale": scale}, facts=blocks) == []
    amax[2_000:, 3] *= 300.0
    (opened,) = detected("scale_frozen", {"amax": amax, "scale": scale}, facts=blocks)
    assert opened.step < 2_050 and opened.evidence["tensors_over"] == 1


def test_a_weight_whose_amax_hardly_moves_is_not_frozen() -> None:
    amax = np.full((3_000, 12), 0.5) * (1.0 + 1e-4 * np.arange(3_000))[:, None]
    assert found("scale_frozen", amax, np.full(amax.shape, 448.0 / 0.7)) == []


def test_a_scale_for_another_amax_is_stale() -> None:
    amax = amaxes(600)
    scale = delayed(amax)
    scale[100:, 2] = scale[100:, 2] / 256.0 * (1.0 + 0.01 * np.arange(500) % 0.1)
    (opened,) = found("scale_stale", amax, scale)
    assert (
        opened.onset_step == 100
        and opened.step == 100 + 4 * HISTORY + 64 + 9
        and opened.value == pytest.approx(9.0, abs=1.0)
    )


def test_the_margin_of_the_recipe_belongs_to_the_scale() -> None:
    amax = amaxes(600)
    scale = delayed(amax) / 2.0**8
    assert found("scale_stale", amax, scale)
    known = replace(facts(), margin=np.full(12, 8.0))
    assert detected("scale_stale", {"amax": amax, "scale": scale}, facts=known) == []


def test_a_jump_of_a_scale_is_found_once() -> None:
    amax = amaxes(600)
    scale = delayed(amax)
    scale[400:, 7] /= 1e4
    opened, closed = found("scale_jump", amax, scale)
    assert (opened.onset_step, opened.step) == (400, 400)
    assert opened.value == pytest.approx(math.log2(1e4), abs=1.0) and not closed.opened


def test_an_all_zero_tensor_is_no_jump() -> None:
    amax = amaxes(600)
    scale = np.float32(448.0 / amax).astype(float)
    amax[200:210], scale[200:210] = 0.0, 1.0
    assert found("scale_jump", amax, scale) == []


@pytest.mark.parametrize("every", [1, 10])
def test_the_first_scales_of_a_tensor_that_appears_late_are_no_jump(every: int) -> None:
    amax = amaxes(1_200)
    scale = delayed(amax)
    # The scale is 1, then it is searched for.
    scale[500:520, 4], scale[520:560, 4] = 1.0, 1e-4
    amax[:500, 4] = scale[:500, 4] = np.nan
    amax[np.arange(1_200) % every > 0] = np.nan
    assert found("scale_jump", amax, scale) == []
    scale[900:, 4] /= 1e4
    assert [finding.onset_step for finding in found("scale_jump", amax, scale)] == [900, 900]


@pytest.mark.parametrize("absent", [10, 200])
def test_a_scale_that_begins_anew_after_a_fallback_is_no_jump(absent: int) -> None:
    amax = amaxes(1_200)
    scale = delayed(amax)
    amax[500 : 500 + absent] = np.nan
    scale[500 + absent : 505 + absent] = 1e-4
    assert found("scale_jump", amax, scale) == []
    scale[900:, 4] /= 1e4
    assert [finding.onset_step for finding in found("scale_jump", amax, scale)] == [900, 900]


def test_a_jump_of_an_expert_that_is_used_now_and_then_is_found() -> None:
    amax = amaxes(3_000)
    scale = delayed(amax)
    amax[np.random.default_rng(2).random(amax.shape) < 0.8] = np.nan
    assert found("scale_jump", amax, scale) == []
    scale[2_000:, 3:9] /= 1e4
    opened = found("scale_jump", amax, scale)[0]
    assert 2_000 <= opened.onset_step < 2_050


def test_a_run_that_begins_to_log_less_often_is_still_judged() -> None:
    amax = amaxes(4_000)
    scale = delayed(amax)
    amax[1_000:][np.arange(3_000) % 50 > 0] = np.nan
    scale[3_000:, 3] /= 1e4
    assert found("scale_jump", amax, scale)[0].onset_step == 3_000


def test_the_late_growth_of_few_amaxes_is_found() -> None:
    amax = amaxes(6_000)
    late = np.exp(np.clip(np.arange(6_000) - 2_000, 0, None) / 800.0)
    for column in (3, 5):
        amax[:, column] *= late
    first, *updates = detected("amax_growth", {"amax": amax}, facts=facts())
    assert 2_000 < first.onset_step < 4_500
    assert (updates[-1] if updates else first).evidence["tensors_over"] == 2
    assert "in layers 1-2 have growing amaxes" in (updates[-1] if updates else first).message


def test_a_growth_that_all_tensors_share_is_no_alarm() -> None:
    doublings = 2.0 ** (np.arange(8_000) // 1_000)
    amax = amaxes(8_000) * doublings[:, None]
    assert detected("amax_growth", {"amax": amax}, facts=facts()) == []


def few(n: int, role: str) -> TensorFacts:
    """The only tensors of a role, beside 6 of another."""
    names = [f"blocks.{i}.mlp.{role}" for i in range(n)] + NAMES[:6]
    return TensorFacts.unknown(names)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_loss_scale_that_few_gradients_share_is_no_growth(n: int) -> None:
    amax = amaxes(8_000, n + 6)
    amax[:, :n] *= (2.0 ** (np.arange(8_000) // 1_000))[:, None]
    assert detected("amax_growth", {"amax": amax}, facts=few(n, "grad_output")) == []


@pytest.mark.parametrize(("n", "role"), [(1, "weight"), (2, "weight"), (3, "weight"), (2, "grad_output")])
def test_the_growth_of_one_of_few_tensors_is_found(n: int, role: str) -> None:
    amax = amaxes(6_000, n + 6)
    amax[:, 0] *= np.exp(np.clip(np.arange(6_000) - 2_000, 0, None) / 800.0)
    opened, *_ = detected("amax_growth", {"amax": amax}, facts=few(n, role))
    assert opened.evidence["tensors"][0]["name"] == f"blocks.0.mlp.{role}"


def test_a_single_outlier_is_no_growth() -> None:
    amax = amaxes(3_000)
    amax[2_000, 3] *= 1e6
    assert detected("amax_growth", {"amax": amax}, facts=facts()) == []


@settings(max_examples=15)
@given(st.lists(st.integers(0, 400), max_size=4), st.integers(0, 100))
def test_the_result_does_not_depend_on_the_batches(cuts: list[int], seed: int) -> None:
    amax = amaxes(400, seed=seed, spread=1.0)
    scale = delayed(amax)
    scale[100:, 3] = scale[100, 3]
    scale[250:, 4] /= 1e4
    amax[200:, :2] *= 50.0
    amax[np.random.default_rng(seed).random(amax.shape) < 0.2] = np.nan
    parameters: dict[str, dict[str, Any]] = {
        "scale_frozen": {},
        "scale_stale": {},
        "scale_jump": {"warmup": 10.0},
        "amax_growth": {"warmup": 50.0, "span": 10.0, "points": 5.0},
    }
    for kind in KINDS:
        columns = {"amax": amax, "scale": scale}
        whole = detected(kind, columns, facts=facts(), **parameters[kind])
        assert detected(kind, columns, facts=facts(), cuts=cuts, **parameters[kind]) == whole


def compared(
    scales: dict[int, np.ndarray], cuts: tuple[int, ...] = (), ranks: tuple[int, ...] = (0, 1), **given: float
) -> list[ConditionChange]:
    """The findings of `scale_disagreement` in rows of every tenth step, each rank in its own division."""
    steps = 10 * np.arange(len(scales[0]))
    parameters = rules.validate("scale_disagreement", given)
    state: State = {}
    findings: list[ConditionChange] = []
    edges = [0, *cuts, len(steps)]
    for first, last in zip(edges, edges[1:], strict=False):
        for rank in ranks:
            state = json.loads(json.dumps(state, allow_nan=False))
            part = {rank: (steps[first:last], scales[rank][first:last])}
            state, new = scale_disagreement(state, part, ranks, NAMES, parameters)
            findings += new
    return findings


def test_ranks_that_agreed_and_then_differ_are_found() -> None:
    scale = delayed(amaxes(200))
    doubled = scale.copy()
    doubled[100:150, 4] *= 1.5
    opened, closed = compared({0: scale, 1: doubled}, cuts=tuple(range(1, 200)))
    assert (opened.onset_step, opened.step, closed.opened) == (1_000, 1_020, False)
    assert opened.evidence["tensors"][0]["name"] == NAMES[4]
    assert "differ by a factor of 1.5" in opened.message


def test_ranks_that_scale_for_themselves_are_no_alarm() -> None:
    assert (
        compared({0: delayed(amaxes(300)), 1: delayed(amaxes(300, seed=1))}, cuts=tuple(range(1, 300))) == []
    )


def test_a_rank_that_sends_nothing_is_not_compared() -> None:
    scale = delayed(amaxes(100))
    assert compared({0: scale, 1: np.full(scale.shape, np.nan)}) == []


@pytest.mark.django_db
def test_ranks_of_a_run_are_compared_as_they_arrive() -> None:
    run = make_run(create_project("default", "Default"))
    steps, scale = np.arange(1, 601), delayed(amaxes(600, n=2))
    doubled = scale.copy()
    doubled[400:, 1] *= 2.0
    recorders = [Recorder(run=run, rank=rank, tensors=NAMES[:2]) for rank in range(2)]
    for first in range(0, 600, 60):
        for recorder, scales in zip(recorders, (scale, doubled), strict=True):
            part = slice(first, first + 60)
            amax = 448.0 / scales[part]
            recorder.rows(steps[part], {"loss": np.full(60, 2.0)}, {"scale": scales[part], "amax": amax})
            evaluate(run.id)
    (event,) = Alert.objects.filter(run=run)
    assert (event.kind, event.onset_step) == ("scale_disagreement", 410)
    assert event.evidence["tensors"][0]["name"] == NAMES[1]


@pytest.mark.django_db
@pytest.mark.parametrize("form", ["E4M3", "e4m3"])
def test_a_frozen_scale_of_a_run_is_found_by_the_range_of_its_format(form: str) -> None:
    run = make_run(create_project("default", "Default"), recipe={"recipe": "DelayedScaling"})
    recorder = Recorder(run=run, tensors=NAMES)
    Tensor.objects.filter(run=run).update(format=form)
    amax = amaxes(160)
    scale = delayed(amax)
    amax[100:], scale[100:] = amax[100:] * 50.0, scale[100]
    recorder.rows(np.arange(160), {"loss": np.full(160, 2.0)}, {"scale": scale, "amax": amax})
    (event,) = evaluate(run.id)
    assert event.kind == "scale_frozen" and event.step < 100 + 4 * HISTORY
    assert event.evidence["tensors_over"] == len(NAMES)
