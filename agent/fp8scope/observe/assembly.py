"""From what the boards sent to one matrix in the order of the catalogue. Runs on the recorder's thread."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fp8scope.observe.snapshot import EMPTY, NO_TENSORS, Observed
from fp8scope.observe.tensors.buffers import NOTES, SAMPLED_STATISTICS, Board
from fp8scope_kernels import BLOCK_STATISTICS, EXPONENT_BINS, SAMPLE_SIZE, STATISTICS

Float64s = NDArray[np.float64]

WIDTHS = (len(STATISTICS), len(BLOCK_STATISTICS), SAMPLE_SIZE, len(NOTES))
"""Values of a row in each of `Board.parts`; in steps that are not sampled only the first is sent."""


class Assembly:
    """Collects the boards of one step."""

    def __init__(self, sampled: bool) -> None:
        self._sampled = sampled
        self._boards: list[tuple[NDArray[np.int64], list[Float64s]]] = []
        self._in_order = True

    def add(self, board: Board, rows: int, values: Float64s) -> int:
        """Take a board's first values, for its first `rows` rows; returns how many values they were."""
        parts, at = [], 0
        for width in WIDTHS if self._sampled else WIDTHS[:1]:
            parts.append(values[at : at + rows * width].reshape(rows, width))
            at += rows * width
        self._boards.append((board.places(rows), parts))
        self._in_order = self._in_order and board.is_in_order(rows)
        return at

    def finish(self, scalars: Mapping[str, float]) -> Observed:
        """Everything that was added, by the places in the catalogue."""
        if not self._sampled and len(self._boards) == 1 and self._in_order:
            # Nearly always: one device, nothing sampled, and the rows are in the catalogue's order.
            _, (statistics,) = self._boards[0]
            return Observed(statistics, {}, scalars, NO_TENSORS, EMPTY)
        tensors = max(
            (int(positions.max()) + 1 for positions, _ in self._boards if len(positions)), default=0
        )
        statistics = np.zeros((tensors, len(STATISTICS)))
        extras = np.full((len(SAMPLED_STATISTICS), tensors), np.nan)
        histograms: list[tuple[NDArray[np.int64], Float64s]] = []
        for positions, parts in self._boards:
            # The same name may be on two boards, for two models: whichever was seen.
            seen = parts[0][:, 0] > 0
            statistics[positions[seen]] = parts[0][seen]
            if self._sampled:
                extras[:, positions[seen]] = _extras(*parts[1:])[:, seen]
                counts = parts[2][:, 2:]
                taken = counts.any(axis=1)
                histograms.append((positions[taken], counts[taken]))
        named = {
            name: values
            for name, values in zip(SAMPLED_STATISTICS, extras, strict=True)
            if not np.isnan(values).all()
        }
        if not histograms:
            return Observed(statistics, named, scalars, NO_TENSORS, EMPTY)
        places = np.concatenate([positions for positions, _ in histograms]).astype(np.int32)
        counts = np.concatenate([counts for _, counts in histograms]).reshape(-1, EXPONENT_BINS)
        return Observed(statistics, named, scalars, places, counts)


def _extras(blocks: Float64s, samples: Float64s, notes: Float64s) -> Float64s:
    """In the order of SAMPLED_STATISTICS [statistics, rows]; NaN where a row has none of a kind."""
    blocks = np.where(blocks[:, :1] > 0, blocks, np.nan)
    # Histograms are taken of tensors that nothing was cast of as well.
    errors = np.where(samples[:, 1:2] > 0, samples[:, :2], np.nan)
    return np.concatenate((blocks, errors, notes), axis=1).T
