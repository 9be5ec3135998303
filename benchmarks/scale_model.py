"""The arithmetic of docs/scale.md: what a fleet of runs asks of a server, and a simulation of its queues."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Any

PARTS = ("web", "postgres", "redis", "jobs")
"""The parts of a server that spend processor time on a message, in the order in which it passes them."""
MAX_LOAD = 0.7
"""The share of a core that is planned: above it, waits grow faster than the load."""
POOL = 16
"""Connections to PostgreSQL that a web process holds at most (FP8SCOPE_DB_POOL)."""
REQUESTS_AT_A_TIME = 8
"""Messages that a web process works on at a time."""
SERIES_OF_A_ROW = 40
"""Scalars of a row that are not of a tensor: loss, times, memory and what the machine reports."""


@dataclass(frozen=True)
class Fleet:
    """Runs that train at the same time."""

    name: str
    runs: int
    ranks: int
    """Processes of each run that send."""
    tensors: int
    """Tensors of each rank that are observed."""
    statistics: int = 7
    step_seconds: float = 1.0
    interval: float = 1.0
    """The longest pause between two messages of a rank (FP8SCOPE_INTERVAL)."""
    every: int = 1
    """Statistics are recorded in every n-th step."""

    @property
    def messages(self) -> float:
        """Messages per second: after each interval a rank sends what it has."""
        return self.runs * self.ranks / max(self.interval, self.step_seconds)

    @property
    def points(self) -> float:
        """Values per second."""
        row = SERIES_OF_A_ROW + self.tensors * self.statistics / self.every
        return self.runs * self.ranks * row / self.step_seconds


@dataclass(frozen=True)
class Constants:
    """The processor time of a message on one machine, and the bytes of a stored value."""

    fixed_ms: dict[str, float]
    """By part: what a message takes whatever is in it."""
    point_us: dict[str, float]
    """By part: what each of its values takes."""
    bytes_per_point: float

    def service_ms(self, part: str, points: float) -> float:
        """The processor milliseconds that a part spends on a message of so many values."""
        return self.fixed_ms[part] + self.point_us[part] * points / 1000


def fitted(loads: list[dict[str, Any]], bytes_per_point: float) -> Constants:
    """The constants that messages of several sizes give, by least squares, none of them below 0.

    `loads` has `points` and `<part>_ms` of each load, as benchmarks/message_cost.py measures them.
    """
    fixed, per_point = {}, {}
    sizes = [load["points"] for load in loads]
    mean = sum(sizes) / len(sizes)
    spread = sum((size - mean) ** 2 for size in sizes)
    for part in PARTS:
        times = [load[f"{part}_ms"] for load in loads]
        middle = sum(times) / len(times)
        slope = sum((size - mean) * (time - middle) for size, time in zip(sizes, times, strict=True)) / spread
        slope = max(0.0, slope)
        fixed[part], per_point[part] = max(0.0, middle - slope * mean), 1000 * slope
    return Constants(fixed, per_point, bytes_per_point)


@dataclass
class Demand:
    """What a fleet asks of a server."""

    fleet: Fleet
    busy: dict[str, float]
    """Cores that each part keeps busy."""
    gib_a_day: float
    web_processes: int
    connections: int
    first: str
    """The part that is at its end first on one machine, and what to add."""
    cores: dict[str, int] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        """As figures of a JSON line."""
        return {
            "fleet": self.fleet.name,
            "messages_per_s": round(self.fleet.messages, 1),
            "points_per_s": round(self.fleet.points),
            **{f"{part}_cores": round(busy, 2) for part, busy in self.busy.items()},
            "cores_planned": sum(self.cores.values()),
            "web_processes": self.web_processes,
            "connections": self.connections,
            "gib_a_day": round(self.gib_a_day, 1),
            "add": self.first,
        }


def demand(fleet: Fleet, constants: Constants, cores: int) -> Demand:
    """What `fleet` asks of a server, and what to add to one machine with so many cores."""
    points = fleet.points / fleet.messages
    busy = {part: fleet.messages * constants.service_ms(part, points) / 1000 for part in PARTS}
    planned = {part: math.ceil(share / MAX_LOAD) for part, share in busy.items()}
    # A web process is one interpreter: it keeps no more than one core busy.
    web = max(1, planned["web"])
    gib = fleet.points * constants.bytes_per_point * 86400 / 2**30
    return Demand(fleet, busy, gib, web, web * POOL + planned["jobs"] + 4, advice(busy, cores), planned)


def advice(busy: dict[str, float], cores: int) -> str:
    """What to add next to one machine, from the cores that its parts keep busy."""
    if busy["web"] <= MAX_LOAD and sum(busy.values()) <= MAX_LOAD * cores:
        return "nothing"
    if sum(busy.values()) <= MAX_LOAD * cores:
        return "web processes on the same machine"
    others = sum(busy.values()) - busy["postgres"]
    if busy["postgres"] <= MAX_LOAD * cores:
        return f"machines for web and workers: {math.ceil(others / MAX_LOAD / cores)} beside the database's"
    nodes = math.ceil(busy["postgres"] / MAX_LOAD / cores)
    return f"{nodes} nodes of the store, or a longer FP8SCOPE_INTERVAL"


def simulate(
    services_ms: list[float], servers: list[int], per_second: float, seconds: float, *, seed: int = 0
) -> list[float]:
    """The times in milliseconds from the arrival of each message to its acknowledgement, in order of arrival.

    Messages arrive at random times (many ranks, each with an interval of its own), wait for the first free
    server of each part in turn, and take a time with the given mean and half of it as standard deviation.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    count = max(1, int(per_second * seconds))
    arrivals = np.cumsum(random.exponential(1000 / per_second, count))
    ready = arrivals.copy()
    for mean, number in zip(services_ms, servers, strict=True):
        # A gamma distribution of shape 4 has half of its mean as standard deviation.
        takes = random.gamma(4.0, mean / 4.0, count) if mean else np.zeros(count)
        free = [0.0] * number
        for index in np.argsort(ready, kind="stable"):
            begin = max(ready[index], heapq.heappop(free))
            ready[index] = begin + takes[index]
            heapq.heappush(free, ready[index])
    return list(ready - arrivals)


def percentile(values: list[float], share: float) -> float:
    """The value below which a share of the values is, of those after the first tenth."""
    rest = sorted(values[len(values) // 10 :])
    return rest[min(len(rest) - 1, int(share * len(rest)))]
