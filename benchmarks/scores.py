"""How often verdicts on scores are wrong, and what they find. Prints one JSON line per case.

    python benchmarks/scores.py [--trials N] [--coverage] [--checks]

Without an option: wrong 'worse' over ten tasks without a harm, power for a true harm of 2 % on 500 paired
items, wrong 'equivalent' at the edge of the margin, and the verdict 'inside the baseline's interval' beside
them; any wrong verdict over 20 checkpoints of one run; and losses of single runs whose seeds differ.
`--coverage`: of the intervals, with heavy tails and unequal clusters: `covered` counts those cases in which
no interval is given (`refused`), because the verdict then says why it cannot tell. `--checks`: published
figures and second witnesses. `--only NAME`: the cases of one function.

Items are simulated: item i is right with probability p_i from a beta distribution of mean 0.6, independently
in each run. `discordance` is the share of items that two runs of the same configuration answer differently, 2
E[p (1 - p)]: 5 to 20 % for two pre-trainings, below 1 % for two models with nearly the same weights. A harm
takes the same share of all right answers. A seed shifts a whole run by a further normal offset, `seed_sd`.
Random choices have a fixed seed.

`limit` beside the power is what no test at this level exceeds: for single runs the exact power of the
uniformly most powerful unbiased test, else the power of a normal test that knows all variances. The same harm
is then found in the margin of each item, the log-likelihood of the right answer less that of the best wrong
one, which says more than its sign does: margins are normal, and each run adds a normal deviation to each.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.scores import intervals, quality
from fp8scope_dashboard.analysis.scores.differences import ScoreDifference, paired
from fp8scope_dashboard.analysis.scores.result import RunScore, TaskScores
from fp8scope_dashboard.analysis.scores.spending import shares
from fp8scope_dashboard.analysis.scores.verdict import compare_scores, judge

Floats = NDArray[np.float64]
Share = float | np.floating[Any]
ALPHA, MEAN, TASKS, SEED = 0.05, 0.6, 10, 0


@dataclass(frozen=True)
class Design:
    """Arms of `run` and `baseline` runs over n items."""

    run: int
    baseline: int
    n: int
    discordance: float
    seed_sd: float = 0.0

    @property
    def label(self) -> dict[str, object]:
        """The design as fields of a JSON line."""
        return {
            "seeds": f"{self.run} v {self.baseline}",
            "items": self.n,
            "discordance": self.discordance,
            "seed_sd": self.seed_sd,
        }


def draw(design: Design, harm: float, chance: np.random.Generator) -> TaskScores:
    """One task: an arm whose score is lower by `harm` in expectation, and its baseline."""
    # 2 E[p (1 - p)] = 2 m (1 - m) s / (s + 1) for a beta distribution with a + b = s.
    share = design.discordance / (2.0 * MEAN * (1.0 - MEAN))
    total = share / (1.0 - share)
    p = chance.beta(MEAN * total, (1.0 - MEAN) * total, design.n)

    def seed(lost: float) -> RunScore:
        shift = chance.normal(0.0, design.seed_sd) if design.seed_sd else 0.0
        right = chance.random(design.n) < p
        # An offset turns answers of either kind, so that the score moves by it on average.
        rate = (lost - shift) / MEAN if lost >= shift else (shift - lost) / (1.0 - MEAN)
        turned = chance.random(design.n) < rate
        items = right & ~turned if lost >= shift else right | turned
        return RunScore(items.astype(np.float64))

    runs = [seed(harm) for _ in range(design.run)]
    return TaskScores(
        name="task",
        metric="accuracy",
        kind="proportion",
        higher_is_better=True,
        arm=runs,
        baselines=[seed(0.0) for _ in range(design.baseline)],
    )


def wrong_worse(trials: int) -> Iterator[dict[str, object]]:
    """No harm in any of ten tasks: how often is any called worse."""
    designs = [
        Design(1, 1, 500, 0.005),
        Design(1, 1, 500, 0.02),
        Design(1, 1, 500, 0.2),
        Design(1, 3, 500, 0.1),
        Design(3, 3, 500, 0.1),
        Design(1, 3, 1000, 0.1, 0.005),
        Design(3, 3, 1000, 0.1, 0.01),
    ]
    for design in designs:
        chance = np.random.default_rng(SEED)
        wrong = outside = 0
        for _ in range(trials):
            results = judge([draw(design, 0.0, chance) for _ in range(TASKS)], alpha=ALPHA)
            wrong += any(result.verdict == "worse" for result in results)
            outside += any(_below(result.score, result.baseline_interval) for result in results)
        yield {
            "case": "no harm, ten tasks",
            **design.label,
            "wrong_worse": wrong / trials,
            "old_below": outside / trials,
            "goal": "wrong_worse <= 0.05",
        }


def power(trials: int) -> Iterator[dict[str, object]]:
    """A true harm of 2 % on 500 paired items: how often is it found."""
    harm = 0.02
    designs = [
        *(Design(1, 1, 500, discordance) for discordance in (0.001, 0.005, 0.02, 0.05, 0.1, 0.2)),
        *(Design(3, 3, 500, discordance) for discordance in (0.005, 0.02, 0.05)),
        *(Design(10, 10, 500, discordance) for discordance in (0.02, 0.05, 0.1)),
    ]
    for design in designs:
        chance = np.random.default_rng(SEED)
        results = [compare_scores(draw(design, harm, chance), alpha=ALPHA) for _ in range(trials)]
        yield {
            "case": "harm of 2 %",
            **design.label,
            "worse": np.mean([result.verdict == "worse" for result in results]),
            "limit": round(_limit(harm, design), 3),
            "equivalent": np.mean([result.verdict == "equivalent" for result in results]),
            "old_inside": np.mean([bool(result.inside) for result in results]),
            "items_for_90": _items_for(harm, design, 0.9),
        }
    for discordance in (0.02, 0.05, 0.1, 0.2):
        design = Design(1, 1, 500, discordance)
        yield {
            "case": "harm of 2 %, margins of the log-likelihoods",
            **design.label,
            "worse": _margins_worse(harm, design, trials),
            "wrong_worse": _margins_worse(0.0, design, trials),
        }


def _limit(harm: float, design: Design) -> float:
    """The power that no test of this level exceeds."""
    lost = design.discordance / 2.0 + (MEAN - design.discordance / 2.0) * harm / MEAN
    won = (1.0 - harm / MEAN) * design.discordance / 2.0
    if design.run == design.baseline == 1:
        return _limit_of_single_runs(lost, won, design.n)
    variance = design.discordance / 2.0 * (1.0 / design.run + 1.0 / design.baseline)
    quantile = scipy.stats.norm.isf(ALPHA)
    return float(scipy.stats.norm.sf(quantile - harm / math.sqrt(variance / design.n)))


def _limit_of_single_runs(lost: float, won: float, n: int) -> float:
    """Power of the randomised exact McNemar test: given the number of differing items, uniformly most
    powerful unbiased for paired answers (Lehmann and Romano, 2005, section 4.5).

    Args:
        lost: probability that only the baseline answers an item rightly; `won` that only the run does.
    """
    power = 0.0
    for differing in range(n + 1):
        counts = np.arange(differing + 1)
        beyond = scipy.stats.binom.sf(counts, differing, 0.5)
        rejected = np.clip((ALPHA - beyond) / scipy.stats.binom.pmf(counts, differing, 0.5), 0.0, 1.0)
        given = scipy.stats.binom.pmf(counts, differing, lost / (lost + won)) @ rejected
        power += float(scipy.stats.binom.pmf(differing, n, lost + won) * given)
    return power


def _margins_worse(harm: float, design: Design, trials: int) -> float:
    """How often the margins of single runs are called worse, where the harm takes this share of answers."""
    level, lower = scipy.stats.norm.ppf(MEAN), scipy.stats.norm.ppf(MEAN - harm)

    def excess(correlation: float) -> float:
        both = scipy.stats.multivariate_normal.cdf(
            [level, level], cov=[[1.0, correlation], [correlation, 1.0]]
        )
        return 2.0 * (MEAN - float(both)) - design.discordance

    correlation = scipy.optimize.brentq(excess, 0.0, 1.0 - 1e-9)
    chance = np.random.default_rng(SEED)
    worse = 0
    for _ in range(trials):
        shared = math.sqrt(correlation) * chance.normal(size=design.n)
        own = math.sqrt(1.0 - correlation) * chance.normal(size=(2, design.n))
        run, baseline = shared + own[0] + lower, shared + own[1] + level
        task = TaskScores(
            name="task",
            metric="margin",
            kind="mean",
            higher_is_better=True,
            arm=[RunScore(run)],
            baselines=[RunScore(baseline)],
        )
        worse += compare_scores(task, alpha=ALPHA).verdict == "worse"
    return worse / trials


def _items_for(harm: float, design: Design, wanted: float) -> int:
    """Items by which a one-sided paired test finds the harm with the wanted power."""
    variance = design.discordance / 2.0 * (1.0 / design.run + 1.0 / design.baseline) + harm
    quantiles = scipy.stats.norm.isf(ALPHA) + scipy.stats.norm.ppf(wanted)
    return math.ceil(quantiles**2 * variance / harm**2)


def wrong_equivalent(trials: int) -> Iterator[dict[str, object]]:
    """A true harm of exactly the limit that the verdict names: how often is it called equivalent.

    The limit is the margin of 1 %; with a borrowed seed spread two margins, `equivalent_within`.
    """
    designs = [
        Design(1, 1, 300, 0.0005),
        Design(1, 1, 450, 0.0005),
        Design(1, 1, 2000, 0.005),
        Design(1, 1, 5000, 0.05),
        Design(3, 3, 5000, 0.1),
        Design(1, 3, 2000, 0.02),
    ]
    for design in designs:
        chance = np.random.default_rng(SEED)
        for harm in (0.01, 0.02):
            results = [compare_scores(draw(design, harm, chance), alpha=ALPHA) for _ in range(trials)]
            limits = [result.equivalent_within for result in results]
            yield {
                "case": f"harm of {harm:.0%}",
                **design.label,
                "wrong_equivalent": np.mean([limit is not None and limit <= harm for limit in limits]),
                "equivalent_within_more": np.mean([limit is not None and limit > harm for limit in limits]),
                "goal": "wrong_equivalent <= 0.05",
            }


def right_equivalent(trials: int) -> Iterator[dict[str, object]]:
    """No harm: how often is that shown."""
    for design in (Design(1, 1, 500, 0.005), Design(1, 1, 2000, 0.02), Design(3, 3, 5000, 0.1)):
        chance = np.random.default_rng(SEED)
        results = [compare_scores(draw(design, 0.0, chance), alpha=ALPHA) for _ in range(trials)]
        equivalent = np.mean([result.verdict == "equivalent" for result in results])
        yield {"case": "no harm, one task", **design.label, "equivalent": equivalent}


CHECKPOINTS = list(range(1000, 21_000, 1000))


def checkpoints(trials: int) -> Iterator[dict[str, object]]:
    """20 checkpoints without a harm: how often is any of them wrongly called worse or better.

    Each checkpoint has new items and new offsets of the seeds. `planned`: the run's steps are known. A harm
    of 3 % shows the power that is left at the last one.
    """
    designs = [
        Design(1, 1, 500, 0.02),
        Design(1, 1, 500, 0.2),
        Design(3, 3, 500, 0.1),
        Design(3, 3, 500, 0.1, 0.005),
        Design(1, 1, 1000, 0.1, 0.002),
    ]
    for design, planned in [(design, planned) for design in designs for planned in (True, False)]:
        chance = np.random.default_rng(SEED)
        wrong = late = 0
        for _ in range(trials):
            wrong += bool({"worse", "better"} & set(_over_checkpoints(design, 0.0, chance, planned=planned)))
        for _ in range(trials // 4):
            late += _over_checkpoints(design, 0.03, chance, planned=planned)[-1] == "worse"
        yield {
            "case": "20 checkpoints, no harm",
            **design.label,
            "planned": planned,
            "any_wrong": wrong / trials,
            "goal": "any_wrong <= 0.05",
            "harm_of_3_percent_found_at_the_last": late / (trials // 4),
        }


def _over_checkpoints(
    design: Design, harm: float, chance: np.random.Generator, *, planned: bool
) -> list[str]:
    parts = shares(CHECKPOINTS, CHECKPOINTS[-1] if planned else None, ended=True)
    return [
        judge([draw(design, harm, chance)], alpha=ALPHA, checkpoint=number, alpha_share=part)[0].verdict
        for number, part in enumerate(parts, start=1)
    ]


def losses(trials: int) -> Iterator[dict[str, object]]:
    """The nll of 500 texts, one run each, whose seeds differ by `seed_spread` of the loss: wrong verdicts.

    The public curves' seeds spread by 0.00035 of the loss. `worse_at`: power for a harm of so much.
    """
    for spread in (0.0, 0.00035, 0.0007, 0.0011):
        for texts, alike in ((500, 0.01), (500, 0.05), (5000, 0.05)):
            chance = np.random.default_rng(SEED)
            results = {
                harm: [_nll(harm, spread, texts, alike, chance) for _ in range(trials)]
                for harm in (0.0, 0.005, 0.01, 0.02)
            }
            yield {
                "case": "nll of single runs",
                "seed_spread": spread,
                "items": texts,
                "item_noise": alike,
                "wrong": np.mean([verdict in ("worse", "better") for verdict in results[0.0]]),
                "equivalent": np.mean([verdict == "equivalent" for verdict in results[0.0]]),
                "worse_at": {
                    str(harm): np.mean([verdict == "worse" for verdict in results[harm]])
                    for harm in results
                    if harm
                },
                "goal": "wrong <= 0.05",
            }


def _nll(harm: float, spread: float, texts: int, noise: float, chance: np.random.Generator) -> str:
    shared = chance.gamma(25.0, 3.0 / 25.0, texts)
    offsets = 1.0 + chance.normal(0.0, spread, 2) if spread else np.ones(2)
    baseline, run = (
        shared * offset + chance.normal(0.0, noise * 3.0, texts) for offset in offsets + [0.0, harm]
    )
    task = TaskScores(
        name="heldout",
        metric="nll",
        kind="mean",
        higher_is_better=False,
        arm=[RunScore(run)],
        baselines=[RunScore(baseline)],
    )
    return compare_scores(task, alpha=ALPHA).verdict


def heavy_tails(trials: int) -> Iterator[dict[str, object]]:
    """Coverage of a paired difference of 95 % where the items' differences have a heavy tail on one side."""
    tails: list[tuple[str, Callable[[np.random.Generator, int], Floats], float]] = [
        ("exponential", lambda chance, n: chance.exponential(size=n), 1.0),
        ("gamma 0.1", lambda chance, n: chance.gamma(0.1, size=n), 0.1),
        *(
            (f"lognormal {s}", lambda chance, n, s=s: chance.lognormal(0.0, s, n), math.exp(s * s / 2.0))
            for s in (1.0, 1.5, 2.0, 3.0)
        ),
        *(
            (f"pareto {a}", lambda chance, n, a=a: chance.pareto(a, n), 1.0 / (a - 1.0))
            for a in (1.2, 1.5, 2.0, 3.0)
        ),
        ("t with 2 degrees", lambda chance, n: chance.standard_t(2.0, n), 0.0),
    ]
    for name, drawn, true in tails:
        for n in (20, 50, 200, 1000):
            chance = np.random.default_rng(n)
            differences = [paired(drawn(chance, n)[None, :], np.zeros((1, n))) for _ in range(trials)]
            yield _covered(f"paired difference, {name}", n, differences, true)


def unequal_clusters(trials: int) -> Iterator[dict[str, object]]:
    """The same for clusters of unequal sizes, whose items are alike to a degree (`icc`)."""
    patterns = {
        "98, 1, 1": [98, 1, 1],
        "90, 5, 5": [90, 5, 5],
        "60, 20, 20": [60, 20, 20],
        "50 and 50 of 1": [50] + [1] * 50,
        "33, 33, 33, 1": [33, 33, 33, 1],
        "100 / rank": [100 // rank for rank in range(1, 21)],
    }
    for label, sizes in patterns.items():
        for icc in (1.0, 0.5, 0.0):
            chance = np.random.default_rng(SEED)
            index = np.repeat(np.arange(len(sizes)), sizes)
            names = index.astype(str).tolist()
            differences = []
            for _ in range(trials):
                common = math.sqrt(icc) * chance.normal(size=len(sizes))[index]
                items = common + math.sqrt(1.0 - icc) * chance.normal(size=len(index))
                differences.append(paired(items[None, :], np.zeros((1, len(index))), clusters=names))
            yield {**_covered(f"clusters of {label}", len(index), differences, 0.0), "icc": icc}


def _covered(interval: str, size: int, differences: list[ScoreDifference], true: float) -> dict[str, object]:
    given = [difference for difference in differences if not difference.doubt]
    held = sum(difference.interval(ALPHA).holds(true) for difference in given)
    refused = len(differences) - len(given)
    return {
        "interval": interval,
        "size": size,
        "covered": round((held + refused) / len(differences), 4),
        "refused": round(refused / len(differences), 4),
        "goal": "covered >= 0.9",
    }


def _below(score: float | None, band: intervals.Interval | None) -> bool:
    return score is not None and band is not None and score < band.low


def coverage(trials: int) -> Iterator[dict[str, object]]:
    """Coverage of the 95 % intervals, of the old quantile beside it."""
    z = intervals.quantile(ALPHA)
    for n in (2, 3, 5, 10, 30):
        draws = np.random.default_rng(n).normal(0.0, 1.0, (trials, n))
        covered = np.mean([intervals.mean_interval(row, ALPHA).holds(0.0) for row in draws])
        errors = draws.std(axis=1, ddof=1) / math.sqrt(n)
        old = np.mean(np.abs(draws.mean(axis=1)) <= z * errors)
        yield _line("mean over items", n, covered, old)
    for groups in (3, 5, 10, 30):
        yield _clusters(groups, trials, equal=True)
        yield _clusters(groups, trials, equal=False)
    for seeds in (2, 3, 5, 10):
        draws = np.random.default_rng(seeds).normal(0.6, 0.01, (trials, seeds + 1))
        mean = np.mean([intervals.student_t(row[:-1], ALPHA).holds(0.6) for row in draws])
        further = np.mean([intervals.prediction(row[:-1], ALPHA).holds(row[-1]) for row in draws])
        yield _line("mean of seeds", seeds, mean)
        yield _line("a further seed", seeds, further)
    for n, discordance in ((100, 0.05), (500, 0.02), (500, 0.2)):
        yield _paired(n, discordance, trials)


def _clusters(groups: int, trials: int, *, equal: bool) -> dict[str, object]:
    chance = np.random.default_rng(groups)
    covered = 0
    for _ in range(trials // 2):
        sizes = np.full(groups, 4) if equal else chance.integers(2, 9, groups)
        names = np.repeat(np.arange(groups), sizes)
        items = chance.normal(size=groups)[names] + chance.normal(size=len(names))
        covered += intervals.mean_interval(items, ALPHA, names.astype(str).tolist()).holds(0.0)
    return _line("clusters" if equal else "clusters of 2 to 8 items", groups, covered / (trials // 2))


def _paired(n: int, discordance: float, trials: int) -> dict[str, object]:
    chance = np.random.default_rng(n)
    covered = 0
    for _ in range(trials // 2):
        task = draw(Design(1, 1, n, discordance), 0.02, chance)
        sides = [arm[0].items[None, :] for arm in (task.arm, task.baselines)]
        covered += paired(*sides, proportion=True).interval(ALPHA).holds(-0.02)
    return {**_line("paired difference", n, covered / (trials // 2)), "discordance": discordance}


def _line(interval: str, size: int, covered: Share, old: Share | None = None) -> dict[str, object]:
    line = {"interval": interval, "size": size, "coverage": round(float(covered), 4)}
    return line if old is None else {**line, "old": round(float(old), 4)}


def checks() -> Iterator[dict[str, object]]:
    """Published figures, and scipy as the second witness."""
    yield _check("Miller: questions for 3 points", quality.items_needed(0.03, 1 / 9), 969)
    for samples, published in (((1, 1), 13.3), ((10, 10), 7.6)):
        effect = 100 * quality.smallest_effect(198, 1 / 9, (1 / 6, 1 / 6), samples)
        yield _check(f"Miller: smallest effect with 198 questions, K = {samples[0]}", effect, published)
    # The mean of SIQA is about 46 per cent; the width hardly depends on it.
    for name, share, items, published in (("MMLU", 0.2586, 14_042, 0.72), ("SIQA", 0.46, 1_954, 2.21)):
        yield _check(f"Madaan: half-width of {name}", 100 * quality.half_width(share, items), published)
    chance = np.random.default_rng(SEED)
    run, baseline = chance.normal(0.0, 1.0, (1, 40)), chance.normal(0.3, 1.0, (1, 40))
    witness = float(scipy.stats.ttest_rel(run[0], baseline[0]).pvalue)
    yield _check("scipy: paired t", 2 * paired(run, baseline).p_below(), witness)
    wilson = scipy.stats.binomtest(37, 50).proportion_ci(0.95, method="wilson")
    yield _check("scipy: Wilson, lower", intervals.wilson(37, 50, ALPHA).low, wilson.low)
    exact = scipy.stats.binomtest(37, 50).proportion_ci(0.95, method="exact")
    yield _check("scipy: Clopper-Pearson, upper", intervals.clopper_pearson(37, 50, ALPHA).high, exact.high)


def _check(name: str, value: float, expected: float) -> dict[str, object]:
    return {"check": name, "value": value, "expected": expected}


def main() -> None:
    """Print one JSON line per case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--only", help="name of a function, e.g. checkpoints")
    options = parser.parse_args()
    cases: list[Callable[[int], Iterator[dict[str, object]]]] = [
        wrong_worse,
        power,
        wrong_equivalent,
        right_equivalent,
        checkpoints,
        losses,
    ]
    if options.coverage:
        cases = [lambda trials: coverage(10 * trials), heavy_tails, unequal_clusters]
    if options.checks:
        cases = [lambda _: checks()]
    if options.only:
        cases = [case for case in (*cases, heavy_tails, unequal_clusters) if case.__name__ == options.only]
    for case in cases:
        for line in case(options.trials):
            print(json.dumps(line, default=float), flush=True)


if __name__ == "__main__":
    main()
