"""Collect the scales of all ranks, and compare them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from fp8scope_dashboard.alerts import rules
from fp8scope_dashboard.alerts.alert_updates import Detection
from fp8scope_dashboard.alerts.detectors import State, scale_disagreement
from fp8scope_dashboard.alerts.detectors.rank_scales import EVERY
from fp8scope_dashboard.alerts.models import Rule, RuleKind
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.telemetry.codec import ChunkData, Float64s, Int64s


@dataclass
class RankScales:
    """The scales that were read of each rank of the latest attempt."""

    ranks: Collection[int]
    read: dict[int, list[tuple[Int64s, Float64s]]] = field(default_factory=dict)

    def add(self, rank: int, catalogue: Sequence[int], rows: ChunkData) -> None:
        """Keep the scales of the steps that are compared, float64[R, n] by Tensor.index."""
        if len(self.ranks) < 2 or rank not in self.ranks or "scale" not in rows.statistics:
            return
        chosen = rows.steps % EVERY == 0
        scales = rows.statistics["scale"][chosen]
        columns = np.asarray(catalogue, np.int64)[: scales.shape[1]]
        by_index = np.full((len(scales), int(columns.max(initial=-1)) + 1), np.nan)
        by_index[:, columns] = scales[:, : len(columns)]
        self.read.setdefault(rank, []).append((rows.steps[chosen], by_index))

    def judge(
        self, run: Run, enabled: Collection[Rule], states: State, generation: str
    ) -> tuple[list[Detection], dict[str, str]]:
        """The findings, and why streams have ended. Updates `states`, by the rules' ids."""
        judged = [rule for rule in enabled if rule.kind == RuleKind.SCALE_DISAGREEMENT]
        if not self.read or not judged:
            return [], {}
        detections: list[Detection] = []
        ended: dict[str, str] = {}
        names = dict(Tensor.objects.filter(run=run).values_list("index", "name"))
        columns = [names.get(i, f"tensor {i}") for i in range(max(names, default=-1) + 1)]
        rows = {rank: _joined(parts, len(columns)) for rank, parts in self.read.items()}
        for rule in judged:
            before = states.get(str(rule.pk), {})
            if before.get("generation", generation) != generation:
                ended[_stream(before["generation"])] = "The training continued in another process."
                before = {}
            parameters = rules.saved_parameters(rule.kind, rule.parameters)
            after, findings = scale_disagreement(
                before.get("detector", {}), rows, sorted(self.ranks), columns, parameters
            )
            states[str(rule.pk)] = {"generation": generation, "detector": after}
            detections += [Detection(rule, finding, _stream(generation), generation) for finding in findings]
        return detections, ended


def _stream(generation: str) -> str:
    return f"ranks/{generation}"


def _joined(parts: Sequence[tuple[Int64s, Float64s]], n: int) -> tuple[Int64s, Float64s]:
    scales = np.full((sum(len(steps) for steps, _ in parts), n), np.nan)
    first = 0
    for steps, matrix in parts:
        scales[first : first + len(steps), : matrix.shape[1]] = matrix[:, :n]
        first += len(steps)
    return np.concatenate([steps for steps, _ in parts]), scales
