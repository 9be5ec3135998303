"""Values in addresses and forms, which are user input."""

from __future__ import annotations

from uuid import UUID

import pytest

from fp8scope_dashboard.pages.address_values import uuid_in, uuids_in, whole_number

RUN = UUID(int=7)


def test_it_works() -> None:
    assert whole_number(" 240 ") == 240 and whole_number("0") == 0
    assert uuid_in(str(RUN)) == RUN and uuids_in([str(RUN), "x", str(RUN)], 3) == {RUN}


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "٣", "²", "1e3", "9" * 19])
def test_other_texts_are_no_whole_numbers(text: str) -> None:
    assert whole_number(text) is None


def test_bounds_digits_and_ids() -> None:
    assert whole_number("9" * 18) == 10**18 - 1 and whole_number("123", 2) is None
    assert uuids_in([str(UUID(int=i)) for i in range(5)], 2) == {UUID(int=0), UUID(int=1)}


@pytest.mark.parametrize("text", ["", "x", "0" * 31, "٣" * 40])
def test_other_texts_are_no_ids(text: str) -> None:
    assert uuid_in(text) is None
