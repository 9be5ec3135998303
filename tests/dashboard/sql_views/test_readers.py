"""A login reads its views and nothing else, within its limits; making and removing it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
from typing import Any

import psycopg
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seeding import seed_project
from dashboard.helpers.sql_logins import Login, connect
from django.conf import settings
from django.core.cache import cache
from django.db import connection
from django.utils import timezone
from helpers.waiting import wait_until
from psycopg import errors

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.analysis.models import Comparison, EvaluationComparison
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.sql_views import history, readers, tasks
from fp8scope_dashboard.sql_views.definitions import VIEWS
from fp8scope_dashboard.sql_views.models import HistoryState, ScalarHistory, SqlReader
from fp8scope_dashboard.sql_views.readers import ReaderError, make_reader, remove_reader
from fp8scope_dashboard.telemetry.deletion import delete_run


def fetched(query: str, *values: Any) -> list[tuple[Any, ...]]:
    """The rows of a query of the server's own user."""
    with connection.cursor() as cursor:
        cursor.execute(query, values)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


def role_of(session: psycopg.Connection) -> str:
    return session.info.user


def test_it_works(login: Login) -> None:
    project = create_project("research", "Research")
    make_run(project, "a run")
    session = login()
    assert session.execute("SELECT name FROM runs").fetchall() == [("a run",)]
    assert session.execute("SELECT project FROM projects").fetchall() == [("research",)]
    remove_reader(role_of(session))
    assert fetched("SELECT 1 FROM pg_roles WHERE rolname = %s", role_of(session)) == []
    with pytest.raises(psycopg.OperationalError):
        session.execute("SELECT 1")


def test_a_login_of_a_project_reads_that_project_alone(login: Login) -> None:
    mine, theirs = create_project("mine", "Mine"), create_project("theirs", "Theirs")
    seed_project(mine, 150)
    run = make_run(theirs)
    recorder = Recorder(run=run)
    recorder.rows(range(10), {"loss": [1.0] * 10})
    recorder.evaluation(5, [1.0, 0.0])
    Comparison.objects.create(run=run, baseline="bf16", to_step=9, verdict="worse", result={})
    judged = {"name": "heldout", "metric": "accuracy", "step": 5, "verdict": "worse", "result": {}}
    EvaluationComparison.objects.create(run=run, **judged)
    Alert.objects.create(run=run, kind="loss_spike", severity="warning", onset_step=1, step=1, message="x")
    everything = login()
    assert history.copy_due() == 6
    session, none = login(mine), login(create_project("empty", "Empty"))
    for view in VIEWS:
        query = f"SELECT count(*) FILTER (WHERE project_id = %s), count(*) FROM {view.name}"
        of_mine, whole = everything.execute(query, [mine.pk]).fetchone() or (0, 0)
        assert 0 < of_mine < whole, view.name
        assert session.execute(query, [mine.pk]).fetchone() == (of_mine, of_mine), view.name
        assert none.execute(query, [mine.pk]).fetchone() == ((0, 0) if view.name != "projects" else (0, 1))


def test_a_condition_is_not_tried_on_rows_of_other_projects(login: Login) -> None:
    """A function that fails, or tells what it is given, would else show them."""
    mine, theirs = create_project("mine", "Mine"), create_project("theirs", "Theirs")
    make_run(mine, "1")
    make_run(theirs, "secret")
    session = login(mine)
    assert session.execute("SELECT name FROM runs WHERE name::int = 1").fetchall() == [("1",)]
    with pytest.raises(errors.InvalidTextRepresentation, match="secret"):
        login().execute("SELECT name FROM runs WHERE name::int = 1")


def test_a_login_can_use_no_table_and_write_nothing(login: Login) -> None:
    make_run(create_project("research", "Research"))
    session = login()
    session.execute("SET default_transaction_read_only = off")
    tables = fetched("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    assert len(tables) > 60
    for (table,) in tables:
        with pytest.raises(errors.InsufficientPrivilege):
            session.execute(f'SELECT * FROM public."{table}"')
    for statement in (
        "UPDATE fp8scope_views.runs SET name = 'x'",
        "DELETE FROM fp8scope_views.projects",
        "INSERT INTO fp8scope_views.projects (project) VALUES ('x')",
        "CREATE TABLE fp8scope_views.mine (x int)",
        "CREATE TABLE public.mine (x int)",
        "CREATE SCHEMA mine",
        "DROP VIEW fp8scope_views.runs",
        "SET ROLE fp8scope",
        "CREATE ROLE another",
        "COPY (SELECT 1) TO PROGRAM 'true'",
        "SELECT pg_read_file('/etc/passwd')",
        "ALTER SYSTEM SET work_mem = '1GB'",
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'fp8scope'",
    ):
        with pytest.raises((errors.InsufficientPrivilege, errors.ObjectNotInPrerequisiteState)):
            session.execute(statement)


def test_a_login_cannot_choose_another_project(login: Login) -> None:
    mine, theirs = create_project("mine", "Mine"), create_project("theirs", "Theirs")
    make_run(theirs, "theirs")
    everything, session = login(), login(mine)
    session.execute("SET default_transaction_read_only = off")
    for statement in (
        f"SET SESSION AUTHORIZATION {role_of(everything)}",
        f"SET ROLE {role_of(everything)}",
        f"UPDATE public.sql_views_sqlreader SET project_id = NULL WHERE role = '{role_of(session)}'",
    ):
        with pytest.raises(errors.InsufficientPrivilege):
            session.execute(statement)
    assert session.execute("SELECT name FROM runs").fetchall() == []


def test_sessions_are_read_only_and_bounded(login: Login) -> None:
    session = login(seconds=1)
    assert session.execute("SHOW default_transaction_read_only").fetchone() == ("on",)
    with pytest.raises(errors.QueryCanceled):
        session.execute("SELECT pg_sleep(20)")
    assert fetched(
        "SELECT rolconnlimit, rolsuper, rolcreaterole, rolcreatedb FROM pg_roles WHERE rolname = %s",
        role_of(session),
    ) == [(readers.MAX_CONNECTIONS, False, False, False)]


def test_sessions_that_raised_their_limits_are_ended(login: Login) -> None:
    session, polite = login(seconds=1), login(seconds=1)
    session.execute("SET statement_timeout = 0")
    assert readers.enforce_limits() == 0
    session.pgconn.send_query(b"SELECT pg_sleep(60)")
    wait_until(lambda: bool(readers.enforce_limits()))
    wait_until(lambda: not fetched("SELECT 1 FROM pg_stat_activity WHERE pid = %s", session.info.backend_pid))
    session.close()
    assert polite.execute("SELECT 1").fetchone() == (1,)


def test_sessions_that_hold_advisory_locks_are_ended(login: Login) -> None:
    session = login()
    session.execute("SELECT pg_advisory_lock(1, 1)")
    assert readers.enforce_limits() == 1
    wait_until(
        lambda: (
            not fetched("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND classid = 1 AND objid = 1")
        )
    )


def test_making_it_again_changes_its_password_and_project(login: Login) -> None:
    project = create_project("research", "Research")
    make_run(project, "a run")
    session = login(create_project("empty", "Empty"))
    role = role_of(session)
    before = fetched("SELECT rolpassword FROM pg_authid WHERE rolname = %s", role)
    assert session.execute("SELECT 1 FROM runs").fetchall() == []
    make_reader(role, project, seconds=7)
    assert session.execute("SELECT 1 FROM runs").fetchall() == [(1,)]
    assert fetched("SELECT rolpassword FROM pg_authid WHERE rolname = %s", role) != before
    with connect(role, "") as later:
        assert later.execute("SHOW statement_timeout").fetchone() == ("7s",)
    assert SqlReader.objects.filter(role=role).count() == 1


def verifies(stored: str, password: str) -> bool:
    """Compare a password with a SCRAM verifier of PostgreSQL, by RFC 5802."""
    mechanism, rest, keys = stored.split("$")
    iterations, salt = rest.split(":")
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), base64.b64decode(salt), int(iterations))
    client = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    return mechanism == "SCRAM-SHA-256" and base64.b64decode(keys.partition(":")[0]) == client


def test_no_statement_has_the_password(login: Login, caplog: pytest.LogCaptureFixture) -> None:
    role = role_of(login())
    connection.force_debug_cursor = True
    try:
        with caplog.at_level(logging.DEBUG):
            password = make_reader(role, None, password="a password of one's own")
    finally:
        connection.force_debug_cursor = False
    assert password == "a password of one's own"
    statements = [query["sql"] for query in connection.queries]
    assert any("ALTER ROLE" in statement for statement in statements)
    assert not any("of one" in text for text in [*statements, caplog.text])
    ((stored,),) = fetched("SELECT rolpassword FROM pg_authid WHERE rolname = %s", role)
    assert verifies(stored, password) and not verifies(stored, "another password")


@pytest.mark.parametrize(
    ("role", "changes", "problem"),
    [
        ("Grafana", {}, "lower-case letters"),
        ("pg_grafana", {}, "lower-case letters"),
        ('x"; DROP ROLE y', {}, "lower-case letters"),
        ("a" * 64, {}, "at most 63"),
        ("grafana", {"seconds": 0}, "1 to 3600 seconds"),
        ("grafana", {"password": "short"}, "12 to 1024 characters"),
        ("fp8scope", {}, "has a role"),
    ],
)
@pytest.mark.django_db(transaction=True)
def test_what_cannot_be_a_login(role: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ReaderError, match=problem):
        make_reader(role, None, **changes)
    assert not SqlReader.objects.exists()


def test_the_periodic_tasks(login: Login) -> None:
    run = make_run(create_project("mine", "Mine"))
    Recorder(run=run).rows(range(10), {"loss": [1.0] * 10})
    session = login()
    cache.add(tasks.MARK, 1)
    tasks.copy_histories()
    # Another worker copies.
    assert not HistoryState.objects.exists()
    cache.delete(tasks.MARK)
    tasks.copy_histories()
    tasks.enforce_limits()
    assert session.execute("SELECT count(*) FROM scalar_history").fetchone() == (10,)
    assert cache.get(tasks.MARK) is None
    scheduled = {entry["task"] for entry in settings.CELERY_BEAT_SCHEDULE.values()}
    assert {tasks.copy_histories.name, tasks.enforce_limits.name} <= scheduled


@pytest.mark.django_db(transaction=True)
def test_a_login_that_is_not_ours_is_not_removed() -> None:
    with pytest.raises(ReaderError, match="there is no login 'fp8scope'"):
        remove_reader("fp8scope")


@pytest.mark.django_db(transaction=True)
def test_a_user_without_the_right_is_told_what_to_run() -> None:
    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE without_rights_of_tests NOLOGIN")
        try:
            cursor.execute("GRANT ALL ON sql_views_sqlreader TO without_rights_of_tests")
            cursor.execute("SET ROLE without_rights_of_tests")
            with pytest.raises(ReaderError, match='ALTER ROLE ".*" CREATEROLE'):
                make_reader("grafana_of_tests", None)
        finally:
            cursor.execute("RESET ROLE")
            cursor.execute("DROP OWNED BY without_rights_of_tests; DROP ROLE without_rights_of_tests")
    assert not SqlReader.objects.exists()


def test_nothing_is_copied_without_a_login(transactional_db: None) -> None:
    project = create_project("research", "Research")
    Recorder(run=make_run(project)).rows(range(10), {"loss": [1.0] * 10})
    assert history.copy_due() == 0 and not ScalarHistory.objects.exists()


def test_only_projects_that_a_login_reads_are_copied(login: Login) -> None:
    mine, theirs = create_project("mine", "Mine"), create_project("theirs", "Theirs")
    runs = [make_run(project) for project in (mine, theirs)]
    for run in runs:
        Recorder(run=run).rows(range(10), {"loss": [1.0] * 10})
    login(mine)
    assert history.copy_due() == 1 and history.copy_due() == 0
    assert [state.run_id for state in HistoryState.objects.all()] == [runs[0].pk]


def test_a_live_run_is_copied_once_a_minute(login: Login) -> None:
    run = make_run(create_project("mine", "Mine"))
    writer = Recorder(run=run)
    writer.rows(range(10), {"loss": [1.0] * 10})
    session = login()
    assert history.copy_due() == 1
    writer.rows(range(10, 20), {"loss": [1.0] * 10})
    assert history.copy_due() == 0
    state = HistoryState.objects.get(run=run)
    state.copied_at = state.copied_at.replace(year=2020)
    state.save()
    assert history.copy_due() == 1
    assert session.execute("SELECT max(step) FROM scalar_history").fetchone() == (19,)


def test_a_run_has_the_histories_of_its_loss_and_of_the_first_names(login: Login) -> None:
    run = make_run(create_project("mine", "Mine"))
    names = [f"a{number:03}" for number in range(history.MAX_SCALARS + 5)]
    Recorder(run=run).rows([0], {"loss": [1.0], **{name: [2.0] for name in names}})
    login()
    assert history.copy_due() == 1
    stored = set(ScalarHistory.objects.values_list("name", flat=True))
    assert stored == {"loss", *names[: history.MAX_SCALARS - 1]}


def test_a_run_that_is_being_deleted_is_not_copied(transactional_db: None) -> None:
    run = make_run(create_project("mine", "Mine"))
    Recorder(run=run).rows(range(10), {"loss": [1.0] * 10})
    assert history.copy_run(run.pk) and ScalarHistory.objects.filter(run=run).exists()
    Run.objects.filter(pk=run.pk).update(deleted_at=timezone.now())
    assert not history.copy_run(run.pk)
    delete_run(run.pk)
    assert not ScalarHistory.objects.filter(run_id=run.pk).exists()
    assert not HistoryState.objects.filter(run_id=run.pk).exists()
