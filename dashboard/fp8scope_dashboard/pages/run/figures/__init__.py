"""The figures of a run's page."""
