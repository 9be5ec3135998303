"""Modules named like other trackers, which record to fp8scope only, for where those are not installed."""
