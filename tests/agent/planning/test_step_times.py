"""The equations against the tables of the report, cell by cell, and against steps."""

import dataclasses

import pytest

from fp8scope.planning.step_times import (
    ClusterRates,
    ModelShape,
    ParallelPlan,
    PlanError,
    compare_with_steps,
    flops_for,
    step_times,
    utilisation,
)

A100 = 312e12
NETWORK = 195e9 / 8
"""Of 200 Gb/s, in bytes/s; a node has two connectors."""

# Yuan 1.0: 2,128 devices. A follows from T1 / T0, the others are its published shape.
YUAN1 = ModelShape(layers=76, hidden=16384, sequence=2048, vocabulary=53228)
YUAN1_PLAN = ParallelPlan(pipeline=38, tensor=8, data=7, accumulation=480)
TABLE_5 = {"compute": 36.666, "bubble": 2.826, "pipeline": 2.643, "tensor": 2.602, "data": 0.455}

# Appendix D: 1,152 sequences a step.
YUAN2 = ModelShape(layers=84, hidden=8192, sequence=4096, vocabulary=135040, architecture="lfa")
SEQUENCES = 1152
TABLE_6 = {
    (1, 96): (584.28, 405.45, 316.32),
    (2, 96): (239.06, 238.40, 238.10),
    (1, 256): (224.10, 156.64, 123.21),
    (2, 256): (101.22, 100.92, 100.81),
}
LINKS = (100e9, 200e9, 400e9)


def yuan1_cluster() -> ClusterRates:
    """The two rates that the report does not give, from T0 and T3 themselves."""
    flops = flops_for(YUAN1, YUAN1_PLAN, TABLE_5["compute"])
    return ClusterRates(flops=flops, link=519.95e9, network=NETWORK, connectors=2)


def test_it_works() -> None:
    """Table 5: each part within its last digit; T1, T2 and T4 have no free parameter."""
    times = step_times(YUAN1, YUAN1_PLAN, yuan1_cluster())
    for part, expected in TABLE_5.items():
        assert getattr(times, part) == pytest.approx(expected, abs=0.0006), part
    assert times.total == pytest.approx(45.192, abs=0.001)
    assert times.optimizer == 0


def test_the_efficiency_of_table_5_is_that_of_the_measured_step() -> None:
    assert utilisation(YUAN1, YUAN1_PLAN, 46.20, A100) == pytest.approx(0.45, abs=0.005)
    assert yuan1_cluster().flops / A100 == pytest.approx(0.565, abs=0.001)
    assert YUAN1.parameters == pytest.approx(245.7e9, rel=0.001)


@pytest.mark.parametrize(("method", "devices"), TABLE_6)
def test_table_6(method: int, devices: int) -> None:
    """All twelve cells within 0.05 %, with 55 % of the A100's peak and 85 % of half a link's rate."""
    pipeline, tensor = (4, 8) if method == 1 else (32, 1)
    data = devices // (pipeline * tensor)
    plan = ParallelPlan(
        pipeline=pipeline,
        tensor=tensor,
        data=data,
        accumulation=SEQUENCES // data,
        optimizer_parallel=True,
        stages_share_node=method == 2,
    )
    assert plan.devices == devices
    for link, expected in zip(LINKS, TABLE_6[method, devices], strict=True):
        cluster = ClusterRates(flops=0.55 * A100, link=0.85 * link / 2, network=NETWORK, connectors=2)
        assert step_times(YUAN2, plan, cluster).total == pytest.approx(expected, rel=0.0005), link


def test_appendix_d_as_printed_cannot_give_method_1() -> None:
    """With Ts = 1 there is no tensor parallelism, and the link's bandwidth would hardly matter."""
    plan = ParallelPlan(pipeline=32, tensor=1, data=3, accumulation=384, optimizer_parallel=True)
    totals = [
        step_times(YUAN2, plan, ClusterRates(flops=0.55 * A100, link=0.85 * link / 2, network=NETWORK)).total
        for link in LINKS
    ]
    assert max(totals) - min(totals) < 1
    assert step_times(YUAN2, plan, ClusterRates(flops=1e14, link=1e11, network=1e10)).tensor == 0


def test_a_single_device_only_computes() -> None:
    plan = ParallelPlan(pipeline=1, tensor=1, data=1, accumulation=4)
    times = step_times(YUAN1, plan, yuan1_cluster())
    assert times.total == times.compute > 0


def test_compares_with_a_runs_steps() -> None:
    cluster = yuan1_cluster()
    total = step_times(YUAN1, YUAN1_PLAN, cluster).total
    comparison = compare_with_steps(YUAN1, YUAN1_PLAN, cluster, [46.20, 46.20, 300.0, float("nan")])
    assert (comparison.predicted, comparison.measured) == (total, 46.20)
    assert comparison.error == pytest.approx(-0.0218, abs=1e-4)
    assert comparison.flops is not None
    calibrated = dataclasses.replace(cluster, flops=comparison.flops)
    assert step_times(YUAN1, YUAN1_PLAN, calibrated).total == pytest.approx(46.20)
    # Transfers alone take longer than these steps: no rate explains them.
    assert compare_with_steps(YUAN1, YUAN1_PLAN, cluster, [1.0]).flops is None
    with pytest.raises(PlanError, match="no measured step"):
        compare_with_steps(YUAN1, YUAN1_PLAN, cluster, [0.0])


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(PlanError, match="tensor must be a number above 0"):
        ParallelPlan(pipeline=1, tensor=0, data=1, accumulation=1)
    with pytest.raises(PlanError, match="link must be"):
        ClusterRates(flops=1.0, link=float("inf"), network=1.0)
    with pytest.raises(PlanError, match="gpt, lfa"):
        ModelShape(layers=1, hidden=1, sequence=1, vocabulary=1, architecture="rnn")  # type: ignore[arg-type]
