"""Names of 128 and 200 characters without a space fit a phone, on every page that shows a run's name."""

from __future__ import annotations

import pytest
from dashboard.helpers.recording import Recorder, make_run
from e2e.helpers.tabs import OpenTab
from helpers.live_servers import Server

from fp8scope_dashboard.alerts.models import Alert, Rule

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

# The elements that are beyond the right edge, without those that contain another one.
WIDEST = """() => [...document.querySelectorAll("body *")]
    .filter(tag => tag.getBoundingClientRect().right > innerWidth + 1)
    .filter(tag => ![...tag.children].some(child => child.getBoundingClientRect().right > innerWidth + 1))
    .map(tag => `${tag.tagName}.${tag.className} ${tag.textContent.slice(0, 40)}`).slice(0, 5)"""
NAME = "gpt-fp8-delayed-" + "x" * 184


def test_it_works(open_tab: OpenTab, server: Server) -> None:
    run = make_run(server.project, NAME, precision="fp8", group="g" * 128)
    Recorder(run=run, tensors=["layer." * 40 + "input"]).rows(
        range(30), {"loss": [3.0] * 30}, {"amax": [[1.0]] * 30, "saturated": [[0.0]] * 30}
    )
    rule = Rule.objects.filter(project=server.project).earliest("id")
    event = Alert.objects.create(
        run=run, rule=rule, kind=rule.kind, severity="warning", onset_step=1, step=2, message=f"{NAME} is up."
    )
    slug = server.project.slug
    pages = [
        f"/p/{slug}/",
        *(f"/p/{slug}/{name}/" for name in ("alerts", "compare", "evaluations", "reports")),
    ]
    pages += [f"/p/{slug}/alerts/{event.pk}/", f"/p/{slug}/compare/?runs={run.pk}", f"/p/{slug}/reports/new"]
    pages += [f"/p/{slug}/runs/{run.pk}/", f"/p/{slug}/rules/", f"/p/{slug}/rules/new"]
    tab = open_tab(width=390)
    wide = []
    for path in pages:
        tab.open(path)
        if tab.is_too_wide():
            wide.append((path, tab.page.evaluate(WIDEST)))
    assert wide == []
