"""Where the memory of a run and its baseline goes, and what FP8 takes more for."""

from __future__ import annotations

from typing import Any

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor, html

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.pages.compare.memory import accounts_of, categories, compared
from fp8scope_dashboard.runs.models import Run

GIB = 2**30
BF16 = {
    "weights": {"bfloat16": 2 * GIB},
    "gradients": {"bfloat16": 2 * GIB},
    "optimizer": {
        "exp_avg": {"float32": 4 * GIB},
        "exp_avg_sq": {"float32": 4 * GIB},
        "step": {"float32": 12},
    },
    "scaling": 0,
    "buffers": 0,
}
FP8 = {
    "weights": {"bfloat16": 2 * GIB},
    "gradients": {"bfloat16": 2 * GIB},
    "optimizer": {
        "exp_avg": {"float8_e4m3fn": GIB},
        "exp_avg_scale": {"float32": 400},
        "exp_avg_sq": {"float16": 2 * GIB},
        "master": {"float16": 2 * GIB},
    },
    "scaling": GIB // 4,
    "buffers": 0,
}


def run_of(project: Project, account: Any, peak: float | None = None, **fields: Any) -> Run:
    environment = {"training": {"memory_account": account}}
    scalars = {} if peak is None else {"memory_peak": peak}
    return make_run(project, "run", environment=environment, last_scalars=scalars, **fields)


def test_it_works(viewer: Visitor) -> None:
    run_of(viewer.project, BF16, 20.0 * GIB, precision="bf16", group="bf16")
    run = run_of(viewer.project, FP8, 18.0 * GIB, precision="fp8", baseline="bf16")
    Comparison.objects.create(run=run, baseline="bf16", to_step=1, verdict="cannot_tell", result={})
    page = html(viewer, f"compare/?runs={run.pk}")
    assert "Where the memory goes" in page
    # 18 GiB less 9.25, and 20 less 12.
    more = (
        "master weights (+2.0\u202fGiB)", "what comes and goes within a step (+768\u202fMiB)",
        "scales and amax histories (+256\u202fMiB)",
    )  # fmt: skip
    sentence = page[page.index("FP8 takes more memory for") :].partition(".</p>")[0]
    assert sorted(sentence.removeprefix("FP8 takes more memory for ").split(", ")) == sorted(more)
    assert "float8_e4m3fn / float32" in page and "a second copy of the weights" in page


def test_rows_are_exact() -> None:
    account = compared(FP8, 18.0 * GIB, BF16, 20.0 * GIB)
    rows = {row.title: (row.ours, row.theirs, row.difference) for row in account.rows}
    assert rows["First moment"] == ("1.0\u202fGiB", "4.0\u202fGiB", "−3.0\u202fGiB")
    assert rows["Weights"] == ("2.0\u202fGiB", "2.0\u202fGiB", "±0\u202fbytes")
    assert rows["Master weights"] == ("2.0\u202fGiB", "0\u202fbytes", "+2.0\u202fGiB")
    assert account.has_rest and next(iter(rows)) == "Within a step" and "Optimizer state step" not in rows


@pytest.mark.parametrize("peaks", [(None, 20.0 * GIB), (18.0 * GIB, "NaN"), (1.0, 20.0 * GIB)])
def test_without_a_peak_nothing_is_said_of_activations(peaks: tuple[Any, Any]) -> None:
    account = compared(FP8, peaks[0], BF16, peaks[1])
    assert not account.has_rest and "Within a step" not in [row.title for row in account.rows]


def test_equal_runs_take_more_in_no_category() -> None:
    assert compared(BF16, None, BF16, None).sentence == "FP8 takes more memory in no category."


@pytest.mark.parametrize(
    "sent",
    [None, [], "x", {}, {"weights": 5}, {"optimizer": [1]}, {"weights": {"bfloat16": "x"}},
     {"weights": {"bfloat16": -1}}, {"scaling": True}, {"buffers": 1e300}, {"optimizer": {"master": None}}],
)  # fmt: skip
def test_what_another_client_sends_is_left_out(sent: Any) -> None:
    assert categories(sent) == {} and compared(sent, None, sent, None).rows == []


def test_the_newest_run_of_the_baseline_counts(project: Project) -> None:
    smaller = {**BF16, "weights": {"bfloat16": GIB}}
    run_of(project, BF16, precision="bf16", group="bf16")
    named = run_of(project, smaller, precision="bf16", group="bf16")
    make_run(project, "sends nothing", precision="bf16", group="bf16")
    by_group = run_of(project, FP8, precision="fp8", baseline="bf16")
    by_id = run_of(project, FP8, precision="fp8", baseline=str(named.pk))
    without = run_of(project, FP8, precision="fp8", baseline="other")
    silent = make_run(project, "silent", precision="fp8", baseline="bf16")
    accounts = accounts_of(project, [by_group, by_id, without, silent])
    assert set(accounts) == {by_group.pk, by_id.pk}
    for account in accounts.values():
        assert next(row for row in account.rows if row.title == "Weights").theirs == "1.0\u202fGiB"
