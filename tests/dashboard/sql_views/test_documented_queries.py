"""Every query of docs/grafana.md and of the dashboard runs, and finds the seeded runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import psycopg
import pytest
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.sql_logins import Login
from django.db import connection
from helpers.code_blocks import texts_of

from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.sql_views import history
from fp8scope_dashboard.sql_views.definitions import VIEWS

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "grafana.md").read_text()
DASHBOARD: dict[str, Any] = json.loads((DOCS.parent / "deploy" / "grafana" / "runs.json").read_text())
QUERIES = texts_of(DOCS / "grafana.md", "sql")
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}


def quoted(values: list[str]) -> str:
    """As Grafana's `:sqlstring` writes the values of a variable."""
    return ",".join("'" + value.replace("'", "''") + "'" for value in values)


def expanded(query: str, values: dict[str, list[str]]) -> str:
    """A query with Grafana's variables and macros replaced, as its data source does."""
    for name, chosen in values.items():
        query = query.replace(f"${{{name}:sqlstring}}", quoted(chosen))
    query = re.sub(
        r"\$__timeFilter\((.*?)\)", r"\1 BETWEEN '2020-01-01T00:00:00Z' AND '2040-01-01T00:00:00Z'", query
    )
    assert "$" not in query, query
    return query


@pytest.fixture
def session(seeded: Seeded, login: Login) -> psycopg.Connection:
    Run.objects.filter(pk=seeded.healthy.pk).update(state="running")
    return login()


def test_it_works(seeded: Seeded, session: psycopg.Connection) -> None:
    """Each query of the page and of the dashboard finds something in one seeded project."""
    assert len(QUERIES) == 6
    for query in QUERIES:
        assert session.execute(query).fetchall(), query
    check_panels(session)


def check_panels(session: psycopg.Connection) -> None:
    values: dict[str, list[str]] = {}
    for name, variable in VARIABLES.items():
        options = session.execute(expanded(variable["query"], values)).fetchall()
        values[name] = [str(option[-1]) for option in options]
        assert values[name], name
    assert values["project"] == ["research"] and len(values["run"]) == 5 and "loss" in values["scalar"]
    values["scalar"] = ["loss"]
    for title, panel in PANELS.items():
        (target,) = panel["targets"]
        rows = session.execute(expanded(target["rawSql"], values)).fetchall()
        assert rows, title
    assert session.execute(expanded(PANELS["Running"]["targets"][0]["rawSql"], values)).fetchone() == (1,)
    hostile = {"project": ["x'); DROP SCHEMA fp8scope_views; --"]}
    assert session.execute(expanded(PANELS["Runs"]["targets"][0]["rawSql"], hostile)).fetchall() == []


def test_panels_name_the_data_source_that_the_import_asks_for() -> None:
    (asked,) = DASHBOARD["__inputs"]
    sources = [PANELS[title]["datasource"] for title in PANELS]
    sources += [target["datasource"] for panel in PANELS.values() for target in panel["targets"]]
    sources += [variable["datasource"] for variable in VARIABLES.values()]
    assert {(source["type"], source["uid"]) for source in sources} == {
        (asked["pluginId"], f"${{{asked['name']}}}")
    }
    assert len({panel["id"] for panel in PANELS.values()}) == len(DASHBOARD["panels"]) == len(PANELS)


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in PANELS.values():
        at = panel["gridPos"]
        taken = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells and at["x"] + at["w"] <= 24, panel["title"]
        cells |= taken


def test_the_page_lists_every_view_and_column() -> None:
    listed = PAGE.partition("## Views")[2].partition("## Histories")[0]
    assert re.findall(r"^\| `(\w+)` \| ", listed, re.MULTILINE) == [view.name for view in VIEWS]
    columns = PAGE.partition("## Columns")[2].partition("\n## ")[0]
    parts = re.findall(
        r"^### `(\w+)`\n\n(.*)\n\n\| column \| meaning \|\n\|---\|---\|\n((?:\|.*\n)+)", columns, re.MULTILINE
    )
    assert [(name, meaning) for name, meaning, _ in parts] == [(view.name, view.meaning) for view in VIEWS]
    for (name, _, rows), view in zip(parts, VIEWS, strict=True):
        assert rows.splitlines() == [f"| `{column.name}` | {column.meaning} |" for column in view.columns], (
            name
        )


@pytest.mark.django_db
def test_every_column_has_a_comment() -> None:
    cursor = connection.cursor()
    cursor.execute(
        "SELECT c.relname, a.attname, col_description(c.oid, a.attnum), obj_description(c.oid)"
        " FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0"
        " WHERE c.relnamespace = 'fp8scope_views'::regnamespace ORDER BY c.relname, a.attnum"
    )
    rows = cursor.fetchall()
    expected = [
        (view.name, column.name, column.meaning, view.meaning) for view in VIEWS for column in view.columns
    ]
    assert sorted(rows) == sorted(expected)


def test_figures_of_the_page_are_those_of_the_code() -> None:
    assert f"up to {history.POINTS:,}" in PAGE and f"histories of {history.MAX_SCALARS} scalars" in PAGE
    assert history.MIN_SECONDS == 60 and f"longer than {history.MIN_SECONDS * history.SHARE:g} s" in PAGE
