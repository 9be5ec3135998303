"""Formatting of numbers, rates and times."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.pages.formatting import (
    ago,
    compact,
    count,
    number,
    ordinal,
    percent,
    size,
    span,
    with_spread,
    written,
)
from fp8scope_dashboard.text.numbers import about, as_factor, length_against, rounded

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def plain(text: str) -> str:
    return text.replace("\N{NARROW NO-BREAK SPACE}", " ").replace("\N{MINUS SIGN}", "-")


def test_it_works() -> None:
    assert number(2.31417) == "2.314"
    assert plain(percent(0.0025)) == "0.25 %"
    assert plain(count(12345)) == "12 345"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (math.nan, "NaN"),
        (math.inf, "+∞"),
        (-math.inf, "-∞"),
        (-1.5, "-1.5"),
        (0.00001234, "1.23×10⁻⁵"),
        (123456.7, "123 457"),
        (2637461.2, "2 637 461"),
        (1.5e9, "1.50×10⁹"),
        (1e-12, "1.00×10⁻¹²"),
    ],
)
def test_formats_numbers(value: float | None, text: str) -> None:
    assert plain(number(value)) == text


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0.0, "±0 %"), (0.00113, "+0.11 %"), (-0.0031, "-0.31 %"), (0.5, "+50.0 %"), (12.0, "+1200 %")],
)
def test_differences_are_formatted_with_a_sign(fraction: float, text: str) -> None:
    assert plain(percent(fraction, signed=True)) == text


def test_a_tiny_rate_is_not_formatted_as_zero() -> None:
    assert plain(percent(1e-9)) == "< 0.001 %"
    assert plain(percent(0.0)) == "0 %"
    assert plain(percent(None)) == "–"
    assert plain(percent(math.nan)) == "NaN"


@given(st.floats(min_value=1e-8, max_value=1e4))
def test_percentages_are_rounded_correctly(fraction: float) -> None:
    text = plain(percent(fraction))
    if text.startswith("<"):
        assert fraction < 1e-5
    else:
        shown = float(text.removesuffix(" %"))
        digits = len(text.removesuffix(" %").partition(".")[2])
        assert abs(shown - 100 * fraction) <= 0.5 * 10**-digits * 1.0001


@given(st.floats(-1e300, 1e300))
def test_formatted_numbers_keep_their_value(value: float) -> None:
    digits = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    shown = float(plain(number(value)).replace(" ", "").replace("×10", "e").translate(digits))
    assert shown == pytest.approx(value, rel=6e-3)


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (950, "950"), (12_300, "12.3k"), (171_000, "171k"), (4.1e6, "4.1M")]
)
def test_formats_compact_counts(value: float | None, text: str) -> None:
    assert compact(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0, "0 s"),
        (1.25, "1.2 s"),
        (45, "45 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (3600, "1 h"),
        (-5, "0 s"),
    ],
)
def test_formats_durations(seconds: float | None, text: str) -> None:
    assert plain(span(seconds)) == text


def test_formats_timedeltas() -> None:
    assert plain(span(timedelta(days=3, hours=4, minutes=5))) == "3 d 4 h"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "just now"), (2, "just now"), (12, "12 s ago"), (300, "5 min ago"), (90_000, "1 d ago")],
)
def test_formats_times_relative_to_now(seconds: int, text: str) -> None:
    assert plain(ago(NOW - timedelta(seconds=seconds), NOW)) == text
    assert ago(None, NOW) == "never"


def test_formats_ordinals() -> None:
    numbers = (1, 2, 3, 4, 10, 11, 12, 13, 20, 21, 100, 111)
    assert " ".join(ordinal(value) for value in numbers) == (
        "1st 2nd 3rd 4th 10th 11th 12th 13th 20th 21st 100th 111th"
    )


def test_rounding_errors_are_formatted_as_zero() -> None:
    assert plain(percent(1e-17, signed=True)) == "±0 %" and plain(percent(-1e-17)) == "0 %"


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.31, "2.31"), (2.0**10.6, "1,552"), (9999.7, "10,000"), (-15804.7, "-15,800"), (3.1e-6, "3.1e-6"),
     (3e20, "3e20"), (0.0, "0")],
)  # fmt: skip
def test_numbers_of_messages_are_rounded(value: float, text: str) -> None:
    assert rounded(value, 4) == text


@pytest.mark.parametrize(
    ("octaves", "text"), [(0.585, "1.5"), (9.966, "1,000"), (11.3, "2,521"), (13.4, "2^13"), (200.0, "2^200")]
)
def test_factors_have_no_exponent(octaves: float, text: str) -> None:
    assert as_factor(octaves) == text


def test_stored_sentences_have_the_numbers_of_the_pages() -> None:
    sentence = "From -0.55 % to 12,345.5% in blocks.0-2 of 2026-11-23, 1,234,567 times."
    assert written(sentence) == (
        "From \N{MINUS SIGN}0.55\u202f% to 12\u202f345.5\u202f% "
        "in blocks.0-2 of 2026-11-23, 1\u202f234\u202f567 times."
    )


@pytest.mark.parametrize(
    ("amount", "text"),
    [(None, "–"), (0, "0 bytes"), (1, "1 byte"), (1_023, "1023 bytes"), (1_536, "1.5 KiB")]
    + [(712 * 2**10, "712 KiB"), (2**30, "1.0 GiB"), (5 * 2**40, "5.0 TiB")],
)
def test_amounts_of_bytes_have_one_system_of_units(amount: float | None, text: str) -> None:
    assert plain(size(amount)) == text


def test_sentences_of_earlier_versions_are_written_as_new_ones() -> None:
    old = "FP8 runs at 0.62x [0.53, 0.73] the speed of BF16 and needs 1.6 % [-0.7, 5.0] more tokens."
    assert plain(written(old)) == (
        "FP8 runs at 0.62 × (0.53 to 0.73) the speed of BF16 and needs 1.6 % (-0.7 to 5.0) more tokens."
    )
    assert written("The loss is 0.1 nats above 0.2, -0.01 nats to 0.2 nats.") == (
        "The loss is 0.1 above 0.2, \N{MINUS SIGN}0.01 to 0.2."
    )


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (5.0, "5 times as long as"),
        (2.011, "2.01 times as long as"),
        (1.996, "2 times as long as"),
        (1.5, "50 % longer than"),
        (1.011, "1.1 % longer than"),
        (0.8, "20 % shorter than"),
        (0.1, "10 % as long as"),
    ],
)
def test_lengths_against_another(ratio: float, words: str) -> None:
    assert length_against(ratio) == words


def test_estimates_have_few_digits() -> None:
    assert [about(value, "item") for value in (1, 41, 1_936, 1_403_251)] == [
        "about 1 item",
        "about 41 items",
        "about 1,940 items",
        "about 1,400,000 items",
    ]


@pytest.mark.parametrize(
    ("value", "spread", "expected"),
    [
        (2.6, 0.2622, "2.60 ± 0.26"),
        (2.59996, 0.0999, "2.600 ± 0.100"),
        (2.314159, 0.0012, "2.3142 ± 0.0012"),
        (-2.5, 0.5, "-2.50 ± 0.50"),
        (12345.6, 123.4, "12 346 ± 123"),
        (2.5, 0.0, "2.5 ± 0"),
        (2.5, 1e-5, "2.5 ± 1.0×10⁻⁵"),
        (1e-7, 2e-8, "1.00×10⁻⁷ ± 2.0×10⁻⁸"),
        (0.5, 3.0, "0.5 ± 3"),
        (2.5, None, "2.5"),
        (2.5, math.nan, "2.5"),
    ],
)
def test_a_value_and_its_spread_have_equal_decimals(
    value: float, spread: float | None, expected: str
) -> None:
    assert plain(with_spread(value, spread)) == expected
