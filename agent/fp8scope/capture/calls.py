"""The values of one call of a tracker, and what such calls held that is no number."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fp8scope.capture.values import Key, NotANumberError, Number, flattened, key_of, number_of

MAX_KINDS = 50


@dataclass(slots=True, kw_only=True)
class TrackerCall:
    """The numbers that a script has given to a tracker in one call.

    Attributes:
        count: the tracker's own step; None if it has none.
        replaces: a value of the same name and count replaces the earlier one in the tracker, too.
        counts: the count is the step of the values, also if they repeat earlier ones.
        time_us: when, in microseconds since 1970.
    """

    tracker: str
    numbers: list[tuple[str, Number]]
    count: int | None
    replaces: bool
    counts: bool
    time_us: int

    @staticmethod
    def now() -> int:
        """Return the time, as in `time_us`."""
        return time.time_ns() // 1000


class CallReader:
    """Reads calls, counts their values, and knows which ones were made inside of another tracker's call."""

    def __init__(self) -> None:
        self.values: Counter[str] = Counter()
        """Numbers by tracker."""
        self.left_out: dict[str, Counter[str]] = {}
        """Values that are no numbers, by tracker and type."""
        self._inside = threading.local()

    def read(
        self,
        tracker: str,
        values: Mapping[Any, Any],
        count: int | None,
        separator: str,
        *,
        replaces: bool,
        counts: bool = False,
    ) -> tuple[TrackerCall, str]:
        """Return the call, and the name of the first value that is no number, if its type is new."""
        numbers: list[tuple[str, Number]] = []
        news = ""
        for name, value in flattened(values, separator):
            try:
                numbers.append((name, number_of(value)))
            except NotANumberError:
                news = self._leave_out(tracker, name, value) or news
        self.values[tracker] += len(numbers)
        seen: list[Key] | None = getattr(self._inside, "keys", None)
        if seen is not None:
            seen += [key_of(number) for _, number in numbers]
        call = TrackerCall(
            tracker=tracker,
            numbers=numbers,
            count=count,
            replaces=replaces,
            counts=counts and count is not None,
            time_us=TrackerCall.now(),
        )
        return call, news

    def _leave_out(self, tracker: str, name: str, value: Any) -> str:
        kinds = self.left_out.setdefault(tracker, Counter())
        kind = type(value).__name__
        is_new = not kinds
        if kind in kinds or len(kinds) < MAX_KINDS:
            kinds[kind] += 1
        return f"{name}: {kind}" if is_new else ""

    @contextmanager
    def collecting(self, taken: Counter[Key]) -> Iterator[None]:
        """Add to `taken` the keys of the values in the calls that this thread makes within the block."""
        keys: list[Key] = []
        outer, self._inside.keys = getattr(self._inside, "keys", None), keys
        try:
            yield
        finally:
            self._inside.keys = outer
            taken.update(keys)


def without(values: Mapping[Any, Any], taken: Counter[Key], separator: str) -> dict[str, Any]:
    """Return the values that are not among those taken, each of which counts once."""
    left: dict[str, Any] = {}
    available = Counter(taken)
    for name, value in flattened(values, separator):
        try:
            key = key_of(number_of(value))
        except NotANumberError:
            continue
        if available[key] > 0:
            available[key] -= 1
        else:
            left[name] = value
    return left
