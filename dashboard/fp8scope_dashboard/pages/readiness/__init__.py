"""The page of a run's readiness for FP8 and FP4."""
