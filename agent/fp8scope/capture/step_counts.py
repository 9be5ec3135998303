"""The relation of a tracker's steps to those of the run. Pure: integers in, a sentence out."""

from dataclasses import dataclass

MIN_POINTS = 3
"""A relation is said of so many steps."""
MAX_SHOWN = 20


@dataclass(slots=True)
class StepCount:
    """Pairs of a step of the run and the tracker's own step, as far as they are needed to compare both."""

    points: int = 0
    first: tuple[int, int] = (0, 0)
    second: tuple[int, int] = (0, 0)
    last: tuple[int, int] = (-1, -1)
    is_linear: bool = True
    """True while all pairs are on one line."""

    def note(self, step: int, count: int) -> None:
        """Take a pair; the same one again changes nothing."""
        pair = (step, count)
        if pair == self.last:
            return
        self.last = pair
        self.points += 1
        if self.points == 1:
            self.first = pair
        elif self.points == 2:
            self.second = pair
        elif self.is_linear:
            (s0, c0), (s1, c1) = self.first, self.second
            self.is_linear = (count - c0) * (s1 - s0) == (c1 - c0) * (step - s0)

    @property
    def is_same(self) -> bool:
        """Return whether the tracker's steps are those of the run."""
        (s0, c0), (s1, c1) = self.first, self.second
        return self.is_linear and s0 == c0 and (self.points < 2 or s1 == c1)

    def sentence(self) -> str:
        """Describe the tracker's steps by those of the run."""
        (s0, c0), (s1, c1) = self.first, self.second if self.points > 1 else self.first
        if self.is_same:
            return "the steps of the run"
        steps, counts = s1 - s0, c1 - c0
        if not self.is_linear or (self.points > 1 and steps <= 0):
            return f"{c0:,} to {self.last[1]:,} over the steps {s0:,} to {self.last[0]:,} of the run"
        if steps == counts:
            return f"the steps of the run {'plus' if c0 > s0 else 'minus'} {abs(c0 - s0):,}"
        if not counts:
            return f"always {c0:,}"
        begin = f", from {c0:,} at step {s0:,}"
        if counts % steps == 0:
            return f"{counts // steps:,} for each step of the run{begin}"
        if steps % counts == 0:
            return f"1 for every {steps // counts:,} steps of the run{begin}"
        return f"{counts:,} for every {steps:,} steps of the run{begin}"


class TrackerSteps:
    """The counts of one tracker, by the names of its values."""

    MAX_NAMES = 500

    def __init__(self) -> None:
        self._counts: dict[str, StepCount] = {}
        self._is_said = False

    def note(self, name: str, step: int, count: int) -> str | None:
        """Take the steps of a value. Returns a sentence the first time that they are seen to differ."""
        counted = self._counts.get(name)
        if counted is None:
            if len(self._counts) >= self.MAX_NAMES:
                return None
            counted = self._counts[name] = StepCount()
        counted.note(step, count)
        if self._is_said or counted.points != MIN_POINTS or counted.is_same:
            return None
        self._is_said = True
        return f"{name}: {counted.sentence()}"

    def facts(self) -> dict[str, list[str]]:
        """Return some of the names, by the sentence on their steps."""
        facts: dict[str, list[str]] = {}
        for name, counted in self._counts.items():
            names = facts.setdefault(counted.sentence(), [])
            if len(names) < MAX_SHOWN:
                names.append(name)
        return dict(list(facts.items())[:MAX_SHOWN])
