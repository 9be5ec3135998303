"""An account of what was captured, for the run's environment and for people."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from fp8scope.capture.calls import CallReader
from fp8scope.capture.step_counts import TrackerSteps

MAX_RENAMED = 200
logger = logging.getLogger("fp8scope")


class CaptureAccount:
    """Keeps how the steps of trackers relate to those of the run, and says once where they differ."""

    def __init__(self) -> None:
        self._steps: dict[str, TrackerSteps] = {}

    def note_steps(self, tracker: str, names: Iterable[str], step: int, count: int, leader: str) -> None:
        """Note a tracker's step of some values. `leader`: the tracker that counts the run's steps, or ""."""
        steps = self._steps.get(tracker)
        if steps is None:
            steps = self._steps[tracker] = TrackerSteps()
        for name in names:
            difference = steps.note(name, step, count)
            if difference is not None and tracker != leader:
                axis = f"{leader} counts the steps of the run" if leader else "The run counts optimizer steps"
                logger.info(
                    "%s has steps of its own (%s). %s; tracker_step/%s has those of %s.",
                    *(tracker, difference, axis, tracker, tracker),
                )

    def say_what_is_left_out(self, tracker: str, first: str) -> None:
        """Say of which type a value was that is no number."""
        logger.info(
            "values of %s that are no numbers are not recorded (the first is %s); the run's environment has "
            "how many there were.",
            *(tracker, first),
        )

    def facts(
        self, reader: CallReader, step_metrics: Mapping[str, Any], renamed: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return what was captured; empty if nothing was."""
        facts = {
            "values": dict(reader.values),
            "left_out": {tracker: dict(kinds) for tracker, kinds in reader.left_out.items()},
            "steps": {tracker: steps.facts() for tracker, steps in self._steps.items()},
            "renamed": dict(list(renamed.items())[:MAX_RENAMED]),
            "step_metrics": dict(step_metrics),
        }
        return {name: fact for name, fact in facts.items() if fact}
