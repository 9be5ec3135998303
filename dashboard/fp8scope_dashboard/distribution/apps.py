"""The app of the distributed store. It distributes the tables that migrations have made."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig, apps
from django.db import connections
from django.db.models.signals import post_migrate, pre_migrate


class DistributionConfig(AppConfig):
    name = "fp8scope_dashboard.distribution"
    label = "distribution"

    def ready(self) -> None:
        # Both signals are sent for apps with models only. After the first of these all migrations are done.
        with_models = apps.get_app_config("contenttypes")
        pre_migrate.connect(_without_foreign_keys, sender=with_models)
        post_migrate.connect(_distribute_new_tables, sender=with_models)


def _without_foreign_keys(using: str, **_: Any) -> None:
    """Let migrations make no foreign keys: that of a new table would look for runs on the coordinator.

    Those that are possible follow after the migrations.
    """
    # Models can be imported only once all apps are loaded; this also applies below.
    from fp8scope_dashboard.distribution import catalogue

    connection = connections[using]
    connection.features.supports_foreign_keys = not catalogue.is_distributed(connection)


def _distribute_new_tables(using: str, **_: Any) -> None:
    from fp8scope_dashboard.distribution import catalogue, services

    connection = connections[using]
    connection.features.supports_foreign_keys = True
    if catalogue.is_distributed(connection):
        services.distribute(connection)
