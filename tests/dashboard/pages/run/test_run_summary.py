"""Tags, summary and configuration on the page of a run."""

from __future__ import annotations

from typing import Any

from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor

from fp8scope_dashboard.runs.models import Run


def head(visitor: Visitor, **fields: Any) -> str:
    run = make_run(visitor.project)
    Run.objects.filter(pk=run.pk).update(**fields)
    answer = visitor.client.get(visitor.address(f"runs/{run.id}/"))
    assert answer.status_code == 200
    return answer.content.decode()


def test_it_works(admin: Visitor) -> None:
    summary = {"best_loss": 1.25, "items": [1, 2], "note": "<b>good</b>"}
    text = head(admin, summary=summary, tags=["kept"], config={"lr": 0.1})
    assert "<dt>best_loss</dt><dd>1.25</dd>" in text and "<dt>items</dt><dd>[1, 2]</dd>" in text
    assert "&lt;b&gt;good&lt;/b&gt;" in text and "<b>good</b>" not in text
    assert '<span class="tag">kept</span>' in text


def test_a_run_without_a_summary_has_no_card(admin: Visitor) -> None:
    assert 'aria-label="Summary"' not in head(admin)


def test_a_long_summary_is_truncated(admin: Visitor) -> None:
    text = head(admin, summary={f"value_{number:02d}": "x" * 500 for number in range(30)})
    card = text.partition('aria-label="Summary"')[2].partition("</section>")[0]
    assert card.count("<dt>") == 12 and "18 more entries" in card and "x" * 61 not in card
