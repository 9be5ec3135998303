"""The configuration and the summary that a script gives to trackers, for those of the run."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fp8scope.scalars import is_tensor

if TYPE_CHECKING:
    from fp8scope.run import Run

MAX_ENTRIES = 5000
MAX_DEPTH = 8


class Descriptions:
    """Keeps configuration and summary until there is a run, and then adds them to the run's.

    An entry that the run's configuration has with another value stands under the tracker's name instead.
    """

    def __init__(self) -> None:
        self.step_metrics: dict[str, dict[str, str]] = {}
        """The value by which a tracker shows others, by tracker and pattern."""
        self._configs: dict[str, dict[str, Any]] = {}
        self._summary: dict[str, Any] = {}
        self._own: set[str] = set()
        """The entries of the run's configuration that come from trackers."""

    def configure(self, tracker: str, config: Mapping[Any, Any], run: "Run | None") -> None:
        """Take entries of a tracker's configuration."""
        mine = self._configs.setdefault(tracker, {})
        new = {name: value for name, value in host_values(config).items() if len(mine) < MAX_ENTRIES}
        mine |= new
        if run is not None and new:
            self._add_config(tracker, new, run)

    def summarise(self, summary: Mapping[Any, Any], run: "Run | None") -> None:
        """Take entries of a tracker's summary."""
        new = host_values(summary)
        if run is not None:
            run.summary.update(new)
        elif len(self._summary) < MAX_ENTRIES:
            self._summary |= new

    def note_step_metric(self, tracker: str, pattern: str, metric: str) -> None:
        """Note by which value a tracker shows others."""
        metrics = self.step_metrics.setdefault(tracker, {})
        if len(metrics) < MAX_ENTRIES:
            metrics[pattern[:200]] = metric[:200]

    def hand_over(self, run: "Run") -> None:
        """Add to a run that has begun what was given before."""
        self._own = set()
        for tracker, config in self._configs.items():
            if config:
                self._add_config(tracker, config, run)
        if self._summary:
            run.summary.update(self._summary)

    def _add_config(self, tracker: str, new: Mapping[str, Any], run: "Run") -> None:
        stored = run.session.registration.document["config"]
        free, other = {}, {}
        for name, value in new.items():
            if name not in stored or name in self._own:
                free[name] = value
                self._own.add(name)
            elif not _equal(stored[name], value):
                other[name] = value
        if other:
            theirs = stored.get(tracker)
            free[tracker] = {**theirs, **other} if isinstance(theirs, dict) else other
        if free:
            run.config.update(free)


def host_values(values: Mapping[Any, Any], depth: int = 0) -> dict[str, Any]:
    """Return a mapping's entries, without tensors on a device: reading one would wait for it."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if is_tensor(value) and not value.is_cpu:
            result[str(name)] = f"<Tensor on {value.device}>"
        elif isinstance(value, Mapping) and depth < MAX_DEPTH:
            result[str(name)] = host_values(value, depth + 1)
        else:
            result[str(name)] = value
    return result


def from_text(text: str) -> Any:
    """Return the number or truth value that a parameter was before it was made a text; else the text."""
    try:
        value = {"True": True, "False": False, "None": None}[text] if text in _WORDS else json.loads(text)
    except ValueError:
        return text
    return value if text in _WORDS or (isinstance(value, int | float) and str(value) == text) else text


_WORDS = ("True", "False", "None")


def _equal(stored: Any, value: Any) -> bool:
    return bool(stored == value) or str(stored) == str(value)
