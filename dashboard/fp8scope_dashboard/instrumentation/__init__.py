"""Measurements of this server for its operators: counts for Prometheus, and the context of log lines."""
