"""Series, heat maps and histograms, as NumPy arrays and as tables of other packages."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8scope.client.frames import to_arrow, to_pandas, to_polars

Steps = NDArray[np.int64]
Values = NDArray[np.float64]
Times = NDArray[np.datetime64]


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """A series over steps, as the charts read it.

    Attributes:
        name: the scalar, or `tensor statistic`.
        steps: int64[N], increasing.
        values: float64[N]; NaN and infinities are values.
        thinned: whether steps of the range are missing, because there are more than were asked for.
        how: the way in which they were chosen; empty if none is missing.
        times: datetime64[us][N] in UTC at which the steps ended, NaT where a client sent none; None unless
            they were asked for.
    """

    name: str
    steps: Steps
    values: Values
    thinned: bool = False
    how: str = ""
    times: Times | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def numpy(self) -> tuple[Steps, Values]:
        """Steps and values."""
        return self.steps, self.values

    def arrow(self) -> Any:
        """A pyarrow.Table with the columns step and value."""
        return to_arrow({"step": self.steps, "value": self.values})

    def pandas(self) -> Any:
        """A pandas.DataFrame with the column value and the step as index."""
        return to_pandas({"step": self.steps, "value": self.values}, "step")

    def polars(self) -> Any:
        """A polars.DataFrame with the columns step and value."""
        return to_polars({"step": self.steps, "value": self.values})


@dataclass(frozen=True, kw_only=True)
class StatisticMap:
    """A heat map: the largest value of a statistic by tensor and range of steps.

    Attributes:
        tensors: T names, in the order of the model.
        step_edges: int64[C + 1]; column c holds the steps step_edges[c] <= step < step_edges[c + 1].
        values: float64[T, C]; NaN where nothing was observed.
    """

    statistic: str
    tensors: tuple[str, ...]
    step_edges: Steps
    values: Values

    def numpy(self) -> Values:
        """The values, float64[T, C]."""
        return self.values

    def arrow(self) -> Any:
        """A pyarrow.Table with a row for each tensor: its name and its values."""
        return to_arrow({"tensor": list(self.tensors), "values": self.values})

    def pandas(self) -> Any:
        """A pandas.DataFrame with a row for each tensor and a column for each first step of a range."""
        return to_pandas(self._columns(), "tensor")

    def polars(self) -> Any:
        """A polars.DataFrame as `pandas`, with the names in the column tensor."""
        return to_polars({str(name): values for name, values in self._columns().items()})

    def _columns(self) -> dict[Any, Any]:
        by_column = zip(self.step_edges[:-1].tolist(), self.values.T, strict=True)
        return {"tensor": list(self.tensors), **dict(by_column)}


@dataclass(frozen=True, kw_only=True)
class TensorHistograms:
    """The exponents of a tensor's elements in sampled steps.

    Attributes:
        steps: int64[N].
        exponents: int64[E]: an element x counts for floor(log2 |x|).
        counts: float64[N, E].
        zeros, nonfinite: float64[N].
    """

    tensor: str
    steps: Steps
    exponents: Steps
    counts: Values
    zeros: Values
    nonfinite: Values

    def __len__(self) -> int:
        return len(self.steps)

    def numpy(self) -> tuple[Steps, Values]:
        """Steps and counts."""
        return self.steps, self.counts

    def arrow(self) -> Any:
        """A pyarrow.Table with the columns step, zeros, nonfinite and counts."""
        return to_arrow(self._columns())

    def pandas(self) -> Any:
        """A pandas.DataFrame with a column for each exponent, and the step as index."""
        by_exponent = dict(zip(self.exponents.tolist(), self.counts.T, strict=True))
        others = {"zeros": self.zeros, "nonfinite": self.nonfinite}
        return to_pandas({"step": self.steps, **others, **by_exponent}, "step")

    def polars(self) -> Any:
        """A polars.DataFrame with the columns step, zeros, nonfinite and counts."""
        return to_polars(self._columns())

    def _columns(self) -> dict[str, Any]:
        return {
            "step": self.steps,
            "zeros": self.zeros,
            "nonfinite": self.nonfinite,
            "counts": self.counts,
        }
