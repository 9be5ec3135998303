"""Runs of files, read to their end without a server."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8scope.importing.model import SourceEvaluation, SourceMedia, SourceRun, ValueTable
from fp8scope.importing.registry import format_named, sources_of
from fp8scope.importing.source import ImportSource


@dataclass
class ReadRun:
    """A run and its parts."""

    run: SourceRun
    tables: list[ValueTable]
    evaluations: list[SourceEvaluation]
    media: list[SourceMedia]

    def series(self, name: str) -> dict[int, float]:
        """The values of a scalar by step; of several at one step the last.

        Those that a later start of the training has gone back before are left out.
        """
        values: dict[int, float] = {}
        attempt = 0
        for table in self.tables:
            if table.attempt > attempt:
                attempt = table.attempt
                values = {step: value for step, value in values.items() if step < table.steps[0]}
            if name in table.scalars:
                for row, step in enumerate(table.steps.tolist()):
                    if name not in table.missing or not table.missing[name][row]:
                        values[step] = float(table.scalars[name][row])
        return values

    @property
    def names(self) -> set[str]:
        return {name for table in self.tables for name in table.scalars if self.series(name)}

    def statistic(self, name: str, tensor: str) -> dict[int, float]:
        """The values of a tensor's statistic by step."""
        values: dict[int, float] = {}
        for table in self.tables:
            names = [entry.name for entry in table.tensors]
            if name in table.statistics and tensor in names:
                column = table.statistics[name][:, names.index(tensor)]
                values |= {
                    step: value
                    for step, value in zip(table.steps.tolist(), column.tolist(), strict=True)
                    if not math.isnan(value)
                }
        return values


def read(path: Path, name: str = "", **options: Any) -> list[ReadRun]:
    """Read everything at a path, by a format or by that of the content."""
    runs = []
    sources = [(path, format_named(name))] if name else list(sources_of(path))
    for at, form in sources:
        for run in form.read(ImportSource(path=at, **options)):
            parts = list(run.parts)
            tables = [part for part in parts if isinstance(part, ValueTable)]
            evaluations = [part for part in parts if isinstance(part, SourceEvaluation)]
            media = [part for part in parts if isinstance(part, SourceMedia)]
            runs.append(ReadRun(run, tables, evaluations, media))
    return runs
