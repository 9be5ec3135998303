"""Lines as a terminal would leave them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope_dashboard.text.terminal import as_printed


def test_it_works() -> None:
    assert as_printed("\x1b[32mstep 7\x1b[0m loss 2.31") == "step 7 loss 2.31"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("10 %\r50 %\r100 %", "100 %"),
        ("a long bar\rshort\x1b[K", "short"),
        ("abc\b\bX", "aXc"),
        ("gone\x1b[2K\rnew", "new "),
        ("\x1b]0;a title\x07text", "text"),
        ("\x1b]8;;https://example.org\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b31mred\x9b0m", "red"),
        ("\x1b]52;c;ZXZpbA==", ""),
        ("an end\x1b[", "an end"),
        ("a bell\x07, a \x1b(Bcharset", "a bell, a charset"),
        ("tab\tand\nnewline", "tab\tand\nnewline"),
        ("größer ≥ 3", "größer ≥ 3"),
    ],
)
def test_sequences(line: str, shown: str) -> None:
    assert as_printed(line) == shown


@given(st.text(alphabet=st.sampled_from("ab\t \x1b[]0;mK1\r\b\x07\x9b\x9c\\P\x00\x7f"), max_size=40))
def test_no_control_character_is_left(line: str) -> None:
    shown = as_printed(line)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert len(shown) <= len(line)
    assert as_printed(shown) == shown
