"""A run that is deleted while a page reads it: the page is not found, which is no error of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor
from django.db import connection, transaction
from django.utils import timezone

from fp8scope_dashboard.runs.models import Run


def erase(run: Run) -> None:
    Run.with_deleted.filter(pk=run.pk).delete()


def hide(run: Run) -> None:
    """Do what a person's deletion does at once."""
    Run.objects.filter(pk=run.pk).update(deleted_at=timezone.now())


@contextmanager
def deleted_before(query: int, run: Run, delete: Callable[[Run], None]) -> Iterator[list[str]]:
    """Delete the run before this query, counted from the first that reads a run; yields those made."""
    made: list[str] = []
    is_deleting = False

    def execute(call: Callable[..., Any], sql: str, *rest: Any) -> Any:
        nonlocal is_deleting
        if not is_deleting and (made or 'FROM "runs_run"' in sql):
            made.append(sql)
            if len(made) == query:
                is_deleting = True
                delete(run)
                is_deleting = False
        return call(sql, *rest)

    with connection.execute_wrapper(execute):
        yield made


@pytest.mark.parametrize(
    ("address", "delete"),
    [("figures/panels.json", erase), ("figures/panels.json", hide), ("tensors/ranking", erase)],
)
def test_it_works(viewer: Visitor, seeded: Seeded, address: str, delete: Callable[[Run], None]) -> None:
    """Before each of its queries in turn."""
    viewer.client.raise_request_exception = False
    target, statuses, query, is_over = viewer.address(f"runs/{seeded.faulty.pk}/{address}"), [], 1, False
    while not is_over:
        query += 1
        with transaction.atomic(), deleted_before(query, seeded.faulty, delete) as made:
            statuses.append(viewer.client.get(target).status_code)
            transaction.set_rollback(True)
        is_over = len(made) < query
    assert len(statuses) > 3 and set(statuses) <= {200, 404}, statuses
