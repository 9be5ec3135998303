"""Hours and costs of one run, and the price of a GPU hour in the settings of the project."""

from __future__ import annotations

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.trained_runs import trained
from dashboard.helpers.visitors import Visitor, html

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.audit.models import Entry
from fp8scope_dashboard.pages.hours.usage import usage_of, usage_of_run
from fp8scope_dashboard.pages.run.efficiency import hours_figures
from fp8scope_dashboard.runs.models import Run, RunState


def priced(project: Project, price: float | None) -> Project:
    project.gpu_hour_price = price
    project.save()
    return project


def figures(run: Run) -> dict[str, tuple[str, float]]:
    return {figure.term: (figure.value, round(figure.amount or 0.0, 6)) for figure in hours_figures(run)}


def test_it_works(viewer: Visitor) -> None:
    run = trained(viewer.project, "run", (1, 100, 3.2), ranks=4)
    trained(viewer.project, "other", (1, 100, 50.0))
    assert figures(run) == {"gpu_hours": ("12.8", 12.8)}
    priced(viewer.project, 2.5)
    run = Run.objects.get(pk=run.pk)
    assert figures(run)["cost"] == ("32.00", 32.0)
    page = html(viewer, f"runs/{run.pk}/?tab=efficiency")
    assert "GPU hours" in page and ">12.8<" in page and ">32.00<" in page


def test_a_run_without_a_gpu_has_hours_of_processes(viewer: Visitor) -> None:
    run = trained(viewer.project, "run", (1, 100, 3.2), ranks=4)
    Run.objects.filter(pk=run.pk).update(environment={"world_size": "4"})
    run.refresh_from_db()
    assert figures(run) == {"process_hours": ("12.8", 12.8)}
    page = html(viewer, f"runs/{run.pk}/?tab=efficiency")
    assert "Process hours" in page and "GPU hours" not in page


def test_hours_of_a_run_are_those_of_its_row_among_all(project: Project) -> None:
    parent = trained(project, "crashed", (1, 100, 10.0), (81, 120, 4.0), state=RunState.FAILED)
    trained(project, "next", (91, 200, 7.0), parent=str(parent.pk), relation="resumed")
    trained(project, "two ranks of eight", (1, 10, 1.0), ranks=2, world_size=8)
    rows = {row.id: row for row in usage_of(project).largest}
    assert len(rows) == 3
    for run in Run.objects.filter(project=project):
        alone = usage_of_run(run)
        assert alone is not None and alone.seconds == rows[run.pk].seconds
        # What another run trains again is known only beside it.
        if run.pk != parent.pk:
            assert alone == rows[run.pk]


def test_a_run_without_a_process_has_no_hours(project: Project) -> None:
    assert hours_figures(make_run(priced(project, 2.5), "empty")) == []


def test_the_fleet_takes_the_price_of_the_project(viewer: Visitor) -> None:
    trained(viewer.project, "run", (1, 100, 10.0))
    assert "Cost" not in html(viewer, "fleet/")
    priced(viewer.project, 2.5)
    page = html(viewer, "fleet/")
    assert ">25.00<" in page and 'value="2.5"' in page
    # Another price in the address stands for it, a wrong one does not.
    assert ">30.00<" in html(viewer, "fleet/?price=3")
    wrong = html(viewer, "fleet/?price=much")
    assert "“much” is no price" in wrong and ">25.00<" in wrong
    answer = viewer.client.get(viewer.address("fleet/fleet.json")).json()
    assert (answer["price_per_hour"], answer["cost"]) == (2.5, 25.0)


@pytest.mark.parametrize(
    ("text", "price"), [("2.50", 2.5), (" 1,75 ", 1.75), ("", None), ("0.0001", 0.0001), ("1000", 1000.0)]
)
def test_an_administrator_sets_the_price(admin: Visitor, text: str, price: float | None) -> None:
    fields = {"name": admin.project.name, "gpu_hour_price": text}
    answer = admin.client.post(admin.address("settings/general"), fields, follow=True)
    assert "Saved." in answer.content.decode()
    assert Project.objects.get(pk=admin.project.pk).gpu_hour_price == price
    assert Entry.objects.latest("id").text.endswith(
        "price of a GPU hour " + (f"{price:g}" if price else "none")
    )


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1001", "2 EUR", "0.00001", "<b>"])
def test_a_wrong_price_changes_nothing(admin: Visitor, text: str) -> None:
    priced(admin.project, 3.0)
    fields = {"name": "Another name", "gpu_hour_price": text}
    answer = admin.client.post(admin.address("settings/general"), fields, follow=True)
    assert "The price is a number from 0.0001 to 1000" in answer.content.decode()
    stored = Project.objects.get(pk=admin.project.pk)
    assert (stored.gpu_hour_price, stored.name) == (3.0, admin.project.name)
