"""The names in a project's runs: scalars, configuration keys, and values of fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final

from django.db import connection
from django.db.models import Count, Func, IntegerField

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.runs.models import Run

# The newest runs that are read for names. Full names, such as config.model.depth, find entries of all runs.
NEWEST_SCALARS: Final = 500
NEWEST_CONFIGURATIONS: Final = 50
# Bytes as stored: larger configurations have generated entries rather than settings.
MAX_CONFIGURATION: Final = 200_000
MAX_KEYS: Final = 2_000
DEEPEST: Final = 8
MAX_VALUES: Final = 50

_SCALARS = """
    SELECT DISTINCT jsonb_object_keys(last_scalars) FROM (
        SELECT last_scalars FROM runs_run WHERE project_id = %s AND deleted_at IS NULL
        ORDER BY created_at DESC LIMIT %s) AS newest
"""


class Vocabulary:
    """The names that searches of one project may use; read from the database when they are needed."""

    def __init__(self, scalars: tuple[str, ...] = (), config: tuple[str, ...] = ()) -> None:
        self._given = scalars, config

    @cached_property
    def scalars(self) -> tuple[str, ...]:
        """The names of logged scalars, sorted."""
        return self._given[0]

    @cached_property
    def config(self) -> tuple[str, ...]:
        """The dotted names of the entries of configurations, sorted."""
        return self._given[1]

    def config_named(self, name: str) -> tuple[str, ...]:
        """The entries with this name, or whose last part it is."""
        if name in self.config:
            return (name,)
        return tuple(key for key in self.config if key.endswith(f".{name}"))


class _OfProject(Vocabulary):
    def __init__(self, project: Project) -> None:
        super().__init__()
        self._project = project

    @cached_property
    def scalars(self) -> tuple[str, ...]:
        with connection.cursor() as cursor:
            cursor.execute(_SCALARS, [self._project.pk, NEWEST_SCALARS])
            return tuple(sorted(name for (name,) in cursor.fetchall()))

    @cached_property
    def config(self) -> tuple[str, ...]:
        runs = Run.objects.filter(project=self._project).exclude(config={})
        newest = runs.order_by("-created_at").annotate(size=StoredBytes("config"))
        readable = newest.filter(size__lt=MAX_CONFIGURATION)
        keys: set[str] = set()
        for config in readable.values_list("config", flat=True)[:NEWEST_CONFIGURATIONS]:
            keys.update(_keys("", config))
        return tuple(sorted(keys)[:MAX_KEYS])


class StoredBytes(Func):
    """The size of a column's value as it is stored, compressed."""

    function = "pg_column_size"
    output_field = IntegerField()


def vocabulary_of(project: Project) -> Vocabulary:
    """The names that searches of a project may use."""
    return _OfProject(project)


def common_values(project: Project, column: str) -> list[str]:
    """The most common values of a text column of a project's runs, without the empty one."""
    runs = Run.objects.filter(project=project).exclude(**{column: ""}).order_by()
    counted = runs.values_list(column).annotate(runs=Count("pk")).order_by("-runs", column)
    return [value for value, _ in counted[:MAX_VALUES]]


def common_tags(project: Project) -> list[str]:
    """The most common tags of a project's runs."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT tag FROM runs_run, unnest(tags) AS tag WHERE project_id = %s AND deleted_at IS NULL "
            "GROUP BY tag ORDER BY count(*) DESC, tag LIMIT %s",
            [project.pk, MAX_VALUES],
        )
        return [tag for (tag,) in cursor.fetchall()]


def _keys(prefix: str, config: Mapping[str, Any], depth: int = 1) -> Iterator[str]:
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and depth < DEEPEST:
            yield from _keys(f"{name}.", value, depth + 1)
        else:
            yield name
