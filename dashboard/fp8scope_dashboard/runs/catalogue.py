"""Register the tensors of writers, and map them to the tensors of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from django.db import transaction

from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Run, Tensor, Writer
from fp8scope_dashboard.runs.services import reopen, writer_of
from fp8scope_dashboard.wire import limits


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor as described by a writer; see `runs.models.Tensor`."""

    name: str
    module: str
    role: str
    format: str
    shape: tuple[int, ...]
    numel: int


class CatalogueGapError(Exception):
    """Entries before the offset are missing. `length` is the length of the stored catalogue."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.length = length


class CatalogueConflictError(Exception):
    """A different entry is already stored at `position`."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class RepeatedTensorError(Exception):
    """The catalogue would contain the tensor `name` twice."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class TooManyTensorsError(Exception):
    """The run would have more than limits.TENSORS tensors."""


@transaction.atomic
def extend(
    run: Run,
    writer_uuid: UUID,
    offset: int,
    entries: Sequence[TensorEntry],
    *,
    rank: int,
    hostname: str,
    attempt: int = 0,
    imported: bool = False,
) -> int:
    """Append entries to the catalogue of a writer and return its length.

    Entries that are already stored must be equal. Tensors of the same name are the same tensor of the run,
    whichever writers register them.

    Raises:
        CatalogueGapError, CatalogueConflictError, RepeatedTensorError, TooManyTensorsError: see the classes.
        runs.services.TooManyWritersError: the run already has the maximum number of writers.
    """
    # Lock the writer before the run, in the same order as ingest.
    stored = writer_of(run, writer_uuid)
    writer = Writer.objects.select_for_update(no_key=True).get(run=run, pk=stored.pk)
    Run.objects.select_for_update(no_key=True).get(pk=run.pk)
    length = len(writer.catalogue)
    if offset > length:
        raise CatalogueGapError(length)
    by_name = dict(Tensor.objects.filter(run=run).values_list("name", "index"))
    overlap = min(length - offset, len(entries))
    for i, entry in enumerate(entries[:overlap], start=offset):
        if by_name.get(entry.name) != writer.catalogue[i]:
            raise CatalogueConflictError(i)
    new_entries = entries[overlap:]
    _add_tensors(run, by_name, new_entries)
    indices = set(writer.catalogue)
    for entry in new_entries:
        if by_name[entry.name] in indices:
            raise RepeatedTensorError(entry.name)
        indices.add(by_name[entry.name])
    writer.catalogue = [*writer.catalogue, *(by_name[entry.name] for entry in new_entries)]
    is_new_attempt = attempt > writer.attempt
    writer.rank, writer.hostname, writer.attempt, writer.imported = rank, hostname, attempt, imported
    Writer.objects.filter(run=run, pk=writer.pk).update(
        catalogue=writer.catalogue, rank=rank, hostname=hostname, attempt=attempt, imported=imported
    )
    if is_new_attempt:
        reopen(run, writer)
    if new_entries:
        run_changed(run.id, run.project_id, "tensors")
    return len(writer.catalogue)


def _add_tensors(run: Run, indices: dict[str, int], entries: Sequence[TensorEntry]) -> None:
    """Store tensors that are new to the run, and add their index to `known`."""
    new: list[Tensor] = []
    for entry in entries:
        if entry.name not in indices:
            indices[entry.name] = len(indices)
            new.append(
                Tensor(
                    run=run,
                    index=indices[entry.name],
                    name=entry.name,
                    module=entry.module,
                    role=entry.role,
                    format=entry.format,
                    shape=list(entry.shape),
                    numel=entry.numel,
                )
            )
    if len(indices) > limits.TENSORS:
        raise TooManyTensorsError
    Tensor.objects.bulk_create(new, batch_size=1000)
