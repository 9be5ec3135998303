"""Comparisons of FP8 runs with BF16 runs: losses and evaluation scores."""
