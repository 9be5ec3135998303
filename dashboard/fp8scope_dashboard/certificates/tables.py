"""Loss curves in a CSV or Parquet file, for certificates of runs that no server has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from fp8scope_dashboard.analysis.loss_coverage import RunStanding
from fp8scope_dashboard.analysis.losses.alignment import LossCurve
from fp8scope_dashboard.certificates.claim import MAX_ARM
from fp8scope_dashboard.certificates.errors import CertificateError
from fp8scope_dashboard.certificates.members import MAX_POINTS, Member
from fp8scope_dashboard.wire.standard_names import STANDARD

MAX_FILE_BYTES: Final = 2 << 30
MAX_ROWS: Final = 64_000_000
pc: Any = pyarrow.compute
"""Its types do not know the columns of tables."""

RUN: Final = ("run", "run_id", "run_name", "name")
STEP: Final = ("step", "steps", "_step", "iteration", "global_step")
LOSS: Final = (*STANDARD["loss"], "val_loss", "val/loss")
TOKENS: Final = ("tokens",)
GROUP: Final = ("group", "arm")
NAMED: Final = 8
MAX_NAMED: Final = 3
"""Names of a column that an error message has."""


def read_table(path: Path) -> pa.Table:
    """Read a file with one row for each run and step.

    Columns: a run's name (RUN), a step (STEP), a loss (LOSS), and, if they are known, the run's group (GROUP)
    and tokens. Names of columns ignore case. CSV may be compressed with gzip.

    Raises CertificateError if the file cannot be read, or lacks a column.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CertificateError(f"{path} is larger than {MAX_FILE_BYTES >> 30} GiB")
        if path.suffix.lower() in (".parquet", ".pq"):
            table = pa.parquet.read_table(path)
        else:
            table = pa.csv.read_csv(path)
    except (OSError, pa.ArrowException) as error:
        raise CertificateError(f"{path} cannot be read: {str(error).splitlines()[0][:300]}") from None
    if table.num_rows > MAX_ROWS:
        raise CertificateError(f"{path} has more than {MAX_ROWS:,} rows")
    return table.rename_columns([name.strip().lower() for name in table.column_names])


def arm_of(table: pa.Table, name: str, loss: str = "") -> list[Member]:
    """Return the runs of a group, or those that `name` lists, separated by commas, by name.

    `loss`: the column with the loss, in place of those of LOSS.

    Raises CertificateError if there is none, or if a run has two losses for a step.
    """
    runs = _column(table, RUN, "the name of its run").cast(pa.string())
    groups = _optional(table, GROUP)
    members: list[str] = []
    if groups is not None:
        chosen = pc.equal(groups.cast(pa.string()), name)
        members = sorted(pc.unique(runs.filter(chosen)).drop_null().to_pylist())
    if not members:
        wanted = [part.strip() for part in name.split(",") if part.strip()]
        stored = set(pc.unique(runs).to_pylist())
        members = wanted if wanted and set(wanted) <= stored else []
    if not members:
        raise CertificateError(_none_named(name, runs, groups))
    if len(members) > MAX_ARM:
        raise CertificateError(f"{name!r} has {len(members)} runs; a certificate takes at most {MAX_ARM}")
    return [_member(table.filter(pc.equal(runs, member)), member, loss) for member in members]


def _none_named(name: str, runs: Any, groups: Any) -> str:
    listed = groups if groups is not None else runs
    names = [str(value) for value in pc.unique(listed).to_pylist()[:NAMED]]
    kind = "groups" if groups is not None else "runs"
    return f"no run or group of the file is named {name!r:.200}; its first {kind}: {', '.join(names)}"


def _member(rows: pa.Table, name: str, loss: str) -> Member:
    steps = _numbers(_column(rows, STEP, "a step"), "step")
    losses = _numbers(_column(rows, (loss.strip().lower(),) if loss else LOSS, "a loss"), "loss")
    tokens = _optional(rows, TOKENS)
    order = np.argsort(steps, kind="stable")
    steps, losses = steps[order], losses[order]
    if not len(steps) or len(steps) > MAX_POINTS:
        raise CertificateError(f"run {name!r:.200} has {len(steps):,} rows, and not 1 to {MAX_POINTS:,}")
    if not np.isfinite(steps).all() or (steps < 0).any() or (steps != np.floor(steps)).any():
        raise CertificateError(f"run {name!r:.200} has a step that is no whole number")
    if (np.diff(steps) <= 0).any():
        raise CertificateError(f"run {name!r:.200} has two losses for a step")
    last = int(steps[-1])
    curve = LossCurve(
        steps=steps.astype(np.int64),
        losses=losses,
        tokens=None if tokens is None else _numbers(tokens, "tokens")[order],
        planned=last,
        name=name,
    )
    # A file has runs that are over.
    return Member(curve=curve, standing=RunStanding(state="finished", reached=last, planned=None))


def _column(table: pa.Table, names: Sequence[str], what: str) -> Any:
    column = _optional(table, names)
    if column is None:
        raise CertificateError(
            f"the file has no column for {what}: name it {' or '.join(names[:MAX_NAMED])}. It has "
            f"{', '.join(table.column_names)[:300]}"
        )
    return column


def _optional(table: pa.Table, names: Sequence[str]) -> Any:
    name = next((name for name in names if name in table.column_names), None)
    return None if name is None else table.column(name)


def _numbers(column: Any, name: str) -> Any:
    try:
        values = pc.cast(column, pa.float64())
    except pa.ArrowException:
        raise CertificateError(f"the column {name!r} has a value that is no number") from None
    return values.to_numpy(zero_copy_only=False).astype(np.float64)
