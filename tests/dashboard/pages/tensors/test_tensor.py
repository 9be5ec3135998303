"""The page of one tensor: its picture, its history, its ranks, and who may fall back."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.exponents import histogram_of, store_histograms
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.reporting import send_report
from dashboard.helpers.visitors import Visitor, get_json, trace_values

from fp8scope_dashboard.analysis.what_if.distribution import Distribution
from fp8scope_dashboard.analysis.what_if.formats import E4M3
from fp8scope_dashboard.analysis.what_if.margins import MARGINS
from fp8scope_dashboard.analysis.what_if.targets import TARGET_FORMATS
from fp8scope_dashboard.analysis.what_if.tensor_scaling import tensor_effect
from fp8scope_dashboard.control.models import Command
from fp8scope_dashboard.pages.tensors.exponent_picture import PARTS, margin_of
from fp8scope_dashboard.runs.models import Run, RunState, Tensor, Writer
from fp8scope_dashboard.telemetry import queries

SCALE = 1024.0
STEPS = (1, 11, 21)


def normal(seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(seed).normal(size=4_096).astype(np.float32).astype(np.float64)


@pytest.fixture
def run(admin: Visitor) -> Run:
    """A run on two ranks whose input has a scale that is too large, and whose weight is in BF16."""
    run = make_run(
        admin.project, "sampled", precision="fp8", recipe={"recipe": "DelayedScaling", "margin": 1}
    )
    for rank in range(2):
        recorder = Recorder(run=run, rank=rank, tensors=["blocks.0.up.input", "blocks.0.up.weight"])
        Tensor.objects.filter(run=run, index=1).update(format="")
        Tensor.objects.filter(run=run).update(shape=[-1, 64])
        amax = np.abs([normal(rank)] * 21).max(axis=1)
        scale = np.column_stack([np.full(21, SCALE), np.full(21, np.nan)])
        recorder.rows(np.arange(1, 22), {}, {"amax": np.column_stack([amax, amax]), "scale": scale})
        for step in STEPS:
            of_rank = {i: histogram_of(normal(rank) * (rank + 1)) for i in range(2)}
            store_histograms(run, step, of_rank, writer=Writer.objects.get(uuid=recorder.uuid))
    return run


def shown(visitor: Visitor, run: Run, rest: str = "tensors/0/", **query: str) -> str:
    answer = visitor.client.get(visitor.address(f"runs/{run.id}/{rest}"), query)
    assert answer.status_code == 200
    return unescape(answer.content.decode())


def picture_of(visitor: Visitor, run: Run, index: int = 0, **query: str) -> dict[str, Any]:
    return get_json(visitor, f"runs/{run.id}/tensors/{index}/picture.json", **query)


def test_it_works(admin: Visitor, run: Run) -> None:
    picture = picture_of(admin, run)
    assert (picture["tensor"], picture["step"], picture["numel"]) == ("blocks.0.up.input", 21, 8_192)
    counts = histogram_of(normal(0)) + histogram_of(2 * normal(1))
    assert sum(count for _, count in picture["bins"]) == counts[1:-1].sum()
    now, proposed = picture["current"], picture["proposed"]
    assert (now["format"], now["scale"], now["margin"]) == ("E4M3", SCALE, 1)
    at = proposed["margins"].index(1)
    assert proposed["scales"][at] == SCALE and proposed["saturated"][at] == now["saturated"][0]
    assert now["zones"][0][0] == pytest.approx(np.log2(448.0 / SCALE), abs=1e-3)


def test_shares_are_those_of_what_if(admin: Visitor, run: Run) -> None:
    proposed = picture_of(admin, run)["proposed"]
    counts = histogram_of(normal(0)) + histogram_of(2 * normal(1))
    # The stored amax is of values that are not doubled: it does not fit, so it is ignored.
    tensor = Distribution.of(counts[None], None)
    for i, margin in enumerate(MARGINS):
        effect = tensor_effect(tensor, E4M3, np.array([SCALE * 2.0 ** (1 - margin)]))
        for name in ("saturated", "flushed"):
            bounds = getattr(effect, name)
            assert proposed[name][i] == [bounds.low[0], bounds.estimate[0], bounds.high[0]]


def test_advises_a_margin(admin: Visitor, run: Run) -> None:
    picture = picture_of(admin, run)
    advice = picture["advice"]
    assert advice["enough"] and advice["margin"] > 1
    assert re.match(r"Margin \d+: saturation [\d.]+ % → .+, flush to zero ", advice["text"])
    code = picture["code"][picture["proposed"]["margins"].index(advice["margin"])]
    assert f'DelayedScaling(fp8_format="HYBRID", margin={advice["margin"]})' in code
    assert "include='blocks.0.up'" in code


@pytest.mark.parametrize("format", list(TARGET_FORMATS))
@pytest.mark.parametrize("part", list(PARTS))
def test_every_choice_of_the_form_has_an_answer(admin: Visitor, run: Run, format: str, part: str) -> None:
    picture = picture_of(admin, run, format=format, part=part)
    proposed = picture["proposed"]
    assert proposed["name"] == format
    lengths = {
        len(proposed[name]) for name in ("margins", "zones", "scales", "saturated", "flushed", "error")
    }
    assert lengths == {len(picture["code"])} == {len(MARGINS) if proposed["perTensor"] else 1}
    for low, estimate, high in proposed["flushed"]:
        assert 0 <= low <= estimate <= high <= 1
    assert picture["advice"]["text"].endswith(".")


def test_a_tensor_without_a_scale_has_no_present(admin: Visitor, run: Run) -> None:
    picture = picture_of(admin, run, 1)
    assert picture["current"] is None and picture["proposed"]["name"] == "hybrid"
    assert picture["advice"]["text"].startswith("Margin 0: 0 % of the elements saturate")


def test_ranks_are_shown_one_by_one(admin: Visitor, run: Run) -> None:
    ranks = picture_of(admin, run)["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert ranks[1]["top"] == int(np.floor(np.log2(2 * np.abs(normal(1)).max())))
    assert "2 ranks: the thin lines" in shown(admin, run)


def test_a_step_may_be_chosen(admin: Visitor, run: Run) -> None:
    assert picture_of(admin, run, step="20")["step"] == 11
    assert "No histogram" in picture_of(admin, run, step="0")["empty"]
    for nonsense in ("-1", "x", "9" * 40, "1.5", "٣"):
        assert picture_of(admin, run, step=nonsense)["step"] == 21


def test_invalid_choices_become_the_defaults(admin: Visitor, run: Run) -> None:
    assert picture_of(admin, run, format="<x>", part="-3")["proposed"]["name"] == "hybrid"
    assert "blocks.0.up.input" in shown(admin, run, format="<x>", part="?", step="x", margin="zzz")


def test_the_page_and_the_drawer_have_the_same_content(admin: Visitor, run: Run) -> None:
    page, drawer = shown(admin, run), shown(admin, run, drawer="1")
    assert "<html" in page and "<html" not in drawer
    for text in (
        "blocks.0.up.input",
        'id="tensor-history"',
        'id="tensor-lines"',
        "Copy recipe",
        "data-margin",
    ):
        assert text in page and text in drawer
    assert "Open as a page" in drawer and "Open as a page" not in page


def test_the_picture_is_in_the_page_without_another_request(admin: Visitor, run: Run) -> None:
    answer = admin.client.get(admin.address(f"runs/{run.id}/tensors/0/"))
    embedded = re.search(r'<script type="application/json">(.*?)</script>', answer.content.decode(), re.S)
    assert embedded is not None and json.loads(embedded[1]) == picture_of(admin, run)


def test_neighbours_are_one_click_away(admin: Visitor, run: Run) -> None:
    assert "Next<span" in shown(admin, run) and "Previous<span" not in shown(admin, run)
    assert "Previous<span" in shown(admin, run, "tensors/1/")


def test_a_tensor_is_found_by_its_name(admin: Visitor, run: Run) -> None:
    address = admin.address(f"runs/{run.id}/tensors/find")
    answer = admin.client.get(address, {"tensor": "blocks.0.up.weight", "drawer": "1"})
    assert answer.status_code == 302 and answer["Location"].endswith("/tensors/1/?drawer=1")


def test_a_run_without_histograms_says_how_to_get_them(admin: Visitor) -> None:
    run = make_run(admin.project, "plain")
    Recorder(run=run, tensors=["a.input"]).rows([1], {}, {"amax": [[1.0]]})
    assert "readiness=True" in shown(admin, run)


def test_history_draws_the_window_over_the_exponents(admin: Visitor, run: Run) -> None:
    answer = get_json(admin, f"runs/{run.id}/figures/history.json", tensor="0")
    heat, *lines = answer["figure"]["data"]
    assert trace_values(heat["x"]).tolist() == list(STEPS)
    assert [line["name"] for line in lines] == ["largest", "smallest normal", "smallest subnormal"]
    assert trace_values(lines[0]["y"]) == pytest.approx(np.log2(448.0 / SCALE))
    assert "3 sampled steps from 1 to 21; 3 have some above the largest value" in answer["summary"]
    zoomed = get_json(admin, f"runs/{run.id}/figures/history.json", tensor="0", first="5", last="15")
    assert trace_values(zoomed["figure"]["data"][0]["x"]).tolist() == [11]


@pytest.mark.parametrize("query", [{}, {"tensor": "none"}, {"tensor": "0", "first": "30"}])
def test_history_says_what_is_missing(admin: Visitor, run: Run, query: dict[str, str]) -> None:
    assert "empty" in get_json(admin, f"runs/{run.id}/figures/history.json", **query)


def test_histories_read_a_limited_number_of_messages(run: Run) -> None:
    kept = queries.tensor_histograms(run.id, 0, most=4)
    assert [histogram.step for histogram in kept] == [1, 21], "two ranks, so two steps of four messages"
    assert kept[0].total == 8_192
    with pytest.raises(ValueError, match="positive"):
        queries.tensor_histograms(run.id, 0, most=0)


def test_a_later_attempt_replaces_what_it_wrote_again(run: Run) -> None:
    recorder = Recorder(run=run, rank=0, tensors=["blocks.0.up.input"], attempt=1)
    recorder.rows([11, 12], {}, {"amax": [[1.0]] * 2})
    store_histograms(run, 11, {0: histogram_of(np.ones(10))}, writer=Writer.objects.get(uuid=recorder.uuid))
    kept = queries.tensor_histograms(run.id, 0)
    assert [(histogram.step, histogram.total) for histogram in kept] == [(1, 8_192), (11, 10)]
    assert list(queries.rank_histograms(run.id, 0)) == [0]


def steerable(run: Run) -> None:
    send_report(Recorder(run=run, tensors=[], attempt=0), kind="accepts", accepts=["fallback"])
    Run.objects.filter(pk=run.pk).update(state=RunState.RUNNING)


def test_members_may_fall_back_and_viewers_may_not(member: Visitor, viewer: Visitor, run: Run) -> None:
    steerable(run)
    assert "Change the layer to BF16" in shown(member, run)
    assert "Change the layer to BF16" not in shown(viewer, run)
    assert "Members of the project can order it" in shown(viewer, run)
    order = {"kind": "fallback", "precision": "bf16", "patterns": "blocks.0.up"}
    assert viewer.client.post(viewer.address(f"runs/{run.id}/commands/new"), order).status_code == 403
    member.client.post(member.address(f"runs/{run.id}/commands/new"), order)
    command = Command.objects.get(run=run)
    assert command.arguments == {"patterns": ["blocks.0.up"], "precision": "bf16"}


def test_says_why_a_layer_cannot_fall_back(member: Visitor, run: Run) -> None:
    assert "does not accept it" in shown(member, run)
    Run.objects.filter(pk=run.pk).update(state=RunState.FINISHED)
    assert "The run is finished" in shown(member, run)


@pytest.mark.parametrize(
    ("recipe", "margin"),
    [
        ({"margin": 2}, 2),
        ({}, 0),
        (None, 0),
        ({"margin": "2"}, 0),
        ({"margin": 1e9}, 0),
        ({"margin": 900}, 0),
    ],
)
def test_margins_of_recipes(recipe: Any, margin: int) -> None:
    assert margin_of(recipe) == margin
