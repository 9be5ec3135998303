"""The rows of the last steps, within their limits."""

import numpy as np

from fp8scope.incidents.ring import StepRing
from fp8scope.recording.records import Row


def row(step: int) -> Row:
    return Row(step=step, time_us=0, dropped=0, scalars={"loss": 1.0 / step}, statistics=np.ones((2, 7)))


def test_it_works() -> None:
    ring = StepRing(3)
    for step in range(1, 6):
        ring.add(row(step).pieces())
    assert [Row.decode(payload).step for payload in ring.payloads()] == [3, 4, 5]
    assert [each.step for each in ring.rows_since(4)] == [5]
    assert [each.step for each in ring.rows_since(0)] == [3, 4, 5]
    assert ring.added == 5


def test_its_bytes_are_bounded() -> None:
    size = len(row(1).encode())
    ring = StepRing(1000, max_bytes=10 * size)
    for step in range(1, 100):
        ring.add(row(step).pieces())
    assert len(ring.payloads()) == 10 and ring.nbytes == 10 * size
