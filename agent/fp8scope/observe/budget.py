"""Decides how often plain tensors are read, so that watching stays within its share of the training time.

Where steps are short, that leaves no room for times either: only the loss is then taken in every step.

Plain tensors belong to layers in high precision: reading one is an extra pass over memory. Losses, times and
the counters of FP8 layers are collected in every step. So is the gradient norm, unless it exceeds the budget:
then it is computed in the steps in which plain tensors are read.
"""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from fp8scope.config import DEFAULT_OVERHEAD, ConfigurationError

if TYPE_CHECKING:
    from fp8scope_kernels import Pace
    from fp8scope_kernels.devices import Event

Overhead = float | Literal["default"] | None

PACES = (1, 2, 4, 5, 10, 20, 25, 50, 100)
"""Divisors of 100, so that the steps sampled by default (1, 101, 201, ...) are steps with readings."""
COMPLETE_STEPS = 20
"""All of the first steps are read: they say most about a training, and the cost is measured on them."""
REVIEW_STEPS = 50
"""Steps between two decisions; medians are taken over as many."""
READINGS = 10
MIN_SHARE = 0.1
"""The share of the budget that is reserved for plain tensors."""
MARGIN = 0.8
"""Tensors are read more often only if that takes this share of the allowance: prevents oscillation."""
HOOK_SECONDS = 5e-6
"""Time that torch takes to call a hook, which is not measured."""
STEP_SECONDS = 3e-4
"""Time of the other hooks of a step, which is not measured."""
SHORT_STEP = 5e-3
"""In steps that take less seconds, times and the gradient norm are measured in every nth step, too."""
LONG_STEP = 2 * SHORT_STEP
"""Steps that were short are no longer so if they take more seconds: prevents oscillation."""
LAG_SECONDS = 0.02
"""Such short steps are written in the background, this much time after them at most."""
DEVICE_EVERY = 5
"""One in so many readings is timed on the device."""

PLAIN_EVERY = "plain_tensors_every"
"""The scalar with the pace for the run's page; logged once it is not every step."""
MEASURED_EVERY = "measured_every"
"""The same for everything but the loss, where steps are short."""


def check_overhead(value: object) -> float | None:
    """The budget as given to `attach` or `watch`: above 0 and at most 1, None for no limit.

    Raises ConfigurationError on anything else.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigurationError(
            "overhead must be a share of the step's time, above 0 and at most 1 (0.02 is 2 %), or None to "
            f"read every tensor at every step; got {value!r}."
        )
    return float(value)


def choose_pace(step: float, fixed: float, reading: float, overhead: float, current: int = 1) -> int:
    """Return the number of steps per reading: the shortest of PACES whose mean cost is within the budget.

    In seconds: `step`, a step without the agent; `fixed`, what the agent takes in every step; `reading`, what
    one reading of all plain tensors takes. `overhead`: the budget as a share of `step`. Longer than the
    `current` pace at once, shorter only with MARGIN to spare; the longest of PACES where none is enough.
    """
    allowance = max(overhead * step - fixed, MIN_SHARE * overhead * step)
    if allowance <= 0:
        return PACES[-1]

    def shortest(share: float) -> int:
        return next((pace for pace in PACES if reading <= share * allowance * pace), PACES[-1])

    return min(shortest(MARGIN), current) if shortest(1.0) < current else shortest(1.0)


class TimeBudget:
    """Measures the agent's share of the step time, and decides in which steps plain tensors are read."""

    def __init__(self, overhead: float | None = DEFAULT_OVERHEAD) -> None:
        self.overhead = overhead
        self.every = 1
        """Plain tensors are read in step 1 and every `every` steps after that."""
        self.fixed_seconds = 0.0
        """The agent's time in this step except for the reading of tensors; its parts add to it."""
        self.norm_seconds = 0.0
        """The time that the gradients' norm took in this step; the optimizers' hooks add to it."""
        self.takes_norm = True
        """Whether the gradient norm is computed in this step."""
        self.is_light = False
        """Whether nothing is measured in this step but its loss."""
        self.has_readings = True
        """Whether there are plain tensors. Without them only short steps leave something out."""
        self.lag = 0
        """Steps that may wait to be written while the training goes on."""
        self.was_thinned = False
        """Whether plain tensors were ever read in fewer than all steps."""
        self._steps = 0
        self._read = 0
        self._last = 0.0
        self._durations: deque[float] = deque(maxlen=REVIEW_STEPS)
        self._fixed: deque[float] = deque(maxlen=REVIEW_STEPS)
        self._norms: deque[float] = deque(maxlen=READINGS)
        self._thins_norm = False
        self._measured_every = 1
        self._readings: deque[float] = deque(maxlen=READINGS)
        self._device_seconds = 0.0
        self._timed: list[tuple[Event, Event]] = []

    def limit(self, overhead: float | None) -> None:
        """Change the budget, from the next step on."""
        self.overhead = overhead
        self._steps, self.every, self._thins_norm = 0, 1, False
        self._measured_every, self.is_light, self.lag = 1, False, 0

    def begin(self, number: int, sampled: bool, pace: "Pace") -> None:
        """Called when step `number` begins: decide whether to read its plain tensors."""
        observing = (
            self.overhead is None or sampled or self._steps < COMPLETE_STEPS or (number - 1) % self.every == 0
        )
        pace.observing = observing
        self.takes_norm = observing or not self._thins_norm
        self._read += observing
        pace.events = [] if observing and not self._timed and self._read % DEVICE_EVERY == 0 else None

    def plan(self, number: int) -> bool:
        """Decide whether step `number`, which is next, is light. Returns whether measuring begins again."""
        before = self.is_light
        self.is_light = self._measured_every > 1 and (number - 1) % self._measured_every != 0
        return before and not self.is_light

    @property
    def measured_every(self) -> int:
        """More than the loss is taken in step 1 and every so many steps after that."""
        return self._measured_every

    @property
    def is_short(self) -> bool:
        """Return whether steps are so short that not all of them are measured."""
        return self._measured_every > 1

    def next_full(self, number: int) -> int:
        """Return the first step from `number` on in which more than the loss is taken."""
        paces = (self._measured_every, self.every)
        return min(number + (1 - number) % pace for pace in paces)

    def note_light(self, times: Sequence[float]) -> None:
        """Light steps have ended at `times` (`time.perf_counter`), the first one after an earlier step.

        They are all that `end` was not called for.
        """
        if not times:
            return
        if self.overhead is not None and self._last:
            self._durations.extend(after - before for before, after in pairwise((self._last, *times)))
        reviews, self._last = self._steps // REVIEW_STEPS, times[-1]
        self._steps += len(times)
        if self._steps // REVIEW_STEPS > reviews:
            self._review()

    def end(self, sampled: bool, pace: "Pace") -> None:
        """Called when a step ends; `pace` has the time of its readings."""
        now = perf_counter()
        reading, calls = 0.0, pace.calls
        # Without a reading, the time is that of removing the hooks, and belongs to the next one.
        if calls:
            reading = pace.seconds + HOOK_SECONDS * calls
            pace.seconds, pace.calls = 0.0, 0
        fixed, self.fixed_seconds = self.fixed_seconds + STEP_SECONDS, 0.0
        norm, self.norm_seconds = self.norm_seconds, 0.0
        self._take_device_times(pace)
        last, self._last = self._last, now
        if self.overhead is None or not last:
            return
        self._durations.append(max(0.0, now - last - reading - fixed - norm))
        if not self.is_light:
            self._fixed.append(fixed)
        if norm:
            self._norms.append(norm)
        # A sampled step does more than read plain tensors.
        if calls and not sampled:
            self._readings.append(reading)
        self._steps += 1
        if self._steps == COMPLETE_STEPS or self._steps % REVIEW_STEPS == 0:
            self._review()

    def _review(self) -> None:
        if self.overhead is None or (self.has_readings and not self._readings):
            return
        # Device and host work at the same time: the training waits for the slower one.
        reading = max(median(self._readings), self._device_seconds) if self.has_readings else 0.0
        # Other load makes long steps longer, but not short readings: use the lower quartile.
        step, _, _ = quantiles(self._durations, n=4)
        is_short = step < (SHORT_STEP if self._measured_every == 1 else LONG_STEP)
        if not (self.has_readings or is_short):
            self.every, self._thins_norm, self._measured_every, self.lag = 1, False, 1, 0
            return
        fixed, norm = median(self._fixed), median(self._norms) if self._norms else 0.0
        # The norm also reads memory: computed in every step unless it leaves no room for tensors.
        room = (1 - MIN_SHARE) * self.overhead * step
        self._thins_norm = fixed + norm > (MARGIN if self._thins_norm else 1.0) * room
        if self._thins_norm:
            reading += norm
        else:
            fixed += norm
        self.every = choose_pace(step, fixed, reading, self.overhead, self.every)
        if is_short:
            # What a step costs that is not light. The rest of the budget is for reading tensors.
            share = (1 - MIN_SHARE) * self.overhead * step
            self._measured_every = next((pace for pace in PACES if fixed + norm <= share * pace), PACES[-1])
            self.every = max(self.every, self._measured_every)
        else:
            self._measured_every = 1
        self.lag = int(LAG_SECONDS / step) if self._measured_every > 1 and step > 0 else 0
        self.was_thinned |= self.every > 1

    def _take_device_times(self, pace: "Pace") -> None:
        """Add up the device times of a reading, if its events have completed; never waits."""
        if pace.events:
            self._timed, pace.events = pace.events, None
        if self._timed and self._timed[-1][1].query():
            self._device_seconds = sum(before.elapsed_time(after) for before, after in self._timed) / 1000
            self._timed = []
