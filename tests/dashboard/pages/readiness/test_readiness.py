"""The page of a run's readiness for FP8 and FP4, its figure, and the same over the API."""

from __future__ import annotations

from html import unescape
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.exponents import histogram_of, store_histograms
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.token_clients import client_with_token
from dashboard.helpers.visitors import Visitor, get_json

from fp8scope_dashboard.runs.models import Run, Tensor

NAMES = ["a.input", "a.weight", "a.grad_output", "b.weight_grad"]


@pytest.fixture
def run(admin: Visitor) -> Run:
    """A BF16 run with two sampled steps. In the second, the gradients of `a` span 60 powers of two."""
    run = make_run(admin.project, "bf16 watched", precision="bf16")
    recorder = Recorder(run=run, tensors=NAMES)
    Tensor.objects.filter(run=run).update(shape=[-1, 64])
    generator = np.random.default_rng(0)
    normal = generator.normal(size=4096).astype(np.float32).astype(np.float64)
    wide = np.exp2(generator.uniform(-60.0, 0.0, 4096)).astype(np.float32).astype(np.float64)
    amax = np.abs(normal).max()
    values = np.tile([amax, amax, np.abs(wide).max(), amax], (11, 1))
    recorder.rows(np.arange(1, 12), {}, {"amax": values})
    store_histograms(run, 1, {i: histogram_of(normal) for i in range(4)})
    of_last = {i: histogram_of(wide if i == 2 else normal) for i in range(4)}
    store_histograms(run, 11, of_last)
    return run


def shown(visitor: Visitor, run: Run, query: str = "", **headers: str) -> str:
    answer = visitor.client.get(visitor.address(f"runs/{run.id}/readiness/?{query}"), headers=headers)
    assert answer.status_code == 200
    return unescape(answer.content.decode())


def test_it_works(admin: Visitor, run: Run) -> None:
    page = shown(admin, run)
    assert "2 of 3 tensors are ready for FP8 with per-tensor scaling; keep a.grad_output in BF16." in page
    assert page.index("a.grad_output</a>") < page.index("a.input</a>")
    assert f"runs/{run.id}/tensors/2/?format=hybrid" in page, "the worst tensor is a link to its page"
    # What the optimizer keeps is no operand of a product.
    assert "b.weight_grad" not in page
    assert "All 3 tensors are ready for FP8" in shown(admin, run, "step=10")
    run_page = admin.client.get(admin.address(f"runs/{run.id}/")).content.decode()
    assert f"runs/{run.id}/readiness/" in run_page


def test_histograms_without_roles_are_no_missing_histograms(admin: Visitor, run: Run) -> None:
    Tensor.objects.filter(run=run).update(role="")
    sentence = "The run has the exponents of 4 tensors, but none of them has the role input, weight"
    page = shown(admin, run)
    assert sentence in page and "No exponent histograms" not in page
    token = client_with_token(admin.project)
    answer = token.get(f"/api/v1/runs/{run.id}/readiness")
    assert answer.status_code == 409 and sentence in str(answer.json())
    assert "No exponent histograms up to step 0" in shown(admin, run, "step=0")


def test_choices_are_in_the_address(admin: Visitor, run: Run) -> None:
    assert "ready for NVFP4 with a scale for each 16 elements" in shown(admin, run, "format=nvfp4&step=1")
    assert "All 3 tensors are ready for FP8 E5M2 with the scale 32" in shown(
        admin, run, "format=e5m2&scaling=fixed&scale=2^5&step=1"
    )
    # 2^-16 puts a normal tensor below the smallest values of E4M3.
    small = shown(admin, run, "format=e4m3&scaling=fixed&scale=2^-16&step=1")
    assert "0 of 3 tensors are ready for FP8 E4M3" in small
    page = shown(admin, run, "q=WEIGHT")
    assert "a.weight</a>" in page and "a.input</a>" not in page
    assert "No tensor matches" in shown(admin, run, "q=nothing")


def test_only_the_answer_comes_back_for_a_choice(admin: Visitor, run: Run) -> None:
    part = shown(admin, run, "format=mxfp8", **{"HX-Target": "readiness"})
    assert "<html" not in part and part.lstrip().startswith('<div id="readiness"')


@pytest.mark.parametrize(
    "query",
    [
        "format=fp7",
        "scaling=x",
        "scaling=fixed&scale=-1",
        "scaling=fixed&scale=2^9999",
        "margin=99",
        "margin=x",
    ]
    + ["block=-1", "block=" + "9" * 30, "error=0", "error=nan", "step=1.5", "scaling=fixed&scale=1e99"],
)
def test_wrong_choices_are_named(admin: Visitor, run: Run, query: str) -> None:
    page = shown(admin, run, query)
    assert "must be" in page and "The default is shown." in page


def test_a_run_without_histograms_says_how_to_get_them(admin: Visitor) -> None:
    run = make_run(admin.project, "empty")
    assert "run.watch(model, readiness=True)" in shown(admin, run)
    figure = get_json(admin, f"runs/{run.id}/readiness/exponents.json")
    assert "No histogram" in figure["empty"]


def test_the_figure_is_of_the_tensor_and_format_of_the_address(admin: Visitor, run: Run) -> None:
    address = f"runs/{run.id}/readiness/exponents.json"
    worst = get_json(admin, address)
    assert worst["summary"].startswith("Exponents of a.grad_output at step 11") and "becomes zero" in str(
        worst
    )
    chosen = get_json(admin, address, tensor="a.weight", format="mxfp4")
    assert "a.weight" in chosen["summary"] and "with a scale for each block" in chosen["summary"]


def test_strangers_see_nothing(stranger: Visitor, run: Run) -> None:
    for rest in ("readiness/", "readiness/exponents.json"):
        assert stranger.client.get(f"/p/{run.project.slug}/runs/{run.id}/{rest}").status_code == 404


def ask(run: Run, **query: str) -> tuple[int, Any]:
    client = client_with_token(run.project)
    answer = client.get(f"/api/v1/runs/{run.id}/readiness", query)
    return answer.status_code, answer.json()


def test_the_api_has_the_same_verdicts(admin: Visitor, run: Run) -> None:
    status, body = ask(run, format="hybrid")
    assert status == 200, body
    assert body["step"] == 11 and body["method_version"] == 1
    assert body["counts"] == {"ready": 2, "finer": 0, "bf16": 1, "unknown": 0}
    first, *others = body["tensors"]
    assert first["name"] == "a.grad_output" and first["verdict"] == "bf16"
    assert first["flushed"][0] <= first["flushed"][1] <= first["flushed"][2] and first["flushed"][1] > 0.4
    assert all(tensor["saturated"] == [0, 0, 0] for tensor in others)
    assert ask(run, limit="1", offset="1")[1]["tensors"] == others[:1]
    assert [tensor["name"] for tensor in ask(run, search="INPUT")[1]["tensors"]] == ["a.input"]
    # A budget that no FP8 tensor can keep leaves none of them in FP8.
    assert sorted(ask(run, error="1e-9")[1]["error"]["keep_in_bf16"]) == sorted(NAMES[:3])


@pytest.mark.parametrize(
    "query",
    [{"format": "fp7"}, {"scale": "x"}, {"margin": "65"}, {"block": "-1"}, {"error": "2"}, {"limit": "0"}],
)
def test_the_api_refuses_wrong_choices(run: Run, query: dict[str, str]) -> None:
    status, body = ask(run, **query)
    assert status == 422 and body["error"]["message"] and body["error"]["hint"]


def test_the_api_says_that_there_are_no_histograms(admin: Visitor) -> None:
    status, body = ask(make_run(admin.project, "empty"))
    assert status == 409 and "readiness=True" in body["error"]["hint"]


@pytest.mark.parametrize("broken", [np.nan, 40.0])
def test_a_broken_stretch_is_not_judged(admin: Visitor, broken: float) -> None:
    """After NaN or a divergence, the tensors do not show what a working training needs."""
    run = make_run(admin.project, "bf16 watched", precision="bf16")
    recorder = Recorder(run=run, tensors=NAMES)
    steps = np.arange(1, 121)
    losses = 2.0 + np.exp(-steps / 20.0) + np.random.default_rng(0).normal(0.0, 0.01, len(steps))
    losses[80:] = broken
    recorder.rows(steps, {"loss": losses}, {"amax": np.ones((len(steps), len(NAMES)))})
    values = np.random.default_rng(0).normal(size=4096)
    for step in (50, 100):
        store_histograms(run, step, {i: histogram_of(values) for i in range(4)})
    page = shown(admin, run)
    assert "judged at step 50" in page and "The loss is broken from step 81 on" in page
    assert "does not say what a working training needs" in shown(admin, run, "step=100")
