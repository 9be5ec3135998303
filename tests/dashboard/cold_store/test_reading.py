"""Bodies come from the cache, or by few requests; what is damaged is an error."""

from __future__ import annotations

import io
import uuid
from hashlib import sha256

import numpy as np
import pytest
from dashboard.helpers.object_stores import ColdFolder

from fp8scope_dashboard.cold_store import reading
from fp8scope_dashboard.cold_store.errors import ColdStoreError, ColdValuesLostError
from fp8scope_dashboard.cold_store.locations import BodyLocation, file_name
from fp8scope_dashboard.cold_store.object_store import FileRange, ObjectStore, object_store
from fp8scope_dashboard.cold_store.reading import read_bodies

RUN = uuid.UUID(int=7)
BODIES = [np.random.default_rng(number).bytes(1_000 + number) for number in range(20)]


def stored(bodies: list[bytes] = BODIES, run: uuid.UUID = RUN) -> list[BodyLocation]:
    """Put bodies into one file. Returns their locations."""
    content = b"".join(bodies)
    digest = sha256(content).digest()
    object_store().put(file_name(run, digest), io.BytesIO(content), len(content), digest)
    ends = np.cumsum([len(body) for body in bodies]).tolist()
    return [
        BodyLocation(digest, end - len(body), len(body), sha256(body).digest())
        for end, body in zip(ends, bodies, strict=True)
    ]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[FileRange]:
    """What is read from the store."""
    asked: list[FileRange] = []
    read = ObjectStore.read

    def counted(store: ObjectStore, ranges: list[FileRange]) -> list[bytes]:
        asked.extend(ranges)
        return read(store, ranges)

    monkeypatch.setattr(ObjectStore, "read", counted)
    return asked


def test_it_works(any_cold: ColdFolder, requests: list[FileRange]) -> None:
    locations = stored()
    shuffled = [locations[index] for index in np.random.default_rng(0).permutation(20).tolist()]
    shuffled.append(shuffled[0])
    expected = [BODIES[locations.index(location)] for location in shuffled]
    assert [bytes(body) for body in read_bodies(RUN, shuffled)] == expected
    # Neighbours are read together, and once.
    assert [(asked.offset, asked.size) for asked in requests] == [(0, sum(map(len, BODIES)))]
    assert [bytes(body) for body in read_bodies(RUN, shuffled)] == expected and len(requests) == 1
    read_bodies(RUN, shuffled, cached=False)
    assert len(requests) == 2


def test_what_is_far_apart_is_read_by_itself(
    cold: ColdFolder, requests: list[FileRange], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_GAP", 1_500)
    monkeypatch.setattr(reading, "MAX_REQUEST_BYTES", 4_000)
    locations = stored()
    chosen = [locations[index] for index in (0, 2, 6, 7, 8, 9)]
    bodies = read_bodies(RUN, chosen)
    assert [bytes(body) for body in bodies] == [BODIES[index] for index in (0, 2, 6, 7, 8, 9)]
    # 0 to 2, then 6 to 8; 9 would make it too large.
    assert [asked.offset for asked in requests] == [locations[index].offset for index in (0, 6, 9)]
    assert all(asked.size <= 4_000 for asked in requests)


def test_several_files(cold: ColdFolder, requests: list[FileRange]) -> None:
    first, second = stored(BODIES[:10]), stored(BODIES[10:])
    bodies = read_bodies(RUN, [*second, *first])
    assert [bytes(body) for body in bodies] == BODIES[10:] + BODIES[:10] and len(requests) == 2


def test_a_location_is_packed_exactly() -> None:
    location = BodyLocation(bytes(range(32)), 2**40, 2**31, bytes(32))
    packed = location.pack()
    assert BodyLocation.unpack(packed) == BodyLocation.unpack(memoryview(packed)) == location
    # PostgreSQL orders and compares files by the first bytes.
    assert packed[:32] == location.file


def test_a_damaged_cache_is_read_from_the_store(cold: ColdFolder, requests: list[FileRange]) -> None:
    locations = stored()
    read_bodies(RUN, locations)
    for path in (cold.settings.folder / "cache").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    assert [bytes(body) for body in read_bodies(RUN, locations)] == BODIES and len(requests) == 2


def test_damage_is_an_error_of_the_run(any_cold: ColdFolder) -> None:
    locations = stored()
    (name,) = any_cold.names()
    content = bytearray(any_cold.read(name))
    content[locations[3].offset] ^= 1
    any_cold.write(name, bytes(content))
    with pytest.raises(ColdValuesLostError, match=f"damaged values in the file {name}") as raised:
        read_bodies(RUN, locations)
    assert raised.value.run_id == RUN
    assert bytes(read_bodies(RUN, locations[:3])[0]) == BODIES[0]


def test_files_are_those_of_the_run(cold: ColdFolder) -> None:
    with pytest.raises(ColdStoreError, match="lacks the file"):
        read_bodies(uuid.UUID(int=8), stored())
