"""What happened in a run, in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fp8scope_dashboard.pages.run.onset_strip import (
    MAX_FOLDED,
    MAX_SHOWN,
    MIN_ZOOM,
    AlertFact,
    ChangeFact,
    DepartureFact,
    DiagnosisFact,
    StartFact,
    StripFacts,
    departure_of,
    strip_of,
)


def alert(kind: str, onset: int, **fields: Any) -> AlertFact:
    fields = {"severity": "warning", "message": "A sentence.", "address": "/alert"} | fields
    return AlertFact(kind=kind, onset=onset, **fields)


def gradients(number: int) -> tuple[str, ...]:
    return tuple(f"blocks.{i}.mlp.up.grad_output" for i in range(number))


def titles(facts: StripFacts) -> list[tuple[str, str]]:
    return [(onset.steps, onset.title) for onset in strip_of(facts).shown]


def test_it_works() -> None:
    facts = StripFacts(
        last_step=400,
        alerts=[
            alert("loss_divergence", 339, severity="critical"),
            alert("saturation_rate", 240, tensors=gradients(8), tensors_over=8),
        ],
        departure=DepartureFact(284, True, "Outside.", "/compare"),
        diagnosis=DiagnosisFact(
            cause="Frozen scale",
            outcome="cause",
            onset=240,
            sentence="It is the scale.",
            address="/diagnosis",
        ),
    )
    assert titles(facts) == [
        ("240", "grad_output of 8 layers overflow"),
        ("240", "diagnosis: frozen scale"),
        ("284", "loss leaves BF16"),
        ("339", "loss diverges"),
    ]
    first, *_ = strip_of(facts).shown
    assert first.zoom == (240 - MIN_ZOOM, 240 + MIN_ZOOM)
    assert (first.address, first.label, first.detail) == ("/alert", "Alert", "A sentence.")


def test_a_healthy_run_has_one_calm_line() -> None:
    strip = strip_of(StripFacts(last_step=12_345))
    assert not strip.shown and not strip.folded
    assert "up to step 12\u202f345" in strip.calm and "no alert" in strip.calm
    assert "No steps yet" in strip_of(StripFacts()).calm


@pytest.mark.parametrize(
    ("tensors", "over", "title"),
    [
        (("blocks.3.up.input",), 1, "blocks.3.up.input overflows"),
        (("a.input", "b.weight"), 2, "2 tensors overflow"),
        # The evidence names only some: the role of the others is not known.
        (gradients(10), 14, "14 tensors overflow"),
        ((), 0, "a tensor overflows"),
    ],
)
def test_names_the_tensors(tensors: tuple[str, ...], over: int, title: str) -> None:
    facts = StripFacts(last_step=9, alerts=[alert("saturation_rate", 5, tensors=tensors, tensors_over=over)])
    assert titles(facts) == [("5", title)]


def test_a_kind_without_words_of_its_own_has_the_name_of_its_rule() -> None:
    known = alert("threshold", 5, name="norm too large")
    tensors = alert("kurtosis_rise", 7, name="kurtosis rising", tensors=("a.input",), tensors_over=1)
    assert titles(StripFacts(last_step=9, alerts=[tensors, known])) == [
        ("5", "norm too large"),
        ("7", "kurtosis rising: a.input"),
    ]


def test_an_onset_between_two_observations_is_a_range() -> None:
    facts = StripFacts(
        last_step=900, alerts=[alert("underflow_rate", 240, tensors=("a.input",), tensors_over=1, after=230)]
    )
    (onset,) = strip_of(facts).shown
    assert onset.steps == "231–240" and onset.begin == 231
    # 900 steps: a twentieth on both sides.
    assert onset.zoom == (231 - 45, 240 + 45)
    known = replace(facts.alerts[0], after=239)
    assert strip_of(StripFacts(last_step=900, alerts=[known])).shown[0].steps == "240"


def test_an_onset_at_the_first_judged_step_may_be_earlier() -> None:
    facts = StripFacts(
        last_step=900, alerts=[alert("saturation_rate", 11, tensors=("a.input",), tensors_over=1, after=-1)]
    )
    assert strip_of(facts).shown[0].steps == "11 or before"
    assert strip_of(replace(facts, alerts=[replace(facts.alerts[0], onset=1)])).shown[0].steps == "1"


def test_the_alert_replaces_a_later_departure() -> None:
    departure = DepartureFact(284, True, "Outside.", "/compare")
    facts = StripFacts(last_step=400, alerts=[alert("above_baseline", 250)], departure=departure)
    assert titles(facts) == [("250", "loss leaves BF16")]
    near = replace(facts, alerts=[alert("above_baseline", 300)])
    assert [step for step, _ in titles(near)] == ["300"]
    later = replace(facts, alerts=[alert("above_baseline", 390)])
    assert [step for step, _ in titles(later)] == ["284", "390"]
    better = StripFacts(last_step=400, departure=replace(departure, is_above=False))
    assert titles(better) == [("284", "loss falls below BF16")]
    assert strip_of(better).shown[0].tone == "neutral"


def test_a_loss_that_is_not_finite_is_said_once() -> None:
    facts = StripFacts(last_step=400, nonfinite_step=300)
    assert titles(facts) == [("300", "loss is not finite")]
    reported = replace(facts, alerts=[alert("loss_not_finite", 300)])
    assert titles(reported) == [("300", "loss is not finite")]
    # The alert was raised by a later NaN: the first one is named as well.
    again = replace(facts, alerts=[alert("loss_not_finite", 350)])
    assert [step for step, _ in titles(again)] == ["300", "350"]


def test_tells_a_return_from_a_resume() -> None:
    facts = StripFacts(last_step=400, starts=[StartFact(2, 250, 310), StartFact(3, 321, 320)])
    assert titles(facts) == [("250", "goes back from step 310"), ("321", "resumes")]


def test_a_fallback_that_was_ordered_is_said_once() -> None:
    mark = ChangeFact(step=250, kind="mark", text="3 layers to BF16", detail="An alert.")
    ordered = ChangeFact(step=251, kind="fallback", text="command: change precision")
    pause = ChangeFact(step=260, kind="pause", text="command: pause")
    assert titles(StripFacts(last_step=400, changes=[mark, ordered, pause])) == [
        ("250", "3 layers to BF16"),
        ("260", "command: pause"),
    ]
    assert titles(StripFacts(last_step=400, changes=[ordered])) == [("251", "command: change precision")]


def test_a_bad_end_comes_last() -> None:
    facts = StripFacts(last_step=400, ending="the training script fails", ending_detail="ValueError: x")
    facts = replace(facts, alerts=[alert("run_failed", 400), alert("loss_spike", 400)])
    assert titles(facts) == [("400", "loss spikes"), ("400", "the training script fails")]
    assert strip_of(facts).shown[-1].detail == "ValueError: x"
    assert strip_of(replace(facts, last_step=None, alerts=[])).calm


def test_joins_alike_onsets_if_there_are_too_many() -> None:
    spikes = [alert("loss_spike", 10 * i) for i in range(1, 12)]
    few = StripFacts(last_step=400, alerts=spikes)
    assert len(strip_of(few).shown) == 11
    many = replace(few, alerts=[*spikes, alert("grad_norm", 15), alert("loss_divergence", 200)])
    strip = strip_of(many)
    assert titles(many) == [
        ("10–110", "loss spikes, 11 times"),
        ("15", "gradient norm leaves its range"),
        ("200", "loss diverges"),
    ]
    assert strip.shown[0].zoom == (0, 135)


def test_folds_the_least_serious_and_is_bounded() -> None:
    own = [alert("threshold", i, name=f"rule {i}") for i in range(300)]
    facts = StripFacts(last_step=999, alerts=[*own, alert("loss_divergence", 500, severity="critical")])
    strip = strip_of(facts)
    assert len(strip.shown) == MAX_SHOWN and len(strip.folded) == MAX_FOLDED
    assert strip.more == 301 - MAX_SHOWN - MAX_FOLDED
    assert "loss diverges" in [onset.title for onset in strip.shown]
    assert [onset.step for onset in strip.shown] == sorted(onset.step for onset in strip.shown)


def departed(low: list[float], high: list[float]) -> tuple[int, bool] | None:
    steps = np.arange(1, len(low) + 1, dtype=np.float64) * 10
    return departure_of(steps, np.array(low), np.array(high), 0.01)


def test_the_departure_is_the_begin_of_the_last_stretch_outside() -> None:
    assert departed([0.0, 0.02, 0.0, 0.02, 0.03], [0.1] * 5) == (40, True)
    assert departed([-0.1] * 3, [-0.02, -0.02, -0.02]) == (10, False)
    # Inside the tolerance at the end, whatever was before.
    assert departed([0.02, 0.02, 0.005], [0.1] * 3) is None
    assert departed([], []) is None
