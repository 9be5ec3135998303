"""The other steps on plain values, and the order in which they conclude."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fp8scope_dashboard.diagnosis import baseline_health, evaluation, product, software
from fp8scope_dashboard.diagnosis.conclusion import CAUSES, NO_CAUSE, Conclusion, StepFindings, conclude
from fp8scope_dashboard.diagnosis.curves import Trouble, TroubleKind
from fp8scope_dashboard.diagnosis.evaluation import Scored
from fp8scope_dashboard.diagnosis.findings import Finding, Step
from fp8scope_dashboard.diagnosis.precedence import RunTrouble
from fp8scope_dashboard.diagnosis.product import ProductRanking
from fp8scope_dashboard.diagnosis.reference import (
    JudgedWindow,
    ReferenceFinding,
    RunLoss,
    compare_trouble,
    is_worse,
)

Floats = NDArray[np.float64]
STEPS = np.arange(1, 301)


def curve(name: str = "fp8", seed: int | None = 1, rise: Floats | float = 0.0, noise: int = 0) -> RunLoss:
    loss = 2.0 + 3.0 / np.sqrt(1.0 + STEPS / 8.0) + np.random.default_rng(noise).normal(0.0, 0.02, 300)
    return RunLoss(name=name, steps=STEPS, losses=loss + rise, seed=seed)


def spike(at: int, steps: int = 3) -> Floats:
    return np.where((at <= STEPS) & (at + steps > STEPS), 4.0, 0.0)


DIVERGES = 0.03 * np.maximum(0, STEPS - 150)


def test_no_trouble_is_clear() -> None:
    result = compare_trouble(curve(), [curve("bf16", noise=1)])
    assert result.finding.outcome == "clear" and not result.own and not result.is_worse


def test_the_same_spike_in_both_arms_is_the_data() -> None:
    result = compare_trouble(curve(rise=spike(180)), [curve("bf16", rise=spike(180), noise=1)])
    assert (result.finding.outcome, result.finding.cause, result.finding.onset) == ("not_fp8", "data", 180)
    assert not result.lasting and not result.own


def test_a_jump_after_a_jump_of_the_learning_rate_is_not_the_data() -> None:
    rates = np.where(STEPS < 179, 1e-3, 1e-2)
    run = RunLoss(name="fp8", steps=STEPS, losses=curve(rise=spike(180)).losses, seed=1, rates=rates)
    result = compare_trouble(run, [curve("bf16", rise=spike(180))])
    assert result.finding.cause == "learning_rate"


def test_both_arms_diverge() -> None:
    result = compare_trouble(curve(rise=1.3 * DIVERGES), [curve("bf16", rise=DIVERGES, noise=1)])
    assert result.lasting and result.finding.cause == "learning_rate" and "Not FP8" in result.finding.sentence


def test_only_fp8_diverges() -> None:
    result = compare_trouble(curve(rise=DIVERGES), [curve("bf16", noise=1), curve("bf16", 2, noise=2)])
    assert result.finding.outcome == "clear" and result.own[0].lasts and result.is_worse


def test_one_of_three_seeds_is_not_enough_unless_it_is_the_same_seed() -> None:
    healthy = [curve("b", 2, noise=2), curve("c", 3, noise=3)]
    for seed, expected in ((1, "not_fp8"), (4, "clear")):
        arms = [curve("a", seed, rise=DIVERGES), *healthy]
        assert compare_trouble(curve(rise=DIVERGES), arms).finding.outcome == expected


def test_large_updates_in_both_arms() -> None:
    flat = 3.0 + np.random.default_rng(0).normal(0.0, 0.1, 300)
    arms = [
        RunLoss(name=name, steps=STEPS, losses=flat, seed=1, update=0.04, growth=1.0)
        for name in ("fp8", "bf16")
    ]
    finding = compare_trouble(arms[0], arms[1:]).finding
    assert finding.cause == "learning_rate" and "4.0 % of the first weights, so" in finding.sentence
    # Weights that grow make the same updates look small.
    grown = [
        RunLoss(name=name, steps=STEPS, losses=flat, seed=1, update=0.008, growth=4.0)
        for name in ("fp8", "bf16")
    ]
    finding = compare_trouble(grown[0], grown[1:]).finding
    assert (
        finding.cause == "learning_rate" and "3.2 % of the first weights, which grow 4.0" in finding.sentence
    )
    # They drift apart by some per cent, whatever the precision; a jump of the FP8 run alone is its own.
    higher = replace(arms[0], losses=flat + 0.03 * 3.0 * STEPS / 300.0)
    assert is_worse(higher, arms[1:])
    assert compare_trouble(higher, arms[1:]).finding.cause == "learning_rate"
    jumps = replace(arms[0], losses=flat + np.where(STEPS > 150, 4.0, 0.0))
    assert compare_trouble(jumps, arms[1:]).own
    falls = [replace(arm, losses=flat - STEPS / 300.0) for arm in arms]
    assert compare_trouble(falls[0], falls[1:]).finding.outcome == "clear"
    usual = [
        RunLoss(name=name, steps=STEPS, losses=flat, seed=1, update=0.002, growth=1.0)
        for name in ("fp8", "bf16")
    ]
    assert compare_trouble(usual[0], usual[1:]).finding.outcome == "clear"


def test_without_baseline_a_reference_window_may_show_it() -> None:
    run = curve(rise=DIVERGES)
    assert compare_trouble(run, [], [JudgedWindow(280, 290, "within")]).finding.outcome == "not_fp8"
    assert compare_trouble(run, [], [JudgedWindow(280, 290, "over")]).finding.outcome == "unknown"
    assert "resume at step 150" in compare_trouble(run, [], [], [150]).finding.sentence


def test_worse_needs_one_per_cent_and_four_errors() -> None:
    assert not is_worse(curve(), [curve(noise=1)])
    assert is_worse(curve(rise=0.1), [curve(noise=1)])
    assert not is_worse(curve(rise=0.01), [curve(noise=1)])
    nothing = RunLoss(name="fp8", steps=np.zeros(0, np.int64), losses=np.zeros(0))
    assert not is_worse(nothing, [curve()]) and compare_trouble(nothing, [curve()]).finding.outcome == "clear"


@pytest.mark.parametrize(
    ("package", "version", "recipe", "suspect"),
    [
        ("transformer_engine", "1.7.0", {}, True),
        ("transformer_engine", "1.8", {}, False),
        ("transformer_engine", "2.19.0+cu13", {}, False),
        ("torch", "2.7.1+cu126", {"recipe": "RowwiseScaling"}, True),
        ("torch", "2.7.1+cu126", {"recipe": "DelayedScaling"}, False),
        ("torch", "unknown", {}, False),
    ],
)
def test_known_versions(package: str, version: str, recipe: dict[str, str], suspect: bool) -> None:
    finding = software.examine([{package: version}], recipe)
    assert finding.outcome == ("suspect" if suspect else "clear")
    assert all(link.parts["address"].startswith("https://github.com/") for link in finding.links)


def test_versions_that_differ_between_ranks() -> None:
    finding = software.examine([{"torch": "2.8"}, {"torch": "2.9"}], {})
    assert finding.cause == "mixed_versions" and "torch: 2.8 and 2.9" in finding.sentence
    collected = {"torch": "2.8", "mixed_versions": {"torch": ["2.8", "2.9"]}}
    assert software.examine([collected], {}).cause == "mixed_versions"
    assert software.examine([], {}).outcome == "unknown"


def test_one_product_that_stands_out() -> None:
    flat = [("a", "dgrad", 0.02), ("b", "wgrad", 0.015)]
    assert product.examine(ProductRanking(3, flat)).outcome == "clear"
    finding = product.examine(ProductRanking(3, [("c", "dgrad", 0.7), ("c", "wgrad", 0.6), *flat]))
    assert finding.cause == "bad_layer" and finding.tensors == ("c",)
    assert product.examine(ProductRanking(3, [("c", "dgrad", float("nan")), *flat])).cause == "bad_layer"
    assert product.examine(None).outcome == "unknown"


def scored(precision: str = "", verdict: str = "", step: int = 100) -> Scored:
    return Scored("heldout", "accuracy", step, precision, verdict)


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome"),
    [
        (scored("fp8"), scored("bf16"), "clear"),
        (scored("FP8-E4M3"), scored("bfloat16"), "clear"),
        (scored("fp16"), scored("bf16"), "cause"),
        (scored("bf16"), scored("bf16"), "cause"),
        (scored("fp8"), scored("fp8"), "cause"),
        (scored(), scored(), "clear"),
        (scored(verdict="worse"), scored(), "suspect"),
        (scored("fp8", "worse"), scored("bf16"), "clear"),
        (scored(verdict="equivalent"), scored(), "clear"),
    ],
)
def test_the_precision_of_evaluations(ours: Scored, theirs: Scored, outcome: str) -> None:
    finding = evaluation.examine([ours], [theirs], "fp8", training_is_worse=False)
    assert finding.outcome == outcome
    assert finding.cause == ("" if outcome == "clear" else "evaluation_precision")


def test_worse_scores_of_a_worse_training_are_no_fault_of_the_evaluation() -> None:
    finding = evaluation.examine([scored(verdict="worse")], [], "fp8", training_is_worse=True)
    assert finding.outcome == "clear" and "Only 1 checkpoint" in finding.sentence
    three = [scored(step=step) for step in (1, 2, 3)]
    assert "Only" not in evaluation.examine(three, [], "fp8", training_is_worse=False).sentence
    assert evaluation.examine([], [], "fp8", training_is_worse=False).outcome == "unknown"


SEVEN: tuple[Step, ...] = (
    "baseline",
    "reference",
    "software",
    "optimizer",
    "scaling",
    "product",
    "evaluation",
)
CLEAR = {step: Finding(step=step, outcome="clear", sentence="") for step in SEVEN}
FROZEN = Finding(
    step="scaling",
    outcome="cause",
    sentence="The scales are frozen.",
    cause="frozen_scale",
    onset=60,
    is_proven=True,
)
BAD_LAYER = Finding(
    step="scaling",
    outcome="cause",
    sentence="One layer is bad, up: far.",
    cause="bad_layer",
    onset=83,
    tensors=("up.input",),
    suggestion="Compute it in BF16.",
    observation="The layer up stands out: far.",
)
LEAPS = Finding(
    step="optimizer",
    outcome="cause",
    sentence="The weights leap at step 71.",
    cause="optimizer_state",
    onset=71,
)
SHARED = Finding(
    step="reference", outcome="not_fp8", sentence="Not FP8: ...", cause="learning_rate", onset=50
)
PRECISION = Finding(
    step="evaluation", outcome="cause", sentence="Wrong precision.", cause="evaluation_precision"
)
VERSION = Finding(step="software", outcome="suspect", sentence="torch 2.7 is known.", cause="known_version")


def concluded(reference: ReferenceFinding, **findings: Finding) -> tuple[str, str]:
    result = conclusion(reference, **findings)
    return result.cause, result.sentence


def conclusion(reference: ReferenceFinding, **findings: Finding) -> Conclusion:
    chosen: dict[str, Any] = {str(step): finding for step, finding in CLEAR.items()}
    chosen |= {**findings, "reference": reference}
    result = conclude(StepFindings(**chosen, trouble=RunTrouble(1, reference.own, reference.is_worse)))
    assert result.cause in {*CAUSES, ""}
    return result


def in_trouble(*troubles: Trouble) -> ReferenceFinding:
    return ReferenceFinding(CLEAR["reference"], own=troubles, is_worse=True)


def test_nothing_found_has_one_sentence() -> None:
    assert concluded(ReferenceFinding(CLEAR["reference"])) == ("", NO_CAUSE)


def test_bf16_in_the_same_lasting_trouble_wins() -> None:
    assert (
        concluded(ReferenceFinding(SHARED, lasting=True, is_worse=True), scaling=FROZEN)[0] == "learning_rate"
    )
    assert concluded(ReferenceFinding(SHARED), scaling=FROZEN)[0] == "learning_rate"
    # Both had it and recovered, but FP8 ends worse: that is FP8's.
    assert concluded(ReferenceFinding(SHARED, is_worse=True), scaling=FROZEN)[0] == "frozen_scale"


def test_scaling_comes_before_evaluation_and_software() -> None:
    calm, worse = ReferenceFinding(CLEAR["reference"]), ReferenceFinding(CLEAR["reference"], is_worse=True)
    assert concluded(worse, scaling=FROZEN, evaluation=PRECISION, software=VERSION)[0] == "frozen_scale"
    # Without trouble of the loss, a fault of the scales that does no harm does not explain scores.
    assert concluded(calm, scaling=FROZEN, evaluation=PRECISION)[0] == "evaluation_precision"
    assert concluded(calm, evaluation=PRECISION, software=VERSION)[0] == "evaluation_precision"
    assert concluded(calm, software=VERSION) == ("", NO_CAUSE)
    cause, sentence = concluded(worse, software=VERSION)
    assert cause == "known_version" and sentence.startswith("Possible cause: ")


def test_an_effect_is_no_cause() -> None:
    """The loss was up at 75, and the layer stood out from 83 on."""
    trouble = in_trouble(Trouble("jump", 75, None, 0.5))
    result = conclusion(trouble, scaling=BAD_LAYER)
    assert result.decisive is None and result.cause == "" and result.sentence == NO_CAUSE
    effect = next(finding for finding in result.findings if finding.step == "scaling")
    assert effect.outcome == "effect" and "began at step 75: an effect" in effect.sentence
    assert concluded(trouble, scaling=BAD_LAYER, optimizer=LEAPS)[0] == "optimizer_state"


@pytest.mark.parametrize(("kind", "until"), [("jump", None), ("rise", None), ("jump", 400)])
def test_a_cause_begins_before_the_trouble(kind: TroubleKind, until: int | None) -> None:
    assert concluded(in_trouble(Trouble(kind, 90, until, 0.5)), scaling=BAD_LAYER)[0] == "bad_layer"


def test_an_earlier_trouble_that_has_ended_does_not_acquit() -> None:
    troubles = (Trouble("jump", 30, 34, 0.5), Trouble("rise", 95, None, 0.5))
    assert concluded(in_trouble(*troubles), scaling=BAD_LAYER)[0] == "bad_layer"


def test_without_trouble_there_is_no_cause() -> None:
    calm = ReferenceFinding(CLEAR["reference"])
    assert concluded(calm, scaling=BAD_LAYER) == ("", NO_CAUSE)
    proven = conclusion(calm, scaling=FROZEN)
    assert (proven.outcome, proven.cause) == ("suspect", "frozen_scale")
    assert proven.sentence.endswith("It has done no harm so far.")


def test_what_was_so_from_the_beginning_does_not_explain_a_later_jump() -> None:
    """The healthy twin saturates from step 20 on as well."""
    margin = Finding(
        step="scaling", outcome="cause", sentence="The margin is too small.", cause="margin", onset=20
    )
    late = conclusion(in_trouble(Trouble("jump", 163, None, 0.5)), scaling=margin)
    assert late.outcome == "suspect" and "long before the trouble at step 163" in late.sentence
    assert conclusion(in_trouble(Trouble("rise", 163, None, 0.5)), scaling=margin).outcome == "cause"
    assert conclusion(in_trouble(Trouble("jump", 40, None, 0.5)), scaling=margin).outcome == "cause"


def test_a_bisection_after_the_trouble_is_only_possible() -> None:
    ranked = Finding(
        step="product",
        outcome="cause",
        sentence="One layer is bad, up.",
        cause="bad_layer",
        onset=300,
        tensors=("up",),
    )
    result = conclusion(in_trouble(Trouble("rise", 163, None, 0.5)), product=ranked)
    assert (result.outcome, result.cause) == ("suspect", "bad_layer")


def test_a_baseline_that_diverged_is_named() -> None:
    sick = curve("bf16", rise=DIVERGES, noise=1)
    health = baseline_health.examine(curve(), [sick])
    assert health.usable == () and health.finding.cause == "baseline" and "bf16" in health.finding.sentence
    assert concluded(ReferenceFinding(CLEAR["reference"]), baseline=health.finding)[0] == "baseline"
    nan = curve("bf16", noise=1).losses.copy()
    nan[200:] = np.nan
    assert (
        baseline_health.examine(curve(), [RunLoss(name="bf16", steps=STEPS, losses=nan)]).finding.cause
        == "baseline"
    )


def test_a_baseline_in_the_same_trouble_is_compared_with() -> None:
    sick = curve("bf16", rise=DIVERGES, noise=1)
    health = baseline_health.examine(curve(rise=DIVERGES), [sick])
    assert health.usable == (sick,) and health.finding.outcome == "clear"


def test_a_sick_baseline_among_healthy_ones_is_left_out() -> None:
    sick, well = curve("bf16 a", rise=DIVERGES, noise=1), curve("bf16 b", noise=2)
    health = baseline_health.examine(curve(), [sick, well])
    assert health.usable == (well,) and health.finding.outcome == "clear"
    assert "It is left out" in health.finding.sentence


@pytest.mark.parametrize(
    ("rise", "words"),
    [
        (spike(180), "nothing to skip"),
        (np.where(STEPS >= 180, 4.0, 0.0), "no batch can be skipped"),
        (spike(180, 60), "take them out of the data"),
    ],
)
def test_the_advice_on_data_follows_the_finding(rise: Floats, words: str) -> None:
    result = compare_trouble(curve(rise=rise), [curve("bf16", rise=rise, noise=1)])
    assert result.finding.cause == "data" and words in result.finding.suggestion
