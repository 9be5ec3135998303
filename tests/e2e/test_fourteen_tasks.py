"""Fourteen tasks of people who have read nothing, on data that is not ours, each in at most three clicks.

A task begins at the list of runs or at the page of its run. A choice from a list is a click, typing is none.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from e2e.helpers.foreign_data import BAD_SEED, ERROR, FIRST_TENSOR, GAPS, ForeignData, foreign_data
from e2e.helpers.tabs import OpenTab, Tab
from helpers.live_servers import Server
from playwright.sync_api import Locator, Page, expect

from fp8scope_dashboard.alerts.models import Alert, AlertState, Channel, Delivery, Reason
from fp8scope_dashboard.runs.models import Run, SavedView, StepNote

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

MAX_CLICKS = 3
NARROW = 390


@dataclass
class Person:
    """Uses a tab, and counts what that takes."""

    tab: Tab
    data: ForeignData
    folder: Path
    again: Callable[[], Tab]
    clicks: int = 0
    task: str = ""
    taken: dict[str, int] = field(default_factory=dict)

    @property
    def page(self) -> Page:
        return self.tab.page

    @property
    def project(self) -> str:
        return f"/p/{self.data.long.project.slug}/"

    def at_list(self) -> None:
        self.tab.open(self.project)

    def at_run(self, run: Run) -> None:
        self.tab.open(f"{self.project}runs/{run.pk}/")

    def click(self, target: Locator) -> None:
        self.clicks += 1
        target.click()

    def choose(self, select: Locator, label: str) -> None:
        self.clicks += 1
        select.select_option(label=label)

    @contextmanager
    def narrow(self) -> Iterator[None]:
        """The screen of a phone, on which nothing is wider than it."""
        self.page.set_viewport_size({"width": NARROW, "height": 844})
        yield
        assert not self.tab.is_too_wide(), self.task
        self.page.set_viewport_size({"width": 1440, "height": 900})


def the_worst_delta(person: Person) -> None:
    """From the list: one click sorts it by own differences."""
    person.at_list()
    person.click(person.page.get_by_role("columnheader", name="Own difference").get_by_role("link"))
    first = person.page.locator("#runs tbody tr").first
    expect(first.get_by_role("link", name=person.data.bad.name)).to_be_visible()
    expect(first).to_contain_text("+39.1")
    # Names of a sweep often differ only at their ends.
    end = first.locator(".cut__end")
    assert end.inner_text().endswith(f"seed-{BAD_SEED}") and end.bounding_box() is not None


def the_tensor_that_saturated_first(person: Person) -> None:
    """From the list on a phone: the run says what happened, in order."""
    with person.narrow():
        person.at_list()
        person.click(person.page.get_by_role("link", name=person.data.long.name, exact=True))
        strip = person.page.get_by_role("region", name="What happened")
        saturated = strip.get_by_role("listitem").filter(has_text=re.compile("saturat|overflow")).first
        expect(saturated).to_contain_text(FIRST_TENSOR)
        expect(saturated).to_contain_text(re.compile(r"step 90\s?\d{3}"))


def the_margin_of_one_comparison(person: Person) -> None:
    """From the run's page on a phone: beside the verdict."""
    with person.narrow():
        person.at_run(person.data.seeds[0])
        summary = person.page.locator("summary", has_text="Margin ±0.25")
        person.click(summary)
        person.page.get_by_label("Margin of this comparison (% or nats)").fill("1.5")
        person.click(person.page.get_by_role("button", name="Judge by it"))
        expect(person.page.locator("summary", has_text=re.compile(r"Margin ±1\.5"))).to_be_visible()
    margins = dict(Run.objects.values_list("group", "margin").distinct())
    assert margins["ablation fp8"] == 0.015 and margins["production"] is None


def two_configurations(person: Person) -> None:
    """From the list: select two runs, and compare them."""
    person.at_list()
    for run in (person.data.seeds[0], person.data.baselines[0]):
        person.click(person.page.get_by_label(f"Select {run.name}", exact=True))
    person.click(person.page.locator("#bulk").get_by_role("button", name="Compare", exact=True))
    configuration = person.page.get_by_role("region", name="Configuration")
    row = configuration.get_by_role("row").filter(has_text="optim.warmup")
    expect(row).to_contain_text("100")
    expect(row).to_contain_text("250")


def sharing_a_view(person: Person) -> None:
    """From the run's page: the copied address shows the same steps."""
    person.tab.open(f"{person.project}runs/{person.data.long.pk}/?steps=40000..60000")
    page = person.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    person.click(page.locator("#run-more summary"))
    person.click(page.get_by_role("button", name="Copy link", exact=True).first)
    expect(page.get_by_text("Copied").first).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    other = person.again()
    other.page.goto(copied)
    drawn = other.page.locator("#panels")
    other.wait(lambda: drawn.get_attribute("data-state") == "ready", "Drawing the chart")
    script = "document.querySelector('#panels .figure__plot')._fullLayout.xaxis.range.map(Math.round)"
    assert other.page.evaluate(script) == [40_000, 60_000]


def silence_for_two_hours(person: Person) -> None:
    """From the run's page: its alert, for how long, and mute."""
    person.at_run(person.data.long)
    person.click(person.page.get_by_role("region", name="Alerts").get_by_role("link", name="Run failed"))
    person.choose(person.page.get_by_role("combobox", name="Mute", exact=True), "for 2 hours")
    person.click(person.page.get_by_role("button", name="Mute", exact=True))
    expect(person.page.get_by_role("button", name="Unmute")).to_be_visible()
    event = Alert.objects.get(state=AlertState.MUTED)
    assert event.kind == "run_failed" and event.muted_until is not None
    assert 7_000 < (event.muted_until - event.opened_at).total_seconds() < 8_000


def a_slack_channel_and_a_test(person: Person) -> None:
    """From the list: alerts, channels, and adding it sends the test."""
    person.at_list()
    navigation = person.page.get_by_role("navigation", name="Project")
    person.click(navigation.get_by_role("link", name=re.compile("Alerts")))
    person.click(person.page.get_by_role("link", name="Channels", exact=True))
    form = person.page.locator("form", has=person.page.get_by_placeholder("https://hooks.slack.com/…"))
    form.get_by_label("Name").fill("#training")
    form.get_by_label("Address").fill(
        "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"
    )
    person.click(form.get_by_role("button", name="Add and send a test"))
    card = person.page.get_by_role("region", name="#training")
    expect(card.get_by_role("status")).to_contain_text(
        re.compile("The test (is being sent|failed|was accepted)")
    )
    test = Delivery.objects.get(channel=Channel.objects.get(name="#training"))
    assert test.reason == Reason.TEST


def a_high_rate_and_failed(person: Person) -> None:
    """From the list: type `lr>1e-3`, and click on failed."""
    person.at_list()
    person.page.get_by_role("combobox", name=re.compile("Find runs")).fill("lr>1e-3")
    expect(person.page.locator("#runs tbody tr")).to_have_count(3)
    person.click(
        person.page.get_by_role("group", name="State").get_by_role("link", name=re.compile("Failed"))
    )
    expect(person.page.locator("#runs tbody tr")).to_have_count(2)
    for run in person.data.hot[:2]:
        expect(person.page.get_by_role("link", name=run.name, exact=True)).to_be_visible()


def readiness_for_fp4(person: Person) -> None:
    """From the run's page."""
    person.at_run(person.data.long)
    person.click(person.page.locator("#run-more summary"))
    person.click(person.page.get_by_role("link", name=re.compile("FP4")))
    expect(person.page.get_by_role("heading", level=1)).to_contain_text("FP4")
    person.choose(person.page.get_by_label("Format"), "FP4 E2M1")
    answer = person.page.locator("#readiness")
    expect(answer).to_contain_text(re.compile(r"tensors? (is|are) ready for FP4|not ready for FP4"))
    expect(answer).to_contain_text(FIRST_TENSOR)


def the_throughput(person: Person) -> None:
    """From the run's page on a phone."""
    with person.narrow():
        person.at_run(person.data.long)
        person.click(person.page.get_by_role("link", name="System", exact=True))
        measures = person.page.locator(".measures", has_text="Tokens per second")
        expect(measures).to_contain_text(re.compile(r"4[01]\.\d"))


def the_data_as_csv(person: Person) -> None:
    """From the run's page: the steps that are missing are missing in the file."""
    person.at_run(person.data.long)
    chart = person.page.locator("#panels")
    person.tab.wait(lambda: chart.get_attribute("data-state") == "ready", "Drawing the chart")
    person.click(chart.locator(".figure__tools summary"))
    with person.page.expect_download() as download:
        person.click(chart.get_by_text("Data as CSV"))
    file = person.folder / "loss.csv"
    download.value.save_as(file)
    rows = list(csv.DictReader(file.open()))
    losses = [float(row["step"]) for row in rows if row.get(person.data.long.name)]
    assert len(losses) > 500 and max(losses) == 149_999
    assert not any(first <= step < end for step in losses for first, end in GAPS)


def a_note_at_step_5000(person: Person) -> None:
    """From the run's page on a phone: the menu of the chart."""
    with person.narrow():
        person.at_run(person.data.long)
        chart = person.page.locator("#panels")
        person.tab.draw(chart)
        person.click(chart.locator(".figure__tools summary"))
        person.click(chart.get_by_role("link", name="Add a note at a step"))
        person.page.get_by_role("dialog").get_by_label("Step").fill("5000")
        person.page.get_by_role("dialog").get_by_label("Note", exact=True).fill("The mixture changes here.")
        person.click(person.page.get_by_role("button", name="Save the note"))
        expect(person.page.get_by_role("dialog")).to_be_hidden()
    note = StepNote.objects.get()
    assert (note.step, note.text) == (5_000, "The mixture changes here.")


def why_it_died(person: Person) -> None:
    """From the list on a phone: the run's page begins with it."""
    with person.narrow():
        person.at_list()
        person.click(person.page.get_by_role("link", name=person.data.long.name, exact=True))
        alert = person.page.get_by_role("alert")
        expect(alert).to_contain_text("The training script failed after step 149")
        expect(alert.locator(".failure")).to_have_text(ERROR.strip().splitlines()[-1])


def the_same_view_tomorrow(person: Person) -> None:
    """From the run's page: a pinned chart is there the next day, in another browser."""
    person.at_run(person.data.long)
    person.click(person.page.get_by_role("link", name="Charts", exact=True))
    person.click(person.page.get_by_role("button", name="Pin train/grad-norm"))
    pinned = person.page.get_by_role("region", name="Pinned")
    expect(pinned.get_by_role("heading", name="train/grad-norm")).to_be_visible()
    assert SavedView.objects.get().owner.username == "ada"
    tomorrow = person.again()
    tomorrow.open(f"{person.project}runs/{person.data.long.pk}/")
    person.click(tomorrow.page.get_by_role("link", name="Charts", exact=True))
    again = tomorrow.page.get_by_role("region", name="Pinned").get_by_role("heading", name="train/grad-norm")
    expect(again).to_be_visible()


TASKS = (
    the_worst_delta,
    the_tensor_that_saturated_first,
    the_margin_of_one_comparison,
    two_configurations,
    sharing_a_view,
    silence_for_two_hours,
    a_slack_channel_and_a_test,
    a_high_rate_and_failed,
    readiness_for_fp4,
    the_throughput,
    the_data_as_csv,
    a_note_at_step_5000,
    why_it_died,
    the_same_view_tomorrow,
)


def test_it_works(server: Server, open_tab: OpenTab, subtests: pytest.Subtests, tmp_path: Path) -> None:
    """One test, because all tasks have the same data, which takes the most time."""
    data = foreign_data(server.project)
    assert {len(run.name) for run in (*data.baselines, *data.seeds, *data.hot, data.long)} == {200}
    assert len(TASKS) == 14
    for task in TASKS:
        person = Person(open_tab(), data, tmp_path, open_tab, task=task.__name__.replace("_", " "))
        with subtests.test(person.task):
            task(person)
            print(f"{person.task}: {person.clicks} clicks")
            assert person.clicks <= MAX_CLICKS
        # A task that has failed leaves no tab that goes on asking.
        person.page.context.close()
