"""Adding late rows to buckets gives the same parts as aggregating all rows at once."""

from __future__ import annotations

import numpy as np
import pytest

from fp8scope_dashboard.telemetry.aggregates import FINEST, PARTS, Parts, aggregate, blank, unite
from fp8scope_dashboard.telemetry.codec import Int64s

EXTREMES = ("max", "min", "argmax", "argmin", "undefined")
BUCKETS = 6


def parts_of(steps: Int64s) -> Parts:
    return aggregate(steps, VALUES[:, steps], FINEST, 0, BUCKETS, nan_is_value=True)


VALUES = np.random.default_rng(0).integers(-5, 6, (3, BUCKETS * FINEST)).astype(float)
VALUES[np.random.default_rng(1).random(VALUES.shape) < 0.1] = np.nan
VALUES[0, 70], VALUES[1, 200] = np.inf, -np.inf


def assert_same(actual: Parts, expected: Parts, parts: tuple[str, ...] = PARTS) -> None:
    for part in parts:
        np.testing.assert_array_equal(actual[part], expected[part], err_msg=part)


@pytest.mark.parametrize("seed", range(20))
def test_it_works(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first = rng.random(BUCKETS * FINEST) < rng.choice([0.01, 0.3, 0.9])
    # The first bucket has only added rows, the second only known rows.
    first[:FINEST], first[FINEST : 2 * FINEST] = False, True
    known, added = parts_of(np.flatnonzero(first)), parts_of(np.flatnonzero(~first))
    whole = parts_of(np.arange(BUCKETS * FINEST))
    both = unite(known, added)
    assert_same(both, whole, EXTREMES)
    assert_same(unite(both, added), both)
    assert_same({part: both[part][:, :1] for part in PARTS}, {part: added[part][:, :1] for part in PARTS})
    assert_same({part: both[part][:, 1:2] for part in PARTS}, {part: known[part][:, 1:2] for part in PARTS})


def test_adding_nothing_changes_nothing() -> None:
    known = parts_of(np.arange(0, BUCKETS * FINEST, 3))
    assert_same(unite(known, blank(3, BUCKETS)), known)
    assert_same(unite(blank(3, BUCKETS), known), known)
