"""Asks a server for what it has of a run whose file has grown, and finds what of a table it has not."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fp8scope.client.connection import ClientError, Connection
from fp8scope.client.media import read_media
from fp8scope.client.reading import read_every_step
from fp8scope.importing.model import Steps, ValueTable
from fp8scope.importing.posting import TransferError

_NOTHING: Final[Steps] = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class StoredValues:
    """Values of a run that the server has.

    Attributes:
        scalars: the steps of each scalar, of all ranks and attempts together.
        evaluations: name, metric and step of each score.
        media: name, step and SHA-256 of each media.
        attempts: the first step of each start of the training; None of one without rows.
        ranks: the last step of each rank of the latest attempt.
        last_step: -1 without rows.
        unreported_rows, unreported_points: stored, and not reported as sent by any process.
    """

    scalars: Mapping[str, Steps]
    evaluations: frozenset[tuple[str, str, int]]
    attempts: Mapping[int, int | None]
    ranks: Mapping[int, int]
    last_step: int
    state: str
    unreported_rows: int
    unreported_points: int
    media: frozenset[tuple[str, int, str]] = frozenset()

    def rest_of(self, table: ValueTable, attempt: int) -> ValueTable | None:
        """Return what of a table is new; None if nothing is. `attempt` is that of its process."""
        if attempt not in self.attempts:
            return table
        later = [first for number, first in self.attempts.items() if number > attempt and first is not None]
        if later:
            # These rows are stored, and left out of all results: the training went back before them.
            visible = _rows(table, table.steps < min(later))
            return None if visible is None else self._without(visible)
        if len(self.ranks) > 1:
            # Series have the values of all ranks together. A rank writes in the order of its steps.
            return _rows(table, table.steps > self.ranks.get(table.rank, -1))
        return self._without(table)

    def _without(self, table: ValueTable) -> ValueTable | None:
        missing, scalars, keep = dict(table.missing), {}, np.zeros(len(table), np.bool_)
        for name, values in table.scalars.items():
            stored = self.scalars.get(name, _NOTHING)
            absent = np.isin(table.steps, stored)
            if name in table.missing:
                absent = absent | table.missing[name]
            if not absent.all():
                scalars[name], missing[name] = values, absent
                keep = keep | ~absent
        late = table.steps > self.last_step
        statistics = {
            name: np.where(late[:, None], values, np.nan) for name, values in table.statistics.items()
        }
        if statistics:
            keep = keep | late
        trimmed = replace(
            table,
            scalars=scalars,
            missing={name: missing[name] for name in scalars},
            statistics=statistics if late.any() else {},
        )
        return _rows(trimmed, keep)


def _rows(table: ValueTable, keep: NDArray[np.bool_]) -> ValueTable | None:
    """Some rows of a table; None for none."""
    if keep.all():
        return table
    if not keep.any():
        return None
    return replace(
        table,
        steps=table.steps[keep],
        times=None if table.times is None else table.times[keep],
        scalars={name: values[keep] for name, values in table.scalars.items()},
        missing={name: values[keep] for name, values in table.missing.items()},
        statistics={name: values[keep] for name, values in table.statistics.items()},
    )


def read_stored(connection: Connection, run_id: str) -> StoredValues:
    """Ask the server what it has of a run.

    Raises:
        TransferError: the token may not read the run.
    """
    try:
        run = connection.json(f"/runs/{run_id}")
        listed = connection.json(f"/runs/{run_id}/scalars")["scalars"]
        names = [str(entry["name"]) for entry in listed]
        series = {
            name: read_every_step(connection, run_id, {"scalar": name}, None, None).steps for name in names
        }
        scores = connection.json(f"/runs/{run_id}/evaluations")["scores"]
        ranks = connection.json(f"/runs/{run_id}/ranks")["ranks"]
        media = list(read_media(connection, f"/runs/{run_id}/media", {}))
    except ClientError as error:
        raise TransferError(
            f"the file has changed since it was imported, and what is stored cannot be read: {error}. "
            "Use the token that it was imported with, or one with the scope read.",
            error.code,
        ) from error
    return StoredValues(
        scalars=series,
        media=frozenset((item.name, item.step, item.sha256) for item in media),
        evaluations=frozenset((row["name"], row["metric"], int(row["step"])) for row in scores),
        attempts={int(start["attempt"]): start["first_step"] for start in run["attempts"]},
        ranks={
            int(rank["rank"]): -1 if rank["last_step"] is None else int(rank["last_step"]) for rank in ranks
        },
        last_step=-1 if run["last_step"] is None else int(run["last_step"]),
        state=str(run["state"]),
        unreported_rows=int(run["rows_stored"]) - int(run["rows_sent"] or 0),
        unreported_points=int(run["points_stored"]) - int(run["points_sent"] or 0),
    )
