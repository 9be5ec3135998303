"""In what configurations differ, as a pure function and for stored runs."""

from __future__ import annotations

from typing import Any

import pytest
from dashboard.helpers.recording import make_run
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages import configuration_differences
from fp8scope_dashboard.pages.configuration_differences import differences, differences_of, flat

LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=5)
KEYS = st.text("abc", min_size=1, max_size=2)
CONFIGURATIONS = st.dictionaries(KEYS, LEAVES | st.dictionaries(KEYS, LEAVES, max_size=3), max_size=4)


def flattened(config: dict[str, Any]) -> dict[str, Any]:
    return dict(flat(config))


def test_it_works() -> None:
    first = flattened({"lr": 1e-3, "model": {"depth": 12, "width": 64}, "seed": 1})
    second = flattened({"lr": 1e-3, "model": {"depth": 24, "width": 64}})
    found = differences([("a", first), ("b", second)])
    assert [(row.key, [value.text for value in row.values]) for row in found.rows] == [
        ("model.depth", ["12", "24"]),
        ("seed", ["1", None]),
    ]
    assert (found.total, found.differing, found.more) == (4, 2, 0)
    everything = differences([("a", first), ("b", second)], everything=True)
    assert [row.key for row in everything.rows] == ["lr", "model.depth", "model.width", "seed"]
    assert [row.differs for row in everything.rows] == [False, True, False, True]


def test_numbers_are_equal_by_value_but_not_texts() -> None:
    assert differences([("a", {"x": 1}), ("b", {"x": 1.0})]).rows == ()
    assert len(differences([("a", {"x": 1}), ("b", {"x": "1"})]).rows) == 1
    assert len(differences([("a", {"x": 1}), ("b", {"x": True})]).rows) == 1
    assert len(differences([("a", {"x": 2**60}), ("b", {"x": 2**60 + 1})]).rows) == 1
    assert (
        differences([("a", {"x": [1, {"b": 2, "a": 1}]}), ("b", {"x": [1.0, {"a": 1, "b": 2}]})]).rows == ()
    )
    assert len(differences([("a", {"x": [1]}), ("b", {"x": [True]})]).rows) == 1


def test_a_missing_entry_differs_from_null() -> None:
    (row,) = differences([("a", {"x": None}), ("b", {})]).rows
    assert [value.text for value in row.values] == ["null", None]


def test_values_of_many_runs_are_counted_the_most_common_first() -> None:
    runs = [(f"run {i}", {"lr": 1 if i % 4 else 2}) for i in range(20)]
    found = differences(runs)
    assert not found.side_by_side
    (row,) = found.rows
    assert [(shared.value.text, len(shared.runs)) for shared in row.distinct] == [("1", 15), ("2", 5)]


def test_long_values_are_folded_and_cut() -> None:
    long = "x" * 10_000
    (row,) = differences([("a", {"k": long}), ("b", {"k": "line\nline"})]).rows
    assert all(value.is_long for value in row.values)
    assert len(row.values[0].short) == 80 and row.values[1].short == "line"
    assert len(row.values[0].text or "") == configuration_differences.LONGEST + 1


def test_texts_with_blanks_at_their_ends_are_quoted() -> None:
    (row,) = differences([("a", {"x": " 1"}), ("b", {"x": ""})]).rows
    assert [value.text for value in row.values] == ['" 1"', '""']


def test_bounds_the_rows() -> None:
    found = differences([("a", {f"k{i}": i for i in range(900)}), ("b", {})])
    assert len(found.rows) == 500 and found.more == 400
    more = differences([("a", {f"k{i}": i for i in range(900)}), ("b", {})], everything=True, most=800)
    assert len(more.differing_rows) == 800 and more.equal_rows == [] and more.more == 100


def test_deep_objects_end_in_a_value() -> None:
    config: dict[str, Any] = {"leaf": 1}
    for _ in range(40):
        config = {"n": config}
    ((key, value),) = flat(config)
    assert key.count("n") == configuration_differences.DEEPEST and isinstance(value, dict)


@given(CONFIGURATIONS, CONFIGURATIONS)
def test_configurations_have_no_differences_exactly_if_they_are_equal(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    a, b = flattened(first), flattened(second)
    assert differences([("a", a), ("b", a)]).rows == ()
    found = differences([("a", a), ("b", b)], everything=True)
    assert {row.key for row in found.rows} == a.keys() | b.keys()
    for row in found.rows:
        if not row.differs:
            assert a[row.key] == b[row.key]


@pytest.mark.django_db
def test_reads_stored_runs_in_few_queries(django_assert_max_num_queries: Any) -> None:
    project = Project.objects.create(slug="p", name="P")
    runs = [
        make_run(
            project, f"run {i}", seed=i, precision="fp8", recipe={"margin": i}, environment={"torch": "2"},
            config={"a": {"b": i}},
        )
        for i in range(3)
    ]  # fmt: skip
    with django_assert_max_num_queries(3):
        found = differences_of(runs)
    assert [row.key for row in found.rows] == ["config.a.b", "seed", "recipe.margin"]
    assert found.total == 5 and found.unread == ()


@pytest.mark.django_db
def test_leaves_out_what_a_field_of_the_run_says_too() -> None:
    project = Project.objects.create(slug="p", name="P")
    runs = [
        make_run(
            project, f"run {i}", seed=i, group="",
            config={"seed": i, "name": f"run {i}", "group": None, "lr": i},
        )
        for i in range(2)
    ]  # fmt: skip
    compared = differences_of(runs, everything=True)
    assert [row.key for row in compared.rows] == ["config.lr", "precision", "seed"]
    # A script may mean something else by the name.
    other = make_run(project, "other", seed=3, config={"seed": 42})
    keys = [row.key for row in differences_of([*runs, other]).rows]
    assert "config.seed" in keys and "seed" in keys and "config.name" not in keys


@pytest.mark.django_db
def test_leaves_out_the_ids_of_processes_and_jobs() -> None:
    project = Project.objects.create(slug="p", name="P")
    runs = [
        make_run(project, f"run {i}", environment={"pid": i, "slurm_job_id": str(i), "hostname": f"node{i}"})
        for i in range(2)
    ]
    assert [row.key for row in differences_of(runs).rows] == ["environment.hostname"]


@pytest.mark.django_db
def test_says_which_configurations_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration_differences, "LARGEST", 200)
    project = Project.objects.create(slug="p", name="P")
    large = make_run(project, "large", config={f"key {i}": i * 7919 for i in range(400)})
    found = differences_of([large, make_run(project, "small", config={"a": 1})])
    assert found.unread == ("large",) and [row.key for row in found.rows] == ["config.a"]


def test_values_that_all_differ_are_folded() -> None:
    def folded(*values: Any) -> str:
        entries = [(f"run {number}", {"key": value}) for number, value in enumerate(values)]
        return differences(entries).rows[0].folded

    assert folded(59, 48, 100.5, 9) == "4 different: 9 … 100.5", "numbers by size"
    assert folded(*(f"name {number}" for number in range(12))) == "12 different: name 0 … name 9"
    assert folded("x" * 200, "a", "b", "c") == f"4 different: a … {'x' * 24}…"
    assert folded(1, 2, 3) == "" and folded(1, 2, 3, 4, 4) == ""
    assert folded(*range(20), 19) == "20 different: 0 … 19", "more values than are listed"


def test_equal_values_of_any_type_are_one() -> None:
    entries: list[tuple[str, dict[str, Any]]] = [("a", {"k": 1, "b": True}), ("b", {"k": 1.0, "b": 1})]
    entries.append(("c", {"k": 1, "b": "true"}))
    rows = {row.key: row for row in differences(entries, everything=True).rows}
    assert not rows["k"].differs and len(rows["b"].distinct) == 3
