"""The tensors that a writer numbers, and their places in the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from django.db import transaction

from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.runs.models import Run, Tensor, Writer
from fp8scope_dashboard.runs.services import reopen, writer_of
from fp8scope_dashboard.wire import limits


@dataclass(frozen=True)
class TensorEntry:
    """A tensor as a writer describes it; see runs.models.Tensor."""

    name: str
    module: str
    role: str
    format: str
    shape: tuple[int, ...]
    numel: int


class CatalogueGapError(Exception):
    """Entries before these are missing. `length` is that of the stored catalogue."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.length = length


class CatalogueConflictError(Exception):
    """An entry that is stored already is another one. `position` is its place."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class RepeatedTensorError(Exception):
    """The writer's catalogue would hold a tensor twice."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class TooManyTensorsError(Exception):
    """The run would have more than limits.TENSORS."""


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
    """Append entries to the writer's catalogue; those that it has must be the same. Returns its length.

    A tensor that another writer has registered by the same name is the same tensor of the run.

    Raises:
        CatalogueGapError, CatalogueConflictError, RepeatedTensorError, TooManyTensorsError: see there.
        runs.services.TooManyWritersError: the writer would be one too many.
    """
    # Always the writer before the run: the order in which ingest takes its locks.
    writer = Writer.objects.select_for_update(no_key=True).get(pk=writer_of(run, writer_uuid).pk)
    Run.objects.select_for_update(no_key=True).get(pk=run.pk)
    length = len(writer.catalogue)
    if offset > length:
        raise CatalogueGapError(length)
    known = dict(Tensor.objects.filter(run=run).values_list("name", "index"))
    overlap = min(length - offset, len(entries))
    for i, entry in enumerate(entries[:overlap], start=offset):
        if known.get(entry.name) != writer.catalogue[i]:
            raise CatalogueConflictError(i)
    fresh = entries[overlap:]
    _add_tensors(run, known, fresh)
    places = set(writer.catalogue)
    for entry in fresh:
        if known[entry.name] in places:
            raise RepeatedTensorError(entry.name)
        places.add(known[entry.name])
    writer.catalogue = [*writer.catalogue, *(known[entry.name] for entry in fresh)]
    is_new_attempt = attempt > writer.attempt
    writer.rank, writer.hostname, writer.attempt, writer.imported = rank, hostname, attempt, imported
    writer.save(update_fields=["catalogue", "rank", "hostname", "attempt", "imported"])
    if is_new_attempt:
        reopen(run, writer)
    if fresh:
        run_changed(run.id, run.project_id, "tensors")
    return len(writer.catalogue)


def _add_tensors(run: Run, known: dict[str, int], entries: Sequence[TensorEntry]) -> None:
    """Store the tensors that the run does not know yet, and add them to `known`."""
    new: list[Tensor] = []
    for entry in entries:
        if entry.name not in known:
            known[entry.name] = len(known)
            new.append(
                Tensor(
                    run=run,
                    index=known[entry.name],
                    name=entry.name,
                    module=entry.module,
                    role=entry.role,
                    format=entry.format,
                    shape=list(entry.shape),
                    numel=entry.numel,
                )
            )
    if len(known) > limits.TENSORS:
        raise TooManyTensorsError
    Tensor.objects.bulk_create(new, batch_size=1000)
