"""Parts of buckets that are not stored can be computed from the others exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.telemetry.aggregates import (
    FINEST,
    IMPLIED_FROM,
    PARTS,
    Parts,
    aggregate,
    combine,
    from_terms,
    implied,
    spare,
    with_stand_ins,
)


def test_it_works() -> None:
    """One value in each of two buckets, none in the third."""
    parts = aggregate(np.array([7, 100]), np.array([[0.5, -2.0]]), FINEST, 0, 3)
    assert spare(parts) == {"min", "argmin", "last", "count", "sum"}
    assert implied("count", parts).tolist() == [[1.0, 1.0, 0.0]]
    np.testing.assert_array_equal(implied("sum", parts), [[0.5, -2.0, math.nan]])
    # A value that occurs twice: the count must be stored, and implies the sum.
    parts = aggregate(np.array([7, 9, 100]), np.array([[0.5, 0.5, -2.0]]), FINEST, 0, 3)
    assert spare(parts) == {"min", "argmin", "last", "sum"}


def test_reads_the_parts_that_imply_another() -> None:
    assert set(with_stand_ins(("sum",))) == {"sum", "max", "min", "count"}
    assert set(with_stand_ins(("argmin", "undefined"))) == {"argmin", "argmax", "undefined"}
    assert with_stand_ins(("max",)) == ("max",)


@pytest.mark.parametrize(
    ("values", "stored"),
    [
        ([math.inf, -math.inf], {"min", "argmin", "last", "count"}),  # there is no sum
        ([1.0, 2.0], {"min", "argmin", "sum", "count"}),
        ([2.0, 1.0, 2.0], {"min", "argmin", "sum", "count"}),
        ([2.0, 1.0], {"min", "argmin", "last", "sum", "count"}),
        ([0.5] * 3, {"count"}),
        ([0.5], set()),
    ],
)
def test_stores_parts_that_are_not_implied(values: list[float], stored: set[str]) -> None:
    parts = aggregate(np.arange(len(values)), np.array([values]), FINEST, 0, 1)
    assert set(IMPLIED_FROM) - spare(parts) == stored


def test_preserves_the_sign_of_zero() -> None:
    parts = aggregate(np.arange(2), np.array([[-0.0, 0.0]]), FINEST, 0, 1)
    parts |= {"max": np.array([[0.0]]), "last": np.array([[-0.0]])}
    assert "last" not in spare(parts)


def test_from_terms_returns_a_new_array() -> None:
    """A change of the result must not change the terms."""
    steps = np.arange(128)
    terms = {
        "saturated": aggregate(steps, np.arange(128.0)[None], FINEST, 0, 2),
        "numel": aggregate(steps, np.full((1, 128), 4.0), FINEST, 0, 2),
    }
    arrays = [array for term in terms.values() for array in term.values()]
    for part in PARTS:
        computed = from_terms("saturation_rate", terms, part)
        assert not any(np.shares_memory(computed, array) for array in arrays)
    nothing = {"saturated": terms["saturated"], "numel": aggregate(steps, np.zeros((1, 128)), FINEST, 0, 2)}
    assert np.isnan(from_terms("saturation_rate", nothing, "argmax")).all()


KINDS = st.sampled_from(["dense", "constant", "sampled", "empty", "one"])


@st.composite
def parts(draw: st.DrawFn) -> Parts:
    """Parts of buckets of three series, some of them constant or empty."""
    steps = np.flatnonzero(np.random.default_rng(draw(st.integers(0, 99))).random(400) < 0.9)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = np.full((3, len(steps)), math.nan)
    for row, kind in zip(values, draw(st.tuples(KINDS, KINDS, KINDS)), strict=True):
        if kind == "dense":
            row[:] = rng.choice([0.0, -0.0, 1.0, 0.1, -5.0, math.inf, -math.inf, math.nan], len(row))
        elif kind == "constant":
            row[:] = rng.choice([0.0, -0.0, 0.1, 8.0, math.inf])
        elif kind == "sampled":
            row[steps % 100 == 7] = rng.random(np.count_nonzero(steps % 100 == 7))
        elif kind == "one":
            row[rng.integers(0, len(row))] = rng.choice([-0.0, 3.0, -math.inf])
    return aggregate(steps, values, FINEST, 0, 7, nan_is_value=draw(st.booleans()))


@given(parts())
def test_implied_parts_are_identical_to_stored_ones(computed: Parts) -> None:
    spared = spare(computed)
    kept = {part: values for part, values in computed.items() if part not in spared}
    assert {"max", "argmax", "undefined"} <= set(kept)
    for part in IMPLIED_FROM:
        if part in spared:
            kept[part] = implied(part, kept)
    for part, values in computed.items():
        np.testing.assert_array_equal(kept[part], values)
        known = ~np.isnan(values)
        np.testing.assert_array_equal(np.signbit(kept[part][known]), np.signbit(values[known]))


@given(parts())
def test_implied_parts_combine_like_stored_ones(computed: Parts) -> None:
    """Larger buckets are built from parts that are partly implied."""
    padded = {part: np.concatenate([values, values[:, :1]], axis=1) for part, values in computed.items()}
    read = dict(padded)
    for part in IMPLIED_FROM:
        if part in spare(padded):
            read[part] = implied(part, read)
    expected, combined = combine(padded, FINEST), combine(read, FINEST)
    for part, values in expected.items():
        np.testing.assert_array_equal(combined[part], values)
