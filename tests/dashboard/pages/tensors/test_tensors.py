"""The map and the ranking of a run's tensors: what they answer, to whom, and within which bounds."""

from __future__ import annotations

import base64
import csv
import io
import re
from html import unescape
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seeding import TENSORS, Seeded
from dashboard.helpers.visitors import Visitor, get_json
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.onset_search import COLUMNS
from fp8scope_dashboard.pages.tensors.loading import affordable_columns
from fp8scope_dashboard.pages.tensors.ranking import ROWS_A_PAGE, shown_change
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.telemetry import queries

DEPTH = 40


def map_of(visitor: Visitor, run: Run, **query: str) -> dict[str, Any]:
    return get_json(visitor, f"runs/{run.id}/tensors/map.json", **query)


def values_of(answer: dict[str, Any]) -> NDArray[np.float32]:
    values = np.frombuffer(base64.b64decode(answer["values"]), "<f4")
    return values.reshape(len(answer["rows"]), -1)


def ranking_of(visitor: Visitor, run: Run, **query: str) -> str:
    answer = visitor.client.get(visitor.address(f"runs/{run.id}/tensors/ranking"), query)
    assert answer.status_code == 200
    return unescape(answer.content.decode())


def labels(answer: dict[str, Any]) -> list[str]:
    return [row["label"] for row in answer["rows"]]


@pytest.fixture
def deep(admin: Visitor) -> Run:
    """A run of 240 tensors over 30 steps. Saturation begins in layer 7 at step 12, in layer 3 at step 20."""
    run = make_run(admin.project, "deep", precision="fp8")
    names = [
        f"blocks.{i}.mlp.{part}.{role}"
        for i in range(DEPTH)
        for part in ("up", "down")
        for role in ("input", "weight", "grad_output")
    ]
    saturated = np.zeros((30, len(names)))
    saturated[12:, names.index("blocks.7.mlp.up.input")] = 50.0
    saturated[20:, names.index("blocks.3.mlp.down.input")] = 900.0
    saturated[5, names.index("blocks.1.mlp.up.weight")] = 1_000.0
    shape = saturated.shape
    amax = np.ones(shape)
    amax[15:, names.index("blocks.30.mlp.up.weight")] = 64.0
    Recorder(run=run, tensors=names).rows(
        np.arange(30),
        {},
        {
            "amax": amax,
            "saturated": saturated,
            "nonfinite": np.zeros(shape),
            "numel": np.full(shape, 1_000.0),
        },
        rows_per_batch=30,
    )
    return run


def test_it_works(admin: Visitor, deep: Run) -> None:
    answer = map_of(admin, deep)
    assert labels(answer)[:3] == ["blocks.0", "blocks.1", "blocks.2"] and len(answer["rows"]) == DEPTH
    assert answer["tensors"] == 6 * DEPTH
    row = values_of(answer)[7]
    assert (row[:12] == 0).all() and row[12:] == pytest.approx(0.05)
    assert {row["open"] for row in answer["rows"]} == {False}


def test_groups_open_from_the_address(admin: Visitor, deep: Run) -> None:
    answer = map_of(admin, deep, open="blocks.7,blocks.7/blocks.7 · input")
    at = labels(answer).index("blocks.7")
    assert labels(answer)[at + 1 : at + 5] == [
        "blocks.7 · input",
        "blocks.7.mlp.up.input",
        "blocks.7.mlp.down.input",
        "blocks.7 · weight",
    ]
    tensor = answer["rows"][at + 2]
    assert (
        tensor["open"] is None and Tensor.objects.get(run=deep, index=tensor["index"]).name == tensor["label"]
    )
    np.testing.assert_array_equal(values_of(answer)[at], values_of(answer)[at + 2])


def test_a_filter_opens_what_fits(admin: Visitor, deep: Run) -> None:
    answer = map_of(admin, deep, filter="BLOCKS.7.", role="input")
    assert "blocks.7.mlp.up.input" in labels(answer) and answer["tensors"] == 2
    assert "No tensor matches" in map_of(admin, deep, filter="nothing like this")["empty"]


def test_shows_the_change_of_each_tensor_against_its_own_start(admin: Visitor, deep: Run) -> None:
    answer = map_of(admin, deep, statistic="amax", mode="change")
    row = values_of(answer)[labels(answer).index("blocks.30")]
    assert (row[:15] == 0).all() and (row[15:] == 6).all()
    assert answer["signed"]


def test_the_start_is_that_of_the_run_when_zoomed(admin: Visitor, deep: Run) -> None:
    answer = map_of(admin, deep, statistic="amax", mode="change", first="20", last="29")
    assert answer["edges"] == list(range(20, 31))
    assert (values_of(answer)[labels(answer).index("blocks.30")] == 6).all()


def test_shows_the_difference_to_another_run(admin: Visitor, seeded: Seeded) -> None:
    other, run = seeded.healthy, seeded.faulty
    answer = map_of(admin, run, mode="difference", against=str(other.id), filter="mlp.down.input")
    assert answer["note"] == f"against {other.name}" and answer["signed"]
    own, theirs = (
        queries.heatmap(each.id, "overflow_rate", tensors=[TENSORS.index("blocks.2.mlp.down.input")]).values[
            0
        ]
        for each in (run, other)
    )
    row = values_of(answer)[labels(answer).index("blocks.2.mlp.down.input")]
    np.testing.assert_allclose(row, own - theirs, rtol=1e-6)


def test_a_difference_begins_with_the_baseline_and_says_what_is_missing(
    admin: Visitor, seeded: Seeded
) -> None:
    # The BF16 seeds of this project have no tensors at all.
    text = map_of(admin, seeded.faulty, mode="difference")["empty"]
    assert "has no overflow rate of tensors with these names" in text and "gpt bf16" in text


def test_never_compares_with_a_run_of_another_project(admin: Visitor, stranger: Visitor, deep: Run) -> None:
    theirs = make_run(stranger.project, "their secret run")
    answer = map_of(admin, deep, mode="difference", against=str(theirs.id))
    assert "their secret run" not in str(answer)


def test_the_table_has_the_same_rows_as_the_map(admin: Visitor, deep: Run) -> None:
    answer = admin.client.get(admin.address(f"runs/{deep.id}/tensors/map.csv"), {"open": "blocks.7"})
    assert answer["Content-Type"].startswith("text/csv") and "attachment" in answer["Content-Disposition"]
    head, *rows = list(csv.reader(io.StringIO(answer.content.decode())))
    assert head[:3] == ["tensor", "0", "1"]
    assert [row[0] for row in rows] == labels(map_of(admin, deep, open="blocks.7"))
    assert rows[7][-1] == "0.05"


def test_a_spreadsheet_runs_no_name_as_a_formula(admin: Visitor) -> None:
    run = make_run(admin.project, "hostile", precision="fp8")
    Recorder(run=run, tensors=["=1+1"]).rows([1, 2], {}, {"amax": [[1.0]] * 2})
    answer = admin.client.get(admin.address(f"runs/{run.id}/tensors/map.csv"), {"statistic": "amax"})
    assert list(csv.reader(io.StringIO(answer.content.decode())))[1] == ["'=1+1", "1", "1"]


def test_leaves_out_tensors_without_the_statistic(admin: Visitor) -> None:
    run = make_run(admin.project, "with gradients", precision="fp8")
    columns = {"amax": [[1.0, 2.0]] * 2, "numel": [[9.0, 9.0]] * 2}
    columns |= {name: [[0.0, np.nan]] * 2 for name in ("saturated", "nonfinite")}
    Recorder(run=run, tensors=["up.input", "up.weight_grad"]).rows([1, 2], {}, columns)
    assert labels(map_of(admin, run)) == ["up.input"]
    assert "up.weight_grad" in labels(map_of(admin, run, statistic="amax"))
    assert "up.weight_grad" not in ranking_of(admin, run)


def test_new_rows_are_shown_at_once(admin: Visitor) -> None:
    run = make_run(admin.project, "live", precision="fp8")
    recorder = Recorder(run=run, tensors=["up.input"])
    recorder.rows([1, 2], {}, {"amax": [[1.0]] * 2})
    assert map_of(admin, run, statistic="amax")["edges"][-1] == 3
    recorder.rows([3, 4], {}, {"amax": [[1.0]] * 2})
    assert map_of(admin, run, statistic="amax")["edges"][-1] == 5


INVALID: list[dict[str, str]] = [
    {"statistic": "nothing", "mode": "?", "fold": "?", "sort": "?", "against": "x" * 400, "page": "-1"},
    {"open": "," * 9_000, "filter": "%_" * 300, "role": "²", "limit": "nan", "page": "9" * 30},
    {"first": "nan", "last": "1e400", "limit": "-5", "open": "-", "page": "²"},
    {"first": "25", "last": "3", "limit": "1e300", "statistic": "amax"},
    {"first": "900", "last": "1000"},
]


def test_ignores_invalid_parameters(admin: Visitor, deep: Run, subtests: pytest.Subtests) -> None:
    for query in INVALID:
        with subtests.test(query=query):
            assert map_of(admin, deep, **query)
            ranking_of(admin, deep, **query)


def test_ranks_by_the_first_sustained_onset(admin: Visitor, deep: Run) -> None:
    page = ranking_of(admin, deep)
    assert (
        page.index("blocks.7.mlp.up.input") < page.index("blocks.3.mlp.down.input") < page.index("blocks.1.")
    )
    assert "step 12<" in page and "step 20<" in page
    assert ">2 of 240</strong> tensors exceed" in page, "one step over the limit is no onset"


def test_ranks_by_the_worst_value(admin: Visitor, deep: Run) -> None:
    page = ranking_of(admin, deep, sort="ever")
    assert page.index('data-name="blocks.1.mlp.up.weight"') == page.index('data-name="blocks.')


def test_ranks_by_the_change(admin: Visitor, deep: Run) -> None:
    page = ranking_of(admin, deep, statistic="amax", sort="change")
    assert page.index('data-name="blocks.30.mlp.up.weight"') == page.index('data-name="blocks.')
    assert "× 64" in page.replace("\u202f", " ") and "1 of 240</strong> tensors change by a factor of" in page


def test_the_limit_is_a_choice(admin: Visitor, deep: Run) -> None:
    assert ">1 of 240</strong>" in ranking_of(admin, deep, limit="10")
    assert 'data-limit="10"' in ranking_of(admin, deep, limit="10")
    assert "data-limit=" not in ranking_of(admin, deep, limit="0.1"), "the default is not in the address"
    other = ranking_of(admin, deep, limit="10", limit_of="amax")
    assert ">2 of 240</strong>" in other, "a limit written for another statistic does not apply"


def test_a_page_has_at_most_fifty_rows(admin: Visitor, deep: Run) -> None:
    assert ROWS_A_PAGE <= 50
    pages = [ranking_of(admin, deep, page=str(number), everything="1") for number in range(1, 12)]
    assert all(page.count("<tr>") == ROWS_A_PAGE + 1 for page in pages[:9])
    assert "226–240 of 240" in pages[9] and pages[10] == pages[9], "beyond the last page is the last page"


def test_rates_that_are_always_zero_are_counted(admin: Visitor, deep: Run) -> None:
    """Of hundreds of tensors, most have nothing to show: one line instead of pages of flat ones."""
    page = ranking_of(admin, deep)
    assert "237 other tensors are at 0 % in every step" in page and page.count("<tr>") == 3 + 1
    assert ">2 of 240</strong>" in page and "ranking__pages" not in page
    alone = ranking_of(admin, deep, filter="blocks.7.")
    assert "in every step" not in alone and alone.count("<tr>") > 2, "a page of them is listed"
    still = ranking_of(admin, deep, filter=".input")
    assert "tensors are at 0 % in every step" in still and 'data-everything=""' in still
    assert "in every step" not in ranking_of(admin, deep, statistic="amax"), "an amax is no rate"


def test_onsets_in_one_column_are_told_apart_by_step(admin: Visitor) -> None:
    """A column of 3 steps holds both onsets."""
    run = make_run(admin.project, "long", precision="fp8")
    steps = 3 * COLUMNS
    saturated = np.zeros((steps, 3))
    saturated[602:, 0], saturated[601:, 1], saturated[900:, 2] = 500, 10, 1
    numel = np.full((steps, 3), 1_000.0)
    columns = {"saturated": saturated, "nonfinite": 0 * numel, "numel": numel}
    Recorder(run=run, tensors=["late.input", "early.input", "third.input"]).rows(
        np.arange(steps), {}, columns, rows_per_batch=steps
    )
    page = ranking_of(admin, run)
    assert page.index("early.input") < page.index("late.input") < page.index("third.input")
    now = ranking_of(admin, run, sort="now")
    assert now.index("late.input") < now.index("early.input") < now.index("third.input")
    assert "step 601" in page.replace("\u202f", "") and "step 602" in page.replace("\u202f", "")


def test_the_first_steps_do_not_count_as_in_alerts(admin: Visitor) -> None:
    """Scales settle in them. What was over its limit in them already may have begun there."""
    onsets = []
    for first, last in ((2, 60), (10, 60), (0, 8), (30, 60)):
        run = make_run(admin.project, f"from {first} to {last}", precision="fp8")
        steps = np.arange(60)
        saturated = np.where((steps >= first) & (steps < last), 500.0, 0.0)[:, None]
        columns = {"saturated": saturated, "nonfinite": 0 * saturated, "numel": 0 * saturated + 1_000.0}
        Recorder(run=run, tensors=["a.input"]).rows(steps, {}, columns)
        onsets += re.findall(r"step \d+(?: or before)?|none", ranking_of(admin, run).partition("<tbody>")[2])
    assert onsets == ["step 10 or before", "step 10 or before", "none", "step 30"]


def test_a_new_run_says_what_is_missing(admin: Visitor) -> None:
    run = make_run(admin.project, "new")
    assert "call run.watch(model)" in map_of(admin, run)["empty"]
    assert "No tensor telemetry yet" in ranking_of(admin, run)
    page = admin.client.get(admin.address(f"runs/{run.id}/")).content.decode()
    assert "run.watch(model)" in page and 'id="tensors"' not in page


PATHS = ("map.json", "map.csv", "ranking", "0/", "0/picture.json", "find?tensor=0")


def test_viewers_may_read_and_strangers_may_not(viewer: Visitor, stranger: Visitor, deep: Run) -> None:
    for path in PATHS:
        address = viewer.address(f"runs/{deep.id}/tensors/{path}")
        assert viewer.client.get(address).status_code in (200, 302), path
        assert stranger.client.get(address).status_code == 404, path
        assert stranger.client.get(stranger.address(f"runs/{deep.id}/tensors/{path}")).status_code == 404, (
            path
        )


def test_unknown_tensors_and_forms_are_not_found(admin: Visitor, deep: Run) -> None:
    for path in ("999/", "999/picture.json", "find?tensor=none", "find", "map.xml", "-1/"):
        assert admin.client.get(admin.address(f"runs/{deep.id}/tensors/{path}")).status_code == 404, path


def test_zoomed_maps_read_a_bounded_number_of_rows() -> None:
    assert affordable_columns(1_000_000, 2_000) == COLUMNS
    assert affordable_columns(100, 2_000) == COLUMNS
    for steps in (5_000, 10_000, 25_599):
        columns = affordable_columns(steps, 2_000)
        assert columns < COLUMNS and steps >= 64 * columns, "the finest roll-ups have enough buckets"
    assert affordable_columns(10_000, 2_000, 100) == 100 and affordable_columns(6_400, 2_000, 240) == 100


@pytest.mark.parametrize(
    ("change", "text"), [(3.0, "× 8"), (-1.0, "÷ 2"), (0.0, "× 1"), (-0.0001, "× 1"), (np.nan, "–")]
)
def test_changes_in_words(change: float, text: str) -> None:
    assert shown_change(change).replace("\u202f", " ") == text
