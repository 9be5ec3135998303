"""The captured values of one step of the run: each is recorded once, and none replaces another."""

from collections.abc import Iterator, Mapping
from typing import Any

from fp8scope.capture.calls import TrackerCall
from fp8scope.capture.names import STEP_PREFIX
from fp8scope.capture.values import Key, Number, key_of, same
from fp8scope.step import Step

Rows = list[dict[str, Number]]
"""Rows of the same step beside the step's own: a row has one value of a name."""


class StepValues:
    """Adds captured values to a step, and tells which must have a row of their own.

    A step's row has one value of each name, and one step of each tracker. What is replaced by a later value,
    or belongs to another step of its tracker, moves to a row of its own. A value that arrives from two
    trackers is recorded once: of equal values of one name as many as the tracker gave that gave most.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self._given: dict[str, dict[str, dict[Key, int]]] = {}
        """Times that a tracker gave a value, by name, tracker and value."""
        self._held: dict[str, dict[str, Number]] = {}
        """The values that are in the step now, by tracker and name."""
        self._shared: dict[str, set[str]] = {}
        """The names of values that a tracker gave after another one, which holds them."""
        self._counts: dict[str, int] = {}
        """The steps of the trackers that are in the step now."""
        self._alive: list[Number] = []
        """Tensors whose key stands for their memory."""

    def add(self, call: TrackerCall, names: Mapping[str, str], *, apart: bool = False) -> Rows:
        """Add the values of a call. Returns rows to be recorded beside the step.

        `names` are those to record under. With `apart` the values do not become part of the step.
        """
        rows: Rows = []
        tracker, held = call.tracker, self._held.setdefault(call.tracker, {})
        accepted: dict[str, Number] = {}
        if call.count is not None and not apart and self._counts.get(tracker) != call.count:
            if tracker in self._counts:
                rows += self._leave_count(tracker)
            self._counts[tracker] = call.count
        for raw, number in call.numbers:
            name = names[raw]
            if self._is_recorded(name, tracker, number):
                self._shared.setdefault(tracker, set()).add(name)
                continue
            if name in accepted:
                # Two names of the script that are one on the wire.
                rows.append({name: number, **_step_of(call)})
                continue
            if apart:
                accepted[name] = number
                continue
            owner = self._owner(name)
            if owner is None and name in self.step:
                # Logged by `run.log`, which takes precedence in the step.
                rows.append({name: number, **_step_of(call)})
                continue
            if owner is not None and not (owner == tracker and call.replaces):
                rows.append(self._moved(owner, [name]))
            accepted[name] = held[name] = number
        if apart:
            return [*rows, {**accepted, **_step_of(call)}] if accepted else rows
        self.step.log({**accepted, **_step_of(call)})
        return [row for row in rows if row]

    def has(self, tail: str, number: Number) -> bool:
        """Return whether a tracker gave this number in this step, under a name that ends with `tail`."""
        key = key_of(number)
        return any(
            name.rpartition("/")[2] == tail and any(key in keys for keys in by_tracker.values())
            for name, by_tracker in self._given.items()
        )

    def names_of(self, tracker: str) -> frozenset[str]:
        """Return the names of which the step holds a value of this tracker."""
        return frozenset(self._held.get(tracker, ()))

    def count_of(self, tracker: str) -> int | None:
        """Return the tracker's step that is in the step now."""
        return self._counts.get(tracker)

    def replaced(self) -> Iterator[dict[str, Number]]:
        """Yield rows of what `run.log` has replaced in the step since it was captured."""
        scalars = self.step.scalars
        for held in self._held.values():
            lost = {
                name: number
                for name, number in held.items()
                if isinstance(number, float) and name in scalars and not same(scalars[name], number)
            }
            if lost:
                yield {**lost, **self._steps()}

    def _is_recorded(self, name: str, tracker: str, number: Number) -> bool:
        """Note a value, and return whether it is recorded already, by another route."""
        key = key_of(number)
        if isinstance(key, str):
            self._alive.append(number)
        by_tracker = self._given.setdefault(name, {})
        mine = by_tracker.setdefault(tracker, {})
        times = mine.get(key, 0)
        mine[key] = times + 1
        if len(by_tracker) == 1:
            if times or name not in self.step:
                return False
            # `run.log` gave one value of this name.
            return same(number, self.step.scalars.get(name))
        return any(keys.get(key, 0) > times for other, keys in by_tracker.items() if other != tracker)

    def _leave_count(self, tracker: str) -> Rows:
        """Move what the tracker gave at its last step to rows of their own, before it counts on."""
        rows = [self._moved(tracker, list(self._held[tracker]))]
        for name in self._shared.pop(tracker, ()):
            owner = self._owner(name)
            if owner is not None:
                rows.append(self._moved(owner, [name]))
        return rows

    def _owner(self, name: str) -> str | None:
        return next((tracker for tracker, held in self._held.items() if name in held), None)

    def _moved(self, tracker: str, names: list[str]) -> dict[str, Number]:
        """Take values of a tracker out of the step, and return them as a row."""
        held, step = self._held[tracker], self.step
        row: dict[str, Number] = {}
        for name in names:
            number = held.pop(name)
            row[name] = number
            if not isinstance(number, float):
                step.device_scalars.pop(name, None)
            elif same(number, step.scalars.get(name)):
                del step.scalars[name]
        return {**row, **self._steps()} if row else row

    def _steps(self) -> dict[str, float]:
        return {f"{STEP_PREFIX}{tracker}": float(count) for tracker, count in self._counts.items()}


def _step_of(call: TrackerCall) -> dict[str, Any]:
    return {} if call.count is None else {f"{STEP_PREFIX}{call.tracker}": float(call.count)}
