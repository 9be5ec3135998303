"""The helper that empties the test database leaves no row to the next test."""

from __future__ import annotations

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from django.apps import apps
from django.db import connection
from helpers.empty_database import KEPT, SMALL_BYTES, empty

from fp8scope_dashboard.accounts.services import create_project

pytestmark = pytest.mark.django_db(transaction=True)


def tables_with_rows() -> set[str]:
    return {model._meta.db_table for model in apps.get_models() if model._base_manager.exists()} - KEPT


@pytest.mark.parametrize("steps", [3, 5_000], ids=["deleted", "truncated"])
def test_removes_every_row(steps: int) -> None:
    recorder = Recorder(run=make_run(create_project("research", "Research")), tensors=["up.input"])
    loss = np.random.default_rng(0).normal(size=steps)
    recorder.rows(np.arange(steps), {"loss": loss}, {"amax": loss[:, None]}, rows_per_batch=steps)
    with connection.cursor() as cursor:
        cursor.execute("SELECT sum(pg_table_size(relid)) FROM pg_partition_tree('telemetry_chunk')")
        ((size,),) = cursor.fetchall()
    assert (size > SMALL_BYTES + 100_000) == (steps > 3)
    assert {"accounts_project", "runs_run", "telemetry_chunk"} <= tables_with_rows()
    empty(connection)
    assert tables_with_rows() == set()
