"""Whether the diagnosis names the cause of injected faults. Prints one JSON line per training, and a summary.

    python benchmarks/diagnosis.py [--parts fixed torchao] [--variations 12] [--seed 0]

Faults are injected into real small trainings (diagnosis_faults.py), each with a BF16 arm, and healthy
trainings in BF16, with delayed and with current scaling are the controls. All are recorded by the agent,
stored by a whole installation, and diagnosed from its database. The part `torchao` trains with the layers of
torchao instead of ours. `--variations` adds as many further trainings with other models, seeds, steps of the
fault, learning rates, strengths and recipes.

    fault     what was injected; empty for a control
    named     the cause that the diagnosis names; empty for none
    right     whether it is the injected one; for a control, whether it is none

The summary has the right ones of each part, and `blamed`: trainings with a fault of both arms, or without
one, in which FP8 was blamed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from uuid import UUID

CAUSES = {
    "frozen": "frozen_scale",
    "stale": "stale_scale",
    "margin": "margin",
    "loss_scale": "loss_scale",
    "bad_layer": "bad_layer",
    "underflow": "underflow",
    "reset": "history_reset",
    "learning_rate": "learning_rate",
    "data": "data",
    "evaluation": "evaluation_precision",
    "optimizer": "optimizer_state",
    "loss_code": "loss_code",
    "baseline": "baseline",
    "lasting_data": "data",
    "unwatched": "",
    "weights": "weight_growth",
    "twin": "optimizer_state",
    "": "",
}
"""What the diagnosis should name, by fault."""
NOT_FP8 = frozenset(
    {
        "learning_rate", "data", "training", "evaluation_precision", "optimizer_state", "weight_growth",
        "loss_code", "baseline", "",
    }
)  # fmt: skip
INNOCENT = frozenset(
    {
        "learning_rate", "data", "evaluation", "optimizer", "loss_code", "baseline", "lasting_data",
        "unwatched", "weights", "twin", "",
    }
)  # fmt: skip
"""Faults that are not FP8's."""
CONTROL_SEEDS = (1, 2, 3)
# The recipes that a fault can be injected into, and the strengths that it has an effect with.
VARIATIONS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "frozen": (("delayed", "current"), (0,)),
    "stale": (("delayed",), (0,)),
    "margin": (("delayed", "current"), (2, 4)),
    "loss_scale": (("delayed", "current", "rowwise", "block"), (8, 16)),
    "bad_layer": (("delayed", "current", "rowwise", "block"), (6, 10)),
    "underflow": (("delayed", "current"), (12, 20)),
    "reset": (("delayed",), (0,)),
    "learning_rate": (("delayed", "current", "rowwise", "block"), (40, 80)),
    "data": (("delayed", "current", "rowwise", "block"), (3, 20)),
    "evaluation": (("delayed", "current", "rowwise", "block"), (0,)),
    "": (("rowwise", "block", "mxfp8", "delayed", "current"), (0,)),
}


def fixed_cases() -> list[Any]:
    """Each fault once, and the controls."""
    from diagnosis_faults import Case

    faults = [Case(fault=fault) for fault in CAUSES if fault]
    return faults + [
        Case(fault="", recipe=recipe, seed=seed)
        for recipe in ("delayed", "current")
        for seed in CONTROL_SEEDS
    ]


def torchao_cases() -> list[Any]:
    """Trainings with torchao's layers: controls, and the faults that do not need our scaling state."""
    from diagnosis_faults import TORCHAO, Case

    faults = ("", "bad_layer", "loss_scale", "learning_rate", "data", "evaluation")
    return [Case(fault=fault, recipe=TORCHAO) for fault in faults] + [Case(fault="", recipe=TORCHAO, seed=2)]


def varied_cases(number: int, seed: int) -> list[Any]:
    """Further trainings, the faults in turn."""
    from diagnosis_faults import Case

    from fp8scope.demo.model import Shape

    chance, cases = random.Random(seed), []
    for i in range(number):
        fault = list(VARIATIONS)[i % len(VARIATIONS)]
        recipes, strengths = VARIATIONS[fault]
        steps = chance.choice((160, 240, 320))
        cases.append(
            Case(
                fault=fault,
                recipe=chance.choice(recipes),
                seed=chance.randint(10, 99),
                steps=steps,
                at=round(steps * chance.uniform(0.3, 0.7)),
                shape=Shape(layers=chance.choice((1, 2, 3)), width=chance.choice((48, 64, 96)), context=32),
                learning_rate=chance.choice((2e-3, 4e-3, 6e-3)),
                strength=chance.choice(strengths),
            )
        )
    return cases


def judge(case: Any, run: str, seconds: float) -> dict[str, Any]:
    """Diagnose a stored run; returns its line."""
    from fp8scope_dashboard.diagnosis.services import diagnose

    begin = time.perf_counter()
    diagnosis = diagnose(UUID(run), again=True)
    assert diagnosis is not None
    return {
        "benchmark": "diagnosis",
        "fault": case.fault,
        "recipe": case.recipe or "bf16",
        "model": f"{case.shape.layers} x {case.shape.width}",
        "seed": case.seed,
        "at": case.at,
        "named": diagnosis.cause,
        "right": diagnosis.cause == CAUSES[case.fault],
        "blamed": diagnosis.cause not in NOT_FP8,
        "sentence": diagnosis.sentence,
        "training_s": round(seconds, 1),
        "diagnosis_s": round(time.perf_counter() - begin, 2),
    }


def train_and_judge(cases: list[Any], known: dict[str, str]) -> list[dict[str, Any]]:
    """Train each case, and its BF16 arm once, and print their lines."""
    from diagnosis_faults import train

    lines = []
    for case in cases:
        begin = time.perf_counter()
        if case.group not in known:
            known[case.group] = train(case.bf16)
        run = train(case)
        lines.append(judge(case, run, time.perf_counter() - begin))
        print(json.dumps(lines[-1]), flush=True)
    return lines


def judge_baselines(known: dict[str, str]) -> list[dict[str, Any]]:
    """Diagnose the BF16 runs of the controls, which are healthy."""
    from diagnosis_faults import Case

    controls = [Case(fault="", recipe="", seed=seed) for seed in CONTROL_SEEDS]
    lines = [judge(control, known[control.group], 0.0) for control in controls]
    for line in lines:
        print(json.dumps(line), flush=True)
    return lines


def summary(name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    faults = [line for line in lines if line["fault"]]
    controls = [line for line in lines if not line["fault"]]
    innocent = [line for line in lines if line["fault"] in INNOCENT]
    return {
        f"{name}_right": sum(line["right"] for line in faults),
        f"{name}_faults": len(faults),
        f"{name}_controls_right": sum(line["right"] for line in controls),
        f"{name}_controls": len(controls),
        f"{name}_blamed": sum(line["blamed"] for line in innocent),
    }


def main() -> None:
    # PYTHONSAFEPATH, which the server processes set, leaves this folder out.
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="*", choices=["fixed", "torchao"], default=["fixed", "torchao"])
    parser.add_argument("--variations", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0, help="of the variations")
    options = parser.parse_args()
    from chaos import make_token

    from fp8scope_dashboard.servers.supervisor import Supervisor

    begin = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as scratch,
        Supervisor(Path(scratch) / "up", port=0) as supervisor,
    ):
        token = make_token(supervisor)
        os.environ |= {
            **supervisor.environment,
            "DJANGO_SETTINGS_MODULE": "fp8scope_dashboard.settings.base",
            "FP8SCOPE_URL": supervisor.url,
            "FP8SCOPE_TOKEN": token,
            "FP8SCOPE_DIR": str(Path(scratch) / "spool"),
        }
        import django
        import torch

        django.setup()
        torch.set_num_threads(1)
        # Of the agent; the servers' settings read a variable of this name, too.
        os.environ["FP8SCOPE_LOG_LEVEL"] = "warning"
        known: dict[str, str] = {}
        cases = {"varied": varied_cases(options.variations, options.seed)}
        if "torchao" in options.parts:
            cases["torchao"] = torchao_cases()
        if "fixed" in options.parts:
            cases["fixed"] = fixed_cases()
        results: dict[str, Any] = {"benchmark": "diagnosis"}
        for part, chosen in cases.items():
            lines = train_and_judge(chosen, known)
            if part == "fixed":
                lines += judge_baselines(known)
            if lines:
                results |= summary(part, lines)
    print(json.dumps({**results, "seconds": round(time.perf_counter() - begin, 1)}))


if __name__ == "__main__":
    main()
