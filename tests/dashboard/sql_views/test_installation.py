"""The views and migrations: made once, dropped for migrations, and in nobody's way."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import psycopg
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.sql_logins import Login
from django.apps import apps
from django.core.management import call_command
from django.db import connection, connections
from django.db.models.signals import pre_migrate
from psycopg import errors

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.sql_views.definitions import VIEWS
from fp8scope_dashboard.sql_views.installation import install_views, remove_views

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def restored_views() -> Iterator[None]:
    yield
    install_views(connection)


def names() -> set[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT viewname FROM pg_views WHERE schemaname = 'fp8scope_views'")
        return {name for (name,) in cursor.fetchall()}


def test_it_works() -> None:
    """`migrate` has made the views, and leaves those of this version alone."""
    assert names() == {view.name for view in VIEWS}
    assert not install_views(connection)
    remove_views(connection)
    assert names() == set()
    call_command("migrate", verbosity=0, interactive=False)
    assert names() == {view.name for view in VIEWS}


def test_a_view_that_is_missing_is_made_again(login: Login) -> None:
    session = login()
    with connection.cursor() as cursor:
        cursor.execute("DROP VIEW fp8scope_views.alerts")
    with pytest.raises(errors.UndefinedTable):
        session.execute("SELECT * FROM alerts")
    assert install_views(connection)
    assert session.execute("SELECT * FROM alerts").fetchall() == []


def test_views_of_an_earlier_version_are_replaced(login: Login) -> None:
    session = login()
    with connection.cursor() as cursor:
        cursor.execute("COMMENT ON SCHEMA fp8scope_views IS 'earlier'")
        cursor.execute("ALTER VIEW fp8scope_views.runs RENAME COLUMN seed TO former_seed")
    assert install_views(connection)
    assert session.execute("SELECT seed FROM runs").fetchall() == []


def test_a_view_of_somebody_else_stays() -> None:
    with connection.cursor() as cursor:
        cursor.execute("CREATE VIEW fp8scope_views.theirs AS SELECT 1 AS x")
        remove_views(connection)
        assert names() == {"theirs"}
        cursor.execute("DROP VIEW fp8scope_views.theirs")


def test_a_migration_waits_for_no_reader(login: Login) -> None:
    """A session holds every view in an open transaction, and a query runs: both are ended."""
    session, busy = login(), login()
    session.execute("BEGIN")
    for view in VIEWS:
        session.execute(f"SELECT * FROM {view.name}")
    ended: list[type[Exception]] = []

    def sleep() -> None:
        try:
            busy.execute("SELECT pg_sleep(25) FROM projects RIGHT JOIN (SELECT 1) AS x ON true")
        except psycopg.Error as error:
            ended.append(type(error))

    thread = threading.Thread(target=sleep)
    thread.start()
    config = apps.get_app_config("sql_views")
    pre_migrate.send(
        config, app_config=config, plan=[(None, False)], using="default", verbosity=0, interactive=False
    )
    with connection.cursor() as cursor:
        # What PostgreSQL refuses while a view has the column.
        cursor.execute("SET lock_timeout = '5s'")
        cursor.execute("ALTER TABLE runs_run ALTER COLUMN name TYPE text")
        cursor.execute("ALTER TABLE runs_run ALTER COLUMN name TYPE varchar(200)")
        cursor.execute("RESET lock_timeout")
    thread.join(20)
    assert not thread.is_alive() and ended == [errors.AdminShutdown]
    with pytest.raises(errors.AdminShutdown):
        session.execute("SELECT 1")


def test_nothing_to_migrate_disturbs_no_reader(login: Login) -> None:
    session = login()
    session.execute("BEGIN")
    session.execute("SELECT * FROM runs")
    call_command("migrate", verbosity=0, interactive=False)
    assert session.execute("SELECT 1").fetchone() == (1,)
    session.execute("ROLLBACK")


def test_ingest_goes_on_while_a_reader_reads(login: Login) -> None:
    run = make_run(create_project("research", "Research"))
    session = login()
    session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    for view in VIEWS:
        session.execute(f"SELECT * FROM {view.name}")
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '2s'")
        Recorder(run=run).rows(range(50), {"loss": [1.0] * 50})
        cursor.execute("RESET lock_timeout")
    run.refresh_from_db()
    assert run.rows_stored == 50
    session.execute("ROLLBACK")


def test_a_condition_on_a_run_reaches_the_tables_index(login: Login) -> None:
    """The views hide rows before they try conditions, except for those that cannot tell anything."""
    session = login()
    session.execute("SET enable_seqscan = off")
    for view in ("scalar_history", "scalar_means", "evaluations", "alerts", "verdicts", "runs"):
        query = f"EXPLAIN SELECT * FROM {view} WHERE run_id = '3f0c9c5e-0000-4000-8000-000000000000'"
        plan = "\n".join(row[0] for row in session.execute(query).fetchall())
        assert re.search(
            r"Scan [^\n]* on \w+_\w+ [^\n]*\n\s+(Index Cond|Recheck Cond|Filter): [^\n]*3f0c", plan
        ), plan


def test_tables_are_made_where_they_were(login: Login) -> None:
    """A schema with the name of the server's user would come before `public`, and logins would read it."""
    call_command("migrate", "sql_views", "zero", verbosity=0, interactive=False)
    call_command("migrate", verbosity=0, interactive=False)
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
        assert cursor.fetchone()[0] > 60
        cursor.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'fp8scope_views'")
        assert cursor.fetchone()[0] == 0


def test_a_migration_back_and_forth() -> None:
    call_command("migrate", "sql_views", "zero", verbosity=0, interactive=False)
    assert names() == set()
    call_command("migrate", verbosity=0, interactive=False)
    assert names() == {view.name for view in VIEWS}
    assert not connections["default"].in_atomic_block
