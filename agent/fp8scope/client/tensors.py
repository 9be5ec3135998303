"""Tensors of a run, and their ranking."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of the catalogue. `index` is its row in heat maps."""

    index: int
    name: str
    module: str
    role: str
    format: str
    shape: tuple[int, ...]
    numel: int


@dataclass(frozen=True, kw_only=True)
class TensorRank:
    """A tensor of the ranking. It left its range between the steps `earliest` and `onset`, if it did.

    Attributes:
        now, ever: the largest value of the last steps, and of the run.
        before, after: the medians of the beginning and the end of the run; `change` is log2 of their ratio.
    """

    index: int
    name: str
    onset: int | None
    earliest: int | None
    now: float | None
    ever: float | None
    before: float | None
    after: float | None
    change: float | None


@dataclass(frozen=True, kw_only=True)
class RankedTensors:
    """The first tensors of a ranking.

    Attributes:
        limit: the value above which a tensor is out of its range: a rate, or a change in powers of two.
        total: the observed tensors; `out_of_range` of them have an onset.
        still: those that are left out, because their rate was 0 in every step.
    """

    statistic: str
    limit: float
    total: int
    out_of_range: int
    still: int
    tensors: tuple[TensorRank, ...]
