"""Numbers and verdicts as sentences."""
