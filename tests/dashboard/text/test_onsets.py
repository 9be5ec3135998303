"""Steps of onsets in words."""

from __future__ import annotations

import pytest

from fp8scope_dashboard.text.onsets import steps_in_words


@pytest.mark.parametrize(
    ("step", "after", "words"),
    [
        (310, 309, "310"),
        (310, 300, "301–310"),
        (1310, 299, "300–1,310"),
        (310, None, "310"),
        (11, 0, "1–11"),
        (11, -1, "11 or before"),
        (1, -1, "1"),
        (310, 320, "310"),
    ],
)
def test_says_between_which_steps_an_onset_lies(step: int, after: int | None, words: str) -> None:
    assert steps_in_words(step, after) == words
