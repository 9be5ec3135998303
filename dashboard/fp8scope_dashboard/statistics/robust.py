"""Estimates that a few outliers do not change."""

from __future__ import annotations

from typing import Final

MAD_TO_SIGMA: Final = 1.4826
"""The standard deviation of normal values over their median absolute deviation: 1 / Phi^-1(3/4)."""
