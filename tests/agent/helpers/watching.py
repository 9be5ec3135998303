"""Watching a model without a run: steps begin and end by hand, and what the collector saw is returned."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fp8scope.observe.collector import Collector
from fp8scope.observe.snapshot import NOTHING, Observed
from fp8scope.observe.tensors import Watching
from fp8scope_kernels import STATISTICS

NUMEL, AMAX, SCALE, SATURATED, UNDERFLOW, SUBNORMAL, NONFINITE = range(len(STATISTICS))


class Watched:
    """A model under observation. What fails in a source is raised here, not swallowed."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, every: int = 1, **how: Any
    ) -> None:
        self.problems: list[Exception] = []
        self.collector = Collector(lambda kind, error: self.problems.append(error))
        self.collector.every = every
        self.tensors = self.collector.watch(model, optimizer, Watching(**how))
        self.catalogue: list[Any] = []
        self.steps = 0
        self._raise()

    @property
    def names(self) -> list[str]:
        return [info.name for info in self.catalogue]

    def step(self, work: Callable[[], object]) -> "Seen":
        """One step that does `work`."""
        self.steps += 1
        self.collector.begin(self.steps)
        work()
        if (grown := self.collector.new_tensors()) is not None:
            offset, entries, _ = grown
            assert offset == len(self.catalogue)
            self.catalogue += entries
        snapshot = self.collector.snapshot({})
        self._raise()
        return Seen(self.names, NOTHING if snapshot is None else snapshot.read())

    def _raise(self) -> None:
        for problem in self.problems:
            raise problem


class Seen:
    """What one step showed, by the tensors' names."""

    def __init__(self, names: list[str], observed: Observed) -> None:
        self.observed = observed
        self.names = names
        self.histograms = {
            names[tensor]: counts
            for tensor, counts in zip(observed.histogram_tensors, observed.histogram_counts, strict=True)
        }

    def row(self, name: str) -> NDArray[np.float64]:
        """The statistics of a tensor; `numel` is 0 where it was not observed."""
        place = self.names.index(name)
        rows = self.observed.statistics
        return rows[place] if place < len(rows) else np.zeros(len(STATISTICS))

    def extra(self, statistic: str, name: str) -> float:
        """A sampled statistic; NaN where it was not taken."""
        values = self.observed.extras.get(statistic)
        place = self.names.index(name)
        return float(values[place]) if values is not None and place < len(values) else float("nan")


def brute_force(x: Tensor, scale: Tensor, largest: float, smallest_normal: float, q: Tensor) -> list[float]:
    """[saturated, underflow, subnormal, nonfinite] element by element, from q as some cast has made it."""
    scaled = (x.float() * scale).abs()
    q = q.float().abs()
    limit = torch.nextafter(torch.tensor(largest), torch.tensor(torch.inf))
    return [
        float(((scaled > limit) & torch.isfinite(x)).sum()),
        float(((q == 0) & (x != 0)).sum()),
        float(((q > 0) & (q < smallest_normal)).sum()),
        float((~torch.isfinite(x)).sum()),
    ]
