"""The solver: the report's split, and exactly the best one in every small case."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8scope.planning.pipeline_split import (
    Aim,
    LayerCost,
    PipelineCosts,
    PipelineSplit,
    SplitError,
    best_split,
    pipeline_from,
    split_of,
    uniform_split,
)

GB = 1e9

# 24 layers of H 6144 on 8 stages with checkpointing. The report gives 78 GB for 3 layers in the first stage
# and 56 GB for 2: 8 micro-batches of a layer's checkpoint and its weights are 22 GB, and 12 GB belong to no
# layer. That is the embedding: 135,040 tokens x 6144 x 16 bytes = 13 GB. A layer's 12 H^2 parameters take 6
# GB at 13 bytes, which leaves 2 GB for each checkpoint. The head has the embedding's size, and the work of V
# / (12 H) = 1.8 layers.
REPORT = PipelineCosts(
    layers=[LayerCost(seconds=1.0, weights=6 * GB, activations=2 * GB)] * 24,
    stages=8,
    first=LayerCost(weights=12 * GB),
    last=LayerCost(seconds=1.8, weights=12 * GB, activations=4 * GB),
)


def all_splits(layers: int, stages: int) -> Iterator[list[int]]:
    for cuts in combinations(range(1, layers), stages - 1):
        ends = (0, *cuts, layers)
        yield [end - begin for begin, end in zip(ends, ends[1:], strict=False)]


def test_it_works() -> None:
    """From 78 GB to 56 GB, and from 4.8 to 4 layers' time, by the report's own split."""
    uniform, split = uniform_split(REPORT), best_split(REPORT)
    assert (uniform.layers, uniform.memory, uniform.seconds) == ((3,) * 8, 78 * GB, 4.8)
    assert (split.layers, split.memory, split.seconds) == ((2, 2, 3, 3, 4, 4, 4, 2), 56 * GB, 4.0)
    assert 1 - split.memory / uniform.memory == pytest.approx(0.282, abs=0.0005)
    assert [stage.in_flight for stage in split.stages] == [8, 7, 6, 5, 4, 3, 2, 1]


def test_least_memory_first_takes_more_time() -> None:
    split = best_split(REPORT, first="memory")
    assert split.memory < 56 * GB and split.seconds > 4.0


costs = st.integers(0, 9)
pipelines = st.builds(
    lambda layers, stages, first, last, micro_batches: PipelineCosts(
        layers=[LayerCost(seconds=s, weights=w, activations=a) for s, w, a in layers],
        stages=min(stages, len(layers)),
        first=LayerCost(seconds=first[0], weights=first[1], activations=first[2]),
        last=LayerCost(seconds=last[0], weights=last[1], activations=last[2]),
        micro_batches=micro_batches,
    ),
    st.lists(st.tuples(costs, costs, costs), min_size=1, max_size=8),
    st.integers(1, 5),
    st.tuples(costs, costs, costs),
    st.tuples(costs, costs, costs),
    st.none() | st.integers(1, 4),
)


def worst(split: PipelineSplit, first: Aim) -> tuple[float, float]:
    return (split.seconds, split.memory) if first == "time" else (split.memory, split.seconds)


@settings(max_examples=300, deadline=None)
@given(pipelines, st.sampled_from(["time", "memory"]), st.none() | st.integers(5, 120))
def test_no_split_is_better(pipeline: PipelineCosts, first: Aim, limit: int | None) -> None:
    every = [split_of(pipeline, layers) for layers in all_splits(len(pipeline.layers), pipeline.stages)]
    allowed = [split for split in every if limit is None or split.memory <= limit]
    if not allowed:
        with pytest.raises(SplitError, match="No split"):
            best_split(pipeline, first, limit)
        return
    best = best_split(pipeline, first, limit)
    assert best in allowed
    assert worst(best, first) == min(worst(split, first) for split in allowed)


def test_in_flight_by_another_schedule() -> None:
    """With all micro-batches in flight everywhere, as in GPipe, equal layers are split equally."""
    layers = [LayerCost(seconds=1, weights=1, activations=1)] * 8
    pipeline = PipelineCosts(layers=layers, stages=4, in_flight=(16,) * 4)
    assert best_split(pipeline).layers == (2, 2, 2, 2)
    assert uniform_split(PipelineCosts(layers=layers, stages=3)).layers == (3, 3, 2)


def test_the_time_of_a_step() -> None:
    split = split_of(PipelineCosts(layers=[LayerCost(seconds=s) for s in (1, 2, 3)], stages=3), (1, 1, 1))
    assert split.step_seconds(1) == 6 and split.step_seconds(5) == 6 + 4 * 3


def test_many_layers_take_no_time() -> None:
    pipeline = PipelineCosts(layers=[LayerCost(seconds=1 + i % 3, weights=1) for i in range(512)], stages=64)
    assert best_split(pipeline).seconds <= uniform_split(pipeline).seconds


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "needs a list `layers`"),
        ({"layers": [{"seconds": 1}]}, "2 stages need 2 to"),
        ({"layers": [{"seconds": -1}, {}]}, "seconds of a layer must be a number from 0 on"),
        ({"layers": [{"seconds": "1"}, {}]}, "must be a number"),
        ({"layers": [{"time": 1}, {}]}, "A layer has name, seconds"),
        ({"layers": [{}, {}], "stages": 2}, "Unknown: stages"),
        ({"layers": [{}, {}], "micro_batches": 0}, "micro_batches must be"),
        ({"layers": [{}, {}], "in_flight": [1]}, "in_flight must have one"),
    ],
)
def test_bad_documents_are_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(SplitError, match=message):
        pipeline_from(document, 2)


def test_a_split_that_does_not_fit_is_refused() -> None:
    for layers in ([3] * 7, [4] * 8, [0, *[3] * 6, 6]):
        with pytest.raises(SplitError, match="A split has 8 numbers"):
            split_of(REPORT, layers)
