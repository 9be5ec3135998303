"""The rules of a run, and how the detector of rules that people write reads stored rows."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from fnmatch import translate
from functools import lru_cache
from typing import Any, Final, cast
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.detectors import ConditionChange, State, threshold
from fp8scope_dashboard.alerts.detectors.threshold import Condition
from fp8scope_dashboard.alerts.models import Rule, RuleKind
from fp8scope_dashboard.db import sql
from fp8scope_dashboard.db.replica import database
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry.codec import ChunkData
from fp8scope_dashboard.telemetry.rank_merge import derive, sources

# A rule follows at most so many tensors, the first of the catalogue that match its pattern.
MAX_TENSORS: Final = 2_000
MAX_RULES_KEPT: Final = 20_000
_FIELDS: Final = [field.attname for field in Rule._meta.concrete_fields]


# A version of a row has a transaction and a position of its own.
_VERSIONS: Final = """
    SELECT id, xmin::text || ctid::text FROM alerts_rule
    WHERE (run_id IS NULL AND project_id = ANY(%(projects)s)) OR run_id = ANY(%(runs)s) ORDER BY id
"""


class _Versions:
    """The rules that this process has read, with the version of their rows.

    Every evaluation needs the rules of its runs, which hardly ever change: asking for their versions takes a
    tenth of the time of reading them. Thread-safe.
    """

    def __init__(self, most: int = MAX_RULES_KEPT) -> None:
        self._most = most
        self._lock = threading.Lock()
        # By id: the version, and the values of the fields.
        self._rows: OrderedDict[int, tuple[str, list[Any]]] = OrderedDict()

    def rules(self, projects: list[int], runs: list[UUID]) -> list[Rule]:
        """The rules of projects and of runs as they are stored now, in the order of their ids."""
        versions = dict(sql.fetch(_VERSIONS, {"projects": projects, "runs": runs}))
        with self._lock:
            rows = {pk: self._rows[pk] for pk in versions if pk in self._rows}
        changed = [pk for pk, version in versions.items() if pk not in rows or rows[pk][0] != version]
        # What changes in between gets another version, and is read again the next time.
        for rule in Rule.objects.filter(pk__in=changed) if changed else ():
            rows[rule.pk] = versions[rule.pk], [getattr(rule, name) for name in _FIELDS]
        with self._lock:
            for pk in changed:
                if pk in rows:
                    self._rows[pk] = rows[pk]
                    self._rows.move_to_end(pk)
            while len(self._rows) > self._most:
                self._rows.popitem(last=False)
        return [Rule.from_db(database(), _FIELDS, rows[pk][1]) for pk in versions if pk in rows]


_versions: Final = _Versions()


def rules_of(run: Run) -> list[Rule]:
    """The enabled rules that apply to a run: its own, and its project's.

    A rule of the run with a built-in kind replaces the project's rule of this kind, also if it is disabled.
    """
    return rules_of_runs([run])[run.pk]


def rules_of_runs(runs: Sequence[Run]) -> dict[UUID, list[Rule]]:
    """The rules of several runs; see `rules_of`."""
    projects = {run.project_id for run in runs}
    stored = _versions.rules(sorted(projects), [run.pk for run in runs])
    of_project: dict[int, list[Rule]] = {project: [] for project in projects}
    of_run: dict[UUID, list[Rule]] = {run.pk: [] for run in runs}
    for rule in stored:
        if rule.run_id is None:
            of_project[rule.project_id].append(rule)
        else:
            of_run[rule.run_id].append(rule)
    return {run.pk: _applying(of_project[run.project_id], of_run[run.pk]) for run in runs}


def _applying(of_project: Sequence[Rule], of_run: Sequence[Rule]) -> list[Rule]:
    replaced = {rule.kind for rule in of_run if rules.kind_of(rule.kind).is_default}
    applying = [*(rule for rule in of_project if rule.kind not in replaced), *of_run]
    return [rule for rule in applying if rule.enabled]


def columns_read(own: Iterable[Rule]) -> tuple[set[str], set[str]]:
    """The scalars and the stored statistics of tensors that rules of kind THRESHOLD read."""
    scalars, statistics = set[str](), set[str]()
    for rule in own:
        if rule.kind == RuleKind.THRESHOLD and rule.tensors:
            statistics.update(sources(rule.statistic))
        elif rule.kind == RuleKind.THRESHOLD:
            scalars.add(rule.statistic)
    return scalars, statistics


def detect(
    rule: Rule, state: State, data: ChunkData, columns: Sequence[str], leads: bool
) -> tuple[State, list[ConditionChange]]:
    """Run the detector of a rule of kind THRESHOLD over new rows of one writer.

    Args:
        columns: the names of the tensors in the writer's catalogue.
        leads: whether the writer has the run's lowest rank; other ranks' scalars are those of their share.

    The state belongs to a definition: if the rule has changed, the detector starts again.
    """
    definition = [rule.statistic, rule.tensors, rule.condition, *sorted(rule.parameters.items())]
    is_same = state.get("definition") == _as_json(definition)
    before = state.get("detector", {}) if is_same else {}
    # The alert of the former definition would stay open for ever.
    ended = []
    if state.get("open") and not is_same and len(data):
        ended.append(
            ConditionChange(opened=False, onset_step=state["detector"]["onset_step"], step=int(data.steps[0]))
        )
    parameters = rules.saved_parameters(rule.kind, rule.parameters)
    condition = cast("Condition", rule.condition)
    if rule.tensors:
        names, values = _tensors(rule, data, columns)
        after, findings = (
            threshold(before, data.steps, values, names, condition, parameters, statistic=rule.statistic)
            if names
            else (before, [])
        )
    elif leads and rule.statistic in data.logged:
        logged = data.logged[rule.statistic]
        values = data.scalars[rule.statistic][logged][:, np.newaxis]
        after, findings = threshold(
            before, data.steps[logged], values, [rule.statistic], condition, parameters
        )
    else:
        after, findings = before, []
    # `open` is where the evaluation looks for it, whatever the detector.
    return {
        "definition": _as_json(definition),
        "detector": after,
        "open": bool(after.get("open")),
    }, [*ended, *findings]


def matches(pattern: str, name: str) -> bool:
    """Return whether a tensor's name matches a pattern.

    * for any characters, ? for one, [abc] for one of these.
    """
    return _compiled(pattern).match(name) is not None


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))


def _tensors(rule: Rule, data: ChunkData, columns: Sequence[str]) -> tuple[list[str], NDArray[np.float64]]:
    """The names of the tensors that match, and their values, float64[R, n]."""
    chosen = [i for i, name in enumerate(columns) if matches(rule.tensors, name)][:MAX_TENSORS]
    stored = {name: data.statistics.get(name) for name in sources(rule.statistic)}
    present = {name: array for name, array in stored.items() if array is not None}
    if not chosen or len(present) < len(stored):
        return [], np.empty((len(data), 0))
    values = {}
    for name, array in present.items():
        # A chunk from before the catalogue grew is narrower.
        values[name] = np.full((len(data), len(chosen)), np.nan)
        within = [k for k, i in enumerate(chosen) if i < array.shape[1]]
        values[name][:, within] = array[:, [chosen[k] for k in within]]
    return [columns[i] for i in chosen], derive(rule.statistic, values)


def _as_json(definition: Sequence[object]) -> list[object]:
    """As it is read back from the database: tuples become lists."""
    return [list(part) if isinstance(part, tuple) else part for part in definition]
