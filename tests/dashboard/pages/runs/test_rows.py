"""The rows of the list: one line a run, equal digits in a column, and the density that a person chooses."""

from __future__ import annotations

import re

from dashboard.helpers.many_runs import fill_project
from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor, html
from django.db import connection
from django.test.utils import CaptureQueriesContext

from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.pages.formatting import aligned, aligned_differences
from fp8scope_dashboard.runs.models import Run

LONG = "w" * 200
RUN_COUNTS = ("project", "precision", "state", "recipe_name", "archived_at")


def cells(page: str, name: str) -> list[str]:
    return re.findall(rf'<td class="[^"]*\b{name}\b[^"]*"[^>]*>(.*?)</td>', page, re.S)


def test_it_works(admin: Visitor) -> None:
    run = make_run(
        admin.project, LONG, precision="fp8", group="g", seed=3, tags=["a", "b", "c", "d", "e", "f"]
    )
    page = html(admin)
    assert f'title="{LONG}"' in page and f'id="row-{run.pk}"' in page
    assert page.count('class="tag"') == 4 and 'title="e, f">+2<' in page
    assert "runs--compact" in page
    assert "FP8, g, seed 3" in page


def test_a_person_keeps_their_density(admin: Visitor, viewer: Visitor) -> None:
    make_run(admin.project, "a")
    answer = viewer.client.post(viewer.address("find/density"), {"density": "comfortable"})
    assert answer.status_code == 302 and "runs--comfortable" in html(viewer)
    assert "runs--compact" in html(admin)
    viewer.client.post(viewer.address("find/density"), {"density": "<script>"})
    assert "runs--comfortable" in html(viewer)


def test_the_digits_of_a_column_are_equal(admin: Visitor) -> None:
    for number, loss in enumerate((2.5, 2.123456, "NaN", 12.0, None)):
        make_run(admin.project, f"run {number}", last_scalars={} if loss is None else {"loss": loss})
    page = html(admin, "?sort=created&col=loss&col=scalar.loss")
    assert cells(page, "runs__cell-wide") == ["2.500", "2.123", "NaN", "12.000", "–"]
    assert cells(page, "runs__cell-own") == ["2.500", "2.123", "NaN", "12.000", "–"]


def test_the_own_difference_sorts_and_has_equal_digits(admin: Visitor) -> None:
    for name, own in (("a", 0.01), ("b", -0.00052), ("c", None)):
        run = make_run(admin.project, name, precision="fp8", baseline="bf16")
        result = {"unit": "relative", "own": {}} if own is not None else {}
        Comparison.objects.create(
            run=run, baseline="bf16", to_step=1, verdict="worse", result=result, own_difference=own
        )
    page = html(admin, "?sort=difference")
    texts = [re.sub(r"<[^>]+>", "", cell) for cell in cells(page, "runs__cell-own")]
    assert texts == ["\u22120.052\u202f%", "+1.000\u202f%", "–"]


def test_aligned_numbers() -> None:
    assert aligned([2.5, 0.004, -11.25]) == ["2.500", "0.004", "\u221211.250"]
    assert aligned([1e-5, 3e-4]) == ["1.000×10⁻⁵", "3.000×10⁻⁴"]
    assert aligned([0.0, 1e9, 2.0]) == ["0", "1.000×10⁹", "2.000×10⁰"]
    assert aligned([12_345.0, 99_999.5]) == ["12\u202f345", "100\u202f000"]
    assert aligned([None, float("nan"), float("-inf")]) == ["–", "NaN", "\u2212∞"]
    assert aligned([0.0, None]) == ["0", "–"] and aligned([]) == []


def test_aligned_differences() -> None:
    values = [(0.0123, "relative"), (-0.2, "relative"), (0.0, "relative"), (0.5, "nats"), (None, "relative")]
    assert aligned_differences(values) == [
        "+1.23\u202f%", "\u221220.00\u202f%", "±0.00\u202f%", "+0.500", "–"
    ]  # fmt: skip


def test_counting_reads_one_index(admin: Visitor) -> None:
    """The list without a search counts all its runs once, from columns that are in one index."""
    fill_project(admin.project, 60, entries=10)
    html(admin)
    with CaptureQueriesContext(connection) as queries:
        html(admin)
    counted = [
        query["sql"] for query in queries if "COUNT(" in query["sql"] and '"runs_run"."state"' in query["sql"]
    ]
    assert len(counted) == 1
    index = next(index for index in Run._meta.indexes if index.name == "run_counts")
    columns = {
        field.column for field in Run._meta.concrete_fields if field.name in (*RUN_COUNTS, "deleted_at")
    }
    assert set(re.findall(r'"runs_run"\."(\w+)"', counted[0])) == columns
    assert [expression.name for expression in index.expressions] == list(RUN_COUNTS)


def test_the_order_and_the_groups_are_read_from_one_index(admin: Visitor) -> None:
    """Rows are wide: those of a page, and the losses of its groups, are read for the page alone."""
    fill_project(admin.project, 60, entries=10)
    index = next(index for index in Run._meta.indexes if index.name == "run_order")
    names = {name.lstrip("-") for name in (*index.fields, *index.include)}
    columns = {field.column for field in Run._meta.concrete_fields if field.name in names}
    for rest, begin in (("?page=2", ' IN (SELECT U0."id"'), ("?by=group", 'MAX("runs_run"."created_at")')):
        with CaptureQueriesContext(connection) as queries:
            html(admin, rest)
        asked = [query["sql"] for query in queries]
        (ordered,) = (sql for sql in asked if begin in sql and " LIMIT " in sql)
        chosen = ordered[ordered.index(begin) :].partition(" LIMIT ")[0]
        assert set(re.findall(r'(?:U0|"runs_run")\."(\w+)"', chosen)) <= {*columns, "deleted_at"}
    (losses,) = (sql for sql in asked if "STDDEV_SAMP" in sql)
    assert '"runs_run"."group" IN (' in losses


def test_a_long_name_keeps_its_end(viewer: Visitor) -> None:
    """Names of a sweep begin alike. A screen reader says the whole name as one."""
    name = f"sweep-{'x' * 170}-8<lr=3e-4>_seed-7"
    make_run(viewer.project, name)
    make_run(viewer.project, "y" * 44)
    page = viewer.client.get(viewer.address("")).content.decode()
    assert '<span class="cut__end">-8&lt;lr=3e-4&gt;_seed-7</span>' in page
    assert 'xx-8&lt;lr=3e-4&gt;_seed-7" aria-label="sweep-xx' in page
    assert page.count("cut__end") == 1 and f">{'y' * 44}</a>" in page
