"""The tabs of a run's page, and the range of steps in its address."""

from __future__ import annotations

import re
from typing import Any

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor, html
from django.utils import timezone

from fp8scope_dashboard.runs.models import Run, Writer


def test_it_works(viewer: Visitor, seeded: Seeded, subtests: pytest.Subtests) -> None:
    for name, words in (
        ("overview", "What happened"),
        ("tensors", 'id="tensors"'),
        ("efficiency", "Step time by phase"),
        ("ranks", 'id="ranks"'),
        ("configuration", "differences to"),
        ("environment", "gpu"),
        ("console", "Console log"),
        ("notes", "No notes yet"),
    ):
        with subtests.test(tab=name):
            page = html(viewer, f"runs/{seeded.faulty.id}/?tab={name}")
            assert words in page
            # The tab, and if that is a group, its part.
            current = re.findall(r'data-tab-link="(\w+)" aria-current="page"', page)
            assert set(current) == {name}
            tabs = page.partition('aria-label="Parts of this run"')[2].partition("</nav>")[0]
            assert tabs.count("data-tab-link") == 6
            assert ("What happened" in page) == (name == "overview")


def test_an_unknown_tab_is_the_overview(viewer: Visitor, seeded: Seeded) -> None:
    assert 'data-tab="overview"' in html(viewer, f"runs/{seeded.faulty.id}/?tab=<script>")


def test_a_tab_without_the_page(viewer: Visitor, seeded: Seeded) -> None:
    part = html(viewer, f"runs/{seeded.faulty.id}/?tab=environment", **{"HX-Target": "run-tab"})
    assert part.strip().startswith('<div id="run-tab"') and "<html" not in part and "run-head" not in part


def test_tabs_keep_the_range_and_the_tensor(viewer: Visitor, seeded: Seeded) -> None:
    page = html(viewer, f"runs/{seeded.faulty.id}/?steps=40..60&tensor=blocks.0.mlp.up.input&x=1")
    assert "?tab=tensors&amp;steps=40..60&amp;tensor=blocks.0.mlp.up.input" in page
    assert 'aria-label="First step" value="40"' in page and 'aria-label="Last step" value="60"' in page


@pytest.mark.parametrize(
    ("sent", "steps"),
    [
        ("first=40&last=60", "40..60"),
        ("first=40&last=", "40..149"),
        ("first=&last=60", "0..60"),
        ("first=&last=", None),
        ("first=x&last=1e999", None),
        ("first=40&last=60&steps=1..2&tab=tensors", "40..60"),
    ],
)
def test_a_form_without_scripts_sets_the_range(
    viewer: Visitor, seeded: Seeded, sent: str, steps: str | None
) -> None:
    path = viewer.address(f"runs/{seeded.faulty.id}/")
    answer = viewer.client.get(f"{path}?{sent}")
    assert answer.status_code == 302
    assert (f"steps={steps}" in answer["Location"]) == (steps is not None)
    assert ("tab=tensors" in answer["Location"]) == ("tab=tensors" in sent)
    assert viewer.client.get(answer["Location"]).status_code == 200


@pytest.mark.parametrize("steps", ["", "5", "..", "a..b", "1..2..3", "1e999..2", "-1..nan"])
def test_ignores_an_invalid_range(viewer: Visitor, seeded: Seeded, steps: str) -> None:
    page = html(viewer, f"runs/{seeded.faulty.id}/?steps={steps}")
    assert 'aria-label="First step" value=""' in page


def test_the_configuration_shows_what_differs_first(admin: Visitor) -> None:
    bf16: dict[str, Any] = {"precision": "bf16", "group": "bf16"}
    make_run(admin.project, "other seed", seed=2, config={"lr": 9.0}, **bf16)
    make_run(admin.project, "same seed", seed=1, config={"lr": 2.0, "width": 64}, **bf16)
    make_run(admin.project, "newest", seed=3, config={"lr": 8.0}, **bf16)
    run = make_run(
        admin.project, "ours", precision="fp8", seed=1, baseline="bf16", config={"lr": 1.0, "width": 64}
    )
    page = html(admin, f"runs/{run.id}/?tab=configuration")
    # Of the seeds, the one with the same number is compared.
    assert "2 differences to <a" in page and ">same seed</a>" in page
    differing, _, equal = page.partition(" equal entr")
    assert ">lr<" in differing and ">1.0" in differing and ">2.0" in differing
    assert ">width<" in equal and ">width<" not in differing


def test_a_failed_run_shows_the_last_line_first(viewer: Visitor) -> None:
    run = make_run(viewer.project, "failing", precision="fp8")
    error = 'Traceback (most recent call last):\n  File "t.py", line 3\nValueError: <b>loss is NaN</b>\n\n'
    Run.objects.filter(pk=run.pk).update(state="failed", error=error, last_step=77)
    page = html(viewer, f"runs/{run.id}/")
    notice = page.partition('role="alert"')[2]
    assert (
        notice.index("ValueError: &lt;b&gt;") < notice.index("Whole traceback") < notice.index("Traceback (")
    )
    assert "after step 77" in page and "<b>loss" not in page
    assert "the training script fails" in page
    Writer.objects.create(
        run=run,
        uuid=run.pk,
        rank=3,
        failed=True,
        error="a\nRuntimeError: NCCL",
        hostname="node7",
        finished_at=timezone.now(),
    )
    console = html(viewer, f"runs/{run.id}/?tab=console")
    assert ">Rank 3 on node7<" in console and ">RuntimeError: NCCL<" in console


@pytest.mark.parametrize(("precision", "shown"), [("bf16", 0), ("fp32", 0), ("fp8", 1), ("unknown", 1)])
def test_a_run_without_fp8_has_no_empty_cards(viewer: Visitor, precision: str, shown: int) -> None:
    """But for what it has telemetry of."""
    run = make_run(viewer.project, "baseline", precision=precision)
    page = html(viewer, f"runs/{run.id}/")
    assert page.count('aria-label="Overflow"') == shown
    card = page.partition('id="tensors-card"')[2].partition(">")[0]
    assert ("hidden" in card.split()) == (not shown)
    # Its tab says how to get some.
    tab = html(viewer, f"runs/{run.id}/?tab=tensors")
    assert (
        "run.watch(model)" in tab and " hidden" not in tab.partition('id="tensors-card"')[2].partition(">")[0]
    )


def test_a_new_run_has_one_line_for_each_empty_part(viewer: Visitor, subtests: pytest.Subtests) -> None:
    run = make_run(viewer.project, "new", precision="fp8")
    for tab, words in (
        ("overview", "No steps yet. What happens in the run appears here."),
        ("configuration", "The script has logged no configuration."),
        ("environment", "The agent has recorded no environment."),
        ("ranks", "No process has sent data yet."),
        ("notes", "No links yet."),
    ):
        with subtests.test(tab=tab):
            assert words in html(viewer, f"runs/{run.id}/?tab={tab}")


def test_the_number_of_queries_does_not_depend_on_the_run(
    admin: Visitor, seeded: Seeded, django_assert_max_num_queries: Any
) -> None:
    for tab, most in (("overview", 50), ("configuration", 25), ("notes", 25)):
        with django_assert_max_num_queries(most):
            html(admin, f"runs/{seeded.faulty.id}/?tab={tab}")


def test_times_are_in_the_zone_that_the_user_has_chosen(viewer: Visitor, seeded: Seeded) -> None:
    Run.objects.filter(pk=seeded.faulty.pk).update(created_at="2026-01-15T12:00:00Z")
    address = f"runs/{seeded.faulty.id}/"
    assert 'data-moment="ago" title="2026-01-15 12:00:00 UTC"' in html(viewer, address)
    for zone, expected in (("Asia/Tokyo", "2026-01-15 21:00:00 JST"), ("UTC", "2026-01-15 12:00:00 UTC")):
        viewer.client.post("/account/time-zone", {"time_zone": zone})
        page = html(viewer, address)
        assert f'title="{expected}"' in page and "data-moment" not in page
