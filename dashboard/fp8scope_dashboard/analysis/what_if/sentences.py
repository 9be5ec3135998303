"""Readiness in words: one sentence for the verdicts, and one for the set to keep in BF16."""

from __future__ import annotations

from collections.abc import Sequence

from fp8scope_dashboard.analysis.what_if.readiness import Readiness
from fp8scope_dashboard.text.numbers import count, percent

# More names than these are counted.
NAMED = 3


def headline(readiness: Readiness) -> str:
    """Return how many tensors are ready, and what the others need."""
    judged = [tensor for tensor in readiness.tensors if tensor.verdict != "unknown"]
    if not judged:
        return "No tensor has finite values other than zero in this step, so none can be judged."
    ready, finer, groups = (readiness.having(verdict) for verdict in ("ready", "finer", "bf16"))
    target = readiness.target
    short = target.format.title.partition(" (")[0]
    every = f"{len(ready):,} of {count(len(judged), 'tensor')}"
    if len(ready) == len(judged):
        every = f"All {len(judged):,} tensors" if len(judged) > 1 else "The only tensor"
    be = "is" if len(ready) == 1 or len(judged) == 1 else "are"
    sentence = f"{every} {be} ready for {short} with {target.title}"
    if groups:
        sentence += f"; keep {names([tensor.name for tensor in groups])} in BF16"
    if finer:
        needs = "needs" if len(finer) == 1 else "need"
        sentence += f"; {names([tensor.name for tensor in finer])} {needs} finer scaling"
    return f"{sentence}."


def kept_sentence(exceptions: Sequence[str], total: int, budget: float) -> str:
    """Return which tensors to keep in BF16 for a mean error of at most `budget`."""
    limit = f"By the error alone, for a mean of at most {percent(budget)},"
    if not exceptions:
        return f"{limit} no tensor has to stay in BF16."
    return (
        f"{limit} keep {names(exceptions)} in BF16: the fewest of {count(total, 'tensor')} that are enough."
    )


def names(of: Sequence[str]) -> str:
    """Up to NAMED names, and the number of the others."""
    if len(of) <= NAMED:
        return " and ".join(part for part in (", ".join(of[:-1]), of[-1]) if part)
    return f"{', '.join(of[:NAMED])} and {len(of) - NAMED:,} more"
