"""The advice that a run's agent has sent at the end: how its training could be faster. See docs/advice.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

ADVICE: Final = "advice"
"""Its entry in the environment of a run."""
MAX_FINDINGS: Final = 16
MAX_TEXT: Final = 1_000


@dataclass(frozen=True, kw_only=True)
class StoredFinding:
    """One finding. `low` and `high`: the expected gain, as shares of the step's time from 0 to 1."""

    practice: str
    title: str
    evidence: str
    change: str
    formula: str
    low: float
    high: float


@dataclass(frozen=True)
class StoredAdvice:
    """The findings of a run that was checked: none, if it follows all practices. `steps` were judged."""

    findings: tuple[StoredFinding, ...]
    steps: int


def advice_of(environment: Mapping[str, Any]) -> StoredAdvice | None:
    """Return what an environment has of advice; None if the run was not checked.

    Any client can send any document, so what is not a finding is left out.
    """
    document = environment.get(ADVICE)
    if not isinstance(document, Mapping) or not isinstance(document.get("findings"), list):
        return None
    findings = [_finding(entry) for entry in document["findings"][:MAX_FINDINGS]]
    steps = document.get("steps")
    return StoredAdvice(
        tuple(finding for finding in findings if finding is not None), steps if isinstance(steps, int) else 0
    )


def _finding(entry: Any) -> StoredFinding | None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("gain"), Mapping):
        return None
    texts = {name: entry.get(name) for name in ("practice", "title", "evidence", "change")}
    texts["formula"] = entry["gain"].get("formula")
    cut = {name: text[:MAX_TEXT] for name, text in texts.items() if isinstance(text, str)}
    low, high = (_share(entry["gain"].get(name)) for name in ("low", "high"))
    if len(cut) < len(texts) or low is None or high is None or low > high:
        return None
    return StoredFinding(**cut, low=low, high=high)


def _share(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and 0 <= value <= 1 else None
