"""The card with ranks and attempts in a real browser, on desktop and phone."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from django.utils import timezone
from e2e.helpers.tabs import OpenTab
from helpers.live_servers import Server
from playwright.sync_api import expect

from fp8scope_dashboard.runs.models import Writer

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


@pytest.mark.parametrize("width", [1440, 390])
def test_it_works(open_tab: OpenTab, server: Server, width: int) -> None:
    run = make_run(server.project, "gpt on four ranks", precision="fp8")
    for attempt, first in enumerate((1, 121)):
        for rank in range(4):
            writer = Recorder(run=run, rank=rank, tensors=("blocks.0.mlp.up.weight",))
            stored_writer = Writer.objects.filter(uuid=writer.uuid)
            stored_writer.update(hostname=f"node{rank // 2}", attempt=attempt)
            steps = np.arange(first, 200 if (rank, attempt) == (3, 1) else 301)
            scale = np.full((len(steps), 1), 8.0 if rank == 1 else 4.0)
            writer.rows(steps, {"loss": 1.0 + 1.0 / steps}, {"scale": scale, "numel": np.ones_like(scale)})
            if attempt == 0 or rank == 3:
                stored_writer.update(seen_at=timezone.now() - timedelta(minutes=9))
    tab = open_tab(width, "light")
    # An event that comes before the page listens would be lost.
    tab.open_live(f"/p/{server.project.slug}/runs/{run.id}/?tab=ranks")
    card = tab.page.locator("#ranks")
    card.scroll_into_view_if_needed()
    text = card.inner_text()
    assert "Ranks disagree" in text and "blocks.0.mlp.up.weight" in text
    assert "Rank 1 differs from the majority" in text
    assert "Rank 3 last reported" in text and "replaced from step 121 on" in text
    assert not tab.is_too_wide()
    # A refresh event reloads only this card.
    Writer.objects.filter(run=run, rank=3, attempt=1).update(seen_at=timezone.now())
    tab.page.evaluate("document.querySelector('#ranks').dispatchEvent(new Event('fp8:refresh'))")
    expect(tab.page.locator("#ranks")).to_contain_text("steps behind the leading rank")
    assert tab.console_errors == []
