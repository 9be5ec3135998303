"""The demo's text."""

import hashlib
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8scope.demo.data import HELD_OUT, load

CORPUS = load(context=64, windows=256)


def test_it_works() -> None:
    text = bytes(CORPUS.train.tolist()).decode()
    assert len(text) > 200_000
    assert "Topic 7\n=======" in text and "the" in text.split()
    assert CORPUS.windows.shape == (256, 65)
    assert CORPUS.windows.dtype == torch.int64
    assert CORPUS.context == 64


def test_item_names_are_unique_and_belong_to_topics() -> None:
    assert len(set(CORPUS.items)) == len(CORPUS.items) == len(CORPUS.clusters) == 256
    assert all(
        item.startswith(f"{topic}@") for item, topic in zip(CORPUS.items, CORPUS.clusters, strict=True)
    )
    assert len(Counter(CORPUS.clusters)) > 20


def test_held_out_text_is_not_in_the_training_text() -> None:
    trained = bytes(CORPUS.train.tolist())
    # Stock phrases occur in several topics: a few windows are found elsewhere, a leak would be all of them.
    leaked = sum(bytes(window.tolist()) in trained for window in CORPUS.windows)
    assert leaked <= 0.05 * len(CORPUS.windows)


def test_the_held_out_share_is_as_stated() -> None:
    with pytest.raises(ValueError) as refused:
        load(context=64, windows=10**6)
    available = int(str(refused.value).split(" to ")[1].split(",")[0])
    # Less the ends that fill no window.
    total = len(CORPUS.train) / (1 - HELD_OUT)
    assert 0.8 * HELD_OUT * total < 65 * available <= HELD_OUT * total


@settings(max_examples=30)
@given(step=st.integers(0, 10**9), size=st.integers(1, 8))
def test_a_batch_depends_only_on_its_step(step: int, size: int) -> None:
    torch.manual_seed(step % 7)
    first = CORPUS.batch(step, size)
    torch.manual_seed(5)
    assert torch.equal(first, CORPUS.batch(step, size))
    assert first.shape == (size, 65)
    assert int(first.min()) >= 0
    assert int(first.max()) < 256


def test_batches_of_different_steps_differ() -> None:
    assert not torch.equal(CORPUS.batch(1, 4), CORPUS.batch(2, 4))


def test_a_seed_has_its_own_text_and_batches() -> None:
    other = load(context=64, windows=256, seed=1)
    assert not torch.equal(CORPUS.train[:1000], other.train[:1000])
    assert not torch.equal(CORPUS.batch(1, 4), other.batch(1, 4))
    again = load(context=64, windows=256, seed=1)
    assert torch.equal(other.train, again.train) and torch.equal(other.batch(7, 4), again.batch(7, 4))


def test_the_bytes_trained_on_are_the_same_everywhere() -> None:
    """The demo's verdicts were tried on these. After a change of the text: `benchmarks/demo_seeds.py`."""
    digest = hashlib.sha256(bytes(CORPUS.train.tolist()) + bytes(CORPUS.windows.flatten().tolist()))
    for step in range(1, 21):
        digest.update(bytes(CORPUS.batch(step, 16).flatten().tolist()))
    assert digest.hexdigest() == "27029a1738abfc3cf03027da2579c7fa8c6e5f1985338c6ddc07c167d0bfa98a"


@pytest.mark.parametrize("windows", [0, -1, 100_000])
def test_too_many_windows_is_an_error_with_the_number_available(windows: int) -> None:
    with pytest.raises(ValueError, match=r"windows must be from 1 to \d+"):
        load(context=64, windows=windows)
