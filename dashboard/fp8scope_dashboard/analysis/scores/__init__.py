"""Evaluation scores against BF16's: intervals, differences, seed variance and verdicts. Pure functions."""
