"""Each check finds its fault by the evidence of it, and nothing in a healthy run."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fp8scope.advice.advisor import advise, as_text
from fp8scope.advice.checks import CHECKS
from fp8scope.advice.finding import AdviceFinding, Gain
from fp8scope.advice.record import MIN_STEPS, WARM_UP, RankRecord, RunRecord
from fp8scope.observe.timing.anatomy import PARTS, scalar_of

STEPS = WARM_UP + 20
HEALTHY = {"data": 0.002, "forward": 0.03, "loss": 0.001, "backward": 0.06, "optimizer": 0.005, "rest": 0.002}
FACTS: Mapping[str, Any] = {
    "device": "cuda",
    "cpus": 8,
    "steps": STEPS,
    "loader": {"workers": 4},
    "products": [
        {"precision": "bf16", "in": 512, "out": 2048, "layer": "mlp.up", "share": 0.95},
        {"precision": "fp32", "in": 512, "out": 8, "layer": "router", "share": 0.05},
    ],
    "attention": {"fused": 4, "written_out": 0, "bytes": 0, "flops": 0, "of": 100},
    "copies": {"bytes": 1000, "repeated": [{"times": 2, "bytes": 10, "shape": [10]}]},
    "memory": {"total": 100.0, "reserved_peak": 90.0, "reserved": 90.0, "inactive": 5.0, "retries": 0.0},
}
MISFIT = {"precision": "fp8", "in": 512, "out": 1000, "layer": "head", "share": 0.5}


def rank(
    number: int = 0,
    *,
    steps: int = STEPS,
    facts: Mapping[str, Any] | None = None,
    scalars: Mapping[str, float] | None = None,
    **parts: float,
) -> RankRecord:
    """A rank whose steps are all alike: the healthy one with these seconds of parts, scalars and facts."""
    seconds = {scalar_of(name): value for name, value in (HEALTHY | parts).items()}
    return RankRecord(
        rank=number,
        scalars={name: np.full(steps, value) for name, value in {**seconds, **(scalars or {})}.items()},
        facts={**FACTS, **(facts or {})},
    )


def run(*ranks: RankRecord) -> RunRecord:
    return RunRecord(ranks=ranks, world_size=len(ranks))


def saves_every(interval: int, seconds: float) -> RankRecord:
    record = rank()
    column = np.where(np.arange(STEPS) % interval == 0, seconds, 0.0)
    return RankRecord(scalars={**record.scalars, scalar_of("checkpoint"): column}, facts=record.facts)


FAULTY = {
    "mixed_precision": run(rank(facts={"products": [FACTS["products"][1] | {"share": 1.0}]})),
    "loader": run(rank(data=0.05)),
    "dimensions": run(rank(facts={"products": [MISFIT, FACTS["products"][0] | {"share": 0.5}]})),
    "batch_size": run(rank(facts={"memory": {"total": 100.0, "reserved_peak": 20.0}}, scalars={"mfu": 0.1})),
    "profile": run(rank(rest=0.2)),
    "attention": run(
        rank(facts={"attention": {"fused": 0, "written_out": 4, "bytes": 8 << 20, "flops": 30, "of": 100}})
    ),
    "allocator": run(rank(facts={"memory": FACTS["memory"] | {"retries": 5.0}})),
    "copies": run(
        rank(
            copy=0.01,
            facts={"copies": {"bytes": 1000, "repeated": [{"times": 24, "bytes": 20, "shape": [20]}]}},
        )
    ),
    "compile": run(rank(facts={"graph_breaks": {"Unsupported Tensor.item() call": 2}})),
    "communication": run(rank(0, communication=0.06), rank(1, communication=0.06)),
    "checkpoints": run(saves_every(5, 0.1)),
    "idle_ranks": run(
        rank(0, scalars={"model_flops_per_second": 100.0}),
        rank(1, scalars={"model_flops_per_second": 30.0}),
    ),
}


def test_it_works() -> None:
    (finding,) = advise(FAULTY["loader"])
    assert finding.practice == "loader" and "34 %" in finding.evidence and "num_workers=8" in finding.change
    # With twice the workers a batch is there in half of 4 * 148 ms / 4 = 74 ms, of which 98 ms are hidden.
    assert finding.gain.high == pytest.approx(0.05 / 0.148) and finding.gain.low == finding.gain.high / 2
    text = as_text(FAULTY["loader"], [finding])
    assert finding.title in text and "17 % to 34 % of the time" in text


@pytest.mark.parametrize("practice", CHECKS)
def test_each_check_finds_its_fault_and_no_other_does(practice: str) -> None:
    (finding,) = advise(FAULTY[practice])
    assert finding.practice == practice
    assert any(character.isdigit() for character in finding.evidence)
    assert finding.gain.high > 0 and finding.gain.formula and finding.change


@pytest.mark.parametrize(
    ("unfused", "change"),
    [
        ({}, "Call torch.nn.functional.scaled_dot_product_attention"),
        ({"from a later version": 1}, "Call torch.nn.functional.scaled_dot_product_attention"),
        ({"dropout_p": 4, "attn_mask": 1}, "no fused kernel takes dropout_p above 0 on this device"),
    ],
)
def test_what_rules_out_fused_attention_is_named(unfused: dict[str, int], change: str) -> None:
    facts = FAULTY["attention"].first.facts["attention"] | {"unfused": unfused}
    (finding,) = advise(run(rank(facts={"attention": facts})))
    assert change in finding.change
    assert ("; or this attn_mask" in finding.change) == ("attn_mask" in unfused)


@pytest.mark.parametrize("practice", CHECKS)
def test_too_few_steps_are_no_evidence(practice: str) -> None:
    short = [
        RankRecord(
            rank=one.rank,
            scalars={name: values[: WARM_UP + MIN_STEPS - 1] for name, values in one.scalars.items()},
            facts=one.facts,
        )
        for one in FAULTY[practice].ranks
    ]
    assert [finding.practice for finding in advise(run(*short))] in ([], ["copies"])


@pytest.mark.parametrize(
    "healthy",
    [
        run(rank()),
        run(rank(0), rank(1, forward=0.031)),
        # A CPU may have no faster products than those in FP32, and pads none of them.
        run(rank(facts={"device": "cpu", "products": [MISFIT | {"precision": "fp32", "share": 1.0}]})),
        # A head of ten classes is a small part of a model.
        run(rank(facts={"products": [FACTS["products"][0], MISFIT | {"share": 0.04}]})),
        # One long wait, at the beginning of an epoch, is no slow loader.
        run(saves_every(STEPS, 1.0)),
        # Batches that are handed over in less than a worker needs.
        run(rank(data=0.001, forward=0.001, backward=0.001, loss=0, optimizer=0, rest=0)),
        # A full device whose memory is in one piece; a small part of it that is busy.
        run(rank(facts={"memory": FACTS["memory"]}, scalars={"mfu": 0.1})),
        run(rank(facts={"memory": FACTS["memory"] | {"reserved_peak": 20.0}}, scalars={"mfu": 0.45})),
        run(rank(0, communication=0.01), rank(1, communication=0.01)),
        RunRecord(ranks=[RankRecord()]),
    ],
    ids=["plain", "ranks", "cpu", "head", "once", "tiny", "full", "busy", "hidden", "empty"],
)
def test_a_healthy_run_has_no_findings(healthy: RunRecord) -> None:
    assert advise(healthy) == []


def test_a_slow_rank_is_not_the_network() -> None:
    slow = run(rank(0, communication=0.05), rank(1, forward=0.08), rank(2, communication=0.05))
    (finding,) = advise(slow)
    assert finding.title == "The other ranks wait for rank 1"
    assert finding.gain.high == pytest.approx(1 - 0.1 / 0.15)


SMALL = {"operations": 5_000, "attention": FACTS["attention"] | {"of": 1_000_000}}
IMAGES = {"convolutions": {"flops": 95, "channels_first": 90, "benchmark": False}}
"""Facts of a model of small operations, and of one of images (of 100 operations)."""


def small(**facts: Any) -> RankRecord:
    """A rank with 5,000 operations in a forward pass of 30 ms: 6 microseconds each."""
    rate = 3 * 1_000_000 / sum(HEALTHY.values())
    return rank(facts=SMALL | facts, scalars={"model_flops_per_second": rate})


def test_a_device_that_waits_for_launches_should_compile() -> None:
    (finding,) = advise(run(small()))
    assert (
        finding.practice == "compile"
        and "6.0 microseconds each" in finding.evidence
        and finding.gain.low == 0
    )
    assert finding.gain.high == pytest.approx(0.9 * (1 - 1 / 1.41))
    # In two micro-batches each operation has half of the time; so is an operation of 60 microseconds work.
    twice = rank(facts=SMALL, scalars={"model_flops_per_second": 6 * 1_000_000 / sum(HEALTHY.values())})
    assert "3.0 microseconds each" in advise(run(twice))[0].evidence
    for healthy in ({"operations": 500}, {"operations": 90}, {"compiled": True}, {"device": "cpu"}):
        assert advise(run(small(**healthy))) == []


def test_convolutions_of_channels_that_come_first() -> None:
    (finding,) = advise(run(rank(facts=IMAGES)))
    assert finding.practice == "attention" and "channels_last" in finding.change and "cudnn" in finding.change
    assert 0 < finding.gain.low < finding.gain.high < 0.3
    for facts in (
        {"convolutions": IMAGES["convolutions"] | {"channels_first": 20}},
        IMAGES | {"device": "cpu"},
        IMAGES | {"compiled": True},
    ):
        assert advise(run(rank(facts=facts))) == []


def test_the_channels_of_an_image_are_no_misfit() -> None:
    """Nobody can round three colours up."""
    image = MISFIT | {"precision": "bf16", "in": 3, "out": 64, "share": 1.0}
    assert CHECKS["dimensions"](run(rank(facts={"products": [image]}))) is None
    assert CHECKS["dimensions"](run(rank(facts={"products": [image | {"in": 12}]}))) is not None


def test_a_few_long_steps_are_no_unclear_anatomy() -> None:
    """The time of a step is its median: pauses of the machine make the mean long."""
    nothing: Any = dict.fromkeys(HEALTHY, 0.0)
    record = rank(**{**nothing, "rest": 0.004})
    rest = np.where(np.arange(STEPS) % 4 == 0, 0.03, 0.004)
    paused = RankRecord(scalars={**record.scalars, scalar_of("rest"): rest}, facts=record.facts)
    assert float(paused.seconds.mean()) > 0.005 > float(np.median(paused.seconds))
    assert advise(run(paused)) == []
    (finding,) = advise(run(rank(**{**nothing, "rest": 0.02})))
    assert "20.0 ms (median)" in finding.evidence


@pytest.mark.parametrize(("device", "is_said"), [("cpu", True), ("cuda", False)])
def test_dropout_of_attention_is_an_obstacle_on_a_cpu(device: str, is_said: bool) -> None:
    attention = {"fused": 0, "written_out": 4, "dropped_out": 4, "bytes": 8 << 20, "flops": 30, "of": 100}
    (finding,) = advise(run(rank(facts={"device": device, "attention": attention})))
    assert ("dropout_p at 0" in finding.change) == is_said


def test_more_workers_than_cpus_are_no_advice() -> None:
    """The wait is real, but workers would share the CPUs that all have one."""
    (finding,) = advise(run(rank(data=0.05, facts={"cpus": 4})))
    assert "num_workers" not in finding.change and "sample cheaper" in finding.change
    assert finding.gain.low == 0 and finding.gain.high == pytest.approx(0.05 / 0.148)
    (finding,) = advise(run(rank(data=0.05, facts={"cpus": 6})))
    assert "num_workers=6" in finding.change


def test_steps_that_compile_are_no_evidence() -> None:
    """An evaluation changes the model's mode, and the compiler works for seconds in a training's middle."""
    record = rank(data=0.05)
    forward = record.scalars[scalar_of("forward")].copy()
    forward[12] = 13.0
    compiling = RankRecord(scalars={**record.scalars, scalar_of("forward"): forward}, facts=record.facts)
    assert len(compiling.seconds) == STEPS - WARM_UP - 1
    assert compiling.share("data") == pytest.approx(record.share("data"))
    # A machine that pauses for a moment is no compiler.
    forward[12] = 0.2
    assert (
        len(RankRecord(scalars={**record.scalars, scalar_of("forward"): forward}).seconds) == STEPS - WARM_UP
    )
    # A save takes as long as it takes, and is evidence.
    assert len(saves_every(5, 13.0).seconds) == STEPS - WARM_UP


def test_the_largest_gain_comes_first() -> None:
    both = run(rank(data=0.05, facts={"graph_breaks": {"print": 1}}))
    gains = [finding.gain.high for finding in advise(both)]
    assert len(gains) == 2 and gains == sorted(gains, reverse=True)


def test_the_dimensions_are_those_of_the_precision() -> None:
    """1000 is a multiple of 8, which suffices in BF16."""
    found: AdviceFinding | None = CHECKS["dimensions"](
        run(rank(facts={"products": [MISFIT | {"precision": "bf16"}]}))
    )
    assert found is None
    (finding,) = advise(FAULTY["dimensions"])
    assert "512 x 1008" in finding.change and "multiples of 16" in finding.evidence
    compute = 0.09 / sum(HEALTHY.values())
    assert finding.gain.low == pytest.approx(compute * 0.5 * (1 - 1000 / 1008))


def test_a_gain_is_a_share() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        Gain(low=0.2, high=0.1, formula="")


def test_parts_add_up_in_a_record() -> None:
    record = rank()
    assert record.seconds.tolist() == pytest.approx([sum(HEALTHY.values())] * (STEPS - WARM_UP))
    assert sum(record.share(name) for name in PARTS) == pytest.approx(1)
