"""The memory of a run and its baseline by what it is for, and where FP8 takes more.

The agent adds up the bytes that a training holds from step to step (`memory_account`, of one rank). The rest
of the peak of the allocator is what comes and goes within a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.analysis.comparison_runs import arm_named, as_run_id
from fp8scope_dashboard.pages.formatting import size
from fp8scope_dashboard.pages.run.training_state import KINDS
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.text.numbers import MINUS

ACCOUNT: Final = "environment__training__memory_account"
PEAK: Final = "last_scalars__memory_peak"
MAX_BASELINES: Final = 64
MAX_BYTES: Final = 2.0**60
SMALL: Final = 1e-4
"""A category is left out if it is a smaller share of the larger side."""
TITLES: Final = {
    "weights": "Weights",
    "gradients": "Gradients",
    **KINDS,
    "scaling": "Scales and amax histories",
    "buffers": "Other buffers",
    "rest": "Within a step",
}
REASONS: Final = {
    "weights": "Its weights are stored in a wider format.",
    "gradients": "Its gradients have the wider format of its weights.",
    "master": "Its optimizer keeps a second copy of the weights, from which it rounds those of the model.",
    "scaling": "Each quantised tensor has a scale, and with delayed scaling a history of amaxes.",
    "rest": "FP8 layers hold casts of weights and inputs, and transposes of both, from the forward to the "
    "backward pass. Batch size and checkpointing of activations count here, too.",
}
IN_REST: Final = "The rest of the peak: activations, casts and transposes, temporaries."


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One category in bytes. `kinds` has the formats of both sides."""

    title: str
    ours: str
    theirs: str
    difference: str
    kinds: str
    reason: str
    takes_more: bool


@dataclass(frozen=True)
class MemoryAccount:
    """The memory of two runs, the largest category first."""

    rows: Sequence[MemoryRow]
    has_rest: bool

    @property
    def sentence(self) -> str:
        """The categories in which FP8 takes more."""
        within = TITLES["rest"]
        more = [
            f"{'what comes and goes within a step' if row.title == within else row.title.lower()} "
            f"({row.difference})"
            for row in self.rows
            if row.takes_more
        ]
        if not more:
            return "FP8 takes more memory in no category."
        return f"FP8 takes more memory for {', '.join(more)}."


def accounts_of(project: Project, runs: Sequence[Run]) -> dict[UUID, MemoryAccount]:
    """The accounts of runs that have one, and whose baseline has one; the newest run of it counts."""
    own = Run.objects.filter(pk__in=[run.pk for run in runs]).exclude(**{f"{ACCOUNT}": None})
    mine = {pk: (account, peak) for pk, account, peak in own.values_list("pk", ACCOUNT, PEAK)}
    names = sorted({run.baseline for run in runs if run.pk in mine})
    if not names:
        return {}
    others = Run.objects.filter(arm_named(names), project=project).exclude(**{f"{ACCOUNT}": None})
    newest = others.order_by("-created_at", "id").values_list("pk", "group", ACCOUNT, PEAK)[:MAX_BASELINES]
    theirs: dict[str, tuple[Any, Any]] = {}
    for pk, group, account, peak in newest:
        for name in (group, str(pk)):
            theirs.setdefault(name, (account, peak))
    accounts = {}
    for run in runs:
        name = str(as_run_id(run.baseline) or run.baseline)
        if run.pk in mine and name in theirs:
            account = compared(*mine[run.pk], *theirs[name])
            if account.rows:
                accounts[run.pk] = account
    return accounts


def compared(ours: Any, peak: Any, theirs: Any, their_peak: Any) -> MemoryAccount:
    """Compare two accounts, as the agent sends them, with the peaks of the allocator, if they are known."""
    sides = [categories(ours), categories(theirs)]
    peaks = [_bytes(peak), _bytes(their_peak)]
    has_rest = all(
        whole > sum(map(total, side.values())) > 0.0 for whole, side in zip(peaks, sides, strict=True)
    )
    if has_rest:
        for whole, side in zip(peaks, sides, strict=True):
            side["rest"] = {"": whole - sum(map(total, side.values()))}
    largest = max((sum(map(total, side.values())) for side in sides), default=0.0)
    names = sorted(
        {*sides[0], *sides[1]},
        key=lambda name: (-max(total(side.get(name, {})) for side in sides), name),
    )
    rows = [_row(name, sides[0].get(name, {}), sides[1].get(name, {})) for name in names]
    sizes = {name: max(total(side.get(name, {})) for side in sides) for name in names}
    shown = [row for name, row in zip(names, rows, strict=True) if sizes[name] > SMALL * largest]
    return MemoryAccount(shown, has_rest)


def categories(account: Any) -> dict[str, dict[str, float]]:
    """Bytes by category and format. Scales of an optimizer's state count with what they scale.

    What a client sends in another form is left out.
    """
    sent: Mapping[str, Any] = account if isinstance(account, dict) else {}
    found_in: dict[str, dict[str, float]] = {}
    for name in ("weights", "gradients"):
        _add(found_in, name, sent.get(name))
    state = sent.get("optimizer")
    for name, sizes in state.items() if isinstance(state, dict) else ():
        _add(found_in, str(name).removesuffix("_scale"), sizes, is_scale=str(name).endswith("_scale"))
    for name in ("scaling", "buffers"):
        if _bytes(sent.get(name)) > 0.0:
            found_in[name] = {"": _bytes(sent.get(name))}
    return found_in


def total(sizes: Mapping[str, float]) -> float:
    """The bytes of all formats together."""
    return sum(sizes.values())


def _add(into: dict[str, dict[str, float]], name: str, sizes: Any, *, is_scale: bool = False) -> None:
    for kind, amount in sizes.items() if isinstance(sizes, dict) else ():
        if _bytes(amount) > 0.0:
            kinds = into.setdefault(name, {})
            shown = "" if is_scale else str(kind)[:32]
            kinds[shown] = kinds.get(shown, 0.0) + _bytes(amount)


def _bytes(value: Any) -> float:
    """A number of bytes; 0 for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= MAX_BYTES
    return float(value) if is_number else 0.0


def _row(name: str, ours: Mapping[str, float], theirs: Mapping[str, float]) -> MemoryRow:
    mine, other = total(ours), total(theirs)
    takes_more = mine > other
    sign = "+" if takes_more else MINUS if mine < other else "±"
    reason = REASONS.get(name, "") if takes_more else ""
    kinds = " / ".join(", ".join(sorted(filter(None, side))) or "none" for side in (ours, theirs))
    return MemoryRow(
        title=TITLES.get(name, f"Optimizer state {name[:32]}"),
        ours=size(mine),
        theirs=size(other),
        difference=f"{sign}{size(abs(mine - other))}",
        kinds="" if kinds == "none / none" else kinds,
        reason=IN_REST + (f" {reason}" if reason else "") if name == "rest" else reason,
        takes_more=takes_more,
    )
