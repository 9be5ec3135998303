"""The figures of compared runs: losses, differences to BF16, and the map of what differs in their tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from django.http import QueryDict

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages import glossary
from fp8scope_dashboard.pages.charts.answers import AnyChart, Chart, EmptyChart
from fp8scope_dashboard.pages.charts.arms import ArmReader, Arms, ComparedArms
from fp8scope_dashboard.pages.charts.series import Options, loss_curves, loss_figure
from fp8scope_dashboard.pages.compare.delta_figure import DeltaCurve, delta_figure
from fp8scope_dashboard.pages.compare.runs import (
    FEW_RUNS,
    chosen_runs,
    result_of,
    runs_with_tensors,
    tensor_pair,
)
from fp8scope_dashboard.pages.formatting import count as count_text
from fp8scope_dashboard.pages.formatting import difference, number
from fp8scope_dashboard.pages.run.summary import HOW_TO_SET_BASELINE
from fp8scope_dashboard.pages.tensors.difference_map import difference_figure
from fp8scope_dashboard.pages.tensors.differences import (
    common_statistics,
    difference_map,
    most_different_statistic,
)
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.text.numbers import count

# Points of all lines together.
MAX_POINTS: Final = 24_000
MIN_POINTS: Final = 100
MAX_DELTAS: Final = 24


def compare_figure(project: Project, query: QueryDict, name: str) -> AnyChart:
    """`loss` or `delta` of the runs in the query, or the map of the `tensors` of two of them."""
    options = Options.of(query)
    runs = chosen_runs(project, query, compared=name == "delta").runs
    if name == "tensors":
        return _tensors(runs, query, options)
    return _loss(project, runs, options) if name == "loss" else _delta(project, runs, options)


def _loss(project: Project, runs: Sequence[Run], options: Options) -> AnyChart:
    quiet = [run.id for run in runs if run.precision == "bf16"] if len(runs) > 1 else []
    points = None
    if len(runs) > FEW_RUNS:
        quiet, options = [run.id for run in runs], replace(options, smooth=False)
        points = max(MIN_POINTS, MAX_POINTS // len(runs))
    arms = ComparedArms(Arms(project), runs)
    curves = loss_curves(runs, arms, options, quiet=quiet, points=points)
    if not curves:
        return EmptyChart("Select runs to compare their losses.")
    drawn = loss_figure(curves, options, height=400)
    listed = ", ".join(curve.name for curve in curves[:FEW_RUNS])
    more = f" and {len(curves) - FEW_RUNS} more" if len(curves) > FEW_RUNS else ""
    return Chart(drawn, f"Losses of {listed}{more}.")


def _delta(project: Project, runs: Sequence[Run], options: Options) -> AnyChart:
    arms = ComparedArms(Arms(project), runs)
    curves, margins = [], [project.margin]
    results = [(run, result) for run in runs if (result := result_of(run)).get("curve", {}).get("x")]
    nats = in_nats([result for _, result in results])
    results = [(run, result) for run, result in results if (result.get("unit") == "nats") == nats]
    # Nor have steps and tokens: those of most runs are drawn.
    axes = Counter(str(result["curve"].get("x_name", "steps")) for _, result in results)
    x_name = axes.most_common(1)[0][0] if axes else "steps"
    others = axes.total() - axes[x_name]
    results = [(run, result) for run, result in results if result["curve"].get("x_name", "steps") == x_name]
    for run, result in _one_of_each_group(results)[-MAX_DELTAS:]:
        curve = result["curve"]
        margins.append(float(result.get("margin") or project.margin))
        drawn_as = _delta_curve(run, arms, result, curve)
        runs_of_group = len((result.get("group") or {}).get("runs", ()))
        curves.append(replace(drawn_as, name=arms.of(run).label) if runs_of_group > 1 else drawn_as)
    if not curves:
        return EmptyChart(f"The delta needs an FP8 run with a baseline: {HOW_TO_SET_BASELINE}.")
    title = f"{x_name} ({count(others, 'run')} without {x_name}: not shown)" if others else x_name
    drawn = delta_figure(
        curves, margins[-1], options.theme, compact=options.compact, x_title=title, nats=nats
    )
    unit = "nats" if nats else "relative"
    last = "; ".join(f"{curve.name} {difference(curve.delta[-1], unit, signed=True)}" for curve in curves)
    return Chart(drawn, f"Difference to BF16 at the end: {last}.")


def _one_of_each_group(results: Sequence[tuple[Run, dict[str, Any]]]) -> list[tuple[Run, dict[str, Any]]]:
    """The result of the furthest run of each seed group: the curve is that of the group."""
    furthest: dict[tuple[str, str], tuple[Run, dict[str, Any]]] = {}
    for run, result in results:
        key = (run.group or str(run.pk), run.baseline)
        before = furthest.get(key)
        if before is None or result["curve"]["x"][-1] > before[1]["curve"]["x"][-1]:
            furthest[key] = (run, result)
    return list(furthest.values())


def in_nats(results: Sequence[dict[str, Any]]) -> bool:
    """Return whether differences are drawn as numbers: they and those in per cent have no common axis.

    Numbers, for losses near 0, are drawn if there is nothing else.
    """
    drawn = [result for result in results if result.get("curve", {}).get("x")]
    return bool(drawn) and all(result.get("unit") == "nats" for result in drawn)


def _delta_curve(run: Run, arms: ArmReader, result: dict[str, Any], curve: dict[str, Any]) -> DeltaCurve:
    x, delta, low, high = (np.asarray(curve[key], np.float64) for key in ("x", "delta", "low", "high"))
    window = result.get("window")
    return DeltaCurve(
        name=run.name,
        slot=arms.of(run).slot,
        x=x,
        delta=delta,
        low=low,
        high=high,
        tolerance=result.get("tolerance"),
        window=(window[0], window[1]) if window else None,
    )


def _tensors(runs: Sequence[Run], query: QueryDict, options: Options) -> AnyChart:
    pair = tensor_pair(runs_with_tensors(runs), query)
    if pair is None:
        return EmptyChart(
            "The map needs two runs with statistics of tensors: FP8 runs, or BF16 runs in shadow mode."
        )
    a, b = pair
    common = common_statistics(a, b)
    if not common:
        return EmptyChart(f"{a.name} and {b.name} have no statistic in common.")
    statistic = query.get("statistic", "")
    if statistic not in common:
        statistic = most_different_statistic(a, b, common, first=options.first, last=options.last)
    compared = difference_map(a, b, statistic, first=options.first, last=options.last)
    if compared is None:
        return EmptyChart(f"{a.name} and {b.name} have no tensor and step in common with this statistic.")
    if not compared.names:
        return EmptyChart(f"{count_text(compared.compared)} tensors are equal in both runs.")
    drawn = difference_figure(
        compared.names,
        compared.step_edges,
        compared.values,
        statistic,
        options.theme,
        is_rate=compared.is_rate,
        runs=(a.name, b.name),
        compact=options.compact,
    )
    row = compared.values[0]
    column = int(np.nanargmax(np.abs(row)))
    size = f"{number(row[column])}" if compared.is_rate else f"a factor of 2^{number(row[column], 3)}"
    more = compared.different - len(compared.names)
    summary = (
        f"{b.name} against {a.name}: {compared.names[0]} differs most, by {size} near step "
        f"{count_text(int(compared.step_edges[column]))}. {count_text(compared.different)} of "
        f"{count_text(compared.compared)} tensors differ in {glossary.title(statistic)}"
        + (f"; the {len(compared.names)} that differ most are shown." if more else ".")
    )
    return Chart(drawn, summary)
