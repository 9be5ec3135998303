"""Alerts of one cause are one group over all runs."""

from __future__ import annotations

import re

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor, html

from fp8scope_dashboard.alerts.models import Alert, AlertState, Rule
from fp8scope_dashboard.pages.alerts import listing
from fp8scope_dashboard.pages.alerts.listing import cause_of

MEMORY = "RuntimeError: CUDA error: out of memory at 0x7f{0}a, rank {0}, tried to allocate 2.{0} GiB."


def fail(visitor: Visitor, number: int, text: str = MEMORY) -> Alert:
    run = make_run(visitor.project, f"run {number}")
    rule = Rule.objects.get(project=visitor.project, kind="run_failed")
    return Alert.objects.create(
        run=run, rule=rule, kind="run_failed", severity="critical", onset_step=number, step=number,
        message=text.format(number),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("message", "other", "is_one"),
    [
        (MEMORY.format(3), MEMORY.format(8), True),
        ("Step 1,234: loss 2.5e-3.", "Step 99: loss  17.", True),
        (
            "123e4567-e89b-12d3-a456-426614174000",
            "00000000-e89b-12d3-a456-426614174fff",
            True,
        ),
        ("NCCL timeout", "CUDA error", False),
        ("tensor blocks.3.up", "tensor blocks.4.up", False),
    ],
)
def test_numbers_do_not_tell_causes_apart(message: str, other: str, is_one: bool) -> None:
    assert (cause_of("run_failed", message) == cause_of("run_failed", other)) is is_one
    assert cause_of("run_failed", message) != cause_of("loss_spike", message)


def test_one_error_in_many_runs_is_one_group(member: Visitor) -> None:
    events = [fail(member, number) for number in range(1, 13)]
    other = fail(member, 20, "ValueError: bad data")
    page = html(member, "alerts/?by=cause")
    assert "12 alerts of 12 runs" in page and page.count('aria-labelledby="group-') == 2
    assert all(f"alerts/{event.pk}/" in page for event in [*events, other])
    assert page.index("12 alerts of 12 runs") < page.index("bad data"), "the cause of most runs comes first"
    # Their newest alert is shown in full, the others by the names of their runs.
    assert f'id="event-{events[-1].pk}"' in page and f'id="event-{events[0].pk}"' not in page
    form = page.partition("Acknowledge all 12")[0].rpartition("<form")[2]
    chosen = re.findall(r'name="alerts" value="(\d+)"', form)
    member.client.post(member.address("alerts/acknowledge"), {"alerts": chosen})
    states = set(Alert.objects.exclude(pk=other.pk).values_list("state", flat=True))
    assert states == {AlertState.ACKNOWLEDGED}


def test_other_filters_keep_the_grouping(member: Visitor) -> None:
    fail(member, 1)
    page = html(member, "alerts/?by=cause&severity=critical")
    assert 'href="?state=all&amp;severity=critical&amp;by=cause"' in page
    assert 'href="?state=open&amp;severity=critical"' in page, "the other grouping"


def test_causes_have_pages(member: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "CAUSES_A_PAGE", 1)
    fail(member, 1)
    fail(member, 2, "ValueError: bad data")
    assert "1 to 1 of 2 causes" in html(member, "alerts/?by=cause")
    assert "2 to 2 of 2 causes" in html(member, "alerts/?by=cause&page=2")


def test_a_cause_has_a_bounded_list(member: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_RUNS_OF_CAUSE", 2)
    for number in range(3):
        fail(member, number)
    page = html(member, "alerts/?by=cause")
    assert "3 alerts of 3 runs" in page and "Acknowledge all 2" in page
