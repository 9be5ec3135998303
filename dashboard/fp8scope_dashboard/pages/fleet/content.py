"""The content of the page of a project's hours: an answer in a sentence, and rows with what they rest on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.pages.fleet.measured import Savings, Waiting, savings_of, waiting_in
from fp8scope_dashboard.pages.formatting import count, percent
from fp8scope_dashboard.pages.hours.usage import RunUsage, Usage, usage_of
from fp8scope_dashboard.pages.hours.wording import HOUR, MIN_HOURS, cost, hours
from fp8scope_dashboard.text.numbers import count as counted

MAX_LISTED: Final = 20
PRECISIONS: Final = {"fp8": "FP8", "bf16": "BF16", "fp16": "FP16", "fp32": "FP32", "unknown": "Not known"}


@dataclass(frozen=True, kw_only=True)
class HoursRow:
    """One line of a table: hours, their share of all, their price, and a note on what they rest on."""

    title: str
    hours: str
    share: str = ""
    price: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run with its hours, their price, and what it lost of them."""

    run: RunUsage
    precision: str
    hours: str
    price: str
    lost: str
    share: str
    reason: str


@dataclass(frozen=True)
class Fleet:
    """The hours of a project. `price`: of a GPU hour, if the user has given one."""

    usage: Usage
    waiting: Waiting
    savings: Savings
    price: float | None = None

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.usage.precisions)

    @property
    def runs(self) -> int:
        return sum(row.runs for row in self.usage.precisions)

    @property
    def fp8(self) -> float:
        return sum(row.seconds for row in self.usage.precisions if row.precision == "fp8")

    @property
    def diverged(self) -> float:
        return sum(row.diverged for row in self.usage.precisions)

    @property
    def crashed(self) -> float:
        return sum(row.crashed for row in self.usage.precisions)

    @property
    def lost(self) -> float:
        return self.diverged + self.crashed + self.waiting.seconds

    @property
    def unit(self) -> str:
        """The unit of the hours: of processes, if no run has said that it has a GPU."""
        without = sum(row.without_gpu for row in self.usage.precisions)
        return "process hours" if self.seconds and without >= self.seconds else "GPU hours"

    @property
    def answer(self) -> str:
        """The first sentences of the page."""
        if not self.seconds:
            return "No run has trained yet."
        in_fp8 = percent(self.share(self.fp8))
        lost = f"{hours(self.lost)} ({percent(self.share(self.lost))}) were lost"
        whole = f"{counted(self.runs, 'run')} took {hours(self.seconds)} {self.unit}, {in_fp8} in FP8"
        return f"{whole}; {lost}.{self._saved()}"

    def _saved(self) -> str:
        savings = self.savings
        if not savings.runs:
            return ""
        low, high = sorted((savings.low, savings.high))
        if max(-low, high) < MIN_HOURS * HOUR:
            return f" FP8 saved or cost less than {MIN_HOURS} hours."
        if low < 0.0 < high:
            return f" Whether FP8 saved hours cannot be told: {hours(low)} to {hours(high)}."
        if savings.seconds >= 0.0:
            return f" FP8 saved {hours(savings.seconds)} hours ({hours(low)} to {hours(high)}) against BF16."
        more = f"{hours(-savings.seconds)} hours more ({hours(-high)} to {hours(-low)})"
        return f" FP8 took {more} than BF16 would have."

    def share(self, seconds: float) -> float:
        return seconds / self.seconds if self.seconds else 0.0

    def rows_of_precisions(self) -> list[HoursRow]:
        """All runs, then those of each precision."""
        rows = [self._row("All runs", self.seconds, self._note_of_all())]
        for row in self.usage.precisions:
            title = PRECISIONS.get(row.precision, row.precision)
            rows.append(self._row(title, row.seconds, counted(row.runs, "run")))
        return rows

    def rows_of_losses(self) -> list[HoursRow]:
        """Divergences, crashes and waiting for data."""
        guesses = sum(row.guesses for row in self.usage.precisions)
        crash = "From the last checkpoint, or from where the run went on, to its end."
        if guesses:
            crash += (
                f" {counted(guesses, 'run')} ended without a known checkpoint and lost the whole last start: "
                "send run.log_artefact(name, address, step=step) with each checkpoint."
            )
        return [
            self._row(
                "Divergences",
                self.diverged,
                "From the onset of an alert of the loss until it was resolved, or the end.",
            ),
            self._row("Crashes", self.crashed, crash),
            self._waiting(),
        ]

    def _waiting(self) -> HoursRow:
        waiting = self.waiting
        if not waiting.runs:
            note = "No run sends time_data: watch or attach the model, so that the parts of a step are timed."
            return HoursRow(title="Waiting for data", hours="Not known", note=note)
        note = (
            f"Measured in {counted(waiting.runs, 'run')} with {percent(self.share(waiting.measured))} of the "
            "hours, by time_data; the others are not included."
        )
        return self._row("Waiting for data", waiting.seconds, note)

    def row_of_savings(self) -> HoursRow:
        """The hours that FP8 saved so far."""
        savings = self.savings
        if not savings.runs:
            note = "No FP8 run was compared in speed: start FP8 runs with baseline=, and log their tokens."
            return HoursRow(title="Saved by FP8", hours="Not known", note=note)
        low, high = sorted((savings.low, savings.high))
        share = percent(savings.measured / self.fp8 if self.fp8 else 0.0)
        note = (
            f"{hours(low)} to {hours(high)}, by the speed to the same loss of {counted(savings.runs, 'run')} "
            f"with {share} of the FP8 hours; the others are not included."
        )
        return self._row("Saved by FP8", savings.seconds, note)

    def rows_of_results(self) -> list[HoursRow]:
        """The hours that FP8 saved, then those that were lost."""
        return [self.row_of_savings(), *self.rows_of_losses()]

    def losers(self) -> list[RunRow]:
        """The runs that lost the most hours to crashes and divergences."""
        return [self._run(run) for run in self.usage.losers]

    def largest(self) -> list[RunRow]:
        """The runs with the most hours."""
        return [self._run(run) for run in self.usage.largest[:MAX_LISTED]]

    def _run(self, run: RunUsage) -> RunRow:
        return RunRow(
            run=run,
            precision=PRECISIONS.get(run.precision, run.precision),
            hours=hours(run.seconds),
            price="" if self.price is None else cost(run.seconds, self.price),
            lost=hours(run.lost),
            share=percent(run.lost / run.seconds if run.seconds else 0.0),
            reason=_reason(run),
        )

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON, in hours."""
        return {
            "answer": self.answer,
            "runs": self.runs,
            "unit": self.unit,
            "hours": _rounded(self.seconds),
            "fp8_share": self.share(self.fp8),
            "lost": {
                "divergences": _rounded(self.diverged),
                "crashes": _rounded(self.crashed),
                "waiting": _rounded(self.waiting.seconds) if self.waiting.runs else None,
                "waiting_measured_hours": _rounded(self.waiting.measured),
            },
            "saved": {
                "hours": _rounded(self.savings.seconds) if self.savings.runs else None,
                "interval": [_rounded(end) for end in sorted((self.savings.low, self.savings.high))],
                "measured_hours": _rounded(self.savings.measured),
                "runs": self.savings.runs,
            },
            "precisions": [_in_hours(asdict(row)) for row in self.usage.precisions],
            "most_lost": [{**_in_hours(asdict(run)), "id": str(run.id)} for run in self.usage.losers],
            "price_per_hour": self.price,
            "cost": None if self.price is None else round(self.price * self.seconds / HOUR, 2),
        }

    def _row(self, title: str, seconds: float, note: str) -> HoursRow:
        price = "" if self.price is None else cost(seconds, self.price)
        return HoursRow(
            title=title, hours=hours(seconds), share=percent(self.share(seconds)), price=price, note=note
        )

    def _note_of_all(self) -> str:
        untimed = sum(row.untimed for row in self.usage.precisions)
        without = sum(row.without_gpu for row in self.usage.precisions)
        parts = [counted(self.runs, "run")]
        if untimed:
            parts.append(f"{count(untimed)} of them without a time")
        if without and without < self.seconds:
            parts.append(f"{hours(without)} hours of processes that named no GPU")
        return ", ".join(parts)


def fleet_of(project: Project, price: float | None = None) -> Fleet:
    """Add up the hours of a project's runs. `price`: of a GPU hour, in place of the project's."""
    usage = usage_of(project)
    price = project.gpu_hour_price if price is None else price
    return Fleet(usage, waiting_in(usage.largest), savings_of(usage.largest), price)


def _reason(run: RunUsage) -> str:
    parts = [
        name for name, seconds in (("diverged", run.diverged), ("crashed", run.crashed)) if seconds > 0.0
    ]
    return " and ".join(parts)


def _in_hours(row: dict[str, Any]) -> dict[str, Any]:
    names = ("seconds", "diverged", "crashed", "without_gpu")
    renamed = {"seconds": "hours"}
    return {
        renamed.get(name, name): _rounded(value) if name in names else value for name, value in row.items()
    }


def _rounded(seconds: float) -> float:
    return round(seconds / HOUR, 4)
