"""Published spreads of benchmark scores between training runs that differ only in their seed.

Source: Madaan et al., 'Quantifying Variance in Evaluation Benchmarks', 2024, arXiv:2406.10229, table 1: ten
models of 7B parameters (the architecture of Llama 2), trained from scratch on 210B tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

SEEDS: Final = 10


@dataclass(frozen=True)
class PublicSpread:
    """Facts about one benchmark, in per cent of items.

    Attributes:
        items: number of test items.
        mean: mean score over the seeds; None if unknown here.
        seed_sd: standard deviation of the score between seeds; None if unknown here. For AGIEval and GSM8K
            it is the published plus-minus, which is not below the standard deviation.
        half_width: of the 95 % interval over items.
    """

    benchmark: str
    items: int
    mean: float | None
    seed_sd: float | None
    half_width: float | None


TABLE: Final = (
    PublicSpread("AGIEval", 2_546, 23.44, 1.63, None),
    PublicSpread("ARC-C", 1_165, 39.71, 0.80, 2.74),
    PublicSpread("COPA", 100, 78.80, 2.15, 8.30),
    PublicSpread("GSM8K", 1_319, 4.10, 0.87, None),
    PublicSpread("HellaSwag", 10_042, 70.08, 0.21, 0.93),
    PublicSpread("HumanEval", 164, 11.89, 1.11, 3.98),
    PublicSpread("MMLU", 14_042, 25.86, 0.57, 0.72),
    PublicSpread("MMLU-Cloze", 14_042, 37.47, 0.22, 0.79),
    PublicSpread("SIQA", 1_954, None, None, 2.21),
)
_ALIASES: Final = {
    "arcchallenge": "arcc",
    "socialiqa": "siqa",
    "socialiqa2": "siqa",
    "agievalen": "agieval",
    "gsm8kcot": "gsm8k",
}


def spread_of(task: str) -> PublicSpread | None:
    """The facts about a task, by its name. Capitals, separators and a harness's prefix do not matter.

    `mmlu`, `leaderboard/gsm8k`, `ARC Challenge` and `hellaswag_5shot` are recognised, `mmlu_pro` is not: it
    is another benchmark.
    """
    name = re.sub(r"[-_ :|,(]*\d+[- ]?shots?\)?$", "", task.rsplit("/", 1)[-1].strip().lower())
    key = re.sub(r"[^a-z0-9]", "", name)
    key = _ALIASES.get(key, key)
    return _BY_KEY.get(key)


_BY_KEY: Final = {re.sub(r"[^a-z0-9]", "", fact.benchmark.lower()): fact for fact in TABLE}
