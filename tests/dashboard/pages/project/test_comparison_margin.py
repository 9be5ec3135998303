"""The form that changes the margin beside a verdict."""

from __future__ import annotations

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor, html

from fp8scope_dashboard.audit.models import Entry


def test_it_works(member: Visitor, seeded: Seeded) -> None:
    run = seeded.healthy
    page = html(member, f"runs/{run.pk}/")
    assert "Margin ±0.25\u202f%, the project's" in page.replace("&#x27;", "'")
    answer = member.client.post(member.address(f"runs/{run.pk}/margin"), {"margin": "1,5 %"})
    assert answer.status_code == 302 and answer["Location"].endswith(f"runs/{run.pk}/")
    run.refresh_from_db()
    assert run.margin == pytest.approx(0.015)
    page = html(member, f"runs/{run.pk}/")
    assert "Margin ±1.50\u202f%<" in page and 'value="1.5"' in page
    assert Entry.objects.latest("id").text == "margin of “fp8-delayed” against “bf16”: 1.50\u202f%"
    member.client.post(member.address(f"runs/{run.pk}/margin"), {"margin": ""})
    run.refresh_from_db()
    assert run.margin is None


@pytest.mark.parametrize("text", ["a lot", "0", "-1", "200", "nan", "1e999"])
def test_refuses_what_is_no_margin(member: Visitor, text: str) -> None:
    run = make_run(member.project, "a", baseline="bf16")
    answer = member.client.post(member.address(f"runs/{run.pk}/margin"), {"margin": text}, follow=True)
    assert "A margin is" in answer.content.decode()
    run.refresh_from_db()
    assert run.margin is None and not Entry.objects.exists()


def test_a_viewer_sees_no_form(viewer: Visitor, seeded: Seeded) -> None:
    assert "Margin of this comparison" not in html(viewer, f"runs/{seeded.healthy.pk}/")


@pytest.mark.parametrize("text", ["0.01 nats", "0,01nats", " .01 NATS ", "1e-2 nat"])
def test_it_may_be_in_nats(member: Visitor, seeded: Seeded, text: str) -> None:
    run = seeded.healthy
    answer = member.client.post(member.address(f"runs/{run.pk}/margin"), {"margin": text}, follow=True)
    run.refresh_from_db()
    assert (run.margin, run.margin_nats) == (None, 0.01)
    page = answer.content.decode()
    assert "judged with the margin 0.01 nats" in page
    assert "Margin ±0.01 nats" in page and 'value="0.01 nats"' in page
    member.client.post(member.address(f"runs/{run.pk}/margin"), {"margin": ""})
    run.refresh_from_db()
    assert (run.margin, run.margin_nats) == (None, None)
