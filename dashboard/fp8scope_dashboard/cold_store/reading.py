"""Read bodies from the cold store: from the cache, and the others by few requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from fp8scope_dashboard.cold_store.cache import cache_in
from fp8scope_dashboard.cold_store.errors import ColdStoreError, ColdValuesLostError
from fp8scope_dashboard.cold_store.locations import BodyLocation, file_name
from fp8scope_dashboard.cold_store.object_store import FileRange, configured, object_store

Body = bytes | memoryview
# Bodies that are at most this far apart are read by one request, of at most so many bytes.
MAX_GAP: Final = 64 << 10
MAX_REQUEST_BYTES: Final = 16 << 20


@dataclass
class _Request:
    """Neighbouring locations of one file, by their offsets, and where their last body ends."""

    locations: list[BodyLocation] = field(default_factory=list)
    end: int = 0

    def takes(self, location: BodyLocation) -> bool:
        first = self.locations[0]
        return (
            location.file == first.file
            and location.offset - self.end <= MAX_GAP
            and location.offset + location.size - first.offset <= MAX_REQUEST_BYTES
        )

    def add(self, location: BodyLocation) -> None:
        self.locations.append(location)
        self.end = max(self.end, location.offset + location.size)


def read_bodies(run_id: UUID, locations: Sequence[BodyLocation], *, cached: bool = True) -> list[Body]:
    """Return the body of each location. All of them are in memory at once.

    With `cached` false, they are read from the store itself, and not kept.

    Raises:
        ColdStoreAwayError: the store does not answer.
        ColdValuesLostError: a body is missing, or not what was stored.
    """
    try:
        bodies = _from_cache(locations) if cached else {}
        missing = sorted({location for location in locations if location not in bodies}, key=_position)
        bodies |= _from_store(run_id, missing, cached=cached)
    except ColdStoreError as error:
        error.run_id = run_id
        raise
    return [bodies[location] for location in locations]


def _from_cache(locations: Sequence[BodyLocation]) -> dict[BodyLocation, Body]:
    chosen = configured()
    if not chosen.cache_bytes:
        return {}
    cache = cache_in(chosen.folder / "cache", chosen.cache_bytes)
    bodies: dict[BodyLocation, Body] = {}
    for location in locations:
        body = cache.get(location.digest)
        if body is not None and location.fits(body):
            bodies[location] = body
    return bodies


def _from_store(run_id: UUID, locations: Sequence[BodyLocation], *, cached: bool) -> dict[BodyLocation, Body]:
    if not locations:
        return {}
    chosen = configured()
    cache = cache_in(chosen.folder / "cache", chosen.cache_bytes)
    requests = _requests(locations)
    ranges = [
        FileRange(
            file_name(run_id, request.locations[0].file),
            request.locations[0].offset,
            request.end - request.locations[0].offset,
        )
        for request in requests
    ]
    bodies: dict[BodyLocation, Body] = {}
    for request, content in zip(requests, object_store().read(ranges), strict=True):
        view, begin = memoryview(content), request.locations[0].offset
        for location in request.locations:
            body = view[location.offset - begin : location.offset - begin + location.size]
            if not location.fits(body):
                raise ColdValuesLostError(
                    f"has damaged values in the file {file_name(run_id, location.file)}"
                )
            if cached and chosen.cache_bytes:
                cache.put(location.digest, body)
            bodies[location] = body
    return bodies


def _requests(locations: Sequence[BodyLocation]) -> list[_Request]:
    """Join neighbouring locations, which are ordered by file and offset."""
    requests: list[_Request] = []
    for location in locations:
        if not requests or not requests[-1].takes(location):
            requests.append(_Request())
        requests[-1].add(location)
    return requests


def _position(location: BodyLocation) -> tuple[bytes, int]:
    return location.file, location.offset
