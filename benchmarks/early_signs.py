"""Which statistics move before the loss does, by how many steps, and how often on healthy trainings.

    python benchmarks/early_signs.py --cache FOLDER [--seeds 5] [--causes NAME ...] [--healthy 50]
                                     [--calibration 16] [--long 4] [--record-only] [--cached-only]

Trains each cause of early_signs_training.py with each seed, its pair without the cause, and healthy trainings
of other shapes, learning rates, schedules and recipes: 360 steps each, some seconds of CPU time. `--cache`
keeps what was recorded, so that an interrupted call goes on where it was.

A statistic alarms by one detector, `alerts/detectors/early_signs.py`: log2 of it is above its own past by
`octaves`. Its limit is the smallest of LIMITS with which no *calibration* training alarms, and the next
larger one for safety. False alarms are counted on the other healthy trainings, the pairs included. The rules
of the loss and of tensors that a new project has are judged in the same way, with their defaults (`rule`).

Prints a JSON line for each cause and statistic:

    runs           trainings with this cause
    alarms         those in which the statistic alarms after the cause began
    alarm_after    steps from then to the alarm: median, least, most
    loss_alarms, loss_alarm_after
                   the same of the first alarm of the default rules of the loss that need no baseline
    baseline_alarm_after
                   the same of the rule that compares with a baseline, which is the pair
    before_loss    share of the runs in which it alarms before these rules, or they never do
    lead           steps between the two alarms: median, least, most, of the runs with both
    loss_moves, loss_moves_after
                   runs in which the loss moves, and when: where the mean of ten steps is 2 % above that of
                   the pair, for 20 steps, which only hindsight knows
    before_move    share of the runs in which it alarms before the loss moves, or that never does
    lead_move      steps between the alarm and the move: median, least, most

and one for each statistic: `octaves`, `healthy` trainings, `false_alarms`, `rate`, `interval` (95 %,
Clopper-Pearson), `causes`, in which it alarms before the rules of the loss in at least 80 % of the runs, and
`causes_move`, in which it alarms before the loss moves in as many.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.alerts.detectors import (
    ConditionChange,
    ScalarRows,
    TensorFacts,
    TensorRows,
    above_baseline,
    divergence,
    grad_norm,
    kurtosis_growth,
    logit_growth,
    noise_growth,
    not_finite,
    router_collapse,
    saturation,
    saturation_rise,
    scale_frozen,
    scale_stale,
    spike,
    underflow,
    underflow_rise,
    update_growth,
)
from fp8scope_dashboard.alerts.detectors.early_signs import MIN_EVEN, sign
from fp8scope_dashboard.alerts.detectors.tensor_alarm import Wording
from fp8scope_dashboard.alerts.kinds import KINDS
from fp8scope_dashboard.analysis.scores.intervals import clopper_pearson

Floats = NDArray[np.float64]
LIMITS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
EVERY_STEP = {"z": 5.0, "window": 50.0, "warmup": 40.0, "points": 5.0, "recover": 20.0}
SAMPLED = {"z": 5.0, "window": 20.0, "warmup": 10.0, "points": 3.0, "recover": 20.0}
FP8_ROLES = ("input", "weight", "grad_output")
# The loss moves where it is so much above its pair's over MOVE_MEAN steps, for MOVE_STEPS.
MOVE, MOVE_MEAN, MOVE_STEPS = 0.02, 10, 20
LEADS = 0.8
# A new project's.
MARGIN, ALPHA = 0.0025, 0.05
CALIBRATION_SEED, HEALTHY_SEED = 7, 8
WORDING = Wording(
    singular="moves",
    plural="move",
    amount=lambda octaves, name: name,
    limit="above its limit",
    unit="octaves",
)
DELAYED_PATIENCE = 4 * 16 + 64


@dataclass(frozen=True)
class Statistic:
    """A positive number of each of some tensors; `roles` are the last parts of their names."""

    name: str
    roles: tuple[str, ...]
    read: Callable[[Any], Floats]
    parameters: dict[str, float]


def _share(count: str, floor: float) -> Callable[[Any], Floats]:
    # Below the floor, changes of a rate say nothing.
    return lambda s: s[count].astype(np.float64) / s["numel"] + floor


def _noise(s: Any) -> Floats:
    noise: Floats = (
        s["sq_error"].astype(np.float64) / s["sq_signal"]
        if "sq_error" in s
        else np.full_like(s["numel"], np.nan)
    )
    return noise


def _plain(name: str) -> Callable[[Any], Floats]:
    return lambda s: s[name].astype(np.float64) if name in s else np.full(s["numel"].shape, np.nan)


def _uneven(s: Any) -> Floats:
    uneven: Floats = 1.0 / (1.0 + MIN_EVEN - _plain("load_imbalance")(s))
    return uneven


STATISTICS = (
    *(Statistic(f"amax of {role}", (role,), _plain("amax"), EVERY_STEP) for role in FP8_ROLES),
    Statistic("saturation", FP8_ROLES, _share("saturated", 1e-3), EVERY_STEP),
    Statistic("underflow", FP8_ROLES, _share("underflow", 1e-2), EVERY_STEP),
    Statistic("noise to signal", FP8_ROLES, _noise, SAMPLED),
    Statistic("kurtosis", ("input",), _plain("kurtosis"), SAMPLED),
    Statistic("update to weight", ("update",), _plain("update_ratio"), SAMPLED),
    Statistic("logit bound", ("logits",), _plain("logit_bound"), SAMPLED),
    Statistic("unevenness of load", ("load",), _uneven, SAMPLED),
    Statistic("largest load", ("load",), _plain("load_max"), SAMPLED),
    Statistic("amax of weight_grad", ("weight_grad",), _plain("amax"), SAMPLED),
    Statistic("amax of exp_avg_sq", ("exp_avg_sq",), _plain("amax"), SAMPLED),
)  # fmt: skip
RULES: dict[str, tuple[Any, str]] = {
    "saturation_rate": (saturation, "saturated"),
    "saturation_rise": (saturation_rise, "saturated"),
    "underflow_rate": (underflow, "underflow"),
    "underflow_rise": (underflow_rise, "underflow"),
    "scale_stale": (scale_stale, "scale"),
    "scale_frozen": (scale_frozen, "scale"),
    "noise_growth": (noise_growth, "sq_error"),
    "kurtosis_growth": (kurtosis_growth, "kurtosis"),
    "logit_growth": (logit_growth, "logit_bound"),
    "router_collapse": (router_collapse, "load_imbalance"),
    "update_growth": (update_growth, "update_ratio"),
}
"""Default rules, each with a statistic that the tensors have that it judges."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A training: its cause, and what was recorded of n tensors over the steps 1 to T."""

    cause: str
    names: list[str]
    loss: Floats
    grad_norm: Floats
    statistics: dict[str, NDArray[np.float32]]
    delayed: bool

    @property
    def steps(self) -> NDArray[np.int64]:
        return np.arange(1, len(self.loss) + 1)


# Recording


def recorded(case: Any, folder: Path, train: bool) -> Recorded | None:
    """What the case has recorded, from the cache or by training it; None if it may not train."""
    path = folder / f"{case.name}.npz"
    if not path.exists():
        if not train:
            return None
        from early_signs_training import record

        series = record(case)
        stored: Any = {f"tensor {name}": values for name, values in series.statistics.items()}
        print(
            json.dumps({"trained": case.name, "cpu_seconds": round(series.cpu_seconds, 1)}),
            file=sys.stderr,
            flush=True,
        )
        partial = path.with_suffix(".part")
        with partial.open("wb") as file:
            np.savez_compressed(
                file,
                names=np.array(series.names),
                loss=series.loss,
                grad_norm=series.grad_norm,
                **stored,
            )
        partial.rename(path)
    with np.load(path) as file:
        tensors = {key[7:]: file[key] for key in file.files if key.startswith("tensor ")}
        return Recorded(
            cause=case.cause,
            names=file["names"].tolist(),
            loss=file["loss"],
            grad_norm=file["grad_norm"],
            statistics=tensors,
            delayed=case.precision in ("delayed", "short"),
        )


def cases(options: argparse.Namespace) -> tuple[list[Any], list[Any], list[Any]]:
    """The cases with a cause, healthy ones for the calibration, and the other healthy ones."""
    from early_signs_training import case_of, long, varied

    faulty = [case_of(cause, seed) for seed in range(1, options.seeds + 1) for cause in options.causes]
    pairs = list(dict.fromkeys(case.healthy for case in faulty))
    calibration = varied(options.calibration, CALIBRATION_SEED)
    return faulty, calibration, [*pairs, *varied(options.healthy, HEALTHY_SEED), *long(options.long)]


def ordered(faulty: Sequence[Any], calibration: Sequence[Any], healthy: Sequence[Any]) -> Iterator[Any]:
    """All cases, in an order in which a part of them already says something."""
    queues = [list(faulty), list(calibration), list(healthy)]
    while any(queues):
        for queue, number in zip(queues, (3, 2, 5), strict=True):
            yield from queue[:number]
            del queue[:number]


# Judging


def rows_of(run: Recorded, chosen: NDArray[np.bool_], values: dict[str, Floats]) -> TensorRows:
    names = [name for name, use in zip(run.names, chosen, strict=True) if use]
    largest = np.array([57344.0 if name.endswith(".grad_output") else 448.0 for name in names])
    n = len(names)
    patience = np.full(n, DELAYED_PATIENCE if run.delayed else 1_100)
    facts = TensorFacts(names, largest, np.zeros(n), patience, np.full(n, run.delayed))
    return TensorRows(run.steps, values, facts, 1)


def alarm(run: Recorded, statistic: Statistic, octaves: float) -> list[int]:
    """The steps at which the detector alarms."""
    chosen = np.array([name.rpartition(".")[2] in statistic.roles for name in run.names])
    if not chosen.any():
        return []
    with np.errstate(invalid="ignore", divide="ignore"):
        values = statistic.read(run.statistics)[:, chosen]
    rows = rows_of(run, chosen, {})
    _, findings = sign({}, rows, values, {**statistic.parameters, "octaves": octaves}, WORDING)
    return _opened(findings)


def rule_alarm(run: Recorded, kind: str) -> list[int]:
    """The steps at which a default rule of tensors, or of the gradient norm, alarms."""
    parameters = {name: each.default for name, each in KINDS[kind].parameters.items()}
    if kind == "grad_norm":
        return _scalar_alarm(run, parameters)
    detect, statistic = RULES[kind]
    if statistic not in run.statistics:
        return []
    chosen = np.asarray(np.isfinite(run.statistics[statistic]).any(axis=0))
    values = {name: each[:, chosen].astype(np.float64) for name, each in run.statistics.items()}
    _, findings = detect({}, rows_of(run, chosen, values), parameters)
    return _opened(findings)


def _scalar_alarm(run: Recorded, parameters: dict[str, float]) -> list[int]:
    logged = {"grad_norm": np.ones(len(run.steps), bool)}
    _, findings = grad_norm({}, ScalarRows(run.steps, {"grad_norm": run.grad_norm}, logged), parameters)
    return _opened(findings)


def grad_norm_sign(run: Recorded, octaves: float) -> list[int]:
    """The steps at which the gradient norm alarms by the detector of all statistics."""
    rows = TensorRows(run.steps, {}, TensorFacts.unknown(["grad_norm"]), 1)
    parameters = {**EVERY_STEP, "octaves": octaves}
    return _opened(sign({}, rows, run.grad_norm[:, None], parameters, WORDING)[1])


def _opened(findings: Sequence[ConditionChange]) -> list[int]:
    return [finding.step for finding in findings if finding.opened and not finding.update]


def loss_alarm(run: Recorded, begin: int = 0) -> int | None:
    """The first step after `begin` at which a default rule of the loss alarms that needs no baseline."""
    detectors = {"loss_not_finite": not_finite, "loss_spike": spike, "loss_divergence": divergence}
    steps = []
    for kind, detector in detectors.items():
        parameters = {name: each.default for name, each in KINDS[kind].parameters.items()}
        steps += _opened(detector({}, run.steps, run.loss, parameters)[1])
    return min((step for step in steps if step > begin), default=None)


def baseline_alarm(run: Recorded, pair: Recorded, begin: int) -> int | None:
    """The same of the rule that compares with a baseline, which here is the pair."""
    parameters = {name: each.default for name, each in KINDS["above_baseline"].parameters.items()}
    parameters |= {"margin": MARGIN, "alpha": ALPHA}
    _, findings = above_baseline({}, run.steps, run.loss, pair.loss[None, :], parameters)
    return next((step for step in _opened(findings) if step > begin), None)


def moved(run: Recorded, pair: Recorded, begin: int) -> int | None:
    """The first step from which the loss is above its pair's by MOVE; see the module."""
    excess = np.where(np.isfinite(run.loss), run.loss / pair.loss - 1.0, np.inf)
    means = np.array([excess[i : i + MOVE_MEAN].mean() for i in range(len(excess) - MOVE_MEAN + 1)])
    for i in range(begin, len(means) - MOVE_STEPS + 1):
        if (means[i : i + MOVE_STEPS] > MOVE).all():
            return i + 1
    return None


def calibrated(runs: Sequence[Recorded], alarms: Callable[[Recorded, float], list[int]]) -> float:
    """The next larger one of LIMITS after the smallest with which none of the runs alarms."""
    quiet = next(
        (i for i, limit in enumerate(LIMITS) if not any(alarms(run, limit) for run in runs)), len(LIMITS)
    )
    return LIMITS[min(quiet + 1, len(LIMITS) - 1)]


def judges(
    calibration: Sequence[Recorded],
) -> Iterator[tuple[str, float | None, Callable[[Recorded], list[int]]]]:
    """Each statistic with its limit and the function that returns the steps of its alarms."""
    for statistic in STATISTICS:
        limit = calibrated(calibration, lambda run, octaves, s=statistic: alarm(run, s, octaves))  # type: ignore[misc]
        yield statistic.name, limit, lambda run, s=statistic, o=limit: alarm(run, s, o)  # type: ignore[misc]
    limit = calibrated(calibration, grad_norm_sign)
    yield "gradient norm", limit, lambda run, o=limit: grad_norm_sign(run, o)  # type: ignore[misc]
    for kind in (*RULES, "grad_norm"):
        yield f"rule {kind}", None, lambda run, k=kind: rule_alarm(run, k)  # type: ignore[misc]


@dataclass(frozen=True)
class Faulty:
    """A training with a cause, and when the loss alarmed and moved; None: never."""

    run: Recorded
    loss_alarm: int | None
    baseline_alarm: int | None
    moved: int | None


def line_of(
    cause: str, name: str, faulty: Sequence[Faulty], first: Sequence[int | None], begin: int
) -> dict[str, Any]:
    """The line of a cause and a statistic, whose first alarm after the cause began is `first`."""
    never = np.inf
    pairs = [(step, each) for step, each in zip(first, faulty, strict=True) if step is not None]
    return {
        "benchmark": "early_signs",
        "cause": cause,
        "statistic": name,
        "runs": len(faulty),
        "alarms": len(pairs),
        "alarm_after": _spread([step - begin for step, _ in pairs]),
        "loss_alarms": sum(each.loss_alarm is not None for each in faulty),
        "loss_alarm_after": _spread([each.loss_alarm - begin for each in faulty if each.loss_alarm]),
        "baseline_alarm_after": _spread(
            [each.baseline_alarm - begin for each in faulty if each.baseline_alarm]
        ),
        "loss_moves": sum(each.moved is not None for each in faulty),
        "loss_moves_after": _spread([each.moved - begin for each in faulty if each.moved]),
        "before_loss": round(sum(step < (each.loss_alarm or never) for step, each in pairs) / len(faulty), 2),
        "lead": _spread([each.loss_alarm - step for step, each in pairs if each.loss_alarm is not None]),
        "before_move": round(sum(step < (each.moved or never) for step, each in pairs) / len(faulty), 2),
        "lead_move": _spread([each.moved - step for step, each in pairs if each.moved is not None]),
    }


def _spread(leads: Sequence[int]) -> list[float] | None:
    return [statistics.median(leads), min(leads), max(leads)] if leads else None


def report(
    faulty: Sequence[Faulty], calibration: Sequence[Recorded], healthy: Sequence[Recorded], begin: int
) -> None:
    """Print all lines."""
    causes = list(dict.fromkeys(each.run.cause for each in faulty))
    quiet_loss = sum(loss_alarm(run) is not None for run in healthy)
    for name, limit, judge in judges(calibration):
        lines = []
        for cause in causes:
            members = [each for each in faulty if each.run.cause == cause]
            first = [next((step for step in judge(each.run) if step > begin), None) for each in members]
            lines.append(line_of(cause, name, members, first, begin))
            print(json.dumps(lines[-1]), flush=True)
        wrong = sum(bool(judge(run)) for run in healthy)
        interval = clopper_pearson(wrong, len(healthy), 0.05)
        summary = {
            "benchmark": "early_signs",
            "statistic": name,
            "octaves": limit,
            "healthy": len(healthy),
            "false_alarms": wrong,
            "rate": round(wrong / len(healthy), 3),
            "interval": [round(interval.low, 3), round(interval.high, 3)],
            "causes": [line["cause"] for line in lines if line["before_loss"] >= LEADS],
            "causes_move": [line["cause"] for line in lines if line["before_move"] >= LEADS],
        }
        print(json.dumps(summary), flush=True)
    print(
        json.dumps(
            {
                "benchmark": "early_signs",
                "statistic": "rules of the loss",
                "healthy": len(healthy),
                "false_alarms": quiet_loss,
            }
        )
    )


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from early_signs_training import AT, CAUSES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="a folder")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--causes", nargs="+", choices=list(CAUSES), default=list(CAUSES))
    parser.add_argument("--healthy", type=int, default=50, help="varied healthy trainings beside the pairs")
    parser.add_argument("--calibration", type=int, default=16)
    parser.add_argument("--long", type=int, default=4, help="healthy trainings of 2,400 steps")
    parser.add_argument("--record-only", action="store_true")
    parser.add_argument("--cached-only", action="store_true", help="judge what the cache has")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    import torch

    torch.set_num_threads(1)
    faulty, calibration, healthy = cases(options)

    def read(case: Any) -> Recorded | None:
        return recorded(case, options.cache, train=False)

    if not options.cached_only:
        for case in ordered(faulty, calibration, healthy):
            recorded(case, options.cache, train=True)
    if options.record_only:
        return
    judged = []
    for case in faulty:
        run, pair = read(case), read(case.healthy)
        if run is not None and pair is not None:
            judged.append(
                Faulty(run, loss_alarm(run, AT), baseline_alarm(run, pair, AT), moved(run, pair, AT))
            )
    quiet, others = (
        [run for case in part if (run := read(case)) is not None] for part in (calibration, healthy)
    )
    report(judged, quiet, others, AT)


if __name__ == "__main__":
    main()
