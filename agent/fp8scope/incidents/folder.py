"""The folder of an incident: what the flight recorder kept, as files that another process can read.

| file             | content                                                                            |
|------------------|------------------------------------------------------------------------------------|
| `incident.json`  | why and when, the run, the steps, the tensors' names, the batches' places and hashes |
| `rows`           | the rows of the steps, framed as in a spool                                         |
| `random.pt`      | torch's random state at the end of each of the last steps                           |
| `snapshot-N.pt`  | the state of the training after step N, where snapshots are allowed                 |
| `batches-N.pt`   | the batches drawn after step N, where snapshots are allowed                         |
| `replay.json`    | the result of `fp8scope replay`                                                     |
"""

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fp8scope.recording.records import (
    FRAME,
    MAX_PAYLOAD,
    RecordKind,
    Row,
    TornRecordError,
    check_frame,
    frame,
)

VERSION = 1
MAX_DOCUMENT = 64 << 20


class IncidentError(ValueError):
    """The folder is no incident, or a file in it cannot be read; the message says which."""


@dataclass
class Contents:
    """The content of an incident. Nothing in it changes any more."""

    document: dict[str, Any]
    rows: Sequence[bytes]
    random: Sequence[tuple[int, Any]] = ()
    snapshots: Mapping[int, Any] = field(default_factory=dict)
    """By the step after which they were taken."""
    batches: Mapping[int, Sequence[Any]] = field(default_factory=dict)
    """`KeptBatch`es by the step after which they were drawn."""


def write(contents: Contents, folder: Path) -> int:
    """Write an incident to `folder`, which appears only when it is complete. Returns its size in bytes."""
    draft = folder.with_name(folder.name + ".part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True, mode=0o700)
    try:
        with (draft / "rows").open("wb") as file:
            for payload in contents.rows:
                file.write(frame(RecordKind.ROW, payload) + payload)
        if contents.random or contents.snapshots or contents.batches:
            # Only a script that has imported torch has any of these.
            import torch

            torch.save([list(entry) for entry in contents.random], draft / "random.pt")
            for step, snapshot in contents.snapshots.items():
                torch.save(snapshot, draft / f"snapshot-{step}.pt")
            for step, batch in contents.batches.items():
                torch.save([[stored.batch, stored.random] for stored in batch], draft / f"batches-{step}.pt")
        document = {"version": VERSION, **contents.document}
        (draft / "incident.json").write_text(json.dumps(document, indent=1, default=str))
        os.replace(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return sum(file.stat().st_size for file in folder.iterdir())


class StoredIncident:
    """An incident that is read from its folder. Raises IncidentError if it cannot be."""

    def __init__(self, folder: Path, *, trust: bool = False) -> None:
        self.folder = folder
        self._trust = trust
        path = folder / "incident.json"
        try:
            if path.stat().st_size > MAX_DOCUMENT:
                raise IncidentError(f"{path} is larger than {MAX_DOCUMENT >> 20} MiB.")
            document = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise IncidentError(f"{folder} is not the folder of an incident ({error}).") from None
        if not isinstance(document, dict) or document.get("version") != VERSION:
            raise IncidentError(f"{path} has another version than {VERSION}: use the fp8scope that wrote it.")
        self.document: dict[str, Any] = document

    @cached_property
    def rows(self) -> list[Row]:
        """The kept steps, oldest first."""
        rows: list[Row] = []
        with (self.folder / "rows").open("rb") as file:
            while header := file.read(FRAME.size):
                try:
                    length = FRAME.unpack(header)[0]
                    if length > MAX_PAYLOAD:
                        raise TornRecordError("a row is too long")
                    payload = file.read(length)
                    check_frame(header, payload)
                    rows.append(Row.decode(payload))
                except (TornRecordError, Exception) as error:
                    raise IncidentError(f"{self.folder / 'rows'} is damaged: {error}.") from None
        return rows

    def row(self, step: int) -> Row | None:
        """The row of a step, from its last attempt."""
        return next((row for row in reversed(self.rows) if row.step == step), None)

    @property
    def target(self) -> int:
        """The step that the incident is about."""
        return int(self.document["target"])

    @property
    def last_step(self) -> int:
        """The last of the kept steps."""
        return self.rows[-1].step

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of batches, oldest first; see `fp8scope.incidents.batches.Group`."""
        return list(self.document["groups"])

    def group_of(self, step: int) -> dict[str, Any] | None:
        """The group of batches that step `step` trained on."""
        return next((group for group in reversed(self.groups) if group["after_step"] < step), None)

    @property
    def snapshots(self) -> list[int]:
        """The steps after which there is a snapshot."""
        return [int(step) for step in self.document["snapshots"]]

    def snapshot(self, step: int) -> Any:
        """The state of the training after this step."""
        return self._load(f"snapshot-{step}.pt")

    def batches(self, after_step: int) -> list[list[Any]]:
        """Pairs of a batch and the random state after it, of the group drawn after this step."""
        return list(self._load(f"batches-{after_step}.pt"))

    def has_batches(self, after_step: int) -> bool:
        """Return whether the batches drawn after this step were kept."""
        return (self.folder / f"batches-{after_step}.pt").is_file()

    def random(self, step: int) -> Any:
        """torch's random state at the end of a step; None if it is not kept."""
        if not (self.folder / "random.pt").is_file():
            return None
        states = {int(number): state for number, state in self._load("random.pt")}
        return states.get(step)

    def result(self) -> dict[str, Any] | None:
        """The result of the latest replay, if there was one."""
        path = self.folder / "replay.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def _load(self, name: str) -> Any:
        import numpy
        import torch

        # A batch may hold NumPy arrays. Other objects of Python would run code when they are read.
        rebuild = numpy.zeros(0).__reduce__()[0]
        allowed: list[Any] = [rebuild, numpy.ndarray, numpy.dtype]
        allowed += [type(numpy.dtype(code)) for code in "?bhilqBHILQefd"]
        try:
            with torch.serialization.safe_globals(allowed):
                return torch.load(self.folder / name, weights_only=not self._trust)
        except Exception as error:
            why = str(error).split("\n")[0][:300]
            raise IncidentError(
                f"{self.folder / name} cannot be read ({why}). If it holds objects of Python and you trust "
                "its origin, pass --trust."
            ) from None


def target_of(rows: Sequence[Row], onset: int | None) -> int:
    """The step to replay: the alert's onset, else the first loss that is not finite, else the last step.

    Of an onset before the first step, that is the first: it is the nearest that can be replayed. An onset
    between two steps that were recorded is at the later one.
    """
    steps = [row.step for row in rows]
    if onset is not None and onset <= steps[-1]:
        return next(step for step in steps if step >= onset)
    for row in rows:
        if not math.isfinite(row.scalars.get("loss", 0.0)):
            return row.step
    return steps[-1]
