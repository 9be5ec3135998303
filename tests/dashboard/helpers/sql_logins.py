"""Sessions of logins that read the SQL views."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
from django.db import connection

Login = Callable[..., psycopg.Connection]


def connect(role: str, password: str) -> psycopg.Connection:
    """A session of a login on the test database."""
    database = connection.settings_dict
    return psycopg.connect(
        host=database["HOST"],
        port=database["PORT"] or None,
        dbname=database["NAME"],
        user=role,
        password=password,
        autocommit=True,
    )
