"""Check that everything which was moved into the cold store can be read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from fp8scope_dashboard.cold_store.errors import ColdValuesLostError
from fp8scope_dashboard.cold_store.locations import BodyLocation, file_name
from fp8scope_dashboard.cold_store.object_store import object_store
from fp8scope_dashboard.cold_store.reading import read_bodies
from fp8scope_dashboard.telemetry.cold.returning import cold_rows, runs_in_store
from fp8scope_dashboard.telemetry.cold.tables import TABLES
from fp8scope_dashboard.telemetry.models import ColdFile

LISTING_SECONDS: Final = 120.0


@dataclass(kw_only=True)
class ColdCheck:
    """The result of a check.

    Attributes:
        files: files in the store that the database lists.
        bodies, bytes: those that were read, and are what was stored.
        missing: names of files that are not in the store.
        lost: for each file, the number of bodies that are not what was stored, or not there.
        unknown, unknown_bytes: files in the store that the database does not list.
    """

    files: int = 0
    bodies: int = 0
    bytes: int = 0
    missing: list[str] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    unknown: int = 0
    unknown_bytes: int = 0


def check_store() -> ColdCheck:
    """Read every body in the cold store.

    Raises:
        ColdStoreAwayError: the store does not answer.
    """
    # The store first: each file of it was registered before it was written.
    there = {file.name: file.bytes for file in object_store().files(LISTING_SECONDS)}
    listed = {
        file_name(run_id, bytes(digest))
        for run_id, digest in ColdFile.objects.values_list("run_id", "digest")
    }
    result = ColdCheck(files=len(there.keys() & listed))
    unknown = there.keys() - listed
    result.unknown, result.unknown_bytes = len(unknown), sum(there[name] for name in unknown)
    for run_id in runs_in_store():
        for table in TABLES:
            for rows in cold_rows(run_id, table):
                _check(run_id, [location for _, location in rows], result)
    result.missing = sorted(name for name in result.lost if name not in there)
    return result


def _check(run_id: UUID, locations: list[BodyLocation], result: ColdCheck) -> None:
    """Read bodies together, and one after the other if any of them is lost."""
    try:
        read_bodies(run_id, locations, cached=False)
    except ColdValuesLostError:
        if len(locations) > 1:
            for location in locations:
                _check(run_id, [location], result)
        else:
            result.lost[file_name(run_id, locations[0].file)] += 1
        return
    result.bodies += len(locations)
    result.bytes += sum(location.size for location in locations)
