"""The page of all runs of a project together: hours, what was lost, and what FP8 saved."""
