"""The app of the SQL views. They are dropped before other migrations and made again after them."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.db import connections
from django.db.models.signals import post_migrate, pre_migrate


class SqlViewsConfig(AppConfig):
    name = "fp8scope_dashboard.sql_views"
    label = "sql_views"

    def ready(self) -> None:
        pre_migrate.connect(_make_way, sender=self)
        post_migrate.connect(_make_views, sender=self)


def _make_way(plan: list[tuple[Any, bool]], using: str, **_: Any) -> None:
    """PostgreSQL refuses to change the type of a column that a view has, so no view is there meanwhile."""
    # Its models can be imported only once all apps are loaded.
    from fp8scope_dashboard.sql_views.installation import remove_views

    if plan:
        remove_views(connections[using])


def _make_views(using: str, **_: Any) -> None:
    from fp8scope_dashboard.sql_views.installation import install_views

    install_views(connections[using])
