"""The longest query of a web process: PostgreSQL ends it, and the page says that the database is busy."""

from __future__ import annotations

import os
import subprocess
import sys

from django.conf import settings
from django.test import RequestFactory

from fp8scope_dashboard.pages.storage_notice import on_server_error

SLEEP = """
import fp8scope_dashboard.asgi
from django.db import OperationalError, connection
try:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(30)")
except OperationalError as error:
    print(error.__cause__.sqlstate)
connection.close()
connection.close_pool()
"""

PARAMETERS = """
import django; django.setup()
from django.db import connection
from fp8scope_dashboard.db.statement_limit import limit_statements
limit_statements(7)
with connection.cursor() as cursor:
    for name in ("application_name", "work_mem", "statement_timeout"):
        cursor.execute(f"SHOW {name}")
        print(*cursor.fetchone())
parameters = connection.connection.info.get_parameters()
print(parameters["tcp_user_timeout"], parameters["sslmode"], parameters["connect_timeout"])
connection.close()
connection.close_pool()
"""


def test_it_works(db: None) -> None:
    variables = {
        **os.environ,
        "DATABASE_URL": settings.DATABASE_URL,
        "DJANGO_SETTINGS_MODULE": "fp8scope_dashboard.settings.base",
        "FP8SCOPE_SECRET_KEY": "k" * 64,
        "FP8SCOPE_STATEMENT_SECONDS": "1",
    }
    finished = subprocess.run([sys.executable, "-c", SLEEP], env=variables, capture_output=True, text=True)
    assert finished.stdout == "57014\n", finished.stderr


def test_parameters_of_the_database_url_reach_the_connection(db: None) -> None:
    given = "application_name=ours&sslmode=allow&connect_timeout=9&options=-c%20work_mem%3D5MB"
    joint = "&" if "?" in settings.DATABASE_URL else "?"
    variables = {
        **os.environ,
        "DATABASE_URL": f"{settings.DATABASE_URL}{joint}{given}",
        "DJANGO_SETTINGS_MODULE": "fp8scope_dashboard.settings.base",
    }
    command = [sys.executable, "-c", PARAMETERS]
    finished = subprocess.run(command, env=variables, capture_output=True, text=True)
    # A database whose host vanishes is given up after 15 s unless the URL says otherwise.
    assert finished.stdout.splitlines() == ["ours", "5MB", "7s", "15000 allow 9"], finished.stderr


def test_a_query_that_is_ended_is_no_fault_of_the_page(db: None) -> None:
    from django.db import OperationalError, connection, transaction

    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET LOCAL statement_timeout = 10")
            cursor.execute("SELECT pg_sleep(30)")
    except OperationalError:
        answer = on_server_error(RequestFactory().get("/p/research/"))
    assert answer.status_code == 503 and answer["Retry-After"]
