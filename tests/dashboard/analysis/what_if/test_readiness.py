"""Verdicts on tensors, the fewest tensors to keep in BF16, and the sentences about them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from dashboard.helpers.exponents import histogram_of
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.what_if.distribution import Distribution
from fp8scope_dashboard.analysis.what_if.readiness import judge, smallest_set, worst_first
from fp8scope_dashboard.analysis.what_if.sentences import headline, kept_sentence, names
from fp8scope_dashboard.analysis.what_if.targets import (
    Target,
    Tensors,
    effect_of,
    finer,
    layout,
    make_target,
    parse_scale,
)

Floats = NDArray[np.float64]
GENERATOR = np.random.default_rng(0)
NORMAL = GENERATOR.normal(size=8192).astype(np.float32).astype(np.float64)
# All elements of E5M2's 33 binades, and as many below them.
WIDE = np.exp2(GENERATOR.uniform(-66.0, 0.0, 8192)).astype(np.float32).astype(np.float64)


def tensors_of(*values: tuple[str, Floats], columns: float = 64.0, past: float = np.nan) -> Tensors:
    """Tensors by role and elements."""
    histograms = np.stack([histogram_of(x) for _, x in values])
    amax = np.array([np.max(np.abs(x[np.isfinite(x)]), initial=0.0) for _, x in values])
    n = len(values)
    return Tensors(
        [f"layer{i}.{role}" for i, (role, _) in enumerate(values)],
        [role for role, _ in values],
        Distribution.of(histograms, amax),
        np.full(n, columns),
        np.full(n, past),
    )


def test_it_works() -> None:
    zeros = np.zeros(100)
    tensors = tensors_of(("input", NORMAL), ("grad_output", WIDE), ("weight", zeros), ("weight", NORMAL))
    readiness = judge(tensors, make_target())
    assert [tensor.verdict for tensor in readiness.tensors] == ["ready", "bf16", "unknown", "ready"]
    assert "flush to zero" in readiness.tensors[1].reason
    assert [tensor.index for tensor in worst_first(readiness)][0] == 1
    assert headline(readiness) == (
        "2 of 3 tensors are ready for FP8 with per-tensor scaling; keep layer1.grad_output in BF16."
    )


@pytest.mark.parametrize("format", ["hybrid", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "e2m3", "e2m1"])
def test_a_normal_tensor_is_ready_for_every_format_that_it_can_be_scaled_to(format: str) -> None:
    target = make_target(format, "current" if not format.startswith("e2") else "block", block=16)
    assert judge(tensors_of(("weight", NORMAL)), target).tensors[0].verdict == "ready"


def test_outliers_in_few_blocks_need_finer_scaling() -> None:
    values = NORMAL.copy()
    values[0] = 2.0**20
    tensor = judge(tensors_of(("input", values)), make_target("e4m3")).tensors[0]
    assert tensor.verdict == "finer" and tensor.finer == "a scale for each row"


def test_non_finite_elements_are_named() -> None:
    values = NORMAL.copy()
    values[:82] = np.nan
    readiness = judge(tensors_of(("input", values)), make_target())
    assert "are NaN or infinite" in readiness.tensors[0].reason and readiness.tensors[0].verdict == "ready"


def test_a_delayed_scale_saturates_after_a_jump_and_a_margin_prevents_it() -> None:
    past = np.abs(NORMAL).max() / 4.0
    tensors = tensors_of(("input", NORMAL), past=past)
    jump = judge(tensors, make_target("e4m3", "delayed"))
    exceeding = np.count_nonzero(np.abs(NORMAL) > past) / NORMAL.size
    assert jump.effect.saturated.low[0] <= exceeding <= jump.effect.saturated.high[0]
    assert "saturate" in jump.tensors[0].reason
    assert judge(tensors, make_target("e4m3", "delayed", margin=2)).tensors[0].verdict == "ready"
    # Without a past, the scale is that of the tensor itself.
    first = judge(tensors_of(("input", NORMAL)), make_target("e4m3", "delayed"))
    assert first.effect.saturated.high[0] == 0


def test_gradients_take_the_other_format() -> None:
    both = effect_of(tensors_of(("input", NORMAL), ("grad_output", NORMAL)), make_target("hybrid"))
    assert both.scale[1] / both.scale[0] == pytest.approx(57344 / 448)
    assert both.floor[1] / both.floor[0] == pytest.approx(4.0, rel=0.01)


def test_finer_scalings_are_tried_from_the_coarsest() -> None:
    assert [(one.scaling, one.block_size) for one in finer(make_target())] == [
        ("row", 0),
        ("block", 128),
        ("block", 32),
        ("block", 16),
    ]
    assert [one.block_size for one in finer(make_target("mxfp4"))] == [16]
    assert finer(make_target("nvfp4")) == []


def test_blocks_do_not_cross_rows() -> None:
    tensors = tensors_of(("input", NORMAL), columns=48.0)
    blocks = layout(tensors, 32)
    assert blocks.size[0] == 32 and blocks.number[0] == np.ceil(8192 / 48) * 2
    assert layout(tensors, 128).size[0] == 48


def test_the_smallest_set_is_smallest() -> None:
    generator = np.random.default_rng(1)
    for _ in range(30):
        errors = generator.exponential(size=7)
        budget = float(generator.uniform(0.0, 1.2)) * errors.mean()
        kept = smallest_set(errors, budget)
        assert np.delete(errors, kept).sum() <= budget * 7 + 1e-9
        for fewer in range(len(kept)):
            for some in combinations(range(7), fewer):
                assert np.delete(errors, list(some)).sum() > budget * 7
    assert smallest_set(np.array([np.nan, 1.0, 3.0]), 0.5).tolist() == [2]
    assert len(smallest_set(np.zeros(0), 1.0)) == 0


def test_sentences() -> None:
    assert headline(judge(tensors_of(("weight", NORMAL)), make_target("mxfp8"))) == (
        "The only tensor is ready for MXFP8 with a scale for each 32 elements."
    )
    assert "none can be judged" in headline(judge(tensors_of(("weight", np.zeros(9))), make_target()))
    assert names(["a"]) == "a" and names(["a", "b", "c"]) == "a, b and c"
    assert names(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert kept_sentence(["a"], 9, 0.001) == (
        "By the error alone, for a mean of at most 0.10 %, keep a in BF16: the fewest of 9 tensors that are "
        "enough."
    )


def test_scales_and_targets_are_read_from_texts() -> None:
    assert (parse_scale("448"), parse_scale("2^-5"), parse_scale(" 0.5 ")) == (448.0, 2.0**-5, 0.5)
    for text in ("", "x", "3^2", "2^x", "2^999", "-1", "0", "nan", "inf", "1e-99"):
        with pytest.raises(ValueError, match="scale must be"):
            parse_scale(text)
    for wrong in ({"format": "fp7"}, {"scaling": "x"}, {"margin": 65}, {"block": -1}):
        with pytest.raises(ValueError, match="must be"):
            make_target(**wrong)
    assert make_target() == Target(make_target().format)
