"""One table of the names of scalars for the agent and the server, which share no code."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8scope.event_files import names
from fp8scope_dashboard.wire import standard_names


def test_agent_and_server_have_the_same_table() -> None:
    assert names.STANDARD == standard_names.STANDARD


def test_a_name_has_one_meaning_and_is_in_small_letters() -> None:
    tags = [tag for entry in standard_names.STANDARD.values() for tag in entry]
    assert len(tags) == len(set(tags)) and all(tag == tag.lower() for tag in tags)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("Train/Loss", "loss"),
        ("lm loss", "loss"),
        ("dl.loss", "loss"),
        ("LR", "learning_rate"),
        ("val_loss", ""),
    ],
)
def test_meanings(name: str, meaning: str) -> None:
    assert standard_names.meaning_of(name) == meaning
    assert names.is_loss(name) == (meaning == "loss")


def test_the_documents_have_every_name() -> None:
    text = (Path(__file__).parents[2] / "docs" / "event_files.md").read_text()
    for scalar, tags in standard_names.STANDARD.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{scalar}` |")]
        assert [f"`{tag}`" for tag in tags if tag != scalar and f"`{tag}`" not in row] == []
