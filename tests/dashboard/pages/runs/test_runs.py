"""The list of runs, and the page of a run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import numpy as np
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor, html
from django.utils import timezone
from django.utils.html import escape

from fp8scope_dashboard.pages.formatting import written
from fp8scope_dashboard.pages.runs.listing import RUNS_A_PAGE
from fp8scope_dashboard.runs import bulk
from fp8scope_dashboard.runs.models import BulkAction, DeletedRun, Run, RunState


def test_it_works(admin: Visitor, seeded: Seeded) -> None:
    page = html(admin)
    for run in (*seeded.baselines, seeded.healthy, seeded.faulty):
        assert run.name in page and f"runs/{run.id}/loss.svg?rows={run.rows_stored}" in page
    assert page.count("</svg>Baseline</span>") == 3
    assert "Worse than BF16" in page and "NaN" in page
    assert f"alerts/?run={seeded.faulty.id}" in page


def test_without_runs_it_says_how_to_get_one(member: Visitor, viewer: Visitor) -> None:
    page = html(member)
    assert "fp8scope login http" in page
    assert "fp8scope.attach(" in page and "Create a token" in page
    # No index has the package: it is installed from a checkout.
    assert "pip install '.[torch]'" in page
    assert "Create a token" not in html(viewer), "a viewer cannot create tokens"


def test_the_first_run_has_three_ways(member: Visitor) -> None:
    page = html(member)
    assert page.count("Waiting for the first row of a run") == 3
    for words in ("fp8scope.convert(model", 'group="bf16", seed=1', "fp8scope run --convert delayed"):
        assert escape(words) in page


def test_the_first_run_that_arrives_is_announced(member: Visitor) -> None:
    run = make_run(member.project, "gpt <fp8>")
    page = html(member, **{"HX-Request": "true", "HX-Target": "runs"})
    assert "“gpt &lt;fp8&gt;” has registered. It waits for its first row." in page and "Open the run" in page
    Recorder(run=run).rows(np.arange(3), {"loss": np.ones(3)})
    assert "The first rows of “gpt &lt;fp8&gt;” have arrived." in html(member)
    Run.objects.filter(pk=run.pk).update(created_at=timezone.now() - timedelta(hours=1))
    assert "have arrived" not in html(member)
    for number in range(3):
        make_run(member.project, f"run {number}")
    assert "have arrived" not in html(member), "no longer a project with its first runs"


def test_the_first_run_is_sent_to_the_address_of_the_visitor(member: Visitor, settings: Any) -> None:
    settings.ALLOWED_HOSTS = ["*"]
    settings.BASE_URL = "http://localhost:8265"
    settings.SECURE_SSL_REDIRECT = False
    for host, server in (
        ("gpu-server:8265", "http://gpu-server:8265"),
        ("10.0.0.5:8265", "http://10.0.0.5:8265"),
        ("127.0.0.1:8265", "http://localhost:8265"),
    ):
        assert f"fp8scope login {server}<" in html(member, host=host)
    settings.BASE_URL = "https://fp8.example.org"
    assert "fp8scope login https://fp8.example.org<" in html(member, host="10.0.0.5:8265")


def test_searches_runs(admin: Visitor) -> None:
    make_run(admin.project, "first", group="bf16")
    make_run(admin.project, "second", tags=["nightly"], state=RunState.FAILED)
    assert "second" not in html(admin, "?q=FIR")
    assert "first" in html(admin, "?q=bf16") and "second" not in html(admin, "?q=bf16")
    assert "second" in html(admin, "?q=nightly")
    assert "first" not in html(admin, "?state=failed")
    assert "No run matches" in html(admin, "?q=nothing")
    assert "first" in html(admin, "?state=nonsense")


def test_a_refresh_gets_only_the_list(admin: Visitor) -> None:
    make_run(admin.project, "a run")
    part = html(admin, **{"HX-Request": "true", "HX-Target": "runs"})
    assert part.strip().startswith('<div id="runs"') and "a run" in part and "<html" not in part


def test_paginates_the_runs(admin: Visitor) -> None:
    for i in range(RUNS_A_PAGE + 1):
        make_run(admin.project, f"run number {i:03}")
    assert html(admin).count("runs__name") == RUNS_A_PAGE
    assert html(admin, "?page=2").count("runs__name") == 1
    assert html(admin, "?page=nonsense").count("runs__name") == RUNS_A_PAGE


def test_the_list_needs_few_queries(admin: Visitor, django_assert_max_num_queries: object) -> None:
    for i in range(20):
        make_run(admin.project, f"run {i}", precision="fp8", group=f"g{i}", baseline="bf16")
    with django_assert_max_num_queries(18):  # type: ignore[operator]
        html(admin)


def test_escapes_names(admin: Visitor) -> None:
    name = "<script>alert(1)</script>"
    run = make_run(admin.project, name, config={"x": "</pre><script>"}, tags=["<i>"])
    for rest in ("", f"runs/{run.id}/"):
        page = html(admin, rest)
        assert "<script>alert" not in page and escape(name) in page and "<i>" not in page


def test_shows_the_head_of_a_healthy_run(admin: Visitor, seeded: Seeded) -> None:
    page = html(admin, f"runs/{seeded.healthy.id}/")
    comparison = seeded.healthy.comparison
    assert escape(written(comparison.result["explanation"])) in page
    assert "gauge__point" in page
    assert "None open" in page
    assert f"/p/research/runs/{seeded.healthy.id}/events" in page


def test_the_head_of_a_faulty_run_names_the_worst_tensors(admin: Visitor, seeded: Seeded) -> None:
    page = html(admin, f"runs/{seeded.faulty.id}/")
    assert "Worse than BF16" in page and "Overflowing" in page
    assert 'data-tensor="blocks.' in page and "mlp.down.input" in page
    assert "Loss not finite" in page and "badge--danger" in page


def test_a_refresh_gets_only_the_head(admin: Visitor, seeded: Seeded) -> None:
    part = html(admin, f"runs/{seeded.faulty.id}/", **{"HX-Request": "true", "HX-Target": "run-head"})
    assert '<div id="run-head"' in part and "data-figure" not in part and "<html" not in part
    summary = html(admin, f"runs/{seeded.faulty.id}/", **{"HX-Request": "true", "HX-Target": "run-summary"})
    assert '<div id="run-summary"' in summary and "What happened" in summary and "data-figure" not in summary
    cards = html(admin, f"runs/{seeded.faulty.id}/", **{"HX-Request": "true", "HX-Target": "run-cards"})
    assert cards.strip().startswith('<div id="run-cards"') and "mlp.down.input" in cards


def test_a_run_without_steps(admin: Visitor) -> None:
    run = make_run(admin.project, "new", precision="fp8", baseline="bf16")
    page = html(admin, f"runs/{run.id}/")
    assert "No steps yet" in page and "Not compared yet" in page and "run.watch(model)" in page


def test_a_baseline_and_a_run_without_one(admin: Visitor) -> None:
    alone = make_run(admin.project, "alone", precision="fp8")
    seed = make_run(admin.project, "seed", precision="bf16", group="bf16")
    assert "To compare an FP8 run with this group, set its baseline=“bf16”" in html(admin, f"runs/{seed.id}/")
    make_run(admin.project, "fp8", precision="fp8", baseline="bf16")
    page = html(admin, f"runs/{alone.id}/")
    assert "No baseline" in page
    configuration = html(admin, f"runs/{alone.id}/?tab=configuration")
    assert "run.log_config" in configuration and "no baseline to compare with" in configuration
    assert "Other runs are compared with this group." in html(admin, f"runs/{seed.id}/")


def test_explains_failed_and_silent_runs(admin: Visitor) -> None:
    failed = make_run(admin.project, "f", state=RunState.FAILED, error="ZeroDivisionError: <oh>")
    silent = make_run(admin.project, "s", state=RunState.SILENT)
    assert "ZeroDivisionError: &lt;oh&gt;" in html(admin, f"runs/{failed.id}/")
    assert "fp8scope sync" in html(admin, f"runs/{silent.id}/")


def test_shows_lost_data(admin: Visitor) -> None:
    run = make_run(admin.project, "r")
    Recorder(run=run).rows(np.arange(3), {"loss": np.ones(3)})
    Run.objects.filter(pk=run.pk).update(rows_dropped=7, agent_errors=2, points_sent=10)
    page = html(admin, f"runs/{run.id}/")
    assert "Dropped" in page and '<span class="badge badge--warning">7</span>' in page
    assert "Agent errors" in page
    assert "Sent but not stored" in page and '<span class="badge badge--danger">7</span>' in page


def test_serves_the_sparkline(admin: Visitor, seeded: Seeded) -> None:
    answer = admin.client.get(admin.address(f"runs/{seeded.faulty.id}/loss.svg?rows=1"))
    assert answer["Content-Type"] == "image/svg+xml"
    assert b"<polyline" in answer.content
    assert "max-age=86400" in answer["Cache-Control"] and "private" in answer["Cache-Control"]


def test_a_deleted_run_has_an_empty_sparkline(admin: Visitor, stranger: Visitor) -> None:
    """Pages that were open before ask for it; an error would be on their consoles."""
    run = make_run(admin.project, "r")
    Recorder(run=run).rows(np.arange(3), {"loss": np.arange(3.0)})
    address = admin.address(f"runs/{run.id}/loss.svg")
    bulk.change(admin.project, Run.objects.filter(pk=run.pk), BulkAction.Kind.DELETE, admin.user)
    for gone in (False, True):
        if gone:
            Run.with_deleted.all().delete()
            DeletedRun.objects.create(run_id=run.id, project=admin.project)
        answer = admin.client.get(address)
        assert answer.status_code == 200 and answer["Content-Type"] == "image/svg+xml"
        assert b"<polyline" not in answer.content and "no-store" in answer["Cache-Control"]
        assert stranger.client.get(address).status_code == 404
        assert stranger.client.get(stranger.address(f"runs/{run.id}/loss.svg")).status_code == 404
    assert admin.client.get(admin.address(f"runs/{uuid4()}/loss.svg")).status_code == 404


def test_browsers_do_not_cache_pages(admin: Visitor) -> None:
    assert "no-store" in admin.client.get(admin.address())["Cache-Control"]
