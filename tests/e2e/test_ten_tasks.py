"""Ten tasks, and the clicks that each takes from the list of runs or from a run's page: at most three.

A click, a filled field and a pressed key count as one each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.seeding import Seeded, seed_project
from e2e.helpers.tabs import OpenTab, Tab
from helpers.live_servers import Server
from playwright.sync_api import Locator, expect

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

MOST_CLICKS = 3
RANGE = "document.querySelector('#panels .figure__plot')?.layout?.xaxis?.range?.map(Math.round) ?? []"


class Person:
    """Uses a tab, and counts what that takes."""

    def __init__(self, tab: Tab) -> None:
        self.tab = tab
        self.clicks = 0

    def click(self, target: Locator) -> None:
        self.clicks += 1
        target.click()

    def fill(self, field: Locator, text: str) -> None:
        self.clicks += 1
        field.fill(text)


@pytest.fixture
def seeded(server: Server) -> Seeded:
    return seed_project(server.project, 300)


@pytest.fixture
def person(open_tab: OpenTab, request: pytest.FixtureRequest) -> Iterator[Person]:
    """A person; the number of clicks is printed and checked afterwards."""
    person = Person(open_tab())
    yield person
    name = request.node.name.removeprefix("test_").replace("_", " ")
    print(f"{name}: {person.clicks} clicks")
    assert person.clicks <= MOST_CLICKS, name


def at_list(person: Person, server: Server) -> None:
    person.tab.open(f"/p/{server.project.slug}/")


def at_run(person: Person, seeded: Seeded) -> None:
    person.tab.open(f"/p/{seeded.faulty.project.slug}/runs/{seeded.faulty.pk}/")


def test_the_first_tensor_to_saturate(person: Person, server: Server, seeded: Seeded) -> None:
    """From the list: its run says what happened, in order."""
    at_list(person, server)
    person.click(person.tab.page.get_by_role("link", name=seeded.faulty.name, exact=True))
    strip = person.tab.page.get_by_role("region", name="What happened")
    saturated = strip.get_by_role("listitem").filter(has_text=re.compile("saturat|overflow")).first
    expect(saturated).to_contain_text(re.compile(r"step \d+"))
    expect(saturated).to_contain_text(re.compile(r"mlp\.down\.input"))


def test_as_good_as_bf16_and_how_sure(person: Person, server: Server, seeded: Seeded) -> None:
    """From the list: the verdict is there; its interval and what could go unseen are on the run's page."""
    at_list(person, server)
    row = person.tab.page.locator(f"#row-{seeded.healthy.pk}")
    expect(row.locator(".runs__cell-verdict .badge").first).to_be_visible()
    person.click(row.get_by_role("link", name=seeded.healthy.name, exact=True))
    verdict = person.tab.page.get_by_role("region", name="Verdict").get_by_text("so the two are equivalent")
    expect(verdict).to_contain_text(re.compile(r"[−-]?[\d.]+\s% to [−-]?[\d.]+\s%"))


def test_what_differs_in_the_configuration(person: Person, seeded: Seeded) -> None:
    """From the run's page."""
    at_run(person, seeded)
    person.click(person.tab.page.get_by_role("link", name="Details", exact=True))
    expect(person.tab.page.get_by_role("heading", name=re.compile(r"\d+ differences? to"))).to_be_visible()


def test_when_and_what_the_scales_did(person: Person, seeded: Seeded) -> None:
    """From the run's page: the worst tensor's amax and the largest value that its scale allows."""
    at_run(person, seeded)
    person.click(person.tab.page.locator("button[data-tensor]").first)
    drawer = person.tab.page.get_by_role("dialog")
    expect(drawer).to_contain_text("mlp.down.input")
    lines = drawer.locator("#tensor-lines")
    lines.scroll_into_view_if_needed()
    person.tab.wait(lambda: lines.get_attribute("data-state") == "ready", "Drawing the tensor")
    names = person.tab.page.evaluate(
        "document.querySelector('#tensor-lines .figure__plot').data.map((trace) => trace.name)"
    )
    assert "largest representable" in names and "amax" in names


def test_steps_240_to_260(person: Person, seeded: Seeded) -> None:
    """From the run's page."""
    at_run(person, seeded)
    page = person.tab.page
    person.fill(page.get_by_label("First step").first, "240")
    person.fill(page.get_by_label("Last step").first, "260")
    person.click(page.get_by_role("button", name="Show", exact=True).first)
    person.tab.wait(lambda: page.evaluate(RANGE) == [240, 260], "Showing the steps")


def test_sharing_the_view(person: Person, seeded: Seeded) -> None:
    """From the run's page: the copied address shows the same steps."""
    person.tab.open(f"/p/{seeded.faulty.project.slug}/runs/{seeded.faulty.pk}/?steps=100..150")
    page = person.tab.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    person.tab.wait(lambda: page.evaluate(RANGE) == [100, 150], "Showing the steps")
    person.click(page.locator("#run-more summary"))
    person.click(page.get_by_role("button", name="Copy link", exact=True).first)
    expect(page.get_by_text("Copied").first).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert parse_qs(urlsplit(copied).query)["steps"] == ["100..150"]


def test_the_data_of_a_chart(person: Person, seeded: Seeded, tmp_path: Path) -> None:
    """From the run's page."""
    at_run(person, seeded)
    figure = person.tab.page.locator("#panels")
    person.tab.wait(lambda: figure.get_attribute("data-state") == "ready", "Drawing the chart")
    person.click(figure.locator(".figure__tools summary"))
    with person.tab.page.expect_download() as download:
        person.click(figure.get_by_text("Data as CSV"))
    download.value.save_as(tmp_path / "loss.csv")
    assert len((tmp_path / "loss.csv").read_text().splitlines()) > 50


def test_acknowledging_an_alert(person: Person, server: Server, seeded: Seeded) -> None:
    """From the list of runs."""
    from fp8scope_dashboard.alerts.models import Event, EventState

    at_list(person, server)
    page = person.tab.page
    person.click(
        page.get_by_role("navigation", name="Project").get_by_role("link", name=re.compile("Alerts"))
    )
    person.click(page.locator("form[action$='/acknowledge']:not(#chosen-alerts) button").first)
    person.tab.wait(
        lambda: Event.objects.filter(state=EventState.ACKNOWLEDGED).exists(), "Acknowledging the alert"
    )


def test_comparing_3_of_2000_runs(person: Person, server: Server, seeded: Seeded) -> None:
    """From the list: search, select what is found, compare."""
    from fp8scope_dashboard.runs.models import Run

    Run.objects.bulk_create(
        Run(project=server.project, name=f"sweep {number}", precision="bf16") for number in range(1997)
    )
    for seed in (1, 2, 3):
        make_run(server.project, f"the one seed {seed}", precision="fp8", group="the-one", seed=seed)
    at_list(person, server)
    page = person.tab.page
    person.fill(page.get_by_label(re.compile("Find runs")), "group:the-one")
    expect(page.locator("#runs tbody tr")).to_have_count(3)
    person.click(page.get_by_label("Select all runs of this page"))
    person.click(page.locator("#bulk").get_by_role("button", name="Compare", exact=True))
    page.wait_for_url("**/compare/**")
    assert len(parse_qs(urlsplit(page.url).query)["runs"]) == 3


def test_filtering_by_precision(person: Person, server: Server, seeded: Seeded) -> None:
    """From the list."""
    at_list(person, server)
    page = person.tab.page
    person.click(page.get_by_role("group", name="Precision").get_by_role("link", name=re.compile("FP8")))
    expect(page.locator("#runs tbody tr")).to_have_count(2)
    assert "precision" in urlsplit(page.url).query
