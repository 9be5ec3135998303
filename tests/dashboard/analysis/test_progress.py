"""The progress of long jobs: when it is stored, announced and shown, and that it never disturbs the job."""

from __future__ import annotations

from datetime import timedelta

import pytest
from dashboard.helpers.recording import make_run
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.analysis.models import JobProgress
from fp8scope_dashboard.analysis.progress import LOST_AFTER, SHOWN_AFTER, progress, running_jobs
from fp8scope_dashboard.runs.models import Run

pytestmark = pytest.mark.django_db
LONG = SHOWN_AFTER


@pytest.fixture
def run(db: None) -> Run:
    return make_run(create_project("default", "Default"), "fp8 1", precision="fp8")


def test_it_works(run: Run) -> None:
    with progress(run.id, "comparison", expected_seconds=LONG) as report:
        report("Reading the losses", 0.25)
        (job,) = running_jobs([run.id])
        assert (job.kind, job.stage, job.percent) == ("comparison", "Reading the losses", 25)
    assert running_jobs([run.id]) == []


def test_a_short_job_writes_nothing(run: Run, django_assert_num_queries: object) -> None:
    with django_assert_num_queries(0), progress(run.id, "comparison") as report:  # type: ignore[operator]
        report("Reading the losses", 0.0)


def test_stages_in_quick_succession_are_written_once(run: Run) -> None:
    with progress(run.id, "comparison", expected_seconds=LONG) as report:
        report("first", 0.0)
        report("second", 0.5)
        assert [job.stage for job in running_jobs([run.id])] == ["first"]


def test_an_error_of_the_job_removes_its_row(run: Run) -> None:
    with pytest.raises(ZeroDivisionError), progress(run.id, "diagnosis", expected_seconds=LONG) as report:
        report("Reading", 2.0)
        assert JobProgress.objects.get().share == 1.0
        raise ZeroDivisionError
    assert not JobProgress.objects.exists()


def test_a_job_leaves_the_row_of_a_later_job(run: Run) -> None:
    with progress(run.id, "comparison", expected_seconds=LONG) as first:
        first("first", 0.9)
        with progress(run.id, "diagnosis", expected_seconds=LONG) as other:
            other("other kind", 0.1)
            assert len(running_jobs([run.id])) == 2
        later = progress(run.id, "comparison", expected_seconds=LONG)
        later.__enter__()("later", 0.1)
    assert [job.stage for job in running_jobs([run.id])] == ["later"]


def test_a_run_deleted_meanwhile_does_not_fail_the_job(run: Run) -> None:
    with progress(run.id, "comparison", expected_seconds=LONG) as report:
        Run.objects.filter(pk=run.pk).delete()
        report("Reading", 0.5)
    assert not JobProgress.objects.exists()


def test_the_row_of_a_killed_job_is_not_shown(run: Run) -> None:
    with progress(run.id, "comparison", expected_seconds=LONG) as report:
        report("Reading", 0.5)
        JobProgress.objects.update(updated_at=timezone.now() - LOST_AFTER - timedelta(seconds=1))
        assert running_jobs([run.id]) == []


def test_the_page_shows_only_jobs_of_its_project(run: Run, client: Client) -> None:
    person = User.objects.create_superuser("ada")
    client.force_login(person)
    other = make_run(create_project("other", "Other"), "foreign")
    project: Project = run.project
    address = reverse("progress", args=[project.slug])
    with (
        progress(run.id, "comparison", expected_seconds=LONG) as mine,
        progress(other.id, "comparison", expected_seconds=LONG) as foreign,
    ):
        mine("Reading the losses", 0.25)
        foreign("Secret stage", 0.25)
        shown = client.get(address, {"runs": [str(run.id), str(other.id), "nonsense"]}).content.decode()
    assert "Reading the losses" in shown and 'value="25"' in shown and "Secret" not in shown
    assert "Reading" not in client.get(address, {"runs": [str(run.id)]}).content.decode()
