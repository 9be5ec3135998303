"""Hours of runs and their price: of a run on its page, of all runs of a project on *Fleet*."""
